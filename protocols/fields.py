"""The base class of messages and the bounded field types that they are built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from msgspec import Meta, Struct

from swarmnet.run.manifest import Manifest
from swarmnet.run.path_rules import PathHeader

Body = bytes | bytearray | memoryview
"""Bytes that follow a message header, or the bytes that are signed."""

# No honest peer exceeds these bounds. The decoder refuses larger values, so handlers need not check them
# again. Every bound on a float also refuses NaN.
Name = Annotated[str, Meta(max_length=64)]
"""A peer id or a code."""
Reason = Annotated[str, Meta(max_length=1000)]
Number = Annotated[int, Meta(ge=0, lt=2**62)]
NumberOrNone = Annotated[int, Meta(ge=-1, lt=2**62)]
RoundNumber = Annotated[int, Meta(ge=-1, lt=2**32)]
"""A round; -1 means before the first round. Envelopes have 32 bits for it."""
Count = Annotated[int, Meta(ge=0, lt=2**15)]
"""Number of contributions in a round. `VoteTally` sums votes in int16, so it stays below 2**15."""
Level = Annotated[int, Meta(ge=0, lt=64)]
"""Distance in hops plus one. `swarmnet.membership.overlay.hops` stays below 32 for any number of peers."""
StageNumber = Annotated[int, Meta(ge=-1, lt=2**15)]
Seconds = Annotated[float, Meta(ge=0.0, le=86400.0)]
Nats = Annotated[float, Meta(ge=0.0, le=1e15)]
Shape = tuple[Number, Number, Number]
Identifier = Annotated[bytes, Meta(max_length=16)]
"""The bytes of a ContributionId."""
Invite = Annotated[bytes, Meta(max_length=256)]
Digest = Annotated[bytes, Meta(max_length=32)]
SetDigest = Annotated[bytes, Meta(max_length=12)]


@dataclass(frozen=True, slots=True)
class RunSizes:
    """The run, and sizes in bytes in one of its stages, from which the largest bodies of messages follow."""

    manifest: Manifest
    payload_bytes: int = 0
    """Size of a contribution to the stage, or of a reducer's result."""
    state_bytes: int = 0
    """Size of the stage's settled weights."""
    slices_bytes: int = 0
    """Size of a contribution that is cut for reducers; 0 without reducers."""


BodyLimit = Callable[[RunSizes], int]
"""Returns the largest body of a message in bytes."""


class Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t"):
    """Base class of all messages. `kind` groups the bytes in the metrics. On one link, a message with a
    smaller `priority` is sent first."""

    kind: ClassVar[str] = "control"
    priority: ClassVar[int] = 0
    body: ClassVar[BodyLimit | None] = None
    """The largest body that may follow. None: a body is malformed."""
    before_hello: ClassVar[bool] = False
    """True if a peer may send this message before its `Hello`."""


class Path(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The stages that a microbatch has passed, as `PathHeader`. Each receiver checks it."""

    visited: Annotated[tuple[StageNumber, ...], Meta(max_length=1024)] = ()
    """Visited stages in order, including the receiver's."""
    hops_left: StageNumber = 0
    """Number of stages still to visit."""

    @classmethod
    def of(cls, header: PathHeader) -> Self:
        """Return the wire form of a path header."""
        return cls(header.visited, header.hops_left)

    def header(self) -> PathHeader:
        """Return the path header that this message describes."""
        return PathHeader(self.visited, self.hops_left)
