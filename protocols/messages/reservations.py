"""Messages of runs that skip stages: what peers tell of themselves, and questions that run ahead of bodies.

Their numbers and the rest of the table are in table.py and docs/wire.md. Moments are seconds from when the
message was sent; the receiver takes off the latency.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from protocols.fields import Message, Name, Number, Path, Seconds, StageNumber

MOST_BOOKINGS = 32
"""Told of a peer: more cost each choice of a neighbour more than a millisecond."""
MOST_COSTS = 256
"""Frontiers times stages left."""
Moment = Annotated[float, Meta(ge=-86400.0, le=86400.0)]


class Booked(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One microbatch that the sender holds or expects (swarmnet/routing/capacity.py)."""

    start: Moment
    """Its forward begins, or began ..."""
    release: Moment
    """... and its backward ends."""


class Cost(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One entry of a table of costs to go (swarmnet/routing/cheapest_path.py)."""

    frontier: StageNumber
    hops_left: StageNumber
    seconds: Seconds


class Prospect(Message, frozen=True, tag=16):
    """What a microbatch would meet at the sender; to neighbours of the stages above, when it changes."""

    memory: Number
    """Microbatches that it can hold at a time."""
    forward_seconds: Seconds
    backward_seconds: Seconds
    bookings: Annotated[list[Booked], Meta(max_length=MOST_BOOKINGS)]
    costs: Annotated[list[Cost], Meta(max_length=MOST_COSTS)]


class Ask(Message, frozen=True, tag=17):
    """May a microbatch come? Answered by Place; given back by Cancel."""

    origin: Name
    counter: Number
    question: Number
    """Counts the sender's questions about this microbatch."""
    arrival_seconds: Seconds
    """When its body would be there ..."""
    start_seconds: Seconds
    """... and when the sender thinks that its forward would begin."""
    firm: bool
    """Also if it would begin later than that."""
    path: Path


class Place(Message, frozen=True, tag=18):
    """The answer to Ask."""

    origin: Name
    counter: Number
    question: Number
    taken: bool
    """It is expected, and held a place for a while."""
    start_seconds: Seconds
    """When its forward is to begin; 0 where it is not expected."""


class Held(Message, frozen=True, tag=19):
    """Sent before Grad: how long the sender had the microbatch, so that the rest of the time was the hops."""

    origin: Name
    counter: Number
    attempt: Number
    seconds: Seconds
