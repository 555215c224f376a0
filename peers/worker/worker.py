"""A worker: one peer that serves one stage, from joining the run to leaving it.

It builds the services and owns their life cycle: `PeerLinks` (connections), `SnapshotService` (weights of
other peers), `PipelineService` (microbatches), `RoundService` (rounds). It runs on the transport, directory,
compute and event loop that it is given: p2pd and a thread, or memory and a virtual clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, TypeVar

from peers.compute.executor import UPDATE, Compute
from peers.compute.stage_part import HasReplica, MakePart, build_stage_part
from peers.config.run_file import SignedManifest
from peers.errors import IdentityInUse
from peers.network.discovery.announcer import OPERATION_SECONDS, RecordAnnouncer
from peers.network.discovery.discovery import PeerDiscovery, met
from peers.network.discovery.height import RemoteProgressGuard
from peers.network.orders.order_book import OrderBook
from peers.network.peer_links import PeerLinks
from peers.runtime.supervision import Left, until_left
from peers.state.archive_restore import Restoring
from peers.state.archivists import ArchivistClients
from peers.state.checkpoint_writer import CheckpointWriter
from peers.state.snapshot_service import SnapshotService, start_digest
from peers.state.snapshot_store import NOT_BEGUN, Snapshots
from peers.telemetry import log_events
from peers.telemetry.log_events import Notify
from peers.telemetry.snapshot import IN_STEP
from peers.worker.dispatch import MessageDispatcher
from peers.worker.inference.server import Inference
from peers.worker.order_enforcement import OrderEnforcer
from peers.worker.pipeline.pipeline_service import MicrobatchSource, PipelineService
from peers.worker.record_fields import claims_of
from peers.worker.rounds.digest_gossip import SignedDigests
from peers.worker.rounds.receipt_service import Receipts
from peers.worker.rounds.round_counts import RoundCounts
from peers.worker.rounds.round_service import RoundService
from peers.worker.rounds.update_compute import RoundSettled, UpdateWork, experts_line
from peers.worker.run_end import RunShutdown
from peers.worker.settings import Settings
from peers.worker.stage_moves import StageMover, first_stage
from peers.worker.starting_state import StateRecovery, combine_requests
from peers.worker.worker_context import WorkerContext
from protocols.fields import RunSizes
from protocols.messages.table import PeerRecords
from protocols.ports import Directory, Transport
from protocols.signed.identity import Identity
from protocols.signed.records import SignedRecord
from swarmnet.identifiers import PeerId
from swarmnet.membership.membership import Membership
from swarmnet.rounds.audits import Audits
from swarmnet.rounds.contributors import ContributorFilter
from swarmnet.rounds.events import ChainSigned, FetchGroupState
from swarmnet.rounds.own_contributions import NOTHING_PAST, OwnContributions, RestartState

AUDITS_OF = b"swarmnet audits 1\0"
"""Signed together with the run's id, this gives a secret that is the same after a restart. It decides which
results are audited."""
MEET_SECONDS = 3.0
"""How long a newcomer waits for links to the peers that it knows."""
LOOK_AGAIN_SECONDS = 0.2
"""Upper bound on the delay of a condition that no message triggers."""
STEP_SECONDS = 60.0
"""A peer that is not in step after this time fetches the state again."""


Result = TypeVar("Result")


class Worker(WorkerContext):
    """One worker. `run()` returns after `leave()` was called and its work is done, or raises the error that
    ended it."""

    def __init__(
        self,
        *,
        signed: SignedManifest,
        identity: Identity,
        transport: Transport,
        directory: Directory,
        compute: Compute,
        load_text: Callable[[frozenset[bytes]], Awaitable[MicrobatchSource]],
        settings: Settings,
        chance: Random,
        log_event: log_events.LogEvent,
        notify: Notify,
        make_part: MakePart = build_stage_part,
    ) -> None:
        """`log_event(event)` appends to the event log; `notify(event, text)` prints one line for people."""
        self.signed = signed
        self.manifest = signed.manifest
        self.identity = identity
        self.transport = transport
        self.presence = RecordAnnouncer(
            signed=signed,
            identity=identity,
            transport=transport,
            directory=directory,
            version=settings.version,
            log_event=log_event,
            own_start=settings.own_start,
        )
        book = OrderBook(signed=signed, kept=settings.orders, log_event=log_event, notify=notify)
        self.elsewhere = RemoteProgressGuard(
            presence=self.presence,
            ends=lambda: book.order.ends,
            allow_reinit=settings.allow_reinit,
            may_be_empty=self._may_be_empty,
            stage=lambda: self.stage,
            notify=notify,
        )
        self.ending = RunShutdown(
            worker=self,
            book=book,
            elsewhere=self.elsewhere,
            stands=self.stands,
            leave=self.leave,
            hint=settings.export_hint,
        )
        self.orders = OrderEnforcer(
            worker=self,
            book=book,
            ending=self.ending,
            invite=settings.invite,
            load_text=load_text,
            task_ended=self.task_ended,
            stands=self.stands,
        )
        self.compute = compute
        self.settings = settings
        self.chance = chance
        self.log_event = log_event
        self.notify = notify
        self.make_part = make_part
        self.loop = asyncio.get_running_loop()
        self.state = "connecting"
        self.stage = -1
        self.neighbourhood = None
        self.data = None
        self.update = None
        self.states = None
        self.goes_to: int | None = None
        """The stage to which this peer moves, if any; the next worker serves it."""
        self._leaving = asyncio.Event()
        self._drain_seconds = settings.drain_seconds
        self._goodbye = "leaving"
        self._behind = asyncio.Event()
        self._given_up: FetchGroupState | None = None
        """Why the state is being fetched again; None if it is not."""
        self._in_step_before = False
        self._answered_own = 0
        """Sequence number of the newest record of a later process with this identity."""
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # -- life -----------------------------------------------------------------------------------------

    def leave(self, drain_seconds: float | None = None, goodbye: str = "leaving") -> None:
        """Finish current work, hand over the last contribution and say goodbye. `drain_seconds` limits how
        long that may take; None keeps the limit of the settings."""
        self.goes_to = None
        self._goodbye = goodbye
        if self.update is not None:
            self.moving.close()  # Otherwise a pause could become a move while the peer drains.
        if drain_seconds is not None:
            self._drain_seconds = drain_seconds
        self._leaving.set()
        self._changed.set()

    async def run(self) -> None:
        """Train until the peer leaves: choose a stage, fetch its weights, and take part in its rounds.
        Fetches the weights again whenever the peer has fallen behind its group."""
        await self.orders.first_look(OPERATION_SECONDS)
        stage, never, line = self.settings.stage, self.settings.never, self.settings.line
        if stage is None:
            folder = self.settings.checkpoints
            stage = await first_stage(self.presence, self.chance, self.notify, never, line, folder)
        self.stage = stage
        await self.ending.refuse_if_over(self.settings.checkpoints)
        try:
            text = await until_left(self._leaving, self.orders.read_text()) if self.stage == 0 else None
        except Left:
            return
        self._assemble(text)
        self._tasks = [
            self.loop.create_task(self.presence.announce_forever(self.stage, self._record), name="announce"),
            self.loop.create_task(self.presence.look_forever(self.looking.look), name="look up"),
            self.loop.create_task(self.orders.keep_forever(), name="orders"),
            self.loop.create_task(self.receipts.keep_forever(), name="receipts"),
            self.loop.create_task(self.ending.run(), name="end"),
        ]
        for task in self._tasks:
            task.add_done_callback(self.task_ended)
        try:
            self.recovery.restore()
            with suppress(Left):
                if self.recovery.model is not None:
                    await until_left(self._leaving, self.recovery.read_model())
                if self.part.computing.compile or self.part.hold is not None:
                    await until_left(self._leaving, self._warm_up())
                await until_left(self._leaving, self._meet())
                while not self._leaving.is_set():
                    self._enter("joining")
                    await self._start_rounds()
                    self._enter("training")
                    self.stands()
                    await self._until_leaving_or_behind()
            await self._drain()
        finally:
            await self._close()

    def _enter(self, state: str) -> None:
        """Change the state and announce it in the directory at once."""
        if state != self.state:
            self.state = state
            self.presence.announce_now()

    def stands(self) -> None:
        """Called when the owner may have paused, resumed or ended the run."""
        if self.state in IN_STEP:
            held = "paused_by_owner" if self.orders.paused else "training"
            self._enter(held if self.ending.round is None else "ended")

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """End the worker if a background task failed; a cancelled one is ignored."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.compute.failed.done():
            self.compute.failed.set_result(error)

    def _assemble(self, text: MicrobatchSource | None) -> None:
        """Create all parts of the worker for its stage. `text` is the source of microbatches; None except on
        stage 0."""
        manifest, me = self.manifest, self.transport.peer
        self.part = self.make_part(manifest, self.stage)
        by_invite = manifest.access == "invite"
        membership = Membership(
            me=me,
            stage=self.stage,
            chance=self.chance,
            beside=manifest.neighbour_stages(self.stage),
            by_invite=by_invite,
        )
        self.contributors = ContributorFilter(membership, manifest.rounds)
        self.audits = Audits(
            self.identity.sign(AUDITS_OF + bytes.fromhex(self.signed.run_id)), manifest.rounds.window
        )
        self.contributors.convicted = self.audits.convicted
        self.orders.gatekeeper.convicted = self.contributors.convicted
        self.messages = MessageDispatcher(
            worker=self, orders=self.orders, wake=self._changed.set, see_own=self._see_own
        )
        self.neighbourhood = PeerLinks(
            transport=self.transport,
            run_id=self.signed.run_id,
            membership=membership,
            listener=self.messages,
            signed_manifest=self.signed.wire(),
            log_event=self.log_event,
            bodies=self.messages.router.bodies(self._sizes()),
            admission=self.orders.gatekeeper,
        )
        self.looking = PeerDiscovery(
            presence=self.presence,
            neighbourhood=self.neighbourhood,
            stages=len(manifest.stages),
            notify=self.notify,
        )
        self.digests = SignedDigests(
            identity=self.identity,
            signed=self.signed,
            stage=self.stage,
            neighbourhood=self.neighbourhood,
            wrong=self._resynchronise,
            log_event=self.log_event,
        )
        self.receipts = Receipts(
            identity=self.identity,
            signed=self.signed,
            stage=self.stage,
            path=self.settings.receipts,
            neighbourhood=self.neighbourhood,
            now=self.presence.directory.now,
            log_event=self.log_event,
        )
        self.disk = CheckpointWriter(
            folder=self.settings.checkpoints,
            signed=self.signed,
            stage=self.stage,
            part=self.part,
            compute=self.compute,
            log_event=self.log_event,
            notify=self.notify,
            digests=self.digests,
            past=self._past,
        )
        self.snapshots = Snapshots(
            identity=self.identity,
            run_id=self.signed.run_id,
            stage=self.stage,
            rules=manifest.rounds,
            folder=self.settings.checkpoints,
        )
        keepers = ArchivistClients(self.presence, self.neighbourhood, self.stage)
        self.states = SnapshotService(
            snapshots=self.snapshots,
            neighbourhood=self.neighbourhood,
            state_bytes=self.part.state.size * 4,
            log_event=self.log_event,
            notify=self.notify,
            signed=self.digests.roots,
            start=start_digest(manifest, self.stage),
            kept=self.disk.chunks,
            progress=lambda: self.update.progress() if self.update is not None else NOT_BEGUN,
            vouched=keepers.vouched,
        )
        self.recovery = StateRecovery(
            disk=self.disk,
            states=self.states,
            keepers=keepers,
            neighbourhood=self.neighbourhood,
            compute=self.compute,
            log_event=self.log_event,
            notify=self.notify,
            elsewhere=lambda: self.elsewhere.waits(self.disk.lost_round),
            model=self.settings.start,
        )
        self.data = PipelineService(
            manifest=manifest,
            stage=self.stage,
            compute=self.compute,
            part=self.part,
            neighbourhood=self.neighbourhood,
            text=text,
            chance=self.chance,
            slots=self.settings.slots,
            in_flight=self.settings.in_flight,
            committed=self._committed,
            round=self._round,
            log_event=self.log_event,
            line=self.settings.line,
        )
        self.inference = Inference(
            manifest=manifest,
            stage=self.stage,
            snapshots=self.snapshots,
            part=self.part,
            compute=self.compute,
            neighbourhood=self.neighbourhood,
            log_event=self.log_event,
            chance=self.chance,
        )
        # A restarted peer keeps its identity and must not reuse names of microbatches, which other peers
        # would take for duplicates. No peer starts a thousand in a second.
        self.data.next_counter = int(self.presence.directory.now() * 1000)
        self.moving = StageMover(
            presence=self.presence,
            neighbourhood=self.neighbourhood,
            worker=self,
            chance=self.chance,
            log_event=self.log_event,
            notify=self.notify,
        )
        self.messages.begin()
        self._record()
        self.transport.on_address_change(self.presence.announce_now)
        self.orders.begin()
        self.neighbourhood.start()
        self.log_event(log_events.Assembled(stage=self.stage, parameters=self.part.layout.parameters))

    async def _warm_up(self) -> None:
        """Compile, or wait for the processes of several devices, in the compute thread. Meanwhile this loop
        keeps the links, and no peer sends microbatches yet."""
        data, began = self.manifest.data, self.loop.time()
        warm_up = partial(self.part.compute.warm_up, data.micro_batch_size, data.seq_len)
        if self.part.hold is not None:
            await self._computed(warm_up)
            self.notify("devices", f"devices ready in {self.loop.time() - began:.0f} s")
            return
        self.notify(
            "compiles", "compiles the layers for this GPU before it starts to train (compute.compile)"
        )
        await self._computed(warm_up)
        self.notify("compiled", f"compiled the layers in {self.loop.time() - began:.0f} s")

    async def _computed(self, work: Callable[[], Result]) -> Result:
        """Run `work` in the compute thread and return its result."""
        done: asyncio.Future[Result] = self.loop.create_future()

        def deliver(result: Result, _seconds: float) -> None:
            if not done.done():
                done.set_result(result)

        self.compute.submit(UPDATE, work, deliver)
        return await done

    async def _meet(self) -> None:
        """Find the group before deciding that there is none, so that no second branch starts. If no peer
        trains this stage, restore the archive's checkpoint and link to archivists."""
        assert self.neighbourhood is not None
        membership = self.neighbourhood.membership
        await self.looking.look()
        await self._until(lambda: met(membership), self.loop.time() + MEET_SECONDS)
        url, folder = self.settings.archive, self.settings.checkpoints
        # Peers that start at the same time are no group yet: all of them use the archive.
        trained = self.recovery.is_trained
        if trained():
            return
        if url and folder is not None:
            layout = self.part.state
            restoring = Restoring(url, self.signed, self.notify)
            await restoring.bring(folder, self.stage, layout, trained, self.disk.damaged)
            self.recovery.restore()
        await self.recovery.keepers.reach()

    async def _until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until `condition()` holds. It is checked after each message and at intervals, since compute
        and timers change it too. Returns False at the deadline."""
        while not condition():
            now = self.loop.time()
            if now >= deadline:
                return False
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(deadline, now + LOOK_AGAIN_SECONDS)):
                    await self._changed.wait()
        return True

    async def _start_rounds(self) -> None:
        """Get settled weights (from the group, this peer's disk, or the seed) and start the rounds."""
        assert self.neighbourhood is not None
        assert self.states is not None
        assert self.data is not None
        old = self.update
        weights = await until_left(self._leaving, self.recovery.weights(old, lambda: self._given_up))
        await self.disk.chunks.remove()  # A peer that leaves during a download resumes it another time.
        given_up = self._given_up
        self._given_up = None
        self.elsewhere.why = ""
        self._behind.clear()
        if old is not None:
            old.close()  # Devices have one replica, and queued work of the old one comes first.
        begin = partial(self.part.replica, weights.units, weights.settled_round)
        elsewhere = self.part.hold is not None
        replica = await until_left(self._leaving, self._computed(begin)) if elsewhere else begin()
        reduced = self.part.method.reduced
        draw = reduced.draw if reduced is not None else None
        offers = old.rounds.offers if old is not None else OwnContributions(self.manifest.rounds, draw)
        work = UpdateWork(
            run_id=self.signed.run_id,
            stage=self.stage,
            identity=self.identity,
            stage_compute=self.part.compute,
            method=self.part.method,
            replica=replica,
            gathered=self.data.work,
            settled=partial(self._settled, replica),
            counts=RoundCounts(),
            undecided=offers.open,
            signs_every=self.manifest.rounds.snapshot_interval,
        )
        if self.part.method.own is not None:
            self.data.work.after_gradient = work.step_if_due
        if old is not None:
            work.own = old.work.own
            if given_up is not None:
                offers.replaced(given_up, old.rounds.histories, weights.settled_round, weights.chain)
        offers.restored(weights.past.sets)
        offers.jumped(weights.settled_round)
        update = RoundService(
            manifest=self.manifest,
            work=work,
            compute=self.compute,
            neighbourhood=self.neighbourhood,
            weights=weights,
            offers=offers,
            has_weight=self.contributors.counts,
            resynchronise=self._resynchronise,
            log_event=self.log_event,
            rates=self.orders.book.order.rates,
            folder=self.settings.checkpoints,
            audits=self.audits,
        )
        self.update = update
        update.register(self.messages.router)
        if old is not None:
            update.take_over(old)
        update.settled, update.made = self._on_settled, self.receipts.made
        update.took_up = lambda took_up: self.notify("experts", experts_line(took_up))
        self.digests.took_up(weights)
        update.sign_history = self.digests.sign
        self.digests.heard = lambda said: update.feed(ChainSigned(said.peer, said.round, said.chain))
        self.ending.on_change()
        update.start()
        update.counted(self.neighbourhood.membership.group_size())
        for peer in self.recovery.group():
            update.linked(peer)
        await self._in_step()

    def _sizes(self) -> RunSizes:
        """Return the sizes in this stage that bound the bodies of messages."""
        state, method = self.part.state.size * 4, self.part.method
        if method.reduced is None:
            return RunSizes(self.manifest, method.payload_bytes, state)
        slices = sum(method.reduced.slice_bytes)
        return RunSizes(self.manifest, method.reduced.longest_result, state, slices)

    def _may_be_empty(self) -> bool:
        """Return whether microbatches can skip this stage, so that perhaps no peer ever served it."""
        last = len(self.manifest.stages) - 1
        if self.stage > last:
            return True
        return self.manifest.path_rules().skips and 0 < self.stage < last

    def _past(self, until: int) -> RestartState:
        return self.update.past(until) if self.update is not None else NOTHING_PAST

    async def _in_step(self) -> None:
        """Wait until everything that the group has settled is applied here, then serve."""
        assert self.update is not None
        assert self.data is not None
        assert self.neighbourhood is not None
        update, rounds = self.update, self.update.rounds

        def ready() -> bool:
            heard = rounds.histories.all_reported(update.clock.time())
            return (rounds.in_step and heard) or self._leaving.is_set() or self._behind.is_set()

        if not await self._until(ready, self.loop.time() + STEP_SECONDS):
            reason, group = f"not in step after {STEP_SECONDS:g} s", tuple(self.recovery.group())
            self.log_event(
                log_events.Resync(code="not_in_step", peers=list(group), reason=reason, fork_round=None)
            )
            self._resynchronise(FetchGroupState(group, reason))
        if not (self._behind.is_set() or self._leaving.is_set()):
            is_new = not self._in_step_before and rounds.applied >= 0
            if self.part.method.own is not None and is_new:
                update.work.optimizer_warmup_steps = update.work.joins = (
                    self.manifest.sync.optimizer_warmup_steps
                )
            self._in_step_before = True
            self.data.serving = True
            self.log_event(log_events.InStep(round=rounds.current, settled=rounds.settled))
            self.notify(
                "trains", f"in step with its stage, at round {rounds.current}: takes part from now on"
            )
            self.neighbourhood.beat_now()
            self.data.pump()
            if self.settings.moves and self.states is not None:
                self.moving.begin(self.states.fetched_bytes, self.states.state_bytes, self.settings.moved)

    async def _until_leaving_or_behind(self) -> None:
        """Save checkpoints until the peer is to leave or has fallen behind its group. Raises the error of a
        failed compute thread or of saving."""
        saving = self.disk.save_forever(self.settings.checkpoint_seconds, self.snapshots)
        waits: list[asyncio.Task[Any]] = [
            self.loop.create_task(work) for work in (self._leaving.wait(), self._behind.wait(), saving)
        ]
        try:
            done, _ = await asyncio.wait([*waits, self.compute.failed], return_when=asyncio.FIRST_COMPLETED)
            if self.compute.failed in done:
                raise self.compute.failed.result()
            for task in done:
                if isinstance(task, asyncio.Task):
                    task.result()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            if self.data is not None:
                self.data.serving = False

    async def _drain(self) -> None:
        """Finish microbatches, contribute the gathered tokens, wait until a neighbour has the contribution,
        save."""
        if self.data is None or self.update is None or self.neighbourhood is None:
            return
        self._enter("leaving")
        self.neighbourhood.beat_now()
        until = self.loop.time() + self._drain_seconds
        await self._until(self.data.finished, until)
        self.update.leave()
        await self._until(self.update.handed_over, until)
        await self.disk.save(self.update.settled_weights)

    async def keep_newest(self) -> None:
        """Save the newest snapshot, which may be the only copy. Called when the settled weights are lost."""
        if self.neighbourhood is not None:
            await self.disk.save_newest(self.snapshots)

    async def _close(self) -> None:
        """Cancel all tasks and close all parts, the links and then the compute thread last."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.orders.close()
        self.moving.close()
        self.inference.close()
        if self.data is not None:
            self.data.close()
        if self.update is not None:
            self.update.note_undecided()
            self.update.close()
        if self.states is not None:
            self.states.close()
        if self.neighbourhood is not None:
            await self.neighbourhood.close(self._goodbye if self.goes_to is None else "moving")
        await self.receipts.close()
        await self.compute.close()

    # -- directory ------------------------------------------------------------------------------------

    def _record(self) -> bytes:
        """Return a new signed record for the directory and for neighbours."""
        record = self.presence.record(self.stage, claims_of(self), self.orders.gatekeeper.record_invite)
        if self.neighbourhood is not None:
            self.neighbourhood.record = record
        return record

    def _see_own(self, signed: SignedRecord) -> None:
        """End if an earlier process uses this identity. Answer a later process's record with a new own
        record."""
        assert self.neighbourhood is not None
        try:
            is_later = self.presence.judge_own(signed)
        except IdentityInUse as error:
            self._goodbye = ""  # Otherwise the other peers would take the earlier process for gone.
            if not self.compute.failed.done():
                self.compute.failed.set_result(error)
            return
        if is_later and signed.sequence > self._answered_own:
            if not self._answered_own:
                self.notify("identity_shared", "another process has started with this identity; it ends soon")
            self._answered_own = signed.sequence
            self.presence.announce_now()
            self._record()
            for peer in self.linked():
                self.neighbourhood.post(peer, "group", PeerRecords([self.neighbourhood.record]))

    # -- between the parts ----------------------------------------------------------------------------

    def linked(self) -> list[PeerId]:
        """Return the peers with open links."""
        known = self.neighbourhood.known() if self.neighbourhood is not None else {}
        return [peer for peer, seen in known.items() if seen.linked]

    def has_company(self) -> bool:
        """Return whether another peer of the stage has its weights, too."""
        return self.neighbourhood is None or bool(self.neighbourhood.membership.live(self.stage))

    def _text(self) -> MicrobatchSource | None:
        return self.data.text if self.data is not None else None

    def _round(self) -> int:
        return self.update.rounds.current if self.update is not None else 0

    def _committed(self, tokens: int) -> None:
        self._changed.set()
        if self.update is not None:
            self.update.committed(tokens)

    def _on_settled(self, settled: RoundSettled) -> None:
        """Called on the event loop when a round has settled."""
        if self.neighbourhood is not None:
            self.neighbourhood.membership.worked(settled.contributors)
        self.digests.settled(settled)
        self.receipts.settled(settled)

    def _settled(self, replica: HasReplica, settled: RoundSettled) -> None:
        """Keep a snapshot of `replica`. Called in the compute thread right after a round settled; the worker
        may have other weights by now."""
        self.snapshots.keep(settled.round, replica.settled_now, settled.digest, settled.chain, settled.tokens)

    def _resynchronise(self, request: FetchGroupState) -> None:
        self._given_up = combine_requests(self._given_up, request)
        if self._behind.is_set():
            return
        if self.data is not None:
            self.data.serving = False
        self.notify("behind", f"fetches the state again: {request.reason}")
        self._behind.set()
        self._changed.set()
