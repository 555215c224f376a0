"""The peer process: run the role of a peer file until a signal or an error ends it.

A role is what the peer does: worker, bootstrap, observer or archivist. Besides the role, the process serves
metrics over HTTP, answers commands on its control socket, and has two monitors. The pulse measures how late
the event loop runs; the watchdog is a thread that ends the process if the loop hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import uvloop

from peers.config.errors import IdentityInUse, UserError, as_user_errors
from peers.config.peer_file import PeerFile
from peers.process.live_limits import LiveLimits
from peers.process.own_page import OwnPage
from peers.process.role import Process, Role
from peers.process.sessions import Sessions
from peers.runtime.control_server import Control, Request
from peers.runtime.http_server import Exporter
from peers.runtime.liveness import Pulse
from peers.runtime.state_lock import lock_state_folder
from peers.runtime.supervision import FAULT, FatalError, Watchdog, reason
from peers.telemetry import log_events
from peers.telemetry.console import LineReporter, Reporter, open_report, report_library_logs
from peers.telemetry.event_log import LOG_FILE, EventLog
from peers.telemetry.metrics import PeerMetrics
from protocols.errors import CannotStart
from protocols.signed.identity import Identity, IdentityError, load_or_create

OF_A_STAGE = ("page", "pause", "resume", "checkpoint", "credit")
"""Commands of the control socket that only a peer with a stage carries out (`peers/worker/role.py`)."""


def run_peer_file(config: PeerFile, joined: Callable[[], str], create_role: Callable[[Process], Role]) -> int:
    """Run one peer until it is asked to stop. Returns the process's exit code. `joined` is called when a
    bootstrap has answered, and returns a line for the user or an empty string. `create_role` creates the role
    that the peer file names. Raises UserError for what a person can fix."""
    report = open_report(config.log, sys.stderr, time.time, config.name)
    report_library_logs(report)
    _use_batch_scheduling()
    with (
        contextlib.closing(report),
        lock_state_folder(config.state, config.role, to_the_end=True) as was_open,
        as_user_errors(CannotStart, IdentityError),
    ):
        if was_open:
            report.notify(
                "state",
                f"other users could read {config.state}: its permissions are now restricted to this user",
            )
        identity = load_or_create(config.identity)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            peer = Peer(
                config=config, identity=identity, report=report, joined=joined, create_role=create_role
            )
            return runner.run(peer.run())


def _use_batch_scheduling() -> None:
    """Use Linux's batch scheduling policy, so that threads and the p2pd child do not preempt computation when
    they wake up.

    Messages then wait a few milliseconds, and the model's data stays in the CPU caches
    (docs/benchmarks/wan.md). Threads and processes that are started later inherit the policy."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # A container may forbid it; the peer is slower then.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Peer:
    """The process of one peer."""

    def __init__(
        self,
        *,
        config: PeerFile,
        identity: Identity,
        report: Reporter,
        joined: Callable[[], str] = str,
        create_role: Callable[[Process], Role],
    ) -> None:
        self.config = config
        self.report = report
        self.pulse = Pulse(late=self._count_lateness)
        self._stop = asyncio.Event()
        self._signals = 0
        self.control = Control(config.state)
        self.control.answers.update(status=self._answer_status, leave=self._answer_leave)
        self.log = EventLog(path=config.state / LOG_FILE, clock=time.time, monotonic=time.monotonic)
        self.log.trouble = partial(report.notify, "event_log", level="warning")
        self.metrics = PeerMetrics("worker" if config.holds_stage else config.role)
        live = LiveLimits(config)
        self.control.answers["limit"] = live.answer
        self.process = Process(
            live,
            identity,
            report,
            self.metrics,
            self.log,
            self.pulse,
            self._stop,
            self.control,
            joined=joined,
        )
        self.role = create_role(self.process)
        self.page: OwnPage | None = None
        for word in OF_A_STAGE if not config.holds_stage else ():
            self.control.answers[word] = self._refuse_stage_command

    async def run(self) -> int:
        """Run the peer's role until a signal ends it, with its metrics, control socket and watchdog. Returns
        the exit code: `FAULT` after a program error, else 0. Raises UserError for what a user can fix."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        if self.config.leave_after_seconds:
            loop.call_later(self.config.leave_after_seconds, self._request_stop)
        address = self.config.metrics.address
        exporter = None
        if address is not None:
            exporter = Exporter(
                address=address,
                metrics=self.metrics.text,
                healthy=self.pulse.problem,
                ready=self.role.not_ready,
                hosts=self.config.metrics.hosts,
                others=self.config.metrics.other_ports,
            )
            port_note = ""
            if address[1] and exporter.address[1] != address[1]:  # Port 0 means any port.
                port_note = f", as port {address[1]} is taken (metrics.listen chooses another)"
            self.process.notify_event(
                log_events.Metrics(f"metrics at {exporter.url}/metrics{port_note}", exporter.url)
            )
        me = self.process.identity.peer_id
        self.log.record(log_events.Started(peer=me, pid=os.getpid(), role=self.config.role))
        pulse = asyncio.create_task(self.pulse.run(), name="pulse")
        watchdog = Watchdog(
            turns=lambda: self.pulse.turns,
            working_seconds=self.role.working_seconds,
            notify=self._report_fault,
        )
        watchdog.start()
        stopped_event = log_events.Stopped("fault")
        try:
            await self.control.start()
            self._start_page()
            await Sessions(self.process, self.role).run()
        except (FatalError, MemoryError) as error:
            if isinstance(error, FatalError):
                code, why = error.code, str(error)
            else:
                code, why = "out_of_memory", reason(error)
            self._report_fault(f"ends after an error: {why}")
            self.log.record(log_events.Fault(code=code, reason=why))
            stopped_event = log_events.Stopped(code, why)
            return FAULT
        except IdentityInUse as error:
            stopped_event = log_events.Stopped("not_possible", str(error))
            key = shlex.quote(str(self.config.identity))
            raise UserError(
                f"{error}. Stop it, or give this computer its own identity: mv {key} {key}.copied"
            ) from None
        except UserError as error:
            stopped_event = log_events.Stopped("not_possible", str(error))
            raise
        finally:
            watchdog.stop()
            pulse.cancel()
            await self.control.close()
            if self.page is not None:
                await asyncio.to_thread(self.page.close)
            self.log.record(log_events.Stopped("asked") if self._stop.is_set() else stopped_event)
            self.log.close()
            if exporter is not None:
                await asyncio.to_thread(exporter.close)
        return 0

    def _start_page(self) -> None:
        """Serve the page of this computer, if the peer file says so. Its address is a secret: it is printed
        on a terminal only, and never logged. Raises UserError."""
        if not self.config.holds_stage:
            return
        if self.config.page == "off":
            self.control.answers["page"] = self._refuse_page
            return
        self.page = OwnPage(self.config, self.control)
        self.control.answers["page"] = self.page.answer
        is_private = isinstance(self.report, LineReporter) and sys.stderr.isatty()
        address = self.page.secret_url if is_private else f"{self.page.url}: `swarmnet page` opens it"
        self.report.notify("own_page", f"page   {address}")

    def _count_lateness(self, seconds: float) -> None:
        """Count the seconds by which the event loop ran late."""
        self.metrics.about.late.inc(seconds)

    def _report_fault(self, text: str) -> None:
        """Report to the user why the process ends."""
        self.report.notify("fault", text, "error")

    def _on_signal(self) -> None:
        """Request a stop at the first signal, and end the process at once at the second."""
        self._signals += 1
        if self._signals > 1:
            self.log.flush()
            os._exit(FAULT)
        self._request_stop()

    def _request_stop(self) -> None:
        """Make the role finish what it has begun and leave the swarm."""
        longest = f"{self.config.drain_seconds:g} s at most"
        self.report.notify("leaving", f"leaving: finishes what is under way ({longest}); again: at once")
        self._stop.set()

    async def _answer_status(self, _request: Request) -> dict[str, Any]:
        """Answer the command `status`: which peer this is, and why it is not ready, if so."""
        config = self.config
        not_ready_reason = self.role.not_ready()
        return {
            "peer": self.process.identity.peer_id,
            "name": config.name,
            "role": config.role,
            "pid": os.getpid(),
            "ready": not_ready_reason is None,
            "why_not": not_ready_reason,
        }

    async def _refuse_page(self, _request: Request) -> dict[str, Any]:
        """Refuse the command `page` of a peer without a page. Raises UserError."""
        raise UserError(
            "this peer has no page; write `page: 127.0.0.1:9400` into its peer file and start it again"
        )

    async def _refuse_stage_command(self, _request: Request) -> dict[str, Any]:
        """Refuse a command of `OF_A_STAGE`, since this peer is no worker. Raises UserError."""
        role = self.config.role
        raise UserError(
            f"this peer holds no stage ({role}): it cannot pause or earn credit; `swarmnet leave` ends it"
        )

    async def _answer_leave(self, _request: Request) -> dict[str, Any]:
        """Answer the command `leave`: request a stop, and return how long it may take, in seconds."""
        self._request_stop()
        return {"leaving": True, "drain_seconds": self.config.drain_seconds}
