"""Carry out what the `Mover` state machine decides: check the directory, announce a move, change the stage.

A move is a polite leave and a new worker. The old worker finishes its microbatches, hands over its last
contribution and sends Bye. A worker of the other stage then starts on the same transport and fetches its
state.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from random import Random

from peers.network.discovery.announcer import RecordAnnouncer
from peers.network.discovery.claims import claimed_bandwidth
from peers.network.discovery.record_reader import look, waits_for_weights
from peers.runtime.timer import Timer
from peers.state.checkpoint_file import on_disk
from peers.telemetry import log_events
from peers.telemetry.log_events import Notify
from peers.telemetry.reasons import MOVES
from peers.worker.stage_services import StageServices
from protocols.errors import WireError
from protocols.signed.records import SignedRecord
from swarmnet.identifiers import PeerId
from swarmnet.membership.membership import Membership
from swarmnet.membership.peer_info import HELPER_ROLE
from swarmnet.placement.mover import (
    AnnounceMove,
    DirectoryQueried,
    GroupBeat,
    GroupPeerGone,
    MoveEvent,
    Mover,
    MoveToStage,
    PlacementTick,
    QueryDirectory,
    Starving,
    Withdraw,
)
from swarmnet.placement.policy import ObservedPeer, choose_stage, move_rules, summarize_records
from swarmnet.placement.standstill import OnDisk, stage_to_restore
from swarmnet.resources.link_bandwidth import UNKNOWN, LinkBandwidth
from swarmnet.run.manifest import Manifest

GUESSED_BYTES_PER_SECOND = 1_250_000
"""Assumed download rate until a state was fetched: 10 Mbit/s, the slower direction of the home links that the
swarm is designed for."""
GUESSED_SECONDS = 5.0
"""Assumed seconds for leaving, meeting the group and catching up (docs/benchmarks/removed.md)."""
CHANGED = 1.25
"""A speed that has changed by this factor is announced at once."""


async def first_stage(
    presence: RecordAnnouncer,
    chance: Random,
    notify: Notify,
    never: frozenset[int],
    line: LinkBandwidth = UNKNOWN,
    checkpoints: Path | None = None,
) -> int:
    """Return the stage that needs a newcomer with this link most and is not in `never`.

    A stage whose weights are in `checkpoints` and at no present peer goes first."""
    manifest = presence.signed.manifest
    stages = len(manifest.stages)
    records = await _records(presence, stages) or {}
    own = records.get(presence.transport.peer)
    if own is not None:
        presence.judge_own(own)  # This process's own record will replace it in the directory.
    there = await presence.there(records, chance)
    seen = [(peer, _seen(signed, manifest, 0.0)) for peer, signed in records.items() if peer in there]
    rules = move_rules(manifest, never, line)
    view = summarize_records(seen, rules)
    counts = [sum(record.stage == number for _, record in seen) for number in range(stages)]
    now = ", ".join(f"stage {number}: {count}" for number, count in enumerate(counts))
    held = await _on_disk(presence, checkpoints)
    restored = stage_to_restore([record for _, record in seen], held, never)
    if restored is not None:
        notify("stage", f"takes stage {restored}: its newest weights are on this disk (peers now: {now})")
        return restored
    chosen = choose_stage(view, rules, chance)
    frozen = 0 < view.frozen(rules, chosen) < 1
    why = "experts that no peer trains" if frozen else "the least capacity"
    notify("stage", f"takes stage {chosen}, which has {why} (peers now: {now})")
    return chosen


async def stage_to_help(presence: RecordAnnouncer, chance: Random, notify: Notify) -> int:
    """Return the stage that a peer which only reduces should join: the first with the fewest such peers."""
    stages = len(presence.signed.manifest.stages)
    records: Mapping[PeerId, SignedRecord] = {}
    with suppress(WireError):  # Then it joins the first stage.
        records = await look(presence.directory, presence.signed.run_id, stages)
    helpers = {peer: signed for peer, signed in records.items() if signed.record.role == HELPER_ROLE}
    helped = Counter(helpers[peer].record.stage for peer in await presence.there(helpers, chance))
    chosen = min(range(stages), key=lambda stage: (helped[stage], stage))
    notify("stage", f"reduces for stage {chosen}, which has {helped[chosen]} other reducers")
    return chosen


async def _on_disk(presence: RecordAnnouncer, checkpoints: Path | None) -> list[OnDisk]:
    """Return the checkpoints of this run on this peer's disk, the newest file first."""
    if checkpoints is None:
        return []
    stages = len(presence.signed.manifest.stages)
    held = await asyncio.to_thread(on_disk, checkpoints, presence.signed.run_id)
    return [one for one in held if one.stage < stages]


class StageMover:
    """Drives the `Mover` of one worker; does nothing before `begin`."""

    def __init__(self, services: StageServices) -> None:
        self._services = services
        self._context = services.context
        self._links = services.links
        self.moving_to = -1
        """The announced target stage; -1 for none."""
        settings = services.context.settings
        self.rules = move_rules(services.context.manifest, settings.never, settings.line)
        self._clock = services.links.clock
        self._created = self._clock.time()
        self._mover: Mover | None = None
        self._timer = Timer(lambda: self._feed(PlacementTick()), self._clock)
        self._announced_after = 0
        """Sequence number of the first heartbeat that carries the announcement."""
        self._announced_rate = 0.0
        self._looking: asyncio.Task[None] | None = None
        self._on_disk: frozenset[int] | None = None
        """Stages whose weights this peer has on disk; None if not read yet. Only its own stage's can change
        meanwhile."""

    def begin(self, fetched_bytes: int, state_bytes: int, moved: int) -> None:
        """Start to consider moves. Called when the worker serves; it fetched `fetched_bytes` and has moved
        `moved` times."""
        if self._mover is not None:
            return
        now = self._clock.time()
        took = now - self._created
        rests_until = now + self.rules.cool_down(took, moved) if fetched_bytes else now
        download = took if fetched_bytes else GUESSED_SECONDS + state_bytes / GUESSED_BYTES_PER_SECOND
        me, stage = self._links.transport.peer, self._services.stage
        self._mover = Mover(me, stage, self.rules, self._context.chance, rests_until, download, arrived=now)
        self._timer.arm(self._mover.next_deadline())

    def close(self) -> None:
        self._timer.close()
        self._mover = None
        if self._looking is not None:
            self._looking.cancel()

    # -- what happens ---------------------------------------------------------------------------------

    def beaten(self, peer: PeerId) -> None:
        """Called at a neighbour's heartbeat."""
        known = self._links.membership.peers.get(peer)
        if known is not None and known.stage == self._services.stage:
            stays = known.ready and known.moving_to < 0 and not known.is_helper
            self._feed(GroupBeat(peer, known.has_seen >= self._announced_after, stays))

    def gone(self, peer: PeerId) -> None:
        """Called when a neighbour has left or was lost."""
        self._feed(GroupPeerGone(peer))
        membership = self._links.membership
        beside = self._context.manifest.neighbour_stages(self._services.stage)
        if any(not membership.live(stage) for stage in beside):
            self._feed(Starving())

    def _feed(self, event: MoveEvent) -> None:
        """Pass an event to the mover, and do what it returns: query, announce, withdraw, or leave."""
        mover = self._mover
        if mover is None:
            return
        for effect in mover.handle(event, self._clock.time()):
            match effect:
                case QueryDirectory():
                    self._looking = asyncio.get_running_loop().create_task(self._look())
                    self._looking.add_done_callback(self._context.task_ended)
                case AnnounceMove(stage):
                    self._announce(stage)
                    self._context.log_event(log_events.StageChangeStarted(stage=stage))
                case Withdraw(code):
                    self._announce(-1)
                    self._context.log_event(
                        log_events.StageChangeRefused(code=code, reason=MOVES[code].meaning)
                    )
                case MoveToStage(stage):
                    here = self._services.stage
                    self._context.notify(
                        "moves", f"moves from stage {here} to stage {stage}, which has less capacity"
                    )
                    self.close()
                    self._services.lifecycle.move(stage)
        self._timer.arm(mover.next_deadline())

    def _announce(self, stage: int) -> None:
        self.moving_to = stage
        self._announced_after = self._links.next_beat
        self._context.presence.announce_now()

    async def _look(self) -> None:
        """Combine the records of all stages with newer heartbeats of neighbours, and pass the view to the
        `Mover`."""
        load, manifest = self._services.load(self.moving_to), self._context.manifest
        rate = _rate(load.service_seconds)
        if not self._announced_rate / CHANGED <= rate <= self._announced_rate * CHANGED:
            self._announced_rate = rate
            self._context.presence.announce_now()
        records = await _records(self._context.presence, len(self.rules.work))
        view = None
        if records is not None:
            now, membership = self._context.presence.directory.now(), self._links.membership
            seen = {
                peer: _seen(signed, manifest, now)
                for peer, signed in records.items()
                if not _lost(membership, peer, signed.record.stage)
                and not membership.has_left(peer, signed.sequence)
            }
            lines = {peer: claimed_bandwidth(signed.record) for peer, signed in records.items()}
            seen.update(_linked(membership, lines))
            own = self.rules.line
            seen[membership.me] = ObservedPeer(
                self._services.stage, rate, self.moving_to, round=load.round, line=own
            )
            view = summarize_records(seen.items(), self.rules)
            if min(view.capacities) <= 0 and self._on_disk is None:
                held = await _on_disk(self._context.presence, self._context.settings.checkpoints)
                self._on_disk = frozenset(one.stage for one in held)
            self._context.log_event(
                log_events.PlacementChecked(
                    capacities=[round(capacity, 3) for capacity in view.capacities], rate=rate
                )
            )
        self._feed(DirectoryQueried(view, rate, self._on_disk or frozenset()))


def _lost(membership: Membership, peer: PeerId, stage: int) -> bool:
    """Return whether a former neighbour of that stage is gone. A peer that moved is not."""
    known = membership.peers.get(peer)
    if known is None or known.linked or not known.failures or known.stage != stage:
        return False
    return membership.concerns_us(known.stage)


def _linked(
    membership: Membership, lines: Mapping[PeerId, LinkBandwidth]
) -> Iterable[tuple[PeerId, ObservedPeer]]:
    """Yield linked peers as seen by their newer heartbeats; only records contain their bandwidths."""
    for peer, known in membership.peers.items():
        if known.linked and not known.is_helper:
            rate = _rate(known.service_seconds)
            line = lines.get(peer, UNKNOWN)
            waits = not known.ready
            yield (
                peer,
                ObservedPeer(known.stage, rate, known.moving_to, round=known.round, line=line, waits=waits),
            )


def _rate(service_seconds: float) -> float:
    """Return microbatches per second; 0 if not measured yet."""
    return 1.0 / service_seconds if service_seconds > 0 else 0.0


def _seen(signed: SignedRecord, manifest: Manifest, now: float) -> ObservedPeer:
    tokens = manifest.data.seq_len * manifest.data.micro_batch_size
    record = signed.record
    age = max(0.0, now - signed.sequence / 1e6)
    rate, line = record.tokens_per_second / tokens, claimed_bandwidth(record)
    waits = waits_for_weights(record)
    return ObservedPeer(record.stage, rate, record.moving_to, age, record.round, line, waits)


async def _records(presence: RecordAnnouncer, stages: int) -> dict[PeerId, SignedRecord] | None:
    """Return the records of peers that train a stage; None if a look-up failed."""
    try:
        records = await look(presence.directory, presence.signed.run_id, stages)
    except WireError as error:
        presence.log_event(log_events.LookUpFailed(code=error.code, reason=str(error)))
        return None
    return {
        peer: signed
        for peer, signed in records.items()
        if signed.record.stage >= 0 and signed.record.role != HELPER_ROLE
    }
