"""Messages of runs that skip stages: each peer's capacity, and reservations sent ahead of microbatch bodies.

See table.py and docs/wire.md for the message numbers and other properties. Times are seconds relative to
when the message was sent; the receiver subtracts the latency.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from protocols.fields import Message, Name, Number, Path, Seconds, StageNumber

MAX_BOOKINGS = 32
"""Maximum number of bookings in a `Prospect`. More would make each choice of a neighbour take over 1 ms."""
MAX_COSTS = 256
"""Maximum number of entries in a cost table: one for each number of stages left."""
Moment = Annotated[float, Meta(ge=-86400.0, le=86400.0)]


class Booked(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One microbatch that the sender holds or expects (swarmnet/routing/capacity.py)."""

    start: Moment
    """When its forward pass begins or began."""
    release: Moment
    """When its backward pass ends."""


class CostToGo(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One entry of a cost-to-go table (swarmnet/routing/cheapest_path.py)."""

    hops_left: StageNumber
    seconds: Seconds


class Prospect(Message, frozen=True, tag=16):
    """The capacity and costs that a microbatch would find at the sender. It is sent to neighbours in earlier
    stages whenever it changes."""

    memory: Number
    """Maximum number of microbatches that the sender can hold at once."""
    forward_seconds: Seconds
    backward_seconds: Seconds
    bookings: Annotated[list[Booked], Meta(max_length=MAX_BOOKINGS)]
    costs: Annotated[list[CostToGo], Meta(max_length=MAX_COSTS)]


class ReservationRequest(Message, frozen=True, tag=17):
    """Request a reservation for a microbatch. The answer is `ReservationReply`; `Cancel` releases the
    reservation."""

    origin: Name
    counter: Number
    question: Number
    """Counts the sender's requests for this microbatch."""
    arrival_seconds: Seconds
    """When the body would arrive."""
    start_seconds: Seconds
    """When the sender expects the forward pass to begin."""
    firm: bool
    """True if the reservation is also wanted with a later start."""
    path: Path


class ReservationReply(Message, frozen=True, tag=18):
    """The answer to `ReservationRequest`."""

    origin: Name
    counter: Number
    question: Number
    taken: bool
    """True if the microbatch is expected and its place is reserved for a while."""
    start_seconds: Seconds
    """When the forward pass is planned to begin; 0 if the microbatch is not expected."""


class HoldTime(Message, frozen=True, tag=19):
    """How long the sender had the microbatch; sent before `Grad`. The rest was network time."""

    origin: Name
    counter: Number
    attempt: Number
    seconds: Seconds
