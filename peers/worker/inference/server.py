"""Serve inference clients: forward passes of this peer's stage, a few at a time, while it trains.

The cost of a client is bounded. A request is no larger than a microbatch. Each client may have
`ASKED_AT_ONCE` requests here. All clients together may have `MAX_WAITING` requests and `MAX_WAITING_BYTES`.
Further ones are declined as "busy". swarmnet/inference/request_queue.py decides which client gets a place and
whose turn it is.

One request is computed at a time. It goes before the waiting forward passes, because behind dozens of them
each request would wait for the whole queue. Then inference rests for three times as long while training has
work waiting. So inference gets a quarter of a busy peer at most, and all of an idle one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from functools import partial
from random import Random

from peers.compute.executor import BACKWARD, FORWARD, Compute
from peers.compute.stage_part import StagePart
from peers.network.message_router import handles
from peers.network.peer_links import PeerLinks
from peers.runtime.timer import Timer
from peers.state.snapshot_store import Snapshots
from peers.telemetry import log_events
from peers.worker.inference.forward_compute import ForwardWork, Result
from peers.worker.inference.visitor_links import ClientLinks
from peers.worker.pipeline.microbatch_compute import ComputeError
from protocols.messages.table import ForwardDeclined, Forwarded, ForwardRequest
from swarmnet.identifiers import PeerId
from swarmnet.inference.inference_client import ASKED_AT_ONCE, BUSY, MALFORMED, MAX_SEQUENCES, WRONG_STAGE
from swarmnet.inference.request_queue import Client, RequestQueue
from swarmnet.run.manifest import Manifest

MAX_WAITING = 16
MAX_WAITING_BYTES = 64 << 20
REST_FACTOR = 3.0
"""Length of the rest after a request while training has work waiting, as a multiple of the request's time."""
FORGET_SECONDS = 60.0
"""Prepared weights are freed after this time without a request."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    ask: ForwardRequest
    body: bytes
    until: float


_Work = tuple[Callable[[], Result], Callable[[Result, float], None]]
"""A function for the compute thread, and the callback for its result and seconds."""


@dataclass(eq=False, kw_only=True)
class Inference:
    """The forward-only side of a worker."""

    manifest: Manifest
    stage: int
    snapshots: InitVar[Snapshots]
    part: InitVar[StagePart]
    compute: Compute
    neighbourhood: PeerLinks
    log_event: log_events.LogEvent
    chance: InitVar[Random]

    def __post_init__(self, snapshots: Snapshots, part: StagePart, chance: Random) -> None:
        self._rules = self.manifest.path_rules()
        self.is_last = self.stage == len(self.manifest.stages) - 1
        self.work = ForwardWork(manifest=self.manifest, stage=self.stage, part=part, snapshots=snapshots)
        self.visitors = ClientLinks(self.neighbourhood, self.log_event)
        self.outcomes: Counter[str] = Counter()
        """Requests answered ("done") or declined, by code; "stale": expired, or lost their client."""
        self._loop = asyncio.get_running_loop()
        self._waiting: RequestQueue[_Waiting] = RequestQueue(MAX_WAITING, MAX_WAITING_BYTES, chance)
        self._computes = False
        self._rests_until = 0.0
        self._used_at = float("-inf")
        self._timer = Timer(self._look)

    def close(self) -> None:
        self._timer.close()
        self.visitors.close()
        self._waiting.clear()

    @handles(ForwardRequest)
    def message(self, peer: PeerId, ask: ForwardRequest, body: bytes) -> None:
        trouble = self._unfit(ask, body)
        own, now = self._waiting.count(peer), self._loop.time()
        if trouble is None and own >= ASKED_AT_ONCE:
            trouble = ComputeError(BUSY, f"{own} requests of this visitor wait here")
        if trouble is not None:
            self._decline(peer, ask, trouble)
            return
        waiting = _Waiting(ask, body, now + ask.deadline_seconds)
        why = f"{len(self._waiting)} requests wait here"
        has_place, removed = self._waiting.add(self._client(peer), waiting, len(body), now)
        for other in removed:
            self._decline(other.client.peer, other.item.ask, ComputeError(BUSY, why))
        if not has_place:
            self._decline(peer, ask, ComputeError(BUSY, why))
        self._next()

    def _client(self, peer: PeerId) -> Client:
        """Return the queue's view of a client. Clients whose training work has settled, or who have an
        invite, go first. In an open run the claim to serve a stage proves nothing."""
        known = self.neighbourhood.membership.peers.get(peer)
        is_first = known is not None and (known.worked or known.invited)
        return Client(peer, self.neighbourhood.transport.seen_range(peer) or peer, is_first)

    def _unfit(self, ask: ForwardRequest, body: bytes) -> ComputeError | None:
        """Return why a forward request cannot be served; None if it can."""
        model = self.manifest.model
        if self.manifest.is_u_shaped:
            return ComputeError(MALFORMED, "a U-shaped run serves no texts, whose tokens would travel")
        if ask.stage != self.stage:
            return ComputeError(WRONG_STAGE, f"this peer holds stage {self.stage}")
        if not self._rules.shortest <= ask.path <= self._rules.stages:
            fit = f"{self._rules.shortest} to {self._rules.stages}"
            return ComputeError(MALFORMED, f"a path of {ask.path} stages; this run has {fit}")
        size = ask.sequences * ask.tokens
        most = self.manifest.microbatch_tokens
        if not 0 < size <= most or ask.tokens > model.max_position_embeddings:
            return ComputeError(MALFORMED, f"{ask.sequences} x {ask.tokens} tokens; at most {most} are taken")
        if self.is_last and not ask.scores and ask.sequences > MAX_SEQUENCES:
            return ComputeError(
                MALFORMED, f"the next tokens of {ask.sequences} texts; at most {MAX_SEQUENCES}"
            )
        if len(body) != self.work.body_bytes(ask):
            return ComputeError(MALFORMED, f"a body of {len(body)} bytes, not {self.work.body_bytes(ask)}")
        return None

    def _decline(self, peer: PeerId, ask: ForwardRequest, why: ComputeError) -> None:
        self.outcomes[why.code] += 1
        self.visitors.post(peer, ForwardDeclined(ask.request, ask.attempt, why.code, why.reason))

    # -- computing ------------------------------------------------------------------------------------

    def _next(self) -> None:
        """Submit the next request to the compute thread, unless it is training's turn."""
        now = self._loop.time()
        if self._computes or not self._waiting:
            return
        if now < self._rests_until and self.compute.queued:
            self._timer.arm(self._rests_until)
            return
        work = self._pop_work(now)
        if work is not None:
            self._computes = True
            self._used_at = now
            self.compute.submit(BACKWARD, *work)

    def _pop_work(self, now: float) -> _Work | None:
        """Pop the next request that is not stale; None if none is left."""
        while self._waiting:
            found = self._waiting.pop(now)
            peer, waiting = found.client.peer, found.item
            if self._is_stale(peer, waiting.until, now):
                continue
            work = partial(self.work.run, waiting.ask, waiting.body)
            return work, partial(self._done, peer, waiting.ask)
        return None

    def _is_stale(self, peer: PeerId, until: float, now: float) -> bool:
        """Return whether a request has expired or its client's link has closed."""
        stale = until <= now or self.visitors.is_gone(peer)
        self.outcomes["stale"] += stale
        return stale

    def _done(self, peer: PeerId, ask: ForwardRequest, result: Result, seconds: float) -> None:
        self._computes = False
        self._used_at = self._loop.time()
        self._rests_until = self._used_at + REST_FACTOR * seconds
        if isinstance(result, ComputeError):
            self._decline(peer, ask, result)
        else:
            self.outcomes["done"] += 1
            answer = Forwarded(ask.request, ask.attempt, result.round, result.loss_sum)
            self.visitors.post(peer, answer, result.body)
        self._timer.arm(self._used_at + FORGET_SECONDS)
        self._next()

    def _look(self) -> None:
        if not self._waiting and self._loop.time() >= self._used_at + FORGET_SECONDS:
            self.compute.submit(FORWARD, self.work.forget, lambda _result, _seconds: None)
        self._next()
