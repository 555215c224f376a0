"""The peer process: a peer file becomes a running role, until a signal or a fault ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import uvloop

from peers.config.peer_file import PeerFile
from peers.config.sibling_file import sibling_file
from peers.errors import IdentityInUse, UserError, as_user_errors
from peers.process.sessions import Sessions
from peers.role import Process, Role
from peers.runtime.control_server import Control, Request
from peers.runtime.control_siblings import answers_of_all
from peers.runtime.http_server import Exporter
from peers.runtime.liveness import Pulse
from peers.runtime.state_lock import only_one
from peers.runtime.supervision import FAULT, Fault, Watchdog, reason
from peers.telemetry import events as noted
from peers.telemetry.console import Report, SiblingReport, hear_libraries, open_report
from peers.telemetry.event_log import EventLog
from peers.telemetry.metrics import Metrics
from peers.telemetry.sibling_metrics import text_of_all
from protocols.errors import CannotStart
from protocols.signed.identity import Identity, IdentityError, load_or_create

if TYPE_CHECKING:
    from peers.compute.siblings import Siblings


OF_A_STAGE = ("pause", "resume", "checkpoint", "me")
"""Words of the control socket that a worker answers (`roles/worker.py`)."""


Roles = Mapping[str, Callable[[Process], Role]]
"""By the word in a peer file: those that stand above a process (peers/cli/run.py)."""
NO_OTHERS: Roles = MappingProxyType({})


def role_of(process: Process, others: Roles) -> Role:
    """What the peer file asks for, of a process's own roles or of `others`. Each role brings its own
    libraries: a bootstrap or an observer never loads torch (docs/benchmarks/start.md)."""
    wanted = process.config.role
    if wanted in others:
        return others[wanted](process)
    if wanted == "bootstrap":
        from peers.process.bootstrap_role import Bootstrap

        return Bootstrap(process)
    if wanted == "observer":
        from peers.observer.role import ObserverRole

        return ObserverRole(process)
    if wanted == "archivist":
        from peers.archivist.role import ArchivistRole

        return ArchivistRole(process)
    from peers.worker.role import WorkerRole

    return WorkerRole(process)


def run_peer_file(config: PeerFile, joined: Callable[[], str] = str, others: Roles = NO_OTHERS) -> int:
    """Run one peer until it is told to stop. Returns the exit code; UserError for what a person can mend.
    `joined`: see Process; `others`: roles beside its own."""
    report = open_report(config.log, sys.stderr, time.time, config.name)
    hear_libraries(report)
    _compute_in_long_turns()
    with (
        contextlib.closing(report), only_one(config.state, to_the_end=True) as was_open,
        as_user_errors(CannotStart, IdentityError),
    ):  # fmt: skip
        if was_open:
            report.say("state", f"other users could look into {config.state}: it is closed to them now")
        identity = load_or_create(config.identity)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(Peer(config, identity, report, joined, others).run())


def _compute_in_long_turns() -> None:
    """Let nothing that wakes up in this process, or in the p2pd that it starts, cut short the turn of whoever
    computes on that processor: messages wait a few milliseconds, and the model's data stays in the caches
    (docs/benchmarks/wan.md). All threads and processes that are started from now on inherit it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # A container may forbid it: then it is slower.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Peer:
    """One process: one peer, or where it holds several stages, one for each of them."""

    def __init__(
        self, config: PeerFile, identity: Identity, report: Report, joined: Callable[[], str] = str,
        others: Roles = NO_OTHERS,
    ) -> None:  # fmt: skip
        self.config = config
        self._joined = joined
        self.report = report
        self.pulse = Pulse(late=self._late)
        self._stop = asyncio.Event()
        self._signals = 0
        self.control = Control(config.state)
        self.control.answers.update(status=self._asked_how_it_is, leave=self._asked_to_leave)
        if config.stages == 1:
            processes = [self._process(config, identity, report, self.control)]
        else:
            processes = self._siblings(identity)
        self.process, self.processes = processes[0], processes
        self.log, self.metrics = self.process.log, self.process.metrics
        self.roles = [role_of(process, others) for process in processes]
        for word in OF_A_STAGE if config.role != "worker" else ():
            self.control.answers[word] = self._asked_for_a_stage
        if self.process.siblings is not None:
            from peers.worker.role import WorkerRole

            self.process.siblings.roles += [role for role in self.roles if isinstance(role, WorkerRole)]
            self.control.answers.update(answers_of_all([process.control for process in processes]))

    def _process(
        self, config: PeerFile, identity: Identity, report: Report, control: Control,
        siblings: Siblings | None = None, number: int = 0,
    ) -> Process:  # fmt: skip
        log = EventLog(config.state / "events.jsonl", time.time, time.monotonic)
        log.trouble = partial(report.say, "event_log", level="warning")
        metrics = Metrics(config.role, process=number == 0)
        return Process(
            config, identity, report, metrics, log, self.pulse, self._stop, control, siblings, number,
            joined=self._joined if number == 0 else str,
        )  # fmt: skip

    def _siblings(self, identity: Identity) -> list[Process]:
        from peers.compute.siblings import Siblings  # torch

        siblings = Siblings(self.config.stages, self.config.work_share)
        made = []
        for number in range(self.config.stages):
            config = sibling_file(self.config, number)
            key = load_or_create(config.identity) if number else identity
            report = SiblingReport(self.report, number)
            made.append(self._process(config, key, report, Control(config.state), siblings, number))
        return made

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        address = self.config.metrics.address
        exporter = None
        if address is not None:
            exporter = Exporter(
                address, self._metrics_text, self.pulse.problem, self._not_ready, self.config.metrics.hosts,
                others=self.config.metrics.other_ports,
            )  # fmt: skip
            taken = "" if exporter.address[1] == address[1] or not address[1] else (
                f", as port {address[1]} is taken (metrics.listen chooses another)"
            )  # fmt: skip
            self.process.tell(noted.Metrics(f"metrics at {exporter.url}/metrics{taken}", exporter.url))
        for process in self.processes:
            me = process.identity.peer_id
            process.log.record(noted.Started(peer=me, pid=os.getpid(), role=self.config.role))
        pulse = asyncio.create_task(self.pulse.run(), name="pulse")
        watchdog = Watchdog(lambda: self.pulse.turns, self._working_seconds, self._last_words)
        watchdog.start()
        ended = noted.Stopped("fault")
        try:
            await self.control.start()
            await self._live()
        except (Fault, MemoryError) as error:
            why = str(error) if isinstance(error, Fault) else reason(error)
            self._last_words(f"cannot go on: {why}")
            code = error.code if isinstance(error, Fault) else "out_of_memory"
            self.log.record(noted.Fault(code=code, reason=why))
            ended = noted.Stopped(code, why)
            return FAULT
        except IdentityInUse as error:
            ended = noted.Stopped("not_possible", str(error))
            key = shlex.quote(str(self.config.identity))
            raise UserError(
                f"{error}. Stop it, or give this computer its own identity: mv {key} {key}.copied"
            ) from None
        except UserError as error:
            ended = noted.Stopped("not_possible", str(error))
            raise
        finally:
            watchdog.stop()
            pulse.cancel()
            await self.control.close()
            for process in self.processes:
                process.log.record(noted.Stopped("asked") if self._stop.is_set() else ended)
                process.log.close()
            if exporter is not None:
                await asyncio.to_thread(exporter.close)
        return 0

    async def _live(self) -> None:
        """Until all have ended; what ends one of them otherwise ends the process."""
        lives = [
            asyncio.create_task(Sessions(process, role).run(), name=f"sessions {process.number}")
            for process, role in zip(self.processes, self.roles, strict=True)
        ]
        try:
            done, _ = await asyncio.wait(lives, return_when=asyncio.FIRST_EXCEPTION)
            for life in done:
                life.result()
        finally:
            for life in lives:
                life.cancel()
            await asyncio.gather(*lives, return_exceptions=True)

    def _late(self, seconds: float) -> None:
        """The event loop turned so much later than it was to."""
        self.metrics.about.late.inc(seconds)

    def _metrics_text(self) -> bytes:
        """What /metrics answers."""
        siblings = self.process.siblings
        if siblings is None:
            return self.metrics.text()
        return text_of_all([process.metrics for process in self.processes], siblings.stages_held)

    def _not_ready(self) -> str | None:
        """Why /readyz says no: all stages must be there."""
        return next((why for role in self.roles if (why := role.not_ready()) is not None), None)

    def _working_seconds(self) -> float:
        return max(role.working_seconds() for role in self.roles)

    def _last_words(self, text: str) -> None:
        self.report.say("fault", text, "error")

    def _signalled(self) -> None:
        """The first signal leaves politely, the second one at once."""
        self._signals += 1
        if self._signals > 1:
            for process in self.processes:
                process.log.flush()
            os._exit(FAULT)
        self._leave()

    def _leave(self) -> None:
        longest = f"{self.config.drain_seconds:g} s at most"
        self.report.say("leaving", f"leaving: finishes what is under way ({longest}); again: at once")
        self._stop.set()

    async def _asked_how_it_is(self, _request: Request) -> dict[str, Any]:
        config = self.config
        why_not = self._not_ready()
        return {
            "peer": self.process.identity.peer_id, "name": config.name, "role": config.role,
            "pid": os.getpid(), "ready": why_not is None, "why_not": why_not,
        }  # fmt: skip

    async def _asked_for_a_stage(self, _request: Request) -> dict[str, Any]:
        role = self.config.role
        raise UserError(
            f"this peer holds no stage ({role}): it neither pauses nor is counted; `swarmnet leave` ends it"
        )

    async def _asked_to_leave(self, _request: Request) -> dict[str, Any]:
        self._leave()
        return {"leaving": True, "drain_seconds": self.config.drain_seconds}
