"""What happens to microbatches on a peer, and what `Pipeline` asks its caller to do."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.identifiers import MicrobatchId, PeerId

# -- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """This origin has cut a new microbatch from its text."""

    key: MicrobatchId


@dataclass(frozen=True, slots=True)
class ActArrived:
    peer: PeerId
    key: MicrobatchId
    attempt: int
    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class ForwardDone:
    """ComputeForward is done on a stage that is not the last: the output is kept under the key."""

    key: MicrobatchId


@dataclass(frozen=True, slots=True)
class LastDone:
    """ComputeForward is done on the last stage, loss and backward with it."""

    key: MicrobatchId
    tokens: int


@dataclass(frozen=True, slots=True)
class BackwardDone:
    key: MicrobatchId
    tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Computing failed; nothing was added to the gradient."""

    key: MicrobatchId
    code: str
    reason: str
    again: bool = False
    """The gradient that came was no good, and with another one it can be computed still."""


@dataclass(frozen=True, slots=True)
class GradArrived:
    peer: PeerId
    key: MicrobatchId
    attempt: int


@dataclass(frozen=True, slots=True)
class BusyArrived:
    peer: PeerId
    key: MicrobatchId
    attempt: int


@dataclass(frozen=True, slots=True)
class NackArrived:
    peer: PeerId
    key: MicrobatchId
    attempt: int
    code: str


@dataclass(frozen=True, slots=True)
class CancelArrived:
    peer: PeerId
    key: MicrobatchId
    attempt: int
    """The last one that is not wanted any more."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Its links ended, it went silent, or it said Bye."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing but time has passed, or a peer has room again."""


Event = (
    Start | ActArrived | ForwardDone | LastDone | BackwardDone | Failed | GradArrived | BusyArrived
    | NackArrived | CancelArrived | PeerLost | Tick
)  # fmt: skip


# -- effects --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ComputeForward:
    """Answer with ForwardDone (with LastDone on the last stage) or Failed."""

    key: MicrobatchId


@dataclass(frozen=True, slots=True)
class ComputeBackward:
    """Answer with BackwardDone or Failed."""

    key: MicrobatchId


@dataclass(frozen=True, slots=True)
class SendAct:
    key: MicrobatchId
    peer: PeerId
    attempt: int
    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class SendGrad:
    """The kept answer, to one who asked."""

    key: MicrobatchId
    peer: PeerId
    attempt: int


@dataclass(frozen=True, slots=True)
class SendBusy:
    key: MicrobatchId
    peer: PeerId
    attempt: int


@dataclass(frozen=True, slots=True)
class SendNack:
    key: MicrobatchId
    peer: PeerId
    attempt: int
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class SendCancel:
    key: MicrobatchId
    peer: PeerId
    attempt: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Free everything kept under the key: input, output, graph, answer."""

    key: MicrobatchId


Effect = (
    ComputeForward | ComputeBackward | SendAct | SendGrad | SendBusy | SendNack | SendCancel | Forget
)  # fmt: skip
