"""Messages of the data path: microbatches down, gradients up, and who has room for them.

Their numbers and the rest of the table are in table.py and docs/wire.md.
"""

from __future__ import annotations

from typing import ClassVar

from protocols.fields import Message, Name, Nats, Number, Path, Reason, Seconds, Shape, StageNumber


class Act(Message, frozen=True, tag=10):
    """A microbatch one stage down. Body: hidden states, then labels as int32 [B, T]; where boundaries are
    narrow, sequences and labels in one (swarmnet/model/carried_text.py)."""

    kind: ClassVar[str] = "activation"
    priority: ClassVar[int] = 2
    body: ClassVar[bool] = True
    origin: Name
    counter: Number
    attempt: Number
    """Counts the sender's tries of this microbatch, so that answers to an old one are told apart."""
    stage: StageNumber
    """The stage that is to do it."""
    deadline_seconds: Seconds
    """How long the sender waits for GRAD from now on; each hop passes on less."""
    shape: Shape
    path: Path = Path()


class Grad(Message, frozen=True, tag=11):
    """The gradient of the hidden states back up. Body: as the hidden states."""

    kind: ClassVar[str] = "gradient"
    priority: ClassVar[int] = 1
    body: ClassVar[bool] = True
    origin: Name
    counter: Number
    attempt: Number
    loss_sum: Nats
    """Nats, summed over `tokens`."""
    tokens: Number
    path_seconds: Seconds
    """What the stages from here down spent computing."""
    queue_seconds: Seconds
    """How long it waited for that on these stages."""
    shape: Shape


class Busy(Message, frozen=True, tag=12):
    """No slot free: send it elsewhere."""

    kind: ClassVar[str] = "control"
    origin: Name
    counter: Number
    attempt: Number


class Nack(Message, frozen=True, tag=13):
    """It will not be done here (wrong stage, malformed, not finite, path below lost)."""

    origin: Name
    counter: Number
    attempt: Number
    code: Name
    reason: Reason


NO_ATTEMPT = 0
"""Attempts are counted from 1."""


class Cancel(Message, frozen=True, tag=14):
    """The sender no longer wants it."""

    origin: Name
    counter: Number
    attempt: Number
    """The newest that is not wanted; NO_ATTEMPT: the place that was booked for it (reservations.py)."""


class Credit(Message, frozen=True, tag=15):
    """What the sender can do for the receiver; follows every Grad and Busy
    (swarmnet/routing/load_balancer.py)."""

    slots: Number
    """Microbatches that it takes from the receiver, in all, at a time."""
    service_seconds: Seconds
    """That a microbatch keeps its compute busy, forward and backward together, or its line if that is longer;
    0: not measured yet."""
    waiting: Number
    """Pieces of work that wait for its compute."""
