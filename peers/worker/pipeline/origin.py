"""Start this peer's own microbatches, which is the part of the first stage in the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from peers.worker.pipeline.microbatch_compute import MicrobatchState
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.model.carried_text import TextCodec
from swarmnet.model.sampling import learned
from swarmnet.pipeline.flow_control import Flow
from swarmnet.pipeline.pipeline import Pipeline
from swarmnet.routing.next_hop import NextHop
from swarmnet.run.mixtures import MixtureChange, Mixtures, mixture_at


class MicrobatchSource(Protocol):
    """The source of the first stage's microbatches."""

    def microbatch(
        self, key: MicrobatchId, mixture: MixtureChange | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Return inputs_BT and labels_BT, int64, from sources in the shares of `mixture`; None: in those of
        the manifest.

        With random sampling they are a pure function of the key; with epochs they are the next ones in order.
        None means that they are not read yet; the caller tries again in `pump`, which is called when they
        are."""


@dataclass(eq=False, kw_only=True)
class Origin:
    """Cuts microbatches from the text, and limits how many are in flight."""

    text: MicrobatchSource | None
    """What microbatches are cut from; None while none may start, and on later stages."""
    codec: TextCodec
    peer: PeerId
    """The origin, which is this peer."""
    pipeline: Pipeline
    ways: NextHop
    flow: Flow
    round: Callable[[], int]
    """Returns the round that gathers gradients now."""
    mixtures: Mixtures = field(default=(), init=False)
    """Changes of the sources' shares that the run's owner has ordered."""
    next_counter: int = field(default=0, init=False)

    def cut(self, now: float) -> tuple[MicrobatchId, MicrobatchState] | None:
        """Return a new microbatch; None if no more may be in flight, or its text is not read yet."""
        text, pipeline = self.text, self.pipeline
        if text is None or pipeline.started_here >= self.flow.window or not pipeline.has_room_ahead(now):
            return None
        key = MicrobatchId(self.peer, self.next_counter)
        taken = text.microbatch(key, mixture_at(self.mixtures, self.round()))
        if taken is None:
            return None
        self.next_counter += 1
        inputs_BT, labels_BT = taken
        carried = self.codec.encode(inputs_BT, labels_BT)
        state = MicrobatchState(
            self.ways.start(key),
            inputs=inputs_BT,
            text=carried,
            loss_tokens=learned(labels_BT),
            started_at=now,
        )
        return key, state

    def committed(self, kept: MicrobatchState, now: float, peers_here: int, peers_below: int) -> None:
        """Adapt the number in flight to a committed microbatch, if it started here. `peers_here` and
        `peers_below` are the numbers of peers of this stage and of the next one."""
        if kept.started_at is None:
            return
        self.flow.aim(self.pipeline.stages_below + 1, peers_here, peers_below)
        queue = kept.queued + kept.queued_below
        self.flow.done(now - kept.started_at, kept.seconds, queue, self.pipeline.started_here)
