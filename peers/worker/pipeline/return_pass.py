"""Take back at their origin the microbatches of a U-shaped run, and compute their last layers and loss.

The peer of the last stage sends hidden states to the owner that started the microbatch. It is the last
position on the path, with a state machine of its own. The labels are those that the owner kept.
"""

from __future__ import annotations

from dataclasses import replace

from peers.worker.pipeline.microbatch_compute import ComputeError, MicrobatchState
from peers.worker.pipeline.pipeline_service import PipelineService
from peers.worker.pipeline.validate_act import Arrival
from protocols.messages.table import Act
from swarmnet.identifiers import MicrobatchId, PeerId


class ReturnPass(PipelineService):
    """The last position of an owner's microbatches."""

    outward: PipelineService
    """Starts them: the first position."""

    def attach(self, outward: PipelineService) -> None:
        """Take back what `outward` starts. Tokens count there, when the gradient has come back."""
        self.outward = outward
        self.losses = outward.losses
        self.committed = lambda _tokens: None
        outward.returning = self

    def checked(self, peer: PeerId, act: Act, body: bytes) -> Arrival | ComputeError:
        """Return the microbatch with its own labels; a ComputeError if it is malformed or of another
        origin."""
        came = super().checked(peer, act, body)
        if isinstance(came, ComputeError):
            return came
        if came.key.origin != self.origin.peer:
            return ComputeError("illegal_path", "it belongs to another owner, who alone has its labels")
        text = self._started(came.key).text
        return came if text is None else replace(came, text=text)

    def unwanted(self, peer: PeerId, came: Arrival) -> ComputeError | None:
        """Return why a valid microbatch is not accepted. Unlike elsewhere, one that was started here is
        finished although this peer starts no more."""
        if came.key not in self.pipeline.jobs and self._started(came.key).text is None:
            return ComputeError("cancelled", "its owner has finished it, or given it up")
        if self.pipeline.router.is_shunned(peer, self.clock.time()):
            return ComputeError("outlier", "tensors that this peer sent lately differed from those of others")
        return None

    def finished_last(self, key: MicrobatchId, kept: MicrobatchState) -> None:
        """Store the loss for the first position, and count the seconds as this peer's own."""
        started = self._started(key)
        started.loss_sum = kept.loss_sum
        started.own_seconds += kept.seconds
        kept.seconds = 0.0

    def _started(self, key: MicrobatchId) -> MicrobatchState:
        """Return what the first position keeps of a microbatch; an empty state if it is gone."""
        return self.outward.bodies.get(key) or MicrobatchState()
