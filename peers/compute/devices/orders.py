"""What a peer tells the processes of its devices, and what they answer. Both are of one version and one
machine.

Tensors lie behind a message, as its comments say; a *share* is what one device has of a vector or a payload
(swarmnet/model/computing/shares.py).
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from swarmnet.model.computing.choices import DtypeName, MomentsPlace, Recompute


class Begin(msgspec.Struct, tag=True):
    """The first: which stage, and which of its devices this is."""

    manifest: bytes
    """Canonical."""
    stage: int
    rank: int
    device: str
    """As torch names it."""
    devices: int
    store: str
    """A file through which they find each other."""
    threads: int
    dtype: DtypeName
    recompute: Recompute
    moments: MomentsPlace


class Hold(msgspec.Struct, tag=True):
    """Begin from these settled weights: tensor int32, a share of the state."""

    settled_round: int


class Publish(msgspec.Struct, tag=True):
    """Compute with the live weights (Replica.live_tiles)."""

    ahead: bool


class Forward(msgspec.Struct, tag=True):
    """Tensors: inputs, and tokens beside them. All of the microbatch."""

    key: str
    branch_scale: float


class Finish(msgspec.Struct, tag=True):
    """Tensors: inputs, labels, and tokens beside them."""

    key: str


class Backward(msgspec.Struct, tag=True):
    """Tensor: the gradient at the output."""

    key: str


class Drop(msgspec.Struct, tag=True):
    key: str


class Contribute(msgspec.Struct, tag=True):
    """Of the gradient that is gathered."""

    tokens: int
    round: int
    peer: str


class Step(msgspec.Struct, tag=True):
    """The peer's own, by the gradient that is gathered."""

    tokens: int
    round: int
    factor: int


class Tell(msgspec.Struct, tag=True):
    round: int
    peer: str


class GiveBack(msgspec.Struct, tag=True):
    round: int
    peer: str
    payload: bytes


class Add(msgspec.Struct, tag=True):
    round: int
    peer: str
    payload: bytes


class Remove(msgspec.Struct, tag=True):
    round: int
    peer: str


class Rate(msgspec.Struct, tag=True):
    round: int
    factor: int


class Apply(msgspec.Struct, tag=True):
    round: int


class AskConcord(msgspec.Struct, tag=True):
    round: int
    me: str


class Settle(msgspec.Struct, tag=True):
    """Answered with a share of what is settled then: tensor int32."""

    round: int


class Close(msgspec.Struct, tag=True):
    """As Settle, where nobody asks for what is settled then."""

    round: int


class Settled(msgspec.Struct, tag=True):
    """The like, as it is now."""


Order: TypeAlias = (
    Begin | Hold | Publish | Forward | Finish | Backward | Drop | Contribute | Step | Tell | GiveBack | Add
    | Remove | Rate | Apply | AskConcord | Settle | Close | Settled
)  # fmt: skip


class Done(msgspec.Struct, tag=True):
    """A share of what was asked for; tensors: what a device computed of a microbatch, none if it had no
    part."""

    loss_sum: float = 0.0
    tokens: int = 0
    payload: bytes = b""
    gradient_norm: float | None = None
    momentum_norm: float | None = None
    """Of a share."""
    concord: tuple[int, int, int] | None = None


class Refused(msgspec.Struct, tag=True):
    """All devices say so, of what came from outside."""

    what: str
    """`stage`: StageError; `gradient`: GradientError."""
    text: str


class Failed(msgspec.Struct, tag=True):
    """It cannot go on."""

    text: str


Answer: TypeAlias = Done | Refused | Failed
