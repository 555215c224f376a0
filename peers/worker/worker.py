"""A worker: one peer that serves one stage, from joining the run to leaving it.

It owns the life cycle: it chooses a stage, builds the stage's services (stage_services.py), gets the weights,
and joins the rounds, again whenever the peer has fallen behind its group. It runs on the transport,
directory, compute and event loop that it is given: p2pd and a thread, or memory and a virtual clock.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

from peers.compute.executor import computed
from peers.compute.stage_part import MakePart, build_stage_part
from peers.config.errors import UserError
from peers.network.discovery.announcer import OPERATION_SECONDS
from peers.network.discovery.discovery import met
from peers.network.discovery.height import RemoteProgressGuard
from peers.runtime.supervision import Left, until_left
from peers.state.archive_restore import Restoring
from peers.telemetry import log_events
from peers.worker.joining import join_rounds
from peers.worker.lifecycle import Lifecycle
from peers.worker.rounds.round_service import RoundService
from peers.worker.run_end import refuse_ended_run
from peers.worker.run_orders import LoadText, RunOrders
from peers.worker.served_stage import NoStage, ServedStage
from peers.worker.stage_moves import first_stage, stage_to_help
from peers.worker.stage_services import StageServices
from peers.worker.worker_context import WorkerContext
from swarmnet.identifiers import PeerId
from swarmnet.rounds.events import FetchGroupState

MEET_SECONDS = 3.0
"""How long a newcomer waits for links to the peers that it knows."""
STEP_SECONDS = 60.0
"""A peer that is not in step after this time fetches the state again."""


class Worker:
    """One worker. `run()` returns after `leave()` and its work, or raises the error that ended it."""

    def __init__(
        self, context: WorkerContext, load_text: LoadText, make_part: MakePart = build_stage_part
    ) -> None:
        self.context = context
        self.lifecycle = Lifecycle(context.presence, context.settings)
        self.orders = RunOrders(context, load_text)
        self.elsewhere = RemoteProgressGuard(
            presence=context.presence,
            ends=lambda: self.orders.last_round,
            allow_reinit=context.settings.allow_reinit,
            may_be_empty=self._may_be_empty,
            stage=lambda: self.stage,
            notify=context.notify,
        )
        self.stage = -1
        """The stage that this peer serves; -1 until it is chosen."""
        self.served: ServedStage | NoStage = NoStage()
        """The stage's services and what steers them, from the choice of the stage on."""
        self._make_part = make_part
        self._in_step_before = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def state(self) -> str:
        return self.lifecycle.state

    @property
    def services(self) -> StageServices | None:
        """The services of the stage; None until it is chosen."""
        return self.served.services

    # -- life -----------------------------------------------------------------------------------------

    def leave(self, drain_seconds: float | None = None, goodbye: str = "leaving") -> None:
        """Finish current work, hand over the last contribution and say goodbye. `drain_seconds` limits how
        long that may take; None keeps the limit of the settings."""
        self.served.stop_moving()  # Otherwise a pause could become a move while the peer drains.
        self.lifecycle.leave(drain_seconds, goodbye)

    async def run(self) -> None:
        """Train until the peer leaves: choose a stage, fetch its weights, and take part in its rounds.
        Fetches the weights again whenever the peer has fallen behind its group."""
        context, leaving = self.context, self.lifecycle.leaving
        await self.orders.first_look(OPERATION_SECONDS)
        self.stage = await self._choose_stage()
        await refuse_ended_run(context, self.orders, self.elsewhere)
        if self.stage == 0 and not context.settings.reduces_only:
            try:
                await until_left(leaving, self.orders.read_text())
            except Left:
                return
        served = self._serve_stage()
        try:
            served.services.recovery.restore()
            with suppress(Left):
                await until_left(leaving, self._prepare(served.services))
                while not leaving.is_set():
                    self.lifecycle.enter("joining")
                    await self._join_rounds(served)
                    self.lifecycle.enter("training")
                    served.announce_standing()
                    await self._until_leaving_or_behind(served.services)
            await self._drain(served.services)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await served.close()
            await context.compute.close()

    async def _choose_stage(self) -> int:
        context = self.context
        settings = context.settings
        if settings.reduces_only and context.manifest.sync.topology != "sharded-reduce":
            raise UserError("role: reducer: this run has no reducers (sync.topology: all-gather)")
        if settings.stage is not None:
            return settings.stage
        if settings.reduces_only:
            return await stage_to_help(context.presence, context.chance, context.notify)
        return await first_stage(
            context.presence,
            context.chance,
            context.notify,
            settings.never,
            settings.line,
            settings.checkpoints,
        )

    def _serve_stage(self) -> ServedStage:
        """Build the stage's services and start what runs beside the life cycle."""
        context = self.context
        served = ServedStage(
            context=context,
            lifecycle=self.lifecycle,
            orders=self.orders,
            elsewhere=self.elsewhere,
            make_part=self._make_part,
            stage=self.stage,
            leave=self.leave,
        )
        self.served = served
        context.transport.on_address_change(context.presence.announce_now)
        served.start()
        parameters = served.services.part.layout.parameters
        context.log_event(log_events.Assembled(stage=self.stage, parameters=parameters))
        beside = {
            "announce": context.presence.announce_forever(self.stage, served.make_record),
            "look up": context.presence.look_forever(served.services.looking.look),
            "orders": self.orders.keep_forever(),
            "receipts": served.services.receipts.keep_forever(),
            "end": served.ending.run(),
        }
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(work, name=name) for name, work in beside.items()]
        for task in self._tasks:
            task.add_done_callback(context.task_ended)
        return served

    async def _prepare(self, services: StageServices) -> None:
        """Read the run's initial model, warm the devices up, and meet the group."""
        await services.recovery.read_model()
        if services.part.computing.compile or services.part.hold is not None:
            await self._warm_up(services)
        await self._meet(services)

    async def _warm_up(self, services: StageServices) -> None:
        """Compile, or wait for the processes of several devices, in the compute thread. Meanwhile this loop
        keeps the links, and no peer sends microbatches yet."""
        data, notify, loop = self.context.manifest.data, self.context.notify, asyncio.get_running_loop()
        began = loop.time()
        warm_up = partial(services.part.compute.warm_up, data.micro_batch_size, data.seq_len)
        if services.part.hold is not None:
            await computed(self.context.compute, warm_up)
            notify("devices", f"devices ready in {loop.time() - began:.0f} s")
            return
        notify("compiles", "compiles the layers for this GPU before it starts to train (compute.compile)")
        await computed(self.context.compute, warm_up)
        notify("compiled", f"compiled the layers in {loop.time() - began:.0f} s")

    async def _meet(self, services: StageServices) -> None:
        """Find the group before deciding that there is none, so that no second branch starts. If no peer
        trains this stage, restore the archive's checkpoint and link to archivists."""
        context, recovery = self.context, services.recovery
        membership = services.links.membership
        await services.looking.look()
        deadline = asyncio.get_running_loop().time() + MEET_SECONDS
        await self.lifecycle.wait_until(lambda: met(membership), deadline)
        url, folder = context.settings.archive, context.settings.checkpoints
        # Peers that start at the same time are no group yet: all of them use the archive.
        if recovery.is_trained():
            return
        if url and folder is not None:
            restoring = Restoring(url, context.signed, context.notify, services.lineage)
            layout, unused = services.part.state, {*services.disk.damaged, *services.disk.given_up}
            await restoring.bring(folder, self.stage, layout, recovery.is_trained, unused)
            self.orders.book.take_archived(restoring.orders, restoring.url)
            recovery.restore()
        await recovery.keepers.reach()

    async def _join_rounds(self, served: ServedStage) -> None:
        """Get settled weights (from the group, this peer's disk, or the seed) and begin the rounds."""
        services, leaving, part = served.services, self.lifecycle.leaving, served.services.part
        former = services.round_service
        service = former if former.has_weights else None
        weights = await until_left(
            leaving, services.recovery.weights(service, lambda: self.lifecycle.request)
        )
        services.disk.set_given_up_aside()
        await services.disk.chunks.remove()  # A peer that leaves during a download resumes it another time.
        given_up = self.lifecycle.take_request()
        self.elsewhere.why = ""
        former.close()  # Devices have one replica, and queued work of the former comes first.
        make_replica = partial(part.replica, weights.units, weights.settled_round)
        on_devices = part.hold is not None
        if on_devices:
            replica = await until_left(leaving, computed(self.context.compute, make_replica))
        else:
            replica = make_replica()
        joined = join_rounds(
            services=services,
            replica=replica,
            weights=weights,
            given_up=given_up,
            rates=self.orders.book.order.rates,
        )
        served.ending.on_change()
        for peer in services.recovery.group():
            joined.linked(peer)  # First of all: whoever has no neighbours has nobody to catch up with.
        joined.roll_back(self.orders.book.order.rolled_back())
        joined.start()
        joined.counted(services.links.membership.group_size())
        await self._wait_in_step(served, joined)

    async def _wait_in_step(self, served: ServedStage, service: RoundService) -> None:
        """Wait until everything that the group has settled is applied here, then serve."""
        context, lifecycle, services = self.context, self.lifecycle, served.services
        rounds = service.rounds

        def is_ready() -> bool:
            return rounds.in_step or lifecycle.is_interrupted

        if not await lifecycle.wait_until(is_ready, asyncio.get_running_loop().time() + STEP_SECONDS):
            reason, group = f"not in step after {STEP_SECONDS:g} s", tuple(services.recovery.group())
            context.log_event(
                log_events.Resync(code="not_in_step", peers=list(group), reason=reason, fork_round=None)
            )
            services.resynchronise(FetchGroupState(group, reason))
        if lifecycle.is_interrupted:
            return
        if not self._in_step_before and rounds.applied >= 0:
            service.work.source.warm_up(context.manifest.sync.optimizer_warmup_steps)
            await services.momentum.restore(rounds.current)
        self._in_step_before = True
        services.pipeline_service.serving = True
        context.log_event(log_events.InStep(round=rounds.current, settled=rounds.settled))
        does = "reduces" if context.settings.reduces_only else "takes part"
        context.notify("trains", f"in step with its stage, at round {rounds.current}: {does} from now on")
        services.links.beat_now()
        services.pipeline_service.pump()
        if context.settings.moves:
            fetched = services.snapshot_service
            served.moving.begin(fetched.fetched_bytes, fetched.state_bytes, context.settings.moved)

    async def _until_leaving_or_behind(self, services: StageServices) -> None:
        """Save checkpoints until the peer is to leave or has fallen behind its group. Raises the error of a
        failed compute thread or of saving."""
        failed, loop = self.context.compute.failed, asyncio.get_running_loop()
        seconds, rounds = self.context.settings.checkpoint_seconds, services.round_service.rounds
        waits: list[asyncio.Task[Any]] = [
            loop.create_task(work)
            for work in (
                self.lifecycle.leaving.wait(),
                self.lifecycle.behind.wait(),
                services.disk.save_forever(seconds, services.snapshots),
                services.momentum.save_forever(seconds, lambda: rounds.current),
            )
        ]
        try:
            done, _ = await asyncio.wait([*waits, failed], return_when=asyncio.FIRST_COMPLETED)
            if failed in done:
                raise failed.result()
            for task in done:
                if isinstance(task, asyncio.Task):
                    task.result()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            services.pipeline_service.serving = False

    async def _drain(self, services: StageServices) -> None:
        """Finish microbatches, contribute the gathered tokens, wait until a neighbour has the contribution,
        save. After an order to return to a snapshot, only save that, if it is here."""
        service = services.round_service
        if not self.lifecycle.hands_over:
            await services.disk.save_target(services.snapshots, self.orders.book.order.lineage(self.stage))
            return
        if not service.has_weights:
            return
        self.lifecycle.enter("leaving")
        services.links.beat_now()
        until = asyncio.get_running_loop().time() + self.lifecycle.drain_seconds
        await self.lifecycle.wait_until(services.pipeline_service.finished, until)
        service.leave()
        await self.lifecycle.wait_until(service.handed_over, until)
        await services.disk.save(service.settled_weights)
        await services.momentum.save(service.rounds.current)

    # -- what others ask ------------------------------------------------------------------------------

    def _may_be_empty(self) -> bool:
        """Return whether microbatches can skip this stage, so that perhaps no peer ever served it."""
        manifest = self.context.manifest
        last = len(manifest.stages) - 1
        if self.stage > last:
            return True
        return manifest.path_rules().skips and 0 < self.stage < last

    def has_weights(self) -> bool:
        """Return whether this peer has joined the rounds of its stage."""
        return self.served.has_weights

    def linked(self) -> list[PeerId]:
        """Return the peers with open links."""
        return self.served.linked_peers()
