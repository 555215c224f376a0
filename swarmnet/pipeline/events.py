"""Events that happen to microbatches on a peer, and effects that `Pipeline` asks its caller to carry out."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.identifiers import MicrobatchId, PeerId

# -- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MicrobatchCut:
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
    """`ComputeForward` is done on a stage that is not the last. The caller keeps the output under the key."""

    key: MicrobatchId


@dataclass(frozen=True, slots=True)
class LastDone:
    """`ComputeForward` is done on the last stage, including loss and backward pass."""

    key: MicrobatchId
    tokens: int


@dataclass(frozen=True, slots=True)
class BackwardDone:
    key: MicrobatchId
    tokens: int


@dataclass(frozen=True, slots=True)
class ComputeFailed:
    """Computing failed, and nothing was added to the gradient."""

    key: MicrobatchId
    code: str
    reason: str
    again: bool = False
    """Whether only the received gradient was invalid, so that another one can still be used."""


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
    """The last attempt that is not wanted any more."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """All links to the peer ended, it fell silent, or it said Bye."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class PipelineTick:
    """Only time has passed, or a peer has room again."""


Event = (
    MicrobatchCut
    | ActArrived
    | ForwardDone
    | LastDone
    | BackwardDone
    | ComputeFailed
    | GradArrived
    | BusyArrived
    | NackArrived
    | CancelArrived
    | PeerLost
    | PipelineTick
)


# -- effects --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ComputeForward:
    """Compute the forward pass. The caller answers `ForwardDone` (last stage: `LastDone`) or
    `ComputeFailed`."""

    key: MicrobatchId


@dataclass(frozen=True, slots=True)
class ComputeBackward:
    """Compute the backward pass. The caller answers with `BackwardDone` or `ComputeFailed`."""

    key: MicrobatchId


@dataclass(frozen=True, slots=True)
class SendAct:
    key: MicrobatchId
    peer: PeerId
    attempt: int
    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class SendGrad:
    """Send the kept answer to a peer that requested it."""

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
    """Free everything kept under the key: input, output, graph and answer."""

    key: MicrobatchId


Effect = ComputeForward | ComputeBackward | SendAct | SendGrad | SendBusy | SendNack | SendCancel | Forget
