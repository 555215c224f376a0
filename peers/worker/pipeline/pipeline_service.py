"""Carry out what the `Pipeline` state machine decides: compute, send and keep the bodies of microbatches.

`MicrobatchWork` computes in the compute thread; everything in this module runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from peers.compute.executor import BACKWARD, FORWARD, Compute
from peers.compute.process_memory import memory_bytes
from peers.compute.stage_part import StagePart
from peers.network.message_router import MessageRouter, handles
from peers.network.peer_links import PeerLinks
from peers.runtime.timer import Timer
from peers.telemetry import log_events
from peers.telemetry.counters import Timings
from peers.telemetry.reasons import REROUTES
from peers.worker.pipeline.answer_checks import AnswerChecks
from peers.worker.pipeline.microbatch_compute import (
    ComputeError,
    MicrobatchState,
    MicrobatchWork,
    NormSource,
    Outcome,
)
from peers.worker.pipeline.missing_stages import MissingStages
from peers.worker.pipeline.origin import MicrobatchSource, Origin
from peers.worker.pipeline.reservation_client import open_pipeline
from peers.worker.pipeline.validate_act import ActForm, Arrival, checked_act
from protocols.messages.table import NO_ATTEMPT, Act, Busy, Cancel, Credit, Grad, Nack, Path
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.model.sampling import learned
from swarmnet.pipeline import events
from swarmnet.pipeline.flow_control import Flow, graphs_that_fit
from swarmnet.pipeline.ledger import RecentLoss, ServiceTime
from swarmnet.resources.link_bandwidth import UNKNOWN, LinkBandwidth, crossings, seconds_on_line
from swarmnet.routing.load_balancer import Router
from swarmnet.run.manifest import Manifest

NACK_CODES = REROUTES.keys() - {"busy"}
"""Codes that are counted under their own name, since codes become metric labels. Any other code is counted as
"other"."""


class PipelineService:
    """One stage's part in the pipeline of microbatches."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        stage: int,
        compute: Compute,
        part: StagePart,
        neighbourhood: PeerLinks,
        text: MicrobatchSource | None,
        chance: Random,
        slots: int,
        in_flight: int,
        committed: Callable[[int], None],
        round: Callable[[], int],
        log_event: log_events.LogEvent,
        line: LinkBandwidth = UNKNOWN,
    ) -> None:
        """`stage` is the position on the paths. `text` is given to the first stage only. At most `in_flight`
        of this peer's own microbatches and `slots` of others are in progress here, and fewer if memory is
        short. `committed(tokens)` informs the round service; `round()` returns the stage's current round."""
        fitting = _fitting(manifest, stage, part)
        self.form = ActForm.of(manifest)
        self.compute = compute
        self.work = MicrobatchWork(manifest, stage, part.compute, chance)
        self.neighbourhood = neighbourhood
        self.clock = neighbourhood.clock
        self.committed = committed
        self.log_event = log_event
        self.timings = Timings()
        self.losses = RecentLoss()
        """The recent mean loss of microbatches whose loss passed through here."""
        self.service = ServiceTime(seconds_on_line(line, crossings(manifest)[stage % len(manifest.stages)]))
        wake = partial(self.feed, events.PipelineTick())
        self.ways, self.pipeline, self.reservations = open_pipeline(
            manifest=manifest,
            stage=stage,
            slots=slots if self.work.is_last else min(slots, fitting),  # The last stage keeps no graphs.
            router=Router(chance),
            compute=compute,
            neighbourhood=neighbourhood,
            round=round,
            wake=wake,
            serving=lambda: self.serving,
        )
        self.ledger = self.pipeline.ledger
        self.origin = Origin(
            text=text,
            codec=self.form.text,
            peer=neighbourhood.transport.peer,
            pipeline=self.pipeline,
            ways=self.ways,
            flow=Flow(min(in_flight, fitting)),
            round=round,
        )
        self.missing = MissingStages(self.ways, log_event)
        self.bodies: dict[MicrobatchId, MicrobatchState] = {}
        self.serving = False
        self.checks = AnswerChecks(
            manifest=manifest,
            compute=compute,
            work=self.work,
            neighbourhood=neighbourhood,
            ways=self.ways,
            pipeline=self.pipeline,
            bodies=self.bodies,
            is_serving=lambda: self.serving and part.hold is None,  # Several devices count everything.
        )
        self.returning: PipelineService | None = None
        """Takes what comes back to its origin in a U-shaped run; None in other runs and stages."""
        self._senders = set[PeerId]()  # Peers that sent a body: their norms are kept.
        self._timer = Timer(wake, self.clock)

    # -- the machine ----------------------------------------------------------------------------------

    def feed(self, event: events.Event) -> None:
        """Feed an event to the pipeline and carry out its effects."""
        waiting = [event]
        while waiting:
            for effect in self.pipeline.handle(waiting.pop(), self.clock.time()):
                if not isinstance(effect, events.SendAct):
                    self._carry_out(effect)
                elif not self._send_act(effect):  # No link, or its queue is full.
                    waiting.append(events.BusyArrived(effect.peer, effect.key, effect.attempt))
        self._timer.arm(self.pipeline.next_deadline())

    def pump(self) -> None:
        """Start microbatches while this origin may have more in flight and the next stage has capacity."""
        if self.serving and self.missing.look(self.clock.time()):
            self.pipeline.router.forget_others(self.neighbourhood.membership.peers, self.clock.time())
        while self.serving and (cut := self.origin.cut(self.clock.time())) is not None:
            key, self.bodies[key] = cut
            self.feed(events.MicrobatchCut(key))

    def finished(self) -> bool:
        """Return whether no microbatch is in progress here, or all of them wait for a next stage that has
        left."""
        waits = all(job.phase in ("unrouted", "done") for job in self.pipeline.jobs.values())
        return not self.pipeline.under_way or (waits and not self.ways.candidates(None))

    def close(self) -> None:
        if self.returning is not None:
            self.returning.close()
        self._timer.close()
        self.reservations.close()
        self.checks.close()

    def _carry_out(self, effect: events.Effect) -> None:
        """Do what the pipeline machine requested: compute in the compute thread, send a message, or forget a
        microbatch."""
        post = self.neighbourhood.post
        match effect:
            case events.ComputeForward(key):
                self.reservations.begins(key)
                kept = self.bodies[key]
                kept.submitted_at = self.clock.time()
                work = partial(self.work.forward, key, kept)
                self.compute.submit(FORWARD, work, partial(self._forwarded, key))
            case events.ComputeBackward(key):
                self.bodies[key].submitted_at = self.clock.time()
                work = partial(self.work.backward, key, self.bodies[key])
                self.compute.submit(BACKWARD, work, partial(self._backwarded, key))
            case events.SendGrad(key, peer, attempt):
                kept = self.bodies[key]
                if kept.arrived_at is not None:
                    here = self.clock.time() - kept.arrived_at
                    self.timings.append(("handed up", here))
                    self.reservations.hands_up(peer, key, attempt, here)
                    kept.arrived_at = None
                queued = kept.queued + kept.queued_below
                via = kept.answerer.peer if kept.answerer is not None else ""
                loss_sum = kept.loss_sum if self.form.text.size else 0.0  # Else it is the owner's alone.
                seconds = kept.seconds, queued
                grad = Grad(
                    *key, attempt, loss_sum, kept.tokens, *seconds, kept.shape, via=via, digest=kept.digest
                )
                post(peer, "data", grad, kept.answer)
                self._send_credit(peer)
            case events.SendBusy(key, peer, attempt):
                post(peer, "data", Busy(*key, attempt))
                self._send_credit(peer)
            case events.SendNack(key, peer, attempt, code, reason):
                post(peer, "data", Nack(*key, attempt, code, reason))
            case events.SendCancel(key, peer, attempt):
                post(peer, "data", Cancel(*key, attempt))
            case events.Forget(key):
                self.bodies.pop(key, None)
                self.ways.forget(key)
                self.reservations.drop(key)
                drop = partial(self.work.drop, key)
                self.compute.submit(BACKWARD, drop, lambda _result, _seconds: None)

    def _send_act(self, send: events.SendAct) -> bool:
        """Send a microbatch's output to a peer of a later stage. Returns whether it was queued."""
        key, peer, attempt, kept = send.key, send.peer, send.attempt, self.bodies[send.key]
        if attempt > 1:
            job = self.pipeline.jobs[key]
            others = sorted(job.tried.keys() - {peer})
            self.log_event(log_events.Rerouted(code=job.rerouted, counter=key.counter, to=peer, tried=others))
        header = self.ways.header_for(key, self.neighbourhood.membership.peers[peer].stage)
        act = Act(*key, attempt, header.stage, send.deadline_seconds, kept.shape, Path.of(header))
        return self.neighbourhood.post(peer, "data", act, kept.output)

    def _send_credit(self, peer: PeerId) -> None:
        """Send a peer of the previous stage this peer's credit and service time."""
        credit = Credit(self.pipeline.grant(peer), self.service.with_line, self.compute.queued)
        self.neighbourhood.post(peer, "data", credit)

    # -- messages -------------------------------------------------------------------------------------

    def register(self, router: MessageRouter) -> None:
        """Handle messages about microbatches from now on. After each, new ones start if there is room."""
        router.add(self, after=self.pump)
        router.add(self.checks)
        self.reservations.register(router, self.pump)

    @handles(Busy)
    def _busy(self, peer: PeerId, busy: Busy, _body: bytes) -> None:
        self.feed(events.BusyArrived(peer, MicrobatchId(PeerId(busy.origin), busy.counter), busy.attempt))

    @handles(Nack)
    def _nack(self, peer: PeerId, nack: Nack, _body: bytes) -> None:
        key = MicrobatchId(PeerId(nack.origin), nack.counter)
        code = nack.code if nack.code in NACK_CODES else "other"
        self.log_event(
            log_events.MicrobatchRefused(peer=peer, counter=key.counter, code=code, reason=nack.reason[:200])
        )
        self.feed(events.NackArrived(peer, key, nack.attempt, code))

    @handles(Cancel)
    def _cancel(self, peer: PeerId, cancel: Cancel, _body: bytes) -> None:
        key = MicrobatchId(PeerId(cancel.origin), cancel.counter)
        self.reservations.given_back(peer, key)
        if cancel.attempt != NO_ATTEMPT:
            (self.returning or self).feed(events.CancelArrived(peer, key, cancel.attempt))

    @handles(Credit)
    def _credit(self, peer: PeerId, credit: Credit, _body: bytes) -> None:
        self.pipeline.router.on_credit(peer, credit.slots, credit.service_seconds, credit.waiting)
        self.feed(events.PipelineTick())

    def unlinked(self, peer: PeerId) -> None:
        self.missing.look_soon()
        self.reservations.lost(peer)
        if peer in self._senders:
            self._senders.discard(peer)
            self.compute.submit(BACKWARD, partial(self.work.left, peer), lambda _result, _seconds: None)
        if self.returning is not None:
            self.returning.unlinked(peer)
        self.feed(events.PeerLost(peer))
        self.pump()

    @handles(Act)
    def _act(self, peer: PeerId, act: Act, body: bytes) -> None:
        (self.returning or self).accept(peer, act, body)

    def accept(self, peer: PeerId, act: Act, body: bytes) -> None:
        """Check a microbatch that came from a previous stage, store it, and feed it to the machine. Answers
        with a Nack if it is malformed or not wanted."""
        self._senders.add(peer)
        came = self.checked(peer, act, body)
        if isinstance(came, ComputeError):
            self._refuse(peer, act, came)
            self.neighbourhood.refused(peer, came.code, came.reason)
            return
        unwanted = self.unwanted(peer, came)
        if unwanted is not None:
            self._refuse(peer, act, unwanted)
            return
        key = came.key
        if key not in self.pipeline.jobs:
            visited = came.header.visited
            self.bodies[key] = MicrobatchState(
                self.ways.arrive(key, came.header),
                NormSource(peer, visited[-2], len(visited)),
                text=came.text,
                loss_tokens=learned(came.text.labels),
                output=came.hidden,
                shape=act.shape,
                arrived_at=self.clock.time(),
            )
        self.feed(events.ActArrived(peer, key, act.attempt, act.deadline_seconds))
        job = self.pipeline.jobs.get(key)
        if job is None:
            self.bodies.pop(key, None)  # Rejected: busy, or a duplicate.
            self.ways.forget(key)
        elif peer in job.above:
            self.reservations.came(peer, key)

    def checked(self, peer: PeerId, act: Act, body: bytes) -> Arrival | ComputeError:
        """Return the decoded microbatch, or the reason why it is not computed."""
        return checked_act(self.neighbourhood.membership, self.ways, self.form, peer, act, body)

    def _refuse(self, peer: PeerId, act: Act, why: ComputeError) -> None:
        nack = Nack(act.origin, act.counter, act.attempt, why.code, why.reason)
        self.neighbourhood.post(peer, "data", nack)

    def unwanted(self, peer: PeerId, came: Arrival) -> ComputeError | None:
        """Return why a valid microbatch is not accepted; None if it is."""
        if not self.serving:
            return ComputeError("not_ready", "this peer is not in step with its stage yet")
        if came.key in self.pipeline.jobs and self.ways.came_by_other_path(came.key, came.header):
            reason = "the same microbatch is here by another path, and gradients of the two differ"
            return ComputeError("other_path", reason)
        if self.pipeline.router.is_shunned(peer, self.clock.time()):
            return ComputeError("outlier", "tensors that this peer sent lately differed from those of others")
        return None

    @handles(Grad)
    def _grad(self, peer: PeerId, grad: Grad, body: bytes) -> None:
        """Store the gradient that came back for a microbatch, and feed it to the machine. One of a wrong size
        is refused."""
        self._senders.add(peer)
        key = MicrobatchId(PeerId(grad.origin), grad.counter)
        kept = self.bodies.get(key)
        if kept is not None and self.pipeline.expects_answer(key, peer):
            tokens = kept.shape[0] * kept.shape[1]
            if grad.shape != kept.shape or len(body) != self.form.gradient_bytes or grad.tokens != tokens:
                reason = f"a gradient of {len(body)} bytes, {grad.tokens} tokens"
                self.neighbourhood.refused(peer, "malformed", reason)
                self.feed(events.NackArrived(peer, key, grad.attempt, "malformed"))
                return
            kept.answered = self.clock.time() - self.pipeline.jobs[key].sent_at
            self.reservations.answered(peer, key, grad.attempt, kept.answered)
            self.timings.append(("answered", kept.answered))
            kept.gradient, kept.tokens = body, grad.tokens
            if self.form.text.size:  # Else only the owner knows the loss, and `returning` has stored it.
                kept.loss_sum = grad.loss_sum
            known = self.neighbourhood.membership.peers.get(peer)
            stage = known.stage if known is not None else -1
            kept.answerer = NormSource(peer, stage, kept.passage.path_stages)
            kept.seconds = max(0.0, grad.path_seconds)
            kept.queued_below = min(max(0.0, grad.queue_seconds), kept.answered)
            self.checks.answered(peer, grad, kept)
        self.feed(events.GradArrived(peer, key, grad.attempt))

    # -- and their results come back on the event loop ------------------------------------------------

    def _forwarded(self, key: MicrobatchId, result: Outcome, seconds: float) -> None:
        """Record the result of a forward pass, and feed it to the machine. On the last stage the backward
        pass is done too, so the microbatch is committed. Called on the event loop, as is `_backwarded`."""
        kept = self._computed(key, seconds)
        self.reservations.computed(seconds, 0.0)
        if isinstance(result, ComputeError):
            self._failed(key, result)
        elif self.work.is_last:
            kept.answer, kept.loss_sum, kept.tokens = result.encoded, result.loss_sum, result.tokens
            kept.seconds, kept.output, kept.text = seconds, b"", None
            self.service.add(seconds)
            self.finished_last(key, kept)
            self.reservations.done(key)
            self.feed(events.LastDone(key, result.tokens))
            self.committed(result.tokens)
        else:
            text = kept.text.encoded if kept.text is not None else b""
            kept.output, kept.shape, kept.inputs = result.encoded + text, result.shape, None
            kept.answer, kept.own_seconds = b"", seconds
            self.feed(events.ForwardDone(key))
        self.pump()

    def finished_last(self, key: MicrobatchId, kept: MicrobatchState) -> None:
        """Record the loss of a microbatch that the last stage has committed."""
        loss = self._loss(kept.loss_sum, kept.loss_tokens)
        self.log_event(log_events.Committed(*key, kept.tokens, loss))

    def _backwarded(self, key: MicrobatchId, result: Outcome, seconds: float) -> None:
        """Record the result of a backward pass: the microbatch is committed, and its gradient goes back to
        the sender."""
        kept = self._computed(key, seconds)
        self.reservations.computed(0.0, seconds)
        if isinstance(result, ComputeError):
            self._failed(key, result)
        else:
            kept.answer = result.encoded
            kept.output = kept.gradient = b""
            kept.seconds += seconds + kept.own_seconds
            below = kept.seconds - seconds - kept.own_seconds
            self.service.add(seconds + kept.own_seconds)
            tokens, loss = kept.tokens, self._loss(kept.loss_sum, kept.loss_tokens)
            answered, queued, under_way = kept.answered, kept.queued_below, self.pipeline.started_here
            self.log_event(log_events.Committed(*key, tokens, loss, answered, below, queued, under_way))
            live, stage = self.neighbourhood.membership.live, self.ways.stage
            self.origin.committed(kept, self.clock.time(), 1 + len(live(stage)), len(live(stage + 1)))
            self.reservations.done(key)
            self.feed(events.BackwardDone(key, tokens))
            self.committed(tokens)
        self.pump()

    def _computed(self, key: MicrobatchId, seconds: float) -> MicrobatchState:
        """Return the state of a computed microbatch; an empty one if it was dropped meanwhile."""
        kept = self.bodies.get(key) or MicrobatchState()
        kept.queued += max(0.0, self.clock.time() - kept.submitted_at - seconds)
        return kept

    def _failed(self, key: MicrobatchId, trouble: ComputeError) -> None:
        code, reason, peer = trouble.code, trouble.reason, trouble.peer
        self.log_event(
            log_events.MicrobatchFailed(
                code=code, origin=key.origin, counter=key.counter, reason=reason, peer=peer
            )
        )
        self.feed(events.ComputeFailed(key, code, reason, trouble.again))
        if trouble.outlier and peer is not None:
            self.pipeline.router.shun(peer, self.clock.time())
            self.neighbourhood.part_from(peer, "outlier", reason)

    def _loss(self, loss_sum: float, tokens: int) -> float | None:
        """Record the loss of a committed microbatch, summed over `tokens`, and return its mean; None without
        tokens."""
        self.losses.add(loss_sum, tokens)
        return loss_sum / tokens if tokens else None


def _fitting(manifest: Manifest, stage: int, part: StagePart) -> int:
    """Return how many microbatch graphs memory holds."""
    fit = graphs_that_fit(manifest, stage, memory_bytes(part.device), part.computing)
    return min(fit, part.most_graphs)
