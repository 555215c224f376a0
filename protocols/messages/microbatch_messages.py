"""Messages of the data path: microbatches to later stages, gradients back, and free capacity.

See table.py and docs/wire.md for the message numbers and other properties.
"""

from __future__ import annotations

from typing import ClassVar

from protocols.fields import (
    BodyLimit,
    Identifier,
    Message,
    Name,
    Nats,
    Number,
    Path,
    Reason,
    Seconds,
    Shape,
    StageNumber,
)


class Act(Message, frozen=True, tag=10):
    """Forward a microbatch to the next stage. Body: hidden states, then labels as int32 [B, T]. If boundaries
    are narrow, the body carries sequences and labels together, and in a U-shaped run neither
    (swarmnet/model/carried_text.py)."""

    kind: ClassVar[str] = "activation"
    priority: ClassVar[int] = 2
    body: ClassVar[BodyLimit] = lambda run: run.manifest.body_bytes
    origin: Name
    counter: Number
    attempt: Number
    """Counts the sender's attempts of this microbatch, so that late answers to old attempts are
    recognized."""
    stage: StageNumber
    """The stage that is to process it."""
    deadline_seconds: Seconds
    """How long the sender waits for `Grad`, from the time of sending; each hop passes on less."""
    shape: Shape
    path: Path = Path()


class Grad(Message, frozen=True, tag=11):
    """The gradient of the hidden states, sent back to the previous stage. Body: like the hidden states."""

    kind: ClassVar[str] = "gradient"
    priority: ClassVar[int] = 1
    body: ClassVar[BodyLimit] = lambda run: run.manifest.gradient_bytes
    origin: Name
    counter: Number
    attempt: Number
    loss_sum: Nats
    """Loss in nats, summed over `tokens`."""
    tokens: Number
    path_seconds: Seconds
    """Compute time of the stages from here on, in seconds."""
    queue_seconds: Seconds
    """Time that the microbatch waited for compute on these stages, in seconds."""
    shape: Shape
    via: Name = ""
    """The peer of the next stage whose gradient the sender used; empty on the last stage."""
    digest: Identifier = b""
    """BLAKE2b of that gradient's bytes."""


class Busy(Message, frozen=True, tag=12):
    """No slot is free. The sender must choose another peer."""

    kind: ClassVar[str] = "control"
    origin: Name
    counter: Number
    attempt: Number


class Nack(Message, frozen=True, tag=13):
    """The peer will not process this microbatch: wrong stage, malformed, not finite, or a later stage was
    lost."""

    origin: Name
    counter: Number
    attempt: Number
    code: Name
    reason: Reason


NO_ATTEMPT = 0
"""Marks that no attempt exists; attempts are counted from 1."""


class Cancel(Message, frozen=True, tag=14):
    """The sender no longer needs this microbatch."""

    origin: Name
    counter: Number
    attempt: Number
    """The newest attempt that is cancelled. `NO_ATTEMPT` cancels only the reservation."""


class Check(Message, frozen=True, tag=90):
    """Compute a microbatch again that another peer of the stage has answered, and count nothing of it. Body
    as of `Act`. The peer `via` gets the computed hidden states, as `int4-tiles` alone."""

    kind: ClassVar[str] = "activation"
    priority: ClassVar[int] = 3
    body: ClassVar[BodyLimit] = lambda run: run.manifest.body_bytes
    origin: Name
    counter: Number
    stage: StageNumber
    deadline_seconds: Seconds
    shape: Shape
    path: Path
    via: Name
    """The peer of the stage after the receiver's that the first peer used; empty if there is none. It
    compares the hidden states with those that came first, and sends the same gradient again."""


class CheckAnswer(Message, frozen=True, tag=91):
    """Answer to `Check`. Body: the gradient of its hidden states, as in `Grad` from the peer `via`, else as
    `int4-tiles`; none with a `code`."""

    kind: ClassVar[str] = "gradient"
    priority: ClassVar[int] = 3
    body: ClassVar[BodyLimit] = lambda run: run.manifest.gradient_bytes
    origin: Name
    counter: Number
    code: Name
    """Why there is no answer; empty if there is one."""
    agree: bool
    """Whether the peer `via` found the hidden states alike; true on the last stage."""
    digest: Identifier
    """Digest of the gradient from `via`, as in `Grad`."""


class Credit(Message, frozen=True, tag=15):
    """The capacity that the sender offers the receiver. It follows every `Grad` and `Busy`
    (swarmnet/routing/load_balancer.py)."""

    slots: Number
    """Maximum number of microbatches in flight from the receiver."""
    service_seconds: Seconds
    """Seconds that a microbatch occupies the compute (forward and backward) or the link, whichever is longer.
    0 if not measured yet."""
    waiting: Number
    """Number of work items that wait for the sender's compute."""
