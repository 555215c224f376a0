"""The roles worker and reducer: find the run, then serve one stage after another until the peer is stopped.

While the peer is paused, nothing of the run is in memory, and it stays in the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import torch

from peers.compute.devices.device_processes import Processes
from peers.compute.devices.device_restarts import DeviceRestarts
from peers.compute.devices.nodes import listen_for_nodes
from peers.compute.devices.part import spread_part
from peers.compute.executor import Compute, ThreadCompute, set_threads
from peers.compute.gpu import GpuWatch, nvml_of
from peers.compute.limits_watch import LimitsWatch, Why
from peers.compute.machine_use import gpu_use
from peers.compute.memory_budget import all_needs, allowed_bytes, graphs_that_fit
from peers.compute.process_memory import free_until_deleted, resident_bytes, trim_forever
from peers.compute.stage_part import StagePart, build_stage_part, computing_of, device_of, devices_of
from peers.config.errors import DevicesLost, UserError
from peers.config.line_file import known_bandwidth
from peers.config.run_file import SignedManifest, export_hint
from peers.config.run_url import join_command
from peers.data.local_text import missing_text, unservable_stages
from peers.process.role import Network, Process, Role
from peers.runtime.control_server import Request
from peers.runtime.supervision import report_memory_errors, unless_failed
from peers.state.chunks.text_exchange import TextExchange
from peers.state.start_fetch import model_here
from peers.telemetry import log_events
from peers.telemetry.console import StatusLine
from peers.telemetry.counters import OBSERVE_SECONDS
from peers.telemetry.event_fold import PeerTimeline
from peers.telemetry.metric_kinds import only
from peers.telemetry.metrics import STATES
from peers.telemetry.notices import NoticePrinter
from peers.telemetry.snapshot import SwarmSnapshot, as_json
from peers.worker.find_run import find_run
from peers.worker.pause.paused import rest
from peers.worker.pause.pausing import CUT_SECONDS, DRAIN_SECONDS, PauseControl
from peers.worker.pipeline.document_reader import noise_of, privacy_of, reader_of
from peers.worker.rounds.receipt_service import FILE_NAME, summary
from peers.worker.running import NotRunning, RunningWorker
from peers.worker.settings import Settings
from peers.worker.stage_services import StageServices
from peers.worker.watch.compute_sampler import ComputeTime
from peers.worker.watch.own_record import OwnRecord
from peers.worker.watch.sampler import WorkerSampler
from peers.worker.watch.startup_summary import (
    PACE_MICROBATCHES,
    FirstStage,
    found,
    machine_line,
    pace_of,
    run_line,
    swarm_line,
    traffic_line,
)
from peers.worker.watch.upload_watch import UPLOAD_SECONDS, UploadWatch
from peers.worker.worker import Worker
from peers.worker.worker_context import WorkerContext
from protocols.signed.records import SignedRecord
from swarmnet.identifiers import PeerId
from swarmnet.resources.memory_estimate import Needs
from swarmnet.run.manifest import Manifest

SAVE_SECONDS = 10.0
"""How long a new p2pd waits until the weights are on disk."""


class WorkerRole(Role):
    """Role `worker`, or `reducer`, which trains on nothing. Weights outlive a session on disk or in peers."""

    def __init__(self, process: Process) -> None:
        self.process = process
        config = process.config
        self.devices = devices_of(config.compute, device_of(config.device))
        self.computing = computing_of(config.compute, self.device)
        self.processes: Processes | None = None
        """The processes of several devices; None with one device."""
        self._device_count = len(self.devices) + config.compute.remote_devices
        self._restarts = DeviceRestarts()
        self.running: RunningWorker | NotRunning = NotRunning()
        """The worker of the stage that this peer serves now."""
        self._text: object = None
        self._left: Callable[[], Worker | None] = lambda: None
        """Returns the previous worker while anything still references it."""
        self.story = PeerTimeline()
        """The timeline for `swarmnet top`, fed by the event log from the start."""
        process.log.listeners += [self.story.take, NoticePrinter(process.report).on_line]
        self.upload = UploadWatch(lambda: process.config, self.story, process.notify)
        self.stage = None if config.stage == "auto" else config.stage
        self.moved = 0
        self._orders: tuple[bytes, ...] = ()  # The previous worker held these.
        self.signed: SignedManifest | None = None
        self.model: Path | None = None
        """Folder of the model that the run starts from, if this machine has it."""
        self.never: frozenset[int] = frozenset()
        """Stages that this machine cannot serve because it lacks the run's text."""
        self._first = FirstStage()
        self.began = time.monotonic()
        self.pausing = PauseControl()
        self.compute_time = ComputeTime(process.metrics.compute)
        self.record = OwnRecord(config.state, process.identity.peer_id, self._joules)
        self._join_command = ""
        """How others join the run; empty before the run is found."""
        warn = partial(process.report.notify, "limits", level="warning")
        gpu = gpu_use(self.device, config.limits.only_when_idle, warn)
        self._gpu: GpuWatch | None = None
        self.watch = LimitsWatch(
            limits=config.limits,
            duty_cycle=config.compute_duty_cycle,
            role=self,
            gpu=gpu,
            month_bytes=self.record.month_bytes,
            share_changed=lambda share: self.running.work_at_most(share),
        )
        process.live.listeners.append(self._limits_changed)
        process.control.answers.update(
            pause=self._asked_to_pause,
            resume=self._asked_to_resume,
            checkpoint=self._asked_to_save,
            status=self._asked_how_it_is,
            credit=self._asked_what_it_did,
        )

    @property
    def device(self) -> torch.device:
        """The device that computes, or the first of several."""
        return self.devices[0]

    @property
    def services(self) -> StageServices | None:
        """The services of the stage that this peer serves now; None while it serves none."""
        return self.running.services

    async def run(self, network: Network) -> None:
        """Serve the run until the peer has left it."""
        process, config = self.process, self.process.config
        self.signed = await find_run(process, network)
        signed = self.signed
        process.known_as(signed.run_id, self.device.type)
        self._join_command = join_command(signed.run_id, config.bootstrap or network.ways_in[:1])
        set_threads(config.threads)
        self.model = await model_here(config.init_checkpoint, signed.manifest, process.notify)
        missing = await asyncio.to_thread(missing_text, signed.manifest, config)
        self.never = unservable_stages(signed.manifest, config, missing)
        p2pd = network.transport.daemon.pid
        watching = self.watch.run(lambda: (p2pd, *(self.processes.pids if self.processes else ())))
        process.notify("run", run_line(signed))
        if missing and self.never and (config.stage == "auto" or config.may_move):
            process.notify("no_text", f"this peer cannot serve the first stage: {missing}")
        beside = [
            asyncio.create_task(watching, name="limits"),
            asyncio.create_task(self._report_run(signed, network), name="introduction"),
            asyncio.create_task(trim_forever(), name="trim"),
            asyncio.create_task(self.record.rank.watch(signed, network.directory, self._tokens), name="rank"),
        ]
        if self.device.type == "cuda":
            gpu = GpuWatch(process.metrics, self.device, nvml_of(self.device))
            self._gpu = gpu
            beside.append(asyncio.create_task(gpu.run(), name="gpu"))
        await asyncio.sleep(0)  # The first check of the limits may find that the peer must not start now.
        try:
            goes_on = True
            while goes_on:
                if self.pausing:
                    await self._rest(signed, network)
                else:
                    goes_on = await self._stage(signed, network)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _report_run(self, signed: SignedManifest, network: Network) -> None:
        """Report what was found of the run and, once this machine's speed is known, its expected traffic."""
        process = self.process
        records = await found(network.directory, signed, process.identity.peer_id)
        process.notify("swarm", swarm_line(records))
        stage = await self._first.wait()
        if process.config.role == "reducer":  # Its traffic depends on the group, not on its own speed.
            return
        self.upload.look(signed, records, stage)
        await asyncio.gather(
            self._report_traffic(signed, records, stage), self._watch_upload(signed, network)
        )

    async def _report_traffic(
        self, signed: SignedManifest, records: Mapping[PeerId, SignedRecord] | None, stage: int
    ) -> None:
        process, limits = self.process, self.process.config.limits
        pace = await pace_of(self._tokens, PACE_MICROBATCHES * signed.manifest.microbatch_tokens)
        process.notify("line", traffic_line(signed.manifest, stage, pace, records, limits))

    async def _watch_upload(self, signed: SignedManifest, network: Network) -> None:
        """Compare the upload link with what the run needs, again and again while it may be too slow."""
        while True:
            await asyncio.sleep(UPLOAD_SECONDS)
            services = self.services
            if services is not None and self.upload.is_doubted:
                records = await found(network.directory, signed, self.process.identity.peer_id)
                self.upload.look(signed, records, services.stage)

    def _tokens(self) -> int:
        """Return the tokens that the current worker has committed."""
        services = self.services
        return services.pipeline_service.ledger.tokens if services is not None else 0

    # -- serving a stage ------------------------------------------------------------------------------

    async def _stage(self, signed: SignedManifest, network: Network) -> bool:
        """Serve one stage. Returns False if the peer is stopped or the run has ended, else True."""
        process = self.process
        compute = self._computing()
        report_memory_errors(asyncio.get_running_loop(), compute.failed)
        process.pulse.fault = lambda: compute.failed.result() if compute.failed.done() else None
        self._text = text = reader_of(
            process=process,
            signed=signed,
            exchange=self._exchange(signed, network),
            opened=self._text_opened,
            ended=lambda task: self.running.task_ended(task),
        )
        context = WorkerContext(
            signed=signed,
            identity=process.identity,
            transport=network.transport,
            directory=network.directory,
            compute=compute,
            settings=self._settings(signed),
            chance=Random(process.identity.peer_id),
            log_event=process.log.record,
            notify=process.notify,
        )
        worker = Worker(context, text.open, self._part)
        network.dht.linked = worker.linked
        observer = self._observer(worker, network)
        self.running = RunningWorker(worker, observer, compute)
        observing = asyncio.create_task(observer.run(), name="observer")
        if process.stop.is_set():
            worker.leave()
        observing.add_done_callback(context.task_ended)
        lost: DevicesLost | None = None
        try:
            await self._until_paused(worker, compute)
        except DevicesLost as error:
            lost = error
            await worker.served.save_newest()
        finally:
            observing.cancel()
            # A worker that was cut off did not close its compute thread.
            await asyncio.gather(observing, compute.close(), return_exceptions=True)
            await self._let_devices_go()
            await text.close()
            observer.look()
            observer.log_event()
            self.record.end_stage(worker.services, process.report.notify)
            process.log.flush()
            if worker.services is not None:
                known = worker.services.links.membership.peers.items()
                with contextlib.suppress(UserError):  # The disk is full, which was reported before.
                    network.cache.write((peer, seen.addresses) for peer, seen in known if seen.reached)
            process.pulse.fault = lambda: None
            network.dht.linked = tuple  # It would keep the whole worker in memory while this peer is paused.
            self.running = NotRunning()
            self._orders = tuple(worker.orders.book.documents)
            self._left = weakref.ref(worker)
            held = worker.stage if worker.stage >= 0 else self.stage  # Also set after its p2pd has died.
            goes_to = worker.lifecycle.goes_to
            self.stage = held if goes_to is None else goes_to
            self.moved += goes_to not in (None, held)
        if lost is not None:
            await self._report_lost(lost)
            return not process.stop.is_set()
        ended = worker.served.ended_at
        if ended is not None:
            hint = context.settings.export_hint
            process.notify("ended", f"the run has ended at round {ended}: {hint}")
            return False
        return not process.stop.is_set()

    def _exchange(self, signed: SignedManifest, network: Network) -> TextExchange:
        return TextExchange(
            config=self.process.config,
            signed=signed,
            transport=network.transport,
            directory=network.directory,
            log_event=self.process.log.record,
            notify=self.process.notify,
        )

    def _observer(self, worker: Worker, network: Network) -> WorkerSampler:
        process = self.process
        return WorkerSampler(
            worker=worker,
            metrics=process.metrics,
            report=process.report,
            log=process.log,
            compute_time=self.compute_time,
            count_totals=self.record.count,
            peak=process.config.metrics.peak_flops,
            directory=network.dht,
            name=process.config.name,
        )

    def _computing(self) -> Compute:
        compute = ThreadCompute(self.watch.share)
        if self._device_count > 1:
            compute.used = time.perf_counter  # Other processes do its work.
        return compute

    async def _let_devices_go(self) -> None:
        if self.processes is not None:
            processes = self.processes
            self.processes = None
            await asyncio.to_thread(processes.close)

    async def _report_lost(self, lost: DevicesLost) -> None:
        """Report lost devices and wait before the restart."""
        seconds = self._restarts.next_delay(time.monotonic())
        self.process.notify("devices_lost", f"{lost}; the stage starts again in {seconds:g} s")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.process.stop.wait()

    async def _until_paused(self, worker: Worker, compute: Compute) -> None:
        """Run the worker until it is done. A pause makes it leave quickly; what takes longer is cut off."""
        work = asyncio.create_task(unless_failed(worker.run(), compute.failed), name="worker")
        begun = asyncio.create_task(self.pausing.begun(), name="pause")
        try:
            await asyncio.wait({work, begun}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                drain = self.process.config.drain_seconds
                if not self.process.stop.is_set():
                    worker.leave(min(DRAIN_SECONDS, drain), "pausing")
                # Weights that no other peer has are saved, however long that takes, once there are some.
                others_have_it = worker.served.has_company or not worker.has_weights()
                await asyncio.wait({work}, timeout=CUT_SECONDS if others_have_it else None)
            if work.done():
                work.result()
            else:
                self.process.notify("pause_cut", f"dropped what was not finished within {CUT_SECONDS:g} s")
        finally:
            for task in (work, begun):
                task.cancel()
            await asyncio.gather(work, begun, return_exceptions=True)

    def _part(self, manifest: Manifest, stage: int) -> StagePart:
        """Return the part that computes the stage. Raises UserError if it exceeds the allowed memory."""
        config = self.process.config
        every, allowed, limited = self._needs(manifest), self._allowed(), config.limits.memory is not None
        graphs = graphs_that_fit(every, stage, allowed, limited)
        at_most = min(graphs, max(config.slots, config.in_flight))
        self.process.notify(
            "machine", machine_line(every[stage], at_most, allowed, limited, self.device.type, self.computing)
        )
        self._first.serve(stage)
        if self._device_count == 1:
            noise = noise_of(self._text, manifest, self.device)
            part = build_stage_part(manifest, stage, self.device, self.computing, noise)
            return replace(part, most_graphs=graphs)
        self._restarts.held_since = time.monotonic()
        nodes = listen_for_nodes(
            config.compute.nodes,
            kind=self.device.type,
            is_stopped=lambda: self.process.stop.is_set() or bool(self.pausing),
            notify=self.process.notify,
        )
        devices, threads = self.devices, config.threads
        part, self.processes = spread_part(manifest, stage, devices, self.computing, threads, nodes)
        return replace(part, most_graphs=graphs)

    def _needs(self, manifest: Manifest) -> list[Needs]:
        """Return the memory that each stage of the run needs on this machine."""
        text, remote = self.process.config.max_data_bytes, self.process.config.compute.remote_devices
        return all_needs(manifest, self.device, text, self.computing, len(self.devices), remote)

    def _allowed(self) -> int:
        """Return the bytes of memory that a stage may use."""
        return allowed_bytes(self.process.config.limits.memory, self.device)

    def _settings(self, signed: SignedManifest) -> Settings:
        config, allowed = self.process.config, self._allowed()
        fits = all(needs.least <= allowed for needs in self._needs(signed.manifest))
        return Settings(
            stage=self.stage,
            moves=config.may_move and fits,
            moved=self.moved,
            never=self.never,
            reduces_only=config.role == "reducer",
            in_flight=config.in_flight,
            slots=config.slots,
            checkpoint_seconds=config.checkpoint_seconds,
            drain_seconds=config.drain_seconds,
            checkpoints=config.state / "checkpoints",
            receipts=config.state / FILE_NAME,
            allow_reinit=config.allow_reinit,
            start=self.model,
            orders=config.state / "order.bin",
            heard_orders=self._orders,
            invite=config.invite_bytes,
            archive=config.archive,
            version=version("swarmnet"),
            name=config.name,
            joules=self._joules_from_now(),
            line=known_bandwidth(config),
            export_hint=export_hint(signed, config.state, config.bootstrap),
            own_start=self.process.own_start,
        )

    def _joules_from_now(self) -> Callable[[], float]:
        """Return a function that measures the device's energy in joules from now on."""
        before = self._joules()
        return lambda: self._joules() - before

    def _joules(self) -> float:
        return self._gpu.joules if self._gpu is not None else 0.0

    def _text_opened(self) -> None:
        if (services := self.services) is not None:
            services.pipeline_service.pump()

    def _limits_changed(self) -> None:
        """Follow the limits that hold from now on."""
        config = self.process.config
        if config.limits.only_when_idle and not self.watch.limits.only_when_idle:
            warn = partial(self.process.report.notify, "limits", level="warning")
            self.watch.gpu = gpu_use(self.device, True, warn)
        self.watch.change(config.limits, config.compute_duty_cycle)

    # -- pausing --------------------------------------------------------------------------------------

    def pause(self, reason: Why, text: str = "") -> None:
        """Drop the stage soon, and load none while this or another reason holds."""
        if reason not in self.pausing.texts:
            self.process.notify_event(
                log_events.Pausing(f"pauses: {text or self.pausing.meaning(reason)}", reason)
            )
        self.pausing.pause(reason, text)
        self._report_pause()

    def resume(self, reason: Why) -> None:
        """Clear a reason; the peer resumes if it was the last one."""
        if reason in self.pausing.texts:
            self.pausing.resume(reason)
            left = f"still {self.pausing.line()}" if self.pausing else "the peer resumes"
            self.process.notify_event(log_events.Resuming(f"no longer paused by {reason}: {left}", reason))
            self._report_pause()

    def _report_pause(self) -> None:
        if self.pausing and self.pausing.resting.is_set():
            self.process.report.status(StatusLine(self.pausing.line()))

    async def _rest(self, signed: SignedManifest, network: Network) -> None:
        """Stay paused until no reason holds."""
        process, pausing = self.process, self.pausing
        resting = asyncio.create_task(rest(process, signed, network, pausing.line()), name="resting")
        held = await free_until_deleted(self._left)
        pausing.resting.set()
        training = process.metrics.training
        training.stage.set(-1)
        process.metrics.peak.set("train_flops_utilization_ratio", None)
        only(training.state, STATES, "paused")
        process.notify_event(
            log_events.Paused(f"{pausing.line()}: {held / 1e6:,.0f} MB of memory left in use", held)
        )
        ended = asyncio.create_task(pausing.ended(), name="end of the pause")
        clock = asyncio.get_running_loop()
        try:
            while not (resting.done() or ended.done()):
                self.compute_time.look(clock.time(), None, "paused")
                await asyncio.wait(
                    {resting, ended}, timeout=OBSERVE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
            if resting.done():
                resting.result()
        finally:
            pausing.resting.clear()
            for task in (resting, ended):
                task.cancel()
            await asyncio.gather(resting, ended, return_exceptions=True)

    async def _asked_how_it_is(self, _request: Request) -> dict[str, Any]:
        snapshot, story, signed = self.running.snapshot, self.story, self.signed
        if snapshot is None:
            name = self.process.config.name or self.process.identity.peer_id[-6:]
            state = "paused" if self.pausing else "connecting"
            loss, held = story.recent.mean, resident_bytes()
            snapshot = SwarmSnapshot(f"peer {name}", time.time(), state=state, loss=loss, memory_bytes=held)
        return as_json(
            replace(
                snapshot,
                losses=tuple(loss for _, loss in story.losses.points),
                contributions_decided=story.contributions.decided,
                contributions_late=story.contributions.late,
                events=tuple(story.events),
                own_work=self.record.work(signed, self.services) if signed is not None else None,
                warnings=(*snapshot.warnings, *self.upload.warnings),
            )
        )

    async def _asked_to_pause(self, request: Request) -> dict[str, Any]:
        before, began = resident_bytes(), time.monotonic()
        self.pause("user")
        if request.get("wait") is False:
            return self._standing()
        # Without a worker the peer has not started, and will not start while paused.
        if self.running.is_there and not await self.pausing.rested():
            raise UserError("the pause was ended before it was complete: the peer joins its stage again")
        seconds = round(time.monotonic() - began, 3)
        return {**self._standing(), "seconds": seconds, "bytes_before": before, "bytes": resident_bytes()}

    async def _asked_to_resume(self, _request: Request) -> dict[str, Any]:
        self.resume("user")
        return self._standing()

    async def _asked_to_save(self, _request: Request) -> dict[str, Any]:
        services = self.services
        if services is None or not services.round_service.has_weights:
            raise UserError("this peer has no weights now: it is paused or has not joined its stage yet")
        await services.disk.save(services.round_service.settled_weights)
        if services.disk.saved is None:
            raise UserError("there is nothing to save yet: no round has settled")
        path, round = services.disk.saved
        return {"path": str(path), "round": round}

    async def _asked_what_it_did(self, _request: Request) -> dict[str, Any]:
        """Return the answer to a control request for this peer's work: its state, and the sums of its
        receipts. Raises UserError before the run is found."""
        signed, process, running = self.signed, self.process, self.running
        if signed is None:
            raise UserError("this peer has not found its run yet: no bootstrap has answered so far")
        services = self.services
        work = self.record.work(signed, services)
        return {
            "peer": process.identity.peer_id,
            "role": process.config.role,
            "run": signed.run_id,
            "name": signed.manifest.name,
            "state": running.state or self.pausing.line(),
            "stage": running.stage,
            "moves": self.moved,
            "group": services is not None and services.has_company(),
            "uptime_seconds": round(time.monotonic() - self.began, 1),
            "every": signed.manifest.rounds.snapshot_interval,
            "own_work": work.text() if work.tokens else "",
            "progress": running.snapshot.progress if running.snapshot is not None else "",
            "privacy": spent.text() if (spent := privacy_of(self._text)) is not None else "",
            "warnings": [*running.stuck, *self.upload.warnings],
            "join": self._join_command,
            "month_bytes": self.record.month_bytes(),
            "rank": self.record.rank.request(),
            **self._standing(),
            **summary(self.record.receipts(signed, services)),
        }

    def _standing(self) -> dict[str, Any]:
        return {"paused": dict(self.pausing.texts)}

    # -- what the process asks ------------------------------------------------------------------------

    def not_ready(self) -> str | None:
        if self.running.is_ready:
            return None
        if self.pausing:
            return self.pausing.line()
        return self.running.state or "connecting"

    def leave(self) -> bool:
        self.running.leave()
        return self.running.is_there

    def working_seconds(self) -> float:
        return self.running.working_seconds()

    async def save(self) -> None:
        """Save the weights although no peer can be reached, so that they need not be fetched again."""
        services = self.services
        if services is None or not services.round_service.has_weights:
            return
        try:
            async with asyncio.timeout(SAVE_SECONDS):
                await services.disk.save(services.round_service.settled_weights)
        except TimeoutError:
            self.process.notify("notsaved", f"the weights were not saved within {SAVE_SECONDS:g} s")
