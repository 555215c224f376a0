"""What messages are made of: their base, and the bounds of their fields."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from msgspec import Meta, Struct

from swarmnet.run.path_rules import Header

Body = bytes | bytearray | memoryview
"""What comes behind a message, and what is signed."""

# What no honest peer exceeds; the decoder refuses the rest, so handlers meet no surprise. NaN is refused by
# every bound on a float.
Name = Annotated[str, Meta(max_length=64)]
"""A peer id, or a code."""
Reason = Annotated[str, Meta(max_length=1000)]
Number = Annotated[int, Meta(ge=0, lt=2**62)]
NumberOrNone = Annotated[int, Meta(ge=-1, lt=2**62)]
RoundNumber = Annotated[int, Meta(ge=-1, lt=2**32)]
"""-1: before the first. Envelopes have 32 bits for it."""
Count = Annotated[int, Meta(ge=0, lt=2**15)]
"""Contributions of a round: a tally holds as many votes (votes.VoteTally)."""
Level = Annotated[int, Meta(ge=0, lt=64)]
"""Hops, plus one: swarmnet.membership.overlay.hops stays below 32 for any number of peers."""
StageNumber = Annotated[int, Meta(ge=-1, lt=2**15)]
Seconds = Annotated[float, Meta(ge=0.0, le=86400.0)]
Nats = Annotated[float, Meta(ge=0.0, le=1e15)]
Shape = tuple[Number, Number, Number]
Identifier = Annotated[bytes, Meta(max_length=16)]
"""ContributionId."""
Invite = Annotated[bytes, Meta(max_length=256)]
Digest = Annotated[bytes, Meta(max_length=32)]
SetDigest = Annotated[bytes, Meta(max_length=12)]


class Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t"):
    """`kind` groups bytes in the metrics; `priority`: smaller overtakes larger on one link."""

    kind: ClassVar[str] = "control"
    priority: ClassVar[int] = 0
    body: ClassVar[bool] = False
    """Whether a body may follow. A body on any other message is malformed."""


class Path(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How far a microbatch has come (swarmnet/run/path_rules.py, Header); whoever receives it checks it."""

    visited: Annotated[tuple[StageNumber, ...], Meta(max_length=1024)] = ()
    """Stages in the order of visit, the receiver's included."""
    frontier: StageNumber = 0
    """The highest of them."""
    swaps_left: StageNumber = 0
    hops_left: StageNumber = 0
    """Stages still to visit."""

    @classmethod
    def of(cls, header: Header) -> Self:
        return cls(header.visited, header.frontier, header.swaps_left, header.hops_left)

    def header(self) -> Header:
        return Header(self.visited, self.frontier, self.swaps_left, self.hops_left)
