"""Carries out what `Pipeline` decides: computes, sends and keeps the bodies of microbatches.

Compute work runs in the compute thread and touches only the stage's compute; everything else runs on the
event loop. A microbatch that cannot be computed (wrong shape, not finite) is an ordinary outcome: `_Trouble`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from peers.compute import BACKWARD, FORWARD, Compute
from peers.neighbourhood import Neighbourhood
from peers.stage_part import Computes
from peers.timer import Timer
from peers.timings import Timings
from protocols.messages import Act, Busy, Cancel, Grad, Message, Nack
from swarmnet import hidden
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.ledger import Ledger
from swarmnet.manifest import Manifest
from swarmnet.pipeline import Pipeline
from swarmnet.pipeline_events import (
    ActArrived,
    BackwardDone,
    BusyArrived,
    CancelArrived,
    ComputeBackward,
    ComputeForward,
    Effect,
    Event,
    Failed,
    Forget,
    ForwardDone,
    GradArrived,
    LastDone,
    NackArrived,
    PeerLost,
    SendAct,
    SendBusy,
    SendCancel,
    SendGrad,
    SendNack,
    Start,
    Tick,
)
from swarmnet.router import Router
from swarmnet.stage import StageError

LABEL_BYTES = 4
NACK_CODES = frozenset(
    {"committed", "deadline", "malformed", "not_finite", "not_ready", "wrong_stage", "gone", "cancelled"}
)
"""Whatever else a peer writes is counted as "other": codes become names of metrics."""
SMOOTHING = 0.1
"""Weight of a new measurement of the own service time."""


class Text(Protocol):
    """Where the first stage takes its microbatches from."""

    def microbatch(self, key: MicrobatchId) -> tuple[Tensor, Tensor]:
        """inputs_BT and labels_BT, int64: a pure function of the key."""


@dataclass(slots=True)
class _Bodies:
    """Everything kept for one microbatch, until Forget."""

    inputs: Tensor | None = None
    labels: Tensor | None = None
    output: bytes = b""
    """Encoded hidden states and labels, for the next peer and for another if that one fails."""
    shape: tuple[int, int, int] = (0, 0, 0)
    gradient: bytes = b""
    """Encoded gradient that came from below."""
    answer: bytes = b""
    """Encoded gradient for the peer above."""
    loss_sum: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    """Compute spent here and below."""
    own_seconds: float = 0.0
    """Compute spent here."""
    answered: float = 0.0
    """From sending its output to the gradient: compute, queues and network below."""
    arrived_at: float | None = None
    """When it came from above; None once its gradient was handed up."""


@dataclass(frozen=True, slots=True)
class _Trouble:
    """Why a microbatch was not computed."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Computed:
    encoded: bytes
    shape: tuple[int, int, int]
    loss_sum: float = 0.0
    tokens: int = 0


class DataPath:
    """One stage's part in the way of microbatches."""

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        compute: Compute,
        stage_compute: Computes,
        neighbourhood: Neighbourhood,
        text: Text | None,
        chance: Random,
        slots: int,
        in_flight: int,
        committed: Callable[[int], None],
        note: Callable[..., None],
    ) -> None:
        """`text` for the first stage. `committed(tokens)` tells the update path on the event loop."""
        self.manifest = manifest
        self.stage = stage
        self.is_last = stage == len(manifest.stages) - 1
        self.compute = compute
        self.stage_compute = stage_compute
        self.neighbourhood = neighbourhood
        self.text = text
        self.in_flight = in_flight
        self.committed = committed
        self.note = note
        self.ledger = Ledger()
        self.timings = Timings()
        below = len(manifest.stages) - 1 - stage
        self.router = Router(chance)
        self.pipeline = Pipeline(below, self.router, self._next_peers, slots, self.ledger)
        self.bodies: dict[MicrobatchId, _Bodies] = {}
        self.next_counter = 0
        self.gathered_tokens = 0
        """Tokens in the gradient that StageCompute holds; touched by the compute thread alone."""
        self.service_seconds = 0.0
        self.loss: float | None = None
        """Nats per token of the newest microbatch whose loss passed here."""
        self.serving = False
        self.loop = asyncio.get_running_loop()
        self._timer = Timer(lambda: self.feed(Tick()))

    def _next_peers(self) -> list[PeerId]:
        return self.neighbourhood.membership.live(self.stage + 1)

    # -- the machine ----------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Give the pipeline an event and do what it says."""
        for effect in self.pipeline.handle(event, self.loop.time()):
            self._carry_out(effect)
        self._timer.arm(self.pipeline.next_deadline())

    def pump(self) -> None:
        """Start microbatches while this origin has room for them ahead."""
        if self.text is None:
            return
        while (
            self.serving
            and self.pipeline.started_here < self.in_flight
            and self.pipeline.has_room_ahead(self.loop.time())
        ):
            key = MicrobatchId(self.neighbourhood.transport.peer, self.next_counter)
            self.next_counter += 1
            inputs_BT, labels_BT = self.text.microbatch(key)
            self.bodies[key] = _Bodies(inputs=inputs_BT, labels=labels_BT)
            self.feed(Start(key))

    def finished(self) -> bool:
        """Whether nothing is under way here, or all that is waits for a next stage that has left."""
        waits = all(job.phase in ("unrouted", "done") for job in self.pipeline.jobs.values())
        return not self.pipeline.under_way or (waits and not self._next_peers())

    def close(self) -> None:
        self._timer.close()

    def _carry_out(self, effect: Effect) -> None:
        post = self.neighbourhood.post
        match effect:
            case ComputeForward(key):
                work = partial(self._forward, key, self.bodies[key])
                self.compute.submit(FORWARD, work, partial(self._forwarded, key))
            case ComputeBackward(key):
                work = partial(self._backward, key, self.bodies[key])
                self.compute.submit(BACKWARD, work, partial(self._backwarded, key))
            case SendAct(key, peer, attempt, deadline):
                kept = self.bodies[key]
                if attempt > 1:
                    tried = sorted(self.pipeline.jobs[key].tried - {peer})
                    self.note("rerouted", counter=key.counter, to=peer, tried=tried)
                post(peer, "data", Act(*key, attempt, self.stage + 1, deadline, kept.shape), kept.output)
            case SendGrad(key, peer, attempt):
                kept = self.bodies[key]
                if kept.arrived_at is not None:
                    self.timings.add("handed up", self.loop.time() - kept.arrived_at)
                    kept.arrived_at = None
                grad = Grad(*key, attempt, kept.loss_sum, kept.tokens, kept.seconds, kept.shape)
                post(peer, "data", grad, kept.answer)
            case SendBusy(key, peer, attempt):
                post(peer, "data", Busy(*key, attempt))
            case SendNack(key, peer, attempt, code, reason):
                post(peer, "data", Nack(*key, attempt, code, reason))
            case SendCancel(key, peer, attempt):
                post(peer, "data", Cancel(*key, attempt))
            case Forget(key):
                self.bodies.pop(key, None)
                drop = partial(self.stage_compute.drop, key)
                self.compute.submit(BACKWARD, drop, lambda _result, _seconds: None)

    # -- messages -------------------------------------------------------------------------------------

    def message(self, peer: PeerId, message: Message, body: bytes) -> None:
        match message:
            case Act():
                self._act(peer, message, body)
            case Grad():
                self._grad(peer, message, body)
            case Busy(origin, counter, attempt):
                self.feed(BusyArrived(peer, MicrobatchId(PeerId(origin), counter), attempt))
            case Nack(origin, counter, attempt, code, reason):
                key = MicrobatchId(PeerId(origin), counter)
                code = code if code in NACK_CODES else "other"
                self.note("nack", peer=peer, counter=counter, code=code, reason=reason[:200])
                self.feed(NackArrived(peer, key, attempt, code))
            case Cancel(origin, counter, _):
                self.feed(CancelArrived(peer, MicrobatchId(PeerId(origin), counter)))
        self.pump()

    def unlinked(self, peer: PeerId) -> None:
        self.feed(PeerLost(peer))
        self.pump()

    def _act(self, peer: PeerId, act: Act, body: bytes) -> None:
        key = MicrobatchId(PeerId(act.origin), act.counter)
        trouble = self._unfit(peer, act, body)
        if trouble is not None or not self.serving:
            code, reason = (trouble.code, trouble.reason) if trouble else ("not_ready", "not in step yet")
            self.neighbourhood.post(peer, "data", Nack(*key, act.attempt, code, reason))
            if trouble is not None:
                self.neighbourhood.refused(peer, code, reason)
            return
        if key not in self.pipeline.jobs:
            split = hidden.encoded_bytes(act.shape, self.manifest.hidden_codec)
            labels = torch.from_numpy(np.frombuffer(body, np.int32, offset=split).astype(np.int64))
            self.bodies[key] = _Bodies(
                labels=labels.view(act.shape[:2]), output=body[:split], shape=act.shape,
                arrived_at=self.loop.time(),
            )  # fmt: skip
        self.feed(ActArrived(peer, key, act.attempt, act.deadline_seconds))
        if key not in self.pipeline.jobs:
            self.bodies.pop(key, None)  # Refused: busy, or known.

    def _unfit(self, peer: PeerId, act: Act, body: bytes) -> _Trouble | None:
        data, model = self.manifest.data, self.manifest.model
        fits = act.shape == (data.microbatch_sequences, data.sequence_tokens, model.width)
        known = self.neighbourhood.membership.peers.get(peer)
        from_above = known is not None and known.stage == self.stage - 1 and self.stage > 0
        if act.stage != self.stage or not from_above:
            return _Trouble("wrong_stage", f"this peer takes microbatches for stage {self.stage} from above")
        if not fits:
            return _Trouble("malformed", f"hidden states of shape {act.shape}")
        split = hidden.encoded_bytes(act.shape, self.manifest.hidden_codec)
        if len(body) != split + data.microbatch_sequences * data.sequence_tokens * LABEL_BYTES:
            return _Trouble("malformed", f"a body of {len(body)} bytes")
        labels = np.frombuffer(body, np.int32, offset=split)
        if labels.min() < 0 or labels.max() >= model.vocabulary:
            # Else only the last stage would find it, and the honest peer that asked it would get the blame.
            return _Trouble("malformed", "labels outside the vocabulary")
        if not 0.0 < act.deadline_seconds < 3600.0:
            return _Trouble("malformed", f"a deadline of {act.deadline_seconds} s")
        return None

    def _grad(self, peer: PeerId, grad: Grad, body: bytes) -> None:
        key = MicrobatchId(PeerId(grad.origin), grad.counter)
        kept = self.bodies.get(key)
        if kept is not None and self.pipeline.expects_answer(key, peer):
            size = hidden.encoded_bytes(kept.shape, self.manifest.hidden_codec)
            tokens = kept.shape[0] * kept.shape[1]
            if grad.shape != kept.shape or len(body) != size or grad.tokens != tokens:
                reason = f"a gradient of {len(body)} bytes, {grad.tokens} tokens"
                self.neighbourhood.refused(peer, "malformed", reason)
                self.feed(NackArrived(peer, key, grad.attempt, "malformed"))
                return
            kept.answered = self.loop.time() - self.pipeline.jobs[key].sent_at
            self.timings.add("answered", kept.answered)
            kept.gradient, kept.loss_sum, kept.tokens = body, grad.loss_sum, grad.tokens
            kept.seconds = max(0.0, grad.path_seconds)
        self.feed(GradArrived(peer, key, grad.attempt, max(0.0, grad.path_seconds)))

    # -- compute: these two run in the compute thread -------------------------------------------------

    def _forward(self, key: MicrobatchId, kept: _Bodies) -> _Computed | _Trouble:
        codec = self.manifest.hidden_codec
        try:
            inputs = kept.inputs
            if inputs is None:
                inputs = hidden.decode(kept.output, kept.shape, codec)
            if not self.is_last:
                output_BTD = self.stage_compute.forward(key, inputs)
                return _Computed(hidden.encode(output_BTD, codec), _shape(output_BTD))
            assert kept.labels is not None, "the last stage got its labels with the ACT"
            finished = self.stage_compute.finish(key, inputs, kept.labels)
        except (StageError, hidden.HiddenError) as error:
            return _Trouble("not_finite" if isinstance(error, StageError) else "malformed", str(error))
        self.gathered_tokens += finished.tokens
        gradient = finished.hidden_gradient
        encoded = b"" if gradient is None else hidden.encode(gradient, codec)
        return _Computed(encoded, kept.shape, finished.loss_sum, finished.tokens)

    def _backward(self, key: MicrobatchId, kept: _Bodies) -> _Computed | _Trouble:
        codec = self.manifest.hidden_codec
        try:
            gradient = self.stage_compute.backward(key, hidden.decode(kept.gradient, kept.shape, codec))
        except (StageError, hidden.HiddenError) as error:
            return _Trouble("not_finite" if isinstance(error, StageError) else "malformed", str(error))
        self.gathered_tokens += kept.tokens
        return _Computed(b"" if gradient is None else hidden.encode(gradient, codec), kept.shape)

    # -- and their results come back on the event loop ------------------------------------------------

    def _forwarded(self, key: MicrobatchId, result: _Computed | _Trouble, seconds: float) -> None:
        kept = self.bodies.get(key)
        self.timings.add("last" if self.is_last else "forward", seconds)
        if isinstance(result, _Trouble):
            self._failed(key, result)
        elif self.is_last:
            if kept is not None:
                kept.answer, kept.loss_sum, kept.tokens = result.encoded, result.loss_sum, result.tokens
                kept.seconds = seconds
            self._measured(seconds)
            self._note_commit(key, result.loss_sum, result.tokens)
            self.feed(LastDone(key, result.tokens))
            self.committed(result.tokens)
        else:
            if kept is not None:
                labels = kept.labels
                assert labels is not None, "labels come with the inputs"
                kept.output = result.encoded + labels.to(torch.int32).numpy().tobytes()
                kept.shape, kept.inputs = result.shape, None
                kept.answer, kept.own_seconds = b"", seconds
            self.feed(ForwardDone(key))
        self.pump()

    def _backwarded(self, key: MicrobatchId, result: _Computed | _Trouble, seconds: float) -> None:
        kept = self.bodies.get(key)
        self.timings.add("backward", seconds)
        if isinstance(result, _Trouble):
            self._failed(key, result)
        else:
            tokens, loss_sum = (kept.tokens, kept.loss_sum) if kept else (0, 0.0)
            if kept is not None:
                kept.answer, kept.output, kept.gradient = result.encoded, b"", b""
                kept.seconds += seconds + kept.own_seconds
            self._measured(seconds + (kept.own_seconds if kept is not None else 0.0))
            below = kept.seconds - seconds - kept.own_seconds if kept is not None else 0.0
            answered = kept.answered if kept is not None else 0.0
            self._note_commit(key, loss_sum, tokens, answered=answered, below=below)
            self.feed(BackwardDone(key, tokens))
            self.committed(tokens)
        self.pump()

    def _failed(self, key: MicrobatchId, trouble: _Trouble) -> None:
        self.note("microbatch_failed", origin=key.origin, counter=key.counter, reason=trouble.reason)
        self.feed(Failed(key, trouble.code, trouble.reason))

    def _note_commit(self, key: MicrobatchId, loss_sum: float, tokens: int, **below: float) -> None:
        """`below`: how long the answer took (seconds), and how much of that was compute."""
        self.loss = loss_sum / tokens if tokens else None
        self.note("committed", origin=key.origin, counter=key.counter, tokens=tokens, loss=self.loss, **below)

    def _measured(self, seconds: float) -> None:
        known = self.service_seconds
        self.service_seconds = seconds if not known else known + SMOOTHING * (seconds - known)


def _shape(hidden_BTD: Tensor) -> tuple[int, int, int]:
    batch, tokens, width = hidden_BTD.shape
    return batch, tokens, width
