"""Reserve places for microbatches before their bodies travel, in runs that skip stages. Driver of
`PathSearch` and `ReservationTable`.

The client reports this stage's load to earlier stages, requests places from later stages, and answers
requests (docs/decisions/0007-skipping.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator

from peers.compute.executor import Compute
from peers.network.message_router import MessageRouter, handles
from peers.network.peer_links import PeerLinks
from peers.runtime.timer import Timer
from peers.worker.pipeline.validate_act import unfit_way
from protocols.messages.reservation_messages import MAX_BOOKINGS, MAX_COSTS, Booked, CostToGo
from protocols.messages.table import (
    NO_ATTEMPT,
    Cancel,
    HoldTime,
    Path,
    Prospect,
    ReservationReply,
    ReservationRequest,
)
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.pipeline.ledger import MicrobatchLedger
from swarmnet.pipeline.pipeline import Pipeline
from swarmnet.routing.capacity import Booking, Load, truncate_bookings
from swarmnet.routing.load_balancer import Router
from swarmnet.routing.next_hop import NextHop, Returning, Straight
from swarmnet.routing.reservation_requests import PathQuery, PathSearch, RequestToSend
from swarmnet.routing.reservation_table import ReservationTable
from swarmnet.routing.skipping import Skipping
from swarmnet.run.manifest import Manifest

TELL_SECONDS = 0.1
"""Load changes are collected for this long before they are reported. A refused request reports them at
once."""
TELL_AGAIN_SECONDS = 1.0
"""Load is reported anew as often as peers send heartbeats, because reported durations age."""
LATELY_SECONDS = 5.0
"""Changes go only to peers that sent a request this recently. Sending to all of 96 links ten times a second
would take megabits per second."""


class NoReservations:
    """The form for runs that skip no stages: nothing is reserved. `ReservationClient` is the other one."""

    refused = 0
    """Number of own requests that were refused."""

    def __init__(self, neighbourhood: PeerLinks) -> None:
        self.neighbourhood = neighbourhood

    def close(self) -> None:
        """Stop reporting."""

    def computed(self, forward_seconds: float, backward_seconds: float) -> None:
        """Record the duration of a pass; the other one is 0."""

    def begins(self, key: MicrobatchId) -> None:
        """Called when the forward pass is submitted to the compute thread."""

    def came(self, peer: PeerId, key: MicrobatchId) -> None:
        """Called when the body of a microbatch was accepted from the peer that sent it last."""

    def hands_up(self, peer: PeerId, key: MicrobatchId, attempt: int, seconds: float) -> None:
        """Tell the previous peer how long the microbatch was here; called before its gradient is sent
        there."""

    def answered(self, peer: PeerId, key: MicrobatchId, attempt: int, seconds: float) -> None:
        """Called when its gradient arrives, `seconds` after its body was sent; updates the estimated network
        delay."""

    def done(self, key: MicrobatchId) -> None:
        """Called when a microbatch is committed."""

    def drop(self, key: MicrobatchId) -> None:
        """Drop a microbatch and cancel its reservations on later stages."""

    def lost(self, peer: PeerId) -> None:
        """Called when the link to a peer is lost: drop its microbatches and search other paths for those sent
        to it."""

    def given_back(self, peer: PeerId, key: MicrobatchId) -> None:
        """Drop the place of a microbatch that the requesting peer no longer needs."""

    def register(self, router: MessageRouter, pump: Callable[[], None]) -> None:
        """Handle messages about reservations from now on; `pump()` is called after each that is handled."""
        router.refuse(ReservationClient, self._refuse_reservation)

    def _refuse_reservation(self, peer: PeerId) -> None:
        reason = "a path-reservation message, but this run skips no stages (paths.skip_ratio: 0)"
        self.neighbourhood.refused(peer, "malformed", reason)


def open_pipeline(
    *,
    manifest: Manifest,
    stage: int,
    slots: int,
    router: Router,
    compute: Compute,
    neighbourhood: PeerLinks,
    round: Callable[[], int],
    wake: Callable[[], None],
    serving: Callable[[], bool],
) -> tuple[NextHop, Pipeline, NoReservations]:
    """Return the paths of microbatches at a stage, their pipeline, and the reservation of places ahead of it.
    Arguments as for `PipelineService` and `ReservationClient`."""
    rules, live = manifest.path_rules(), neighbourhood.membership.live
    skipping = Skipping(rules=rules, stage=stage, live=live, round=round) if rules.skips else None
    goes_back = manifest.is_u_shaped and stage == rules.last - 1
    ways = skipping or (Returning if goes_back else Straight)(rules, stage, live)
    pipeline = Pipeline(
        stages_below=rules.last - stage,
        router=router,
        candidates=ways.candidates,
        slots=slots,
        ledger=MicrobatchLedger(),
        body_bytes=manifest.body_bytes,
    )
    if skipping is None:
        return ways, pipeline, NoReservations(neighbourhood)
    client = ReservationClient(
        ways=skipping,
        pipeline=pipeline,
        neighbourhood=neighbourhood,
        compute=compute,
        wake=wake,
        serving=serving,
    )
    pipeline.guide = client
    return ways, pipeline, client


class ReservationClient(NoReservations):
    """The `Guide` of a pipeline. Times are seconds on this peer's clock."""

    def __init__(
        self,
        *,
        ways: Skipping,
        pipeline: Pipeline,
        neighbourhood: PeerLinks,
        compute: Compute,
        wake: Callable[[], None],
        serving: Callable[[], bool],
    ) -> None:
        """`wake()` is called when a waiting microbatch may have a path now. `serving()` returns whether this
        peer accepts microbatches."""
        self.serving = serving
        super().__init__(neighbourhood)
        self.ways = ways
        self.pipeline = pipeline
        self.compute = compute
        self.wake = wake
        self.clock = neighbourhood.clock
        self.is_last = ways.stage == ways.rules.last
        self.places = ReservationTable(pipeline.slots, self.is_last)
        self.scouting = PathSearch(ways.rules, ways.stage)
        self.table: dict[int, float] = {}
        self._held: dict[MicrobatchId, tuple[PeerId, int, float]] = {}
        """The durations that later peers reported having had a microbatch; its gradient comes next."""
        self._requested_at: dict[PeerId, float] = {}
        """When each earlier peer last sent a request."""
        self._news = False
        self._reported_at = float("-inf")
        self._timer = Timer(self._tick, self.clock)
        self._timer.arm(self.clock.time())

    @property
    def refused(self) -> int:  # type: ignore[override]
        return self.scouting.refused

    def close(self) -> None:
        self._timer.close()

    # -- what happens to microbatches here ------------------------------------------------------------

    def computed(self, forward_seconds: float, backward_seconds: float) -> None:
        if forward_seconds > 0:
            self.places.forward_took(forward_seconds)
        if backward_seconds > 0:
            self.places.backward_took(backward_seconds)

    def begins(self, key: MicrobatchId) -> None:
        wait = self.compute.queued * self.places.forward_seconds
        start = self.clock.time() + wait
        self.places.begins(key, start)
        self._news = True
        if key not in self.scouting.quests and not self.is_last:
            header = self.ways.headers[key]
            self.scouting.quests[key] = PathQuery(header, start + self.places.forward_seconds)
            self._seek(key)

    def came(self, peer: PeerId, key: MicrobatchId) -> None:
        job = self.pipeline.jobs[key]
        if job.phase == "done":
            return
        header = self.ways.headers[key]
        place = self.places.held.get(key)
        if place is not None and place.header != header:
            self.drop(key)  # It came by another path than the reserved one.
        rest = self.scouting.rest(header, self.table)
        self.places.came(key, peer, header, rest, self.clock.time())
        self._news = True
        if key not in self.scouting.quests and not self.is_last:
            ready = self.clock.time() + self.places.forward_seconds
            self.scouting.quests[key] = PathQuery(header, ready)
            self._seek(key)

    def hands_up(self, peer: PeerId, key: MicrobatchId, attempt: int, seconds: float) -> None:
        self.neighbourhood.post(peer, "data", HoldTime(*key, attempt, seconds))

    def answered(self, peer: PeerId, key: MicrobatchId, attempt: int, seconds: float) -> None:
        held = self._held.pop(key, None)
        if held is not None and held[:2] == (peer, attempt) and held[2] <= seconds:
            self.scouting.measured(peer, (seconds - held[2]) / 2)

    def done(self, key: MicrobatchId) -> None:
        self.scouting.quests.pop(key, None)
        self._news |= self.places.end(key)

    def drop(self, key: MicrobatchId) -> None:
        self._news |= self.places.end(key)
        self._held.pop(key, None)
        quest = self.scouting.quests.pop(key, None)
        if quest is not None and not quest.sent:
            self._give_back(key, quest)

    def lost(self, peer: PeerId) -> None:
        self._requested_at.pop(peer, None)
        for key in self.places.gone(peer, self.clock.time()):
            self.drop(key)
        self.scouting.forget(peer)
        for key in self.scouting.lost(peer):
            self._seek(key)

    # -- the pipeline's guide -------------------------------------------------------------------------

    def choose(
        self, key: MicrobatchId, candidates: Collection[PeerId], now: float, avoid: Collection[PeerId]
    ) -> PeerId | None:
        """Implements `Guide.choose`."""
        quest = self.scouting.quests.get(key)
        if quest is None or quest.sent:
            quest = PathQuery(self.ways.headers[key], now)
            self.scouting.quests[key] = quest
        quest.ready = now
        peer = quest.granted
        if peer is not None:
            earned = self.pipeline.router.has_earned(peer, 0, now)
            if peer in candidates and peer not in avoid and earned:
                quest.sent = True
                return peer
            self._give_back(key, quest)
        if quest.asked is not None or self._seek(key, candidates, avoid):
            return None
        quest.sent = True
        return self.pipeline.router.choose(candidates, now, avoid)

    def has_room(self, candidates: Collection[PeerId], now: float) -> bool:
        """Implements `Guide.has_room`."""
        return any(self._earned(candidates, now))

    def expects(self, key: MicrobatchId, sender: PeerId) -> bool:
        """Implements `Guide.expects`."""
        return self.places.expects(key, sender)

    # -- requests and responses ------------------------------------------------------------------------

    def register(self, router: MessageRouter, pump: Callable[[], None]) -> None:
        router.add(self, after=pump)

    def given_back(self, peer: PeerId, key: MicrobatchId) -> None:
        if self.places.expects(key, peer):
            self.drop(key)

    @handles(HoldTime)
    def _hold_time(self, peer: PeerId, told: HoldTime, _body: bytes) -> None:
        key = MicrobatchId(PeerId(told.origin), told.counter)
        if self.pipeline.expects_answer(key, peer):
            self._held[key] = (peer, told.attempt, told.seconds)

    @handles(Prospect)
    def _prospect(self, peer: PeerId, told: Prospect, _body: bytes) -> None:
        known = self.neighbourhood.membership.peers.get(peer)
        if known is None or known.stage <= self.ways.stage:
            return
        bookings = tuple(Booking(b.start, max(b.start, b.release)) for b in told.bookings)
        load = Load(max(1, told.memory), told.forward_seconds, told.backward_seconds, bookings)
        costs = {cost.hops_left: cost.seconds for cost in told.costs}
        self.scouting.on_load_report(peer, load, costs, self._latency(peer), self.clock.time())

    @handles(ReservationRequest)
    def _ask(self, peer: PeerId, ask: ReservationRequest, _body: bytes) -> None:
        """Answer a peer's request to reserve a place for a microbatch here. If it is granted and the path
        continues, request a place at the next stage."""
        key, header, now = MicrobatchId(PeerId(ask.origin), ask.counter), ask.path.header(), self.clock.time()
        trouble = unfit_way(self.neighbourhood.membership, self.ways, peer, key.origin, header)
        if trouble is not None:
            self.neighbourhood.refused(peer, trouble.code, trouble.reason)
            return
        start, was = None, self.places.held.get(key)
        self._requested_at[peer] = now
        if self.serving() and key not in self.pipeline.jobs:
            since = now - self._latency(peer)
            start = self.places.ask(
                key,
                peer,
                header,
                since + ask.arrival_seconds,
                since + ask.start_seconds,
                self.scouting.rest(header, self.table),
                ask.firm,
                now,
            )
        if start is None:
            self._send_load(peer)
        answer = ReservationReply(
            *key, ask.question, start is not None, 0.0 if start is None else start - now
        )
        self.neighbourhood.post(peer, "data", answer)
        if start is None:
            return
        self._news = True
        ready = start + self.places.forward_seconds
        quest = self.scouting.quests.get(key)
        if quest is not None and was is not None and was.header == header:
            quest.ready = ready  # A repeated request: the onward path is known.
            return
        if quest is not None:
            self._give_back(key, quest)
        if not self.is_last:
            self.scouting.quests[key] = PathQuery(header, ready)
            self._seek(key)

    @handles(ReservationReply)
    def _answer(self, peer: PeerId, reply: ReservationReply, _body: bytes) -> None:
        key = MicrobatchId(PeerId(reply.origin), reply.counter)
        start = self.clock.time() - self._latency(peer) + reply.start_seconds
        quest = self.scouting.answered(peer, key, reply.question, start if reply.taken else None)
        if quest is None:
            if reply.taken:
                self.neighbourhood.post(peer, "data", Cancel(*key, NO_ATTEMPT))
        elif not reply.taken:
            self._seek(key)
        else:
            self.places.answered_at(key, self.scouting.back(quest, start))
            self._news = True
        job = self.pipeline.jobs.get(key)
        if job is not None and job.phase == "unrouted":
            self.wake()

    def _seek(
        self, key: MicrobatchId, candidates: Collection[PeerId] | None = None, avoid: Collection[PeerId] = ()
    ) -> bool:
        """Request a place for a microbatch from a later peer. Returns False if no known peer can be asked."""
        quest, now = self.scouting.quests[key], self.clock.time()
        quest.asked = quest.granted = None
        way = self.ways.onward(quest.header)
        quest.header = way.header
        stage_of = {
            peer: stage
            for stage in way.stages
            for peer in self.neighbourhood.membership.live(stage)
            if candidates is None or peer in candidates
        }
        live = [(peer, stage_of[peer]) for peer in self._earned(stage_of, now)]
        asking = self.scouting.seek(key, live, now, avoid)
        if asking is not None:
            self._send(asking, now)
        return asking is not None

    def _earned(self, peers: Collection[PeerId], now: float) -> Iterator[PeerId]:
        """Yield the peers that may get one more microbatch. A granted reservation costs its sender nothing,
        so earlier promises count until the body is sent."""
        promised = Counter(
            peer
            for quest in self.scouting.quests.values()
            if not quest.sent
            for peer in {quest.asked, quest.granted}
        )
        return (peer for peer in peers if self.pipeline.router.has_earned(peer, promised[peer], now))

    def _send(self, asking: RequestToSend, now: float) -> None:
        arrival, start = asking.arrival - now, asking.start - now
        ask = ReservationRequest(
            *asking.key, asking.question, arrival, start, asking.firm, Path.of(asking.header)
        )
        self.neighbourhood.post(asking.peer, "data", ask)

    def _give_back(self, key: MicrobatchId, quest: PathQuery) -> None:
        for peer in {quest.asked, quest.granted} - {None}:
            assert peer is not None
            self.neighbourhood.post(peer, "data", Cancel(*key, NO_ATTEMPT))
        quest.asked = quest.granted = None

    # -- reporting ------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Drop expired reservations, repeat overdue requests, and report the load to peers of the previous
        stages if it has changed or if it is time. Called at fixed intervals."""
        now = self.clock.time()
        for key in self.places.lapse(now):
            self.drop(key)
            self._news = True
        for key in self.scouting.overdue(now):
            self._seek(key)
        again = now >= self._reported_at + TELL_AGAIN_SECONDS
        if self._news or again:
            if again and not self.is_last:
                self.table = self.scouting.table(self._below(now))
            self._reported_at = now if again else self._reported_at
            self._news = False
            for stage in range(max(0, self.ways.stage - self.ways.reach), self.ways.stage):
                for peer in self.neighbourhood.membership.live(stage):
                    if again or now < self._requested_at.get(peer, float("-inf")) + LATELY_SECONDS:
                        self._send_load(peer)
        self._timer.arm(now + TELL_SECONDS)

    def _send_load(self, peer: PeerId) -> None:
        """Send `peer` this peer's bookings (reserved times, relative to now), its seconds per microbatch, the
        number of microbatches that fit into its memory, and the costs of the way from here to the end."""
        load, now = truncate_bookings(self.places.load, MAX_BOOKINGS), self.clock.time()
        bookings = [Booked(b.start - now, b.release - now) for b in load.bookings]
        costs = [CostToGo(hops, seconds) for hops, seconds in self.table.items()]
        prospect = Prospect(
            load.memory, load.forward_seconds, load.backward_seconds, bookings, costs[:MAX_COSTS]
        )
        self.neighbourhood.post(peer, "data", prospect)

    def _below(self, now: float) -> list[tuple[PeerId, int]]:
        """Return the usable peers of later stages that a microbatch may reach from here, and their stages."""
        last = min(self.ways.stage + self.ways.reach, self.ways.rules.last)
        stages, usable = range(self.ways.stage + 1, last + 1), self.pipeline.router.is_usable
        live = self.neighbourhood.membership.live
        return [(peer, stage) for stage in stages for peer in live(stage) if usable(peer, now)]

    def _latency(self, peer: PeerId) -> float:
        return self.neighbourhood.heartbeats.echoes.round_trips.get(peer, 0.0) / 2
