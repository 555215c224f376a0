"""Answers visitors: forward passes of this peer's stage, a few at a time, while it trains.

What a visitor can cost is bounded. A request is no larger than a microbatch. Each visitor has
ASKED_AT_ONCE of them here, all visitors together MOST_WAITING and MOST_WAITING_BYTES; the rest is
declined as "busy". Visitors take turns. One request is computed at a time, before the forward passes that
wait (behind dozens of them each one would wait for the whole queue), and then none for three times as long
while training has work waiting: so inference takes at most a quarter of a busy peer, and gets it, and all of
an idle one.

Where experts are routed a pass stops at each layer, asks their peers as in training, and goes on before new
ones begin. Those peers treat whoever asks them as a visitor of theirs.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random

from peers.compute.executor import BACKWARD, FORWARD, Compute
from peers.compute.stage_part import StagePart
from peers.network.neighbourhood import Neighbourhood
from peers.runtime.timer import Timer
from peers.state.snapshot_store import Snapshots
from peers.telemetry import events as noted
from peers.worker.inference.forward_compute import Answer, ForwardWork, Going, Result
from peers.worker.inference.visitor_links import Visitors
from peers.worker.pipeline.expert_answering import unfit_call
from peers.worker.pipeline.expert_asking import ExpertAsking
from peers.worker.pipeline.microbatch_compute import Answer as Said
from peers.worker.pipeline.microbatch_compute import Calls, Trouble
from protocols.messages.table import (
    AskExperts,
    AskForward,
    Declined,
    ExpertsDecline,
    ExpertsSay,
    Forwarded,
    Message,
)
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.inference.machine import ASKED_AT_ONCE, BUSY, MALFORMED, MOST_SEQUENCES, WRONG_STAGE
from swarmnet.run.manifest import Manifest

MOST_WAITING = 16
MOST_WAITING_BYTES = 64 << 20
REST_FACTOR = 3.0
"""Rest after a request while training has work waiting, in times of what the request took."""
MOST_UNDER_WAY = 8
"""Passes that wait for experts: as many as one visitor's score has at the most (swarm_session.AT_ONCE)."""
VISITORS = PeerId("visitors")
"""In place of who began a microbatch, in what experts are asked."""
FORGET_SECONDS = 60.0
"""After so long without a request the weights that were made ready for it are freed."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    ask: AskForward | AskExperts
    body: bytes
    until: float


@dataclass(frozen=True, slots=True)
class _Paused:
    """It waits for experts, or has what they say and waits for its turn."""

    peer: PeerId
    going: Going
    key: MicrobatchId
    until: float


_Work = tuple[Callable[[], Result], Callable[[Result, float], None]]
"""What is computed, and what becomes of it."""


class Inference:
    """The forward-only side of a worker."""

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        snapshots: Snapshots,
        part: StagePart,
        compute: Compute,
        neighbourhood: Neighbourhood,
        note: noted.Note,
        chance: Random,
    ) -> None:
        self.manifest = manifest
        self.stage = stage
        self._rules = manifest.path_rules()
        self.is_last = stage == len(manifest.stages) - 1
        self.compute, self.neighbourhood = compute, neighbourhood
        self.note = note
        self.work = ForwardWork(manifest, stage, part, snapshots)
        self.visitors = Visitors(neighbourhood, note)
        self.outcomes: Counter[str] = Counter()
        """Requests answered ("done") or declined, by code; "stale": nobody waited for them any more."""
        self.seconds = 0.0
        """Compute spent on them."""
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[PeerId, deque[_Waiting]] = {}
        """By visitor; whose turn it is comes first."""
        self.asking: ExpertAsking | None = None
        """Where its layers' experts are others'."""
        if manifest.expert_stages(stage):
            self.asking = ExpertAsking(manifest, stage, self.work, self.work, neighbourhood, chance, note)
        self._ready: deque[tuple[_Paused, Mapping[int, Said | None]]] = deque()
        self._under_way = self._passes = 0
        """Passes that wait for experts or for their turn afterwards; all that ever did."""
        self._computes = False
        self._rests_until = 0.0
        self._used_at = float("-inf")
        self._timer = Timer(self._look)

    def close(self) -> None:
        self._timer.close()
        if self.asking is not None:
            self.asking.close()
        self.visitors.close()
        self._waiting.clear()

    def unlinked(self, peer: PeerId) -> None:
        if self.asking is not None:
            self.asking.lost(peer)

    def experts(self, peer: PeerId, message: Message, body: bytes) -> None:
        """What is asked of experts for visitors, and what they say."""
        if isinstance(message, AskExperts):
            self.message(peer, message, body)
        elif isinstance(message, ExpertsSay | ExpertsDecline) and self.asking is not None:
            self.asking.message(peer, message, body)
        else:
            self.neighbourhood.refused(peer, WRONG_STAGE, "an answer of experts to nobody")

    def message(self, peer: PeerId, ask: AskForward | AskExperts, body: bytes) -> None:
        trouble = self._unfit(peer, ask, body) or self._too_many(peer, body)
        if trouble is not None:
            self._decline(peer, ask, trouble)
            return
        waiting = _Waiting(ask, body, self._loop.time() + ask.deadline_seconds)
        self._waiting.setdefault(peer, deque()).append(waiting)
        self._next()

    def _unfit(self, peer: PeerId, ask: AskForward | AskExperts, body: bytes) -> Trouble | None:
        if isinstance(ask, AskForward):
            return self._unfit_request(ask, body)
        if ask.backward:
            return Trouble(MALFORMED, "a visitor's tokens go forward alone")
        return unfit_call(self.manifest, self.stage, self.neighbourhood, peer, ask, body, exact=True)

    def _unfit_request(self, ask: AskForward, body: bytes) -> Trouble | None:
        model = self.manifest.model
        if ask.experts and len(ask.experts) != len(self.manifest.expert_stages(self.stage)):
            return Trouble(MALFORMED, f"rounds of {len(ask.experts)} groups of experts")
        if ask.stage != self.stage:
            return Trouble(WRONG_STAGE, f"this peer holds stage {self.stage}")
        if not self._rules.shortest <= ask.path <= self._rules.stages:
            fit = f"{self._rules.shortest} to {self._rules.stages}"
            return Trouble(MALFORMED, f"a path of {ask.path} stages; this run has {fit}")
        size = ask.sequences * ask.tokens
        most = self.manifest.microbatch_tokens
        if not 0 < size <= most or ask.tokens > model.context:
            return Trouble(MALFORMED, f"{ask.sequences} x {ask.tokens} tokens; at most {most} are taken")
        if self.is_last and not ask.scores and ask.sequences > MOST_SEQUENCES:
            return Trouble(MALFORMED, f"the next tokens of {ask.sequences} texts; at most {MOST_SEQUENCES}")
        if len(body) != self.work.body_bytes(ask):
            return Trouble(MALFORMED, f"a body of {len(body)} bytes, not {self.work.body_bytes(ask)}")
        return None

    def _too_many(self, peer: PeerId, body: bytes) -> Trouble | None:
        own = self._waiting.get(peer, ())
        if len(own) >= ASKED_AT_ONCE:
            return Trouble(BUSY, f"{len(own)} requests of this visitor wait here")
        bodies = [len(waiting.body) for queue in self._waiting.values() for waiting in queue]
        if len(bodies) >= MOST_WAITING or (bodies and sum(bodies) + len(body) > MOST_WAITING_BYTES):
            return Trouble(BUSY, f"{len(bodies)} requests wait here")
        if self.neighbourhood.is_visitor(peer) and not self.visitors.admits(peer):
            return Trouble(BUSY, f"{len(self.visitors)} visitors are here")
        return None

    def _decline(self, peer: PeerId, ask: AskForward | AskExperts, why: Trouble) -> None:
        self.outcomes[why.code] += 1
        if isinstance(ask, AskForward):
            self.visitors.post(peer, Declined(ask.request, ask.attempt, why.code, why.reason))
            return
        self.visitors.post(peer, ExpertsDecline(
            ask.origin, ask.counter, ask.attempt, ask.layer, ask.backward, why.code, why.reason, ask.round
        ))  # fmt: skip

    # -- computing ------------------------------------------------------------------------------------

    def _next(self) -> None:
        """Hand the next request to the compute thread, unless it is training's turn."""
        now = self._loop.time()
        if self._computes or not (self._ready or self._waiting):
            return
        if now < self._rests_until and self.compute.queued:
            self._timer.arm(self._rests_until)
            return
        work = self._resumed(now) or self._begun(now)
        if work is not None:
            self._computes, self._used_at = True, now
            self.compute.submit(BACKWARD, *work)

    def _resumed(self, now: float) -> _Work | None:
        """The next pass of which experts have answered."""
        while self._ready:
            paused, answers = self._ready.popleft()
            self._under_way -= 1
            if self._is_stale(paused.peer, paused.until, now):
                continue
            work = partial(self.work.go_on, paused.going, answers)
            return work, partial(self._done, paused.peer, paused.going.ask, paused.until)
        return None

    def _begun(self, now: float) -> _Work | None:
        """The next request whose turn it is."""
        while self._waiting and self._under_way < MOST_UNDER_WAY:
            peer = next(iter(self._waiting))
            queue = self._waiting.pop(peer)
            waiting = queue.popleft()
            if queue:
                self._waiting[peer] = queue  # At the end: the others' turn comes first.
            if self._is_stale(peer, waiting.until, now):
                continue
            if self.asking is not None:
                self.asking.look()
            ask, body = waiting.ask, waiting.body
            work: Callable[[], Result]
            if isinstance(ask, AskForward):
                work = partial(self.work.run, ask, body)
            else:
                work = partial(self.work.run_experts, ask, body)
            return work, partial(self._done, peer, ask, waiting.until)
        return None

    def _is_stale(self, peer: PeerId, until: float, now: float) -> bool:
        """Whether nobody waits for it any more."""
        stale = until <= now or self.visitors.is_gone(peer)
        self.outcomes["stale"] += stale
        return stale

    def _done(
        self, peer: PeerId, ask: AskForward | AskExperts, until: float, result: Result, seconds: float
    ) -> None:
        self._computes = False
        self.seconds += seconds
        self._used_at = self._loop.time()
        self._rests_until = self._used_at + REST_FACTOR * seconds
        if self.asking is not None:
            self.asking.complained()
        if isinstance(result, Trouble):
            self._decline(peer, ask, result)
        elif isinstance(result, Going):
            self._under_way += 1
            self._passes += 1
            key = MicrobatchId(VISITORS, self._passes)
            self._ask_experts(_Paused(peer, result, key, until), {}, set(result.calls))
        else:
            self.outcomes["done"] += 1
            self._answer(peer, ask, result)
        self._timer.arm(self._used_at + FORGET_SECONDS)
        self._next()

    def _answer(self, peer: PeerId, ask: AskForward | AskExperts, result: Answer) -> None:
        if isinstance(ask, AskForward):
            answer = Forwarded(ask.request, ask.attempt, result.round, result.loss_sum, result.experts)
            self.visitors.post(peer, answer, result.body)
            return
        named = (ask.origin, ask.counter, ask.attempt, ask.layer, ask.backward)
        self.visitors.post(peer, ExpertsSay(*named, result.round), result.body)

    def _ask_experts(self, paused: _Paused, known: Mapping[int, Said | None], groups: set[int]) -> None:
        """Where nobody has a round any more that was asked for, the newest is asked for."""
        assert self.asking is not None, "only then it waits"
        going = paused.going
        calls = tuple(going.calls[group] for group in sorted(groups))
        for encoded in calls:
            encoded.round = going.rounds[encoded.call.group]

        def resume(answers: Mapping[int, Said | None]) -> None:
            unanswered = {group for group, answer in answers.items() if answer is None}
            again = {group for group in unanswered if going.rounds[group] >= 0}
            if again:
                for group in again:
                    going.rounds[group] = -1
                self._ask_experts(paused, {**known, **answers}, again)
                return
            self._ready.append((paused, {**known, **answers}))
            self._next()

        self.asking.ask(paused.key, Calls(calls), resume)

    def _look(self) -> None:
        if not (self._waiting or self._under_way) and self._loop.time() >= self._used_at + FORGET_SECONDS:
            self.compute.submit(FORWARD, self.work.forget, lambda _result, _seconds: None)
        self._next()
