"""The peer process: a peer file becomes a running role, until a signal or a fault ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import uvloop

from peers.config.peer_file import PeerFile
from peers.control.server import Control, Request
from peers.counted_directory import CountedDirectory
from peers.errors import as_user_errors
from peers.event_log import EventLog
from peers.http import Exporter
from peers.joining import PeerCache
from peers.lan import neighbours
from peers.metrics import Metrics
from peers.observe import DirectoryObserver, Pulse
from peers.roles.archivist import ArchivistRole
from peers.roles.bootstrap import Bootstrap
from peers.roles.observer import ObserverRole
from peers.roles.role import Network, Process, Role
from peers.roles.worker import WorkerRole
from peers.state_lock import only_one
from peers.status import Report, Status, hear_libraries, open_report
from peers.supervision import FAULT, Fault, Watchdog, reason
from protocols.daemon import CannotStart, DaemonOptions
from protocols.dht import DhtDirectory
from protocols.identity import Identity, IdentityError, load_or_create
from protocols.p2pd import P2pdTransport
from protocols.relays import circuits_through

RESTART_SECONDS = 1.0
"""Before a p2pd is started again that died soon after its start."""
LONGEST_RESTART_SECONDS = 30.0
"""While p2pd, which had run before, cannot be started."""
SLOT_SECONDS = 3.0
"""For the first relay to reserve a slot, so that the first record names it; four round trips."""

ROLES: Mapping[str, Callable[[Process], Role]] = {
    "worker": WorkerRole,
    "bootstrap": Bootstrap,
    "observer": ObserverRole,
    "archivist": ArchivistRole,
}


class P2pdEnded(Exception):
    """p2pd died; the peer starts it again."""


def run_peer_file(config: PeerFile) -> int:
    """Run one peer until it is told to stop. Returns the exit code; UserError for what a person can mend."""
    report = open_report(config.log, sys.stderr, time.time, config.name)
    hear_libraries(report)
    with contextlib.closing(report), only_one(config.state), as_user_errors(CannotStart, IdentityError):
        identity = load_or_create(config.identity)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(Peer(config, identity, report).run())


class Peer:
    """One process. A session lasts as long as its p2pd; the weights outlive it on disk and in the swarm."""

    def __init__(self, config: PeerFile, identity: Identity, report: Report) -> None:
        self.config = config
        self.report = report
        self.metrics = Metrics()
        self.log = EventLog(config.state / "events.jsonl", time.time, time.monotonic)
        self.log.trouble = partial(report.say, "event_log", level="warning")
        self.pulse = Pulse()
        self.listen = config.listen
        """With the ports that p2pd got: after a restart it is found where it was."""
        self._stop = asyncio.Event()
        self._signals = 0
        self.control = Control(config.state)
        self.control.answers.update(status=self._asked_how_it_is, leave=self._asked_to_leave)
        process = Process(
            config, identity, report, self.metrics, self.log, self.pulse, self._stop, self.control
        )
        self.say = process.say
        self.process = process
        self.role = ROLES[config.role](process)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        address = self.config.metrics.address
        exporter = None
        if address is not None:
            exporter = Exporter(address, self.metrics.text, self.pulse.problem, self.role.not_ready)
            self.say("metrics", f"metrics at {exporter.url}/metrics", url=exporter.url)
        self.log.record("started", peer=self.process.identity.peer_id, pid=os.getpid(), role=self.config.role)
        self.metrics.about.build(version("swarmnet"), platform.python_version(), version("torch")).set(1)
        pulse = asyncio.create_task(self.pulse.run(), name="pulse")
        watchdog = Watchdog(lambda: self.pulse.turns, self.role.working_seconds, self._last_words)
        watchdog.start()
        try:
            await self.control.start()
            await self._sessions()
        except (Fault, MemoryError) as error:
            why = str(error) if isinstance(error, Fault) else reason(error)
            self._last_words(f"cannot go on: {why}")
            code = error.code if isinstance(error, Fault) else "out_of_memory"
            self.log.record("fault", code=code, reason=why)
            return FAULT
        finally:
            watchdog.stop()
            pulse.cancel()
            await self.control.close()
            self.log.record("stopped", code="asked" if self._stop.is_set() else "fault")
            self.log.close()
            if exporter is not None:
                await asyncio.to_thread(exporter.close)
        return 0

    async def _sessions(self) -> None:
        """One after another, until told to stop: each lasts as long as its p2pd."""
        pause = RESTART_SECONDS
        while True:
            began = time.monotonic()
            try:
                await self._session()
                return
            except P2pdEnded as error:
                self.metrics.network.daemon_restarts.inc()
                ran_well = time.monotonic() > began + LONGEST_RESTART_SECONDS
                pause = 0.0 if ran_well else RESTART_SECONDS
                self.say("p2pd_ended", f"{error}; starting it again in {pause:g} s")
            except CannotStart as error:
                if self.listen == self.config.listen:
                    raise  # It never ran: a person must look at the addresses.
                self.say("p2pd_not_started", f"{error}; trying again in {pause:g} s")
                self.listen = self.config.listen
                pause = min(LONGEST_RESTART_SECONDS, max(RESTART_SECONDS, 2 * pause))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stop.wait()
                return

    def _last_words(self, text: str) -> None:
        self.report.say("fault", text, "error")

    def _signalled(self) -> None:
        """The first signal leaves politely, the second one at once."""
        self._signals += 1
        if self._signals > 1:
            self.log.flush()
            os._exit(FAULT)
        self._leave()

    def _leave(self) -> None:
        longest = f"{self.config.drain_seconds:g} s at most"
        self.report.say("leaving", f"leaving: finishes what is under way ({longest}); again: at once")
        self._stop.set()

    async def _asked_how_it_is(self, _request: Request) -> dict[str, Any]:
        config = self.config
        why_not = self.role.not_ready()
        return {
            "peer": self.process.identity.peer_id, "name": config.name, "role": config.role,
            "pid": os.getpid(), "ready": why_not is None, "why_not": why_not,
        }  # fmt: skip

    async def _asked_to_leave(self, _request: Request) -> dict[str, Any]:
        self._leave()
        return {"leaving": True, "drain_seconds": self.config.drain_seconds}

    # -- one session ----------------------------------------------------------------------------------

    async def _session(self) -> None:
        self.report.status(Status("connecting"))
        options = daemon_options(self.config, self.listen)
        transport = await P2pdTransport.start(self.config.identity, options)
        if self.config.limits.upload is not None:
            transport.limit_upload(self.config.limits.upload)
        self.listen = with_ports(self.config.listen, transport.addresses)
        directory = observing = None
        try:
            ways = circuits_through(self.config.bootstrap) if self.config.relay else ()
            directory = await DhtDirectory.start(transport.daemon, ways=ways)
            for address in transport.addresses:
                where = f"listening on {address}/p2p/{transport.peer}"
                self.say("listening", where, p2pd=transport.daemon.pid)
            if keeps_slots(self.config):
                transport.relays.use(self.config.bootstrap, self.say)
                await transport.relays.first(SLOT_SECONDS)
            counted = CountedDirectory(directory)
            observer = DirectoryObserver(counted, directory, self.metrics)
            observing = asyncio.create_task(observer.run(), name="directory observer")
            cache = PeerCache(self.config.state / "peers.json")
            async with neighbours(self.config, transport.peer, transport.addresses, self.say) as lan:
                await self._unless_ended(Network(transport, directory, counted, cache, lan))
        finally:
            if observing is not None:
                observing.cancel()
            if directory is not None:
                await directory.close()
            await transport.close()

    async def _unless_ended(self, network: Network) -> None:
        """Run the role until it ends, is told to stop while nothing is under way, or p2pd dies."""
        work = asyncio.create_task(self.role.run(network), name="role")
        ended = asyncio.create_task(network.transport.ended(), name="p2pd")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            while not work.done():
                if self._stop.is_set() and not self.role.leave():
                    return
                waits = {work, ended} if self._stop.is_set() else {work, ended, stop}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    await self.role.save()
                    raise P2pdEnded(ended.result())
            work.result()
        finally:
            for task in (work, ended, stop):
                task.cancel()
            await asyncio.gather(work, ended, stop, return_exceptions=True)


def daemon_options(config: PeerFile, listen: Sequence[str]) -> DaemonOptions:
    """How a peer's p2pd meets the network; `listen`: the peer file's, or with the ports it got before."""
    return DaemonOptions(
        listen=tuple(listen), announce=config.announce, auto_nat=config.nat, nat_port_map=config.nat,
        relay=config.relay, carries=config.relay and config.role == "bootstrap",
        reachability="public" if config.role == "bootstrap" else None,
    )  # fmt: skip


def keeps_slots(config: PeerFile) -> bool:
    """Whether the peer must be dialled by others, and may not be dialled directly for all that it knows."""
    return config.relay and not config.announce and config.role in ("worker", "archivist")


def with_ports(listen: Sequence[str], addresses: Sequence[str]) -> tuple[str, ...]:
    """`listen` with the ports that p2pd chose where it says 0; as it is where that cannot be told."""
    filled = []
    for wanted in listen:
        _, ip, host, transport, port, *rest = [*wanted.split("/"), *[""] * 5]
        for address in addresses:
            _, its_ip, its_host, its_transport, its_port, *its_rest = [*address.split("/"), *[""] * 5]
            same = (ip, transport, rest) == (its_ip, its_transport, its_rest)
            if same and port == "0" and host in (its_host, "0.0.0.0", "::"):
                wanted = "/".join([*wanted.split("/")[:4], its_port, *wanted.split("/")[5:]])
                break
        filled.append(wanted)
    return tuple(filled)
