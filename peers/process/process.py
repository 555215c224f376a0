"""The peer process: run the role of a peer file until a signal or an error ends it."""

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
from typing import Any

import uvloop

from peers.config.peer_file import PeerFile
from peers.errors import IdentityInUse, UserError, as_user_errors
from peers.process.sessions import Sessions
from peers.role import Process, Role
from peers.runtime.control_server import Control, Request
from peers.runtime.http_server import Exporter
from peers.runtime.liveness import Pulse
from peers.runtime.state_lock import only_one
from peers.runtime.supervision import FAULT, FatalError, Watchdog, reason
from peers.telemetry import events as events
from peers.telemetry.console import Reporter, hear_libraries, open_report
from peers.telemetry.event_log import EventLog
from peers.telemetry.metrics import PeerMetrics
from protocols.errors import CannotStart
from protocols.signed.identity import Identity, IdentityError, load_or_create

OF_A_STAGE = ("pause", "resume", "checkpoint", "credit")
"""Words of the control socket that only a worker answers (`peers/worker/role.py`)."""


Roles = Mapping[str, Callable[[Process], Role]]
"""Additional roles by their name in a peer file, from layers above this one (peers/cli/run.py)."""
NO_OTHERS: Roles = MappingProxyType({})


def role_of(process: Process, others: Roles) -> Role:
    """Return the role that the peer file names, one of this package or of `others`. Each role imports its own
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
    """Run one peer until it is asked to stop. Returns the exit code. Raises UserError for what a person can
    fix. `joined`: see `Process`; `others`: additional roles."""
    report = open_report(config.log, sys.stderr, time.time, config.name)
    hear_libraries(report)
    _compute_in_long_turns()
    with (
        contextlib.closing(report), only_one(config.state, config.role, to_the_end=True) as was_open,
        as_user_errors(CannotStart, IdentityError),
    ):  # fmt: skip
        if was_open:
            report.notify(
                "state",
                f"other users could read {config.state}: its permissions are now restricted to this user",
            )
        identity = load_or_create(config.identity)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(Peer(config, identity, report, joined, others).run())


def _compute_in_long_turns() -> None:
    """Use the batch scheduling policy, so that waking threads and the p2pd child do not preempt computation.

    Messages then wait a few milliseconds, and the model's data stays in the CPU caches
    (docs/benchmarks/wan.md). Threads and processes that are started later inherit the policy."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # A container may forbid it; the peer is slower then.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Peer:
    """The process of one peer."""

    def __init__(
        self, config: PeerFile, identity: Identity, report: Reporter, joined: Callable[[], str] = str,
        others: Roles = NO_OTHERS,
    ) -> None:  # fmt: skip
        self.config = config
        self.report = report
        self.pulse = Pulse(late=self._late)
        self._stop = asyncio.Event()
        self._signals = 0
        self.control = Control(config.state)
        self.control.answers.update(status=self._asked_how_it_is, leave=self._asked_to_leave)
        self.log = EventLog(config.state / "events.jsonl", time.time, time.monotonic)
        self.log.trouble = partial(report.notify, "event_log", level="warning")
        self.metrics = PeerMetrics(config.role)
        self.process = Process(
            config, identity, report, self.metrics, self.log, self.pulse, self._stop, self.control,
            joined=joined,
        )  # fmt: skip
        self.role = role_of(self.process, others)
        for word in OF_A_STAGE if config.role != "worker" else ():
            self.control.answers[word] = self._asked_for_a_stage

    async def run(self) -> int:
        """Run the peer's role until a signal ends it, with its metrics, control socket and watchdog. Returns
        the exit code. Raises UserError if the user must change something first."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        address = self.config.metrics.address
        exporter = None
        if address is not None:
            exporter = Exporter(
                address, self.metrics.text, self.pulse.problem, self.role.not_ready,
                self.config.metrics.hosts, others=self.config.metrics.other_ports,
            )  # fmt: skip
            taken = "" if exporter.address[1] == address[1] or not address[1] else (
                f", as port {address[1]} is taken (metrics.listen chooses another)"
            )  # fmt: skip
            self.process.notify_event(
                events.Metrics(f"metrics at {exporter.url}/metrics{taken}", exporter.url)
            )
        me = self.process.identity.peer_id
        self.log.record(events.Started(peer=me, pid=os.getpid(), role=self.config.role))
        pulse = asyncio.create_task(self.pulse.run(), name="pulse")
        watchdog = Watchdog(lambda: self.pulse.turns, self.role.working_seconds, self._last_words)
        watchdog.start()
        ended = events.Stopped("fault")
        try:
            await self.control.start()
            await Sessions(self.process, self.role).run()
        except (FatalError, MemoryError) as error:
            why = str(error) if isinstance(error, FatalError) else reason(error)
            self._last_words(f"ends after an error: {why}")
            code = error.code if isinstance(error, FatalError) else "out_of_memory"
            self.log.record(events.Fault(code=code, reason=why))
            ended = events.Stopped(code, why)
            return FAULT
        except IdentityInUse as error:
            ended = events.Stopped("not_possible", str(error))
            key = shlex.quote(str(self.config.identity))
            raise UserError(
                f"{error}. Stop it, or give this computer its own identity: mv {key} {key}.copied"
            ) from None
        except UserError as error:
            ended = events.Stopped("not_possible", str(error))
            raise
        finally:
            watchdog.stop()
            pulse.cancel()
            await self.control.close()
            self.log.record(events.Stopped("asked") if self._stop.is_set() else ended)
            self.log.close()
            if exporter is not None:
                await asyncio.to_thread(exporter.close)
        return 0

    def _late(self, seconds: float) -> None:
        """Count the seconds by which the event loop ran late."""
        self.metrics.about.late.inc(seconds)

    def _last_words(self, text: str) -> None:
        self.report.notify("fault", text, "error")

    def _signalled(self) -> None:
        """Leave politely at the first signal, and at once at the second."""
        self._signals += 1
        if self._signals > 1:
            self.log.flush()
            os._exit(FAULT)
        self._leave()

    def _leave(self) -> None:
        longest = f"{self.config.drain_seconds:g} s at most"
        self.report.notify("leaving", f"leaving: finishes what is under way ({longest}); again: at once")
        self._stop.set()

    async def _asked_how_it_is(self, _request: Request) -> dict[str, Any]:
        config = self.config
        why_not = self.role.not_ready()
        return {
            "peer": self.process.identity.peer_id, "name": config.name, "role": config.role,
            "pid": os.getpid(), "ready": why_not is None, "why_not": why_not,
        }  # fmt: skip

    async def _asked_for_a_stage(self, _request: Request) -> dict[str, Any]:
        role = self.config.role
        raise UserError(
            f"this peer holds no stage ({role}): it cannot pause or earn credit; `swarmnet leave` ends it"
        )

    async def _asked_to_leave(self, _request: Request) -> dict[str, Any]:
        self._leave()
        return {"leaving": True, "drain_seconds": self.config.drain_seconds}
