"""Orders of a peer to the processes of its devices, and their answers.

Both sides run the same version, on one machine or on nodes of one private network. The comments say which
tensors follow a message. A *share* is the part of a vector or a payload that one device has
(`swarmnet/model/computing/shares.py`).
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from swarmnet.model.computing.choices import ActivationCheckpointing, DtypeName, OptimizerStateDevice

TCP = "tcp://"
"""Beginning of the address of a store that several nodes reach."""


class Begin(msgspec.Struct, tag=True):
    """The first order: the stage, and the number of this device."""

    manifest: bytes
    """The manifest in canonical form."""
    stage: int
    rank: int
    device: str
    """The device as torch names it."""
    devices: int
    store: str
    """A file through which the devices find each other, or with several nodes TCP and HOST:PORT."""
    threads: int
    dtype: DtypeName
    activation_checkpointing: ActivationCheckpointing
    optimizer_state: OptimizerStateDevice
    store_descriptor: int = -1
    """File descriptor in the first device's process on which it serves the store to other nodes."""


class Hold(msgspec.Struct, tag=True):
    """Start from these settled weights. The tensor is a share of the state, int32, with the whole agreement
    ledger if the run has one."""

    settled_round: int


class Publish(msgspec.Struct, tag=True):
    """Compute with the live weights (`Replica.live_tiles`)."""

    ahead: bool


class Forward(msgspec.Struct, tag=True):
    """Run forward. Tensors are the inputs, and tokens if they are needed, of the whole microbatch."""

    key: str
    branch_scale: float


class Finish(msgspec.Struct, tag=True):
    """Run the last stage. Tensors are inputs, labels, and tokens if they are needed."""

    key: str


class Backward(msgspec.Struct, tag=True):
    """Run backward. The tensor is the gradient at the output."""

    key: str


class Drop(msgspec.Struct, tag=True):
    key: str


class Contribute(msgspec.Struct, tag=True):
    """Make a contribution from the summed gradient."""

    tokens: int
    round: int
    peer: str


class LocalStep(msgspec.Struct, tag=True):
    """Do a local optimizer step with the summed gradient."""

    tokens: int
    round: int
    factor: int


class EncodeDelta(msgspec.Struct, tag=True):
    round: int
    peer: str


class RestoreOnDevice(msgspec.Struct, tag=True):
    round: int
    peer: str
    payload: bytes
    shards: tuple[int, ...] = ()


class AddOnDevice(msgspec.Struct, tag=True):
    round: int
    peer: str
    payload: bytes


class RemoveOnDevice(msgspec.Struct, tag=True):
    round: int
    peer: str


class RateOnDevice(msgspec.Struct, tag=True):
    round: int
    factor: int


class ApplyOnDevice(msgspec.Struct, tag=True):
    round: int


class MeasureAgreement(msgspec.Struct, tag=True):
    round: int
    me: str


class Close(msgspec.Struct, tag=True):
    """Settle a round. `chain` is the value of the chain of settled sets after it."""

    round: int
    chain: bytes


class GetSettledState(msgspec.Struct, tag=True):
    """Return a share of the settled state as it is now, int32, and on the first device the whole agreement
    ledger behind it."""


class GetLedger(msgspec.Struct, tag=True):
    """Return the agreement ledger of the settled state, int32."""


Order: TypeAlias = (
    Begin
    | Hold
    | Publish
    | Forward
    | Finish
    | Backward
    | Drop
    | Contribute
    | LocalStep
    | EncodeDelta
    | RestoreOnDevice
    | AddOnDevice
    | RemoveOnDevice
    | RateOnDevice
    | ApplyOnDevice
    | MeasureAgreement
    | Close
    | GetSettledState
    | GetLedger
)


class Done(msgspec.Struct, tag=True):
    """The result of an order, for one share. Tensors are what the device computed of a microbatch."""

    loss_sum: float = 0.0
    tokens: int = 0
    payload: bytes = b""
    gradient_norm: float | None = None
    momentum_norm: float | None = None
    """Norm over this share."""
    vote_agreement: tuple[int, int, int] | None = None
    corrections: int = 0
    """After a change of rounds: `Replica.corrections`, which is the same on all devices."""


class InputRefused(msgspec.Struct, tag=True):
    """All devices refuse the same input from outside."""

    what: str
    """`stage`: StageError; `gradient`: GradientError."""
    text: str


class DeviceFailed(msgspec.Struct, tag=True):
    """The process cannot continue."""

    text: str


Answer: TypeAlias = Done | InputRefused | DeviceFailed
