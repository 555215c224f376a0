"""Run a peer across restarts of p2pd, its network process (libp2p in Go).

A session lasts as long as one p2pd process. It has the transport and the DHT directory on that p2pd, and
background tasks. The role (worker, bootstrap, observer or archivist) does the peer's work in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from peers.config.peer_file import PeerFile
from peers.network.addresses import Addresses
from peers.network.counted_directory import CountedDirectory
from peers.network.dht_sampler import DirectoryObserver
from peers.network.discovery.bootstrap import PeerCache
from peers.network.discovery.mdns import neighbours
from peers.network.discovery.rejoining import Rejoining
from peers.network.reachability_probe import TEXTS, ReachabilityProbe, Way, has_a_network
from peers.process.role import Network, Process, Role
from peers.telemetry import log_events
from peers.telemetry.console import StatusLine
from peers.telemetry.metric_kinds import only
from peers.telemetry.metrics import WAYS
from protocols.daemon.p2pd import DaemonOptions
from protocols.dht.directory import DhtDirectory
from protocols.errors import CannotStart
from protocols.framing.upload_turns import NO_LIMIT, Upload
from protocols.p2pd.transport import P2pdTransport
from protocols.reachability.dial_back import DialBackResult, ask_dial_back
from protocols.reachability.relay_client import circuits_through
from swarmnet.identifiers import PeerId

RESTART_SECONDS = 1.0
"""Seconds to wait before p2pd is started again if it ended soon after its start."""
LONGEST_RESTART_SECONDS = 30.0
"""Maximum seconds between two tries to start a p2pd that ran before."""
SLOT_SECONDS = 3.0
"""Seconds to wait for the first relay reservation, so that the first record can name it: four round trips."""


class P2pdEnded(Exception):
    """p2pd ended; the peer starts it again."""


class Sessions:
    """Runs one session after another until the process is asked to stop."""

    def __init__(self, process: Process, role: Role) -> None:
        self.process = process
        self.role = role
        self.config = process.config
        self.listen = process.config.listen
        """Listen addresses with the ports that p2pd got, so that the peer keeps them after a restart."""

    async def run(self) -> None:
        """Run sessions until the role ends or a stop is requested, and start p2pd again when it ends. If its
        former ports do not work, those of the peer file are tried; CannotStart if they do not work either."""
        process, pause = self.process, RESTART_SECONDS
        while True:
            started_at = time.monotonic()
            try:
                await self._session()
                return
            except P2pdEnded as error:
                process.metrics.network.daemon_restarts.inc()
                ran_well = time.monotonic() > started_at + LONGEST_RESTART_SECONDS
                pause = 0.0 if ran_well else RESTART_SECONDS
                process.notify("p2pd_ended", f"{error}; starting it again in {pause:g} s")
            except CannotStart as error:
                if self.listen == self.config.listen:
                    raise  # p2pd cannot listen at the peer file's addresses: a person must correct them.
                process.notify("p2pd_not_started", f"{error}; trying again in {pause:g} s")
                self.listen = self.config.listen
                pause = min(LONGEST_RESTART_SECONDS, max(RESTART_SECONDS, 2 * pause))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await process.stop.wait()
                return  # A stop was requested during the pause.

    async def _session(self) -> None:
        """Start p2pd, the directory and the background tasks, run the role until it ends, and close them all.
        Raises P2pdEnded if p2pd ends first, or CannotStart."""
        process = self.process
        process.report.status(StatusLine("connecting"))
        options = daemon_options(self.config, self.listen)
        transport = await P2pdTransport.start(self.config.identity, options)
        upload = Upload(NO_LIMIT)
        transport.upload = upload  # Its links follow later changes of the limit.
        self.listen = with_ports(self.config.listen, transport.addresses)  # For a restart of p2pd.
        directory = None
        background_tasks: list[asyncio.Task[None]] = []
        try:
            circuits = circuits_through(self.config.bootstrap) if self.config.relay else ()
            directory = await DhtDirectory.start(transport.daemon, ways=circuits)
            directory.say = partial(process.notify, "clock")
            limit_upload = partial(self._limit_upload, upload, transport, directory)
            limit_upload()
            process.live.listeners.append(limit_upload)
            background_tasks.append(asyncio.create_task(directory.keep_time_forever(), name="clock"))
            for address in transport.addresses:
                text = f"listening on {address}/p2p/{transport.peer}"
                process.notify_event(log_events.Listening(text, transport.daemon.pid))
            if keeps_slots(self.config):
                transport.relays.use(self.config.bootstrap, self._report_relaying)
                await transport.relays.first(SLOT_SECONDS)
            counted = CountedDirectory(directory)
            observer = DirectoryObserver(counted, directory, process.metrics)
            background_tasks.append(asyncio.create_task(observer.run(), name="directory observer"))
            if self.config.metrics.address is not None and has_a_network(transport.addresses):
                probe = self._create_probe(transport)
                background_tasks.append(asyncio.create_task(probe.run(), name="reachable"))
            cache = PeerCache(self.config.state / "peers.json")
            rejoining = Rejoining(
                directory,
                self.config.bootstrap,
                cache.read,
                me=transport.peer,
                notify=process.notify,
                set_lost=process.metrics.network.bootstraps_lost.set,
                chance=Random(),
            )
            background_tasks.append(asyncio.create_task(rejoining.run(), name="rejoining"))
            async with neighbours(self.config, transport.peer, transport.addresses, process.notify) as lan:
                await self._run_role(Network(transport, directory, counted, cache, lan))
        finally:
            process.live.listeners[:] = [each for each in process.live.listeners if each is not limit_upload]
            for task in background_tasks:
                task.cancel()
            await asyncio.gather(*background_tasks, return_exceptions=True)
            if directory is not None:
                await directory.close()
            await transport.close()

    def _limit_upload(self, upload: Upload, transport: P2pdTransport, directory: DhtDirectory) -> None:
        """Apply the upload limit that holds now to all traffic of a session."""
        limit = self.process.config.limits.upload
        if limit is None and upload.bytes_per_second == NO_LIMIT:
            return  # What is served to others then needs no turns.
        upload.limit(NO_LIMIT if limit is None else limit)
        transport.limit_upload(upload)
        directory.limit_upload(upload)

    def _report_relaying(self, text: str, relay: PeerId, addresses: Sequence[str]) -> None:
        """Report that a relay leads to this peer at these addresses; none means that it does no longer."""
        event = (
            log_events.Relayed(text, relay, addresses) if addresses else log_events.NotRelayed(text, relay)
        )
        self.process.notify_event(event)

    def _create_probe(self, transport: P2pdTransport) -> ReachabilityProbe:
        """Return the probe that asks other peers whether they can dial this one. It reports the result as
        metrics and events; until then, the metric is `unknown`."""
        process, config, gauges = self.process, self.config, self.process.metrics.network.reachable
        only(gauges, WAYS, "unknown")  # Sets this gauge to 1 and the others to 0.

        async def ask(helper: PeerId, addresses: Callable[[str], Sequence[str]]) -> DialBackResult:
            return await ask_dial_back(transport.daemon, helper, process.identity, addresses)

        def report(way: Way) -> None:
            only(gauges, WAYS, way)
            process.notify_event(log_events.Reachable(TEXTS[way], way))

        return ReachabilityProbe(
            asks=ask,
            connections=transport.daemon.connections,
            addresses=lambda: Addresses.of(config.announce, self.listen, transport.addresses),
            tell=report,
            chance=Random(),
        )

    async def _run_role(self, network: Network) -> None:
        """Run the role until it ends. After a stop request, `role.leave()` returns True if the role will end
        on its own; otherwise the role is cancelled. Raises P2pdEnded if p2pd ends first, after the role has
        saved its state."""
        stop_requested = self.process.stop
        role_task = asyncio.create_task(self.role.run(network), name="role")
        p2pd_end = asyncio.create_task(network.transport.ended(), name="p2pd")
        stop = asyncio.create_task(stop_requested.wait(), name="stop")
        try:
            while not role_task.done():
                if stop_requested.is_set() and not self.role.leave():
                    return
                awaited: list[asyncio.Task[Any]] = [role_task, p2pd_end]
                if not stop_requested.is_set():
                    awaited.append(stop)
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                if p2pd_end.done():
                    await self.role.save()
                    raise P2pdEnded(p2pd_end.result())
            role_task.result()
        finally:
            for task in (role_task, p2pd_end, stop):
                task.cancel()
            await asyncio.gather(role_task, p2pd_end, stop, return_exceptions=True)


def daemon_options(config: PeerFile, listen: Sequence[str]) -> DaemonOptions:
    """Return the options for a peer's p2pd, which listens at `listen`. A bootstrap counts as public."""
    return DaemonOptions(
        listen=tuple(listen),
        announce=config.announce,
        auto_nat=config.nat,
        nat_port_map=config.nat,
        relay=config.relay,
        carries=config.relay and config.role == "bootstrap",
        reachability="public" if config.role == "bootstrap" else None,
    )


def keeps_slots(config: PeerFile) -> bool:
    """Return True if the peer should reserve slots at relays, which forward connections to it. It should if
    others must dial it and its peer file announces no address for direct dials."""
    return config.relay and not config.announce and (config.holds_stage or config.role == "archivist")


def with_ports(listen: Sequence[str], addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the listen multiaddrs `listen` with each port 0 replaced by the port that p2pd chose. The port
    is found in `addresses`, p2pd's actual ones; without a matching address, the 0 stays."""
    result = []
    padding = [""] * 5  # Gives every multiaddr enough parts to unpack.
    for listened in listen:
        _, ip, host, transport, port, *rest = [*listened.split("/"), *padding]  # /ip4/HOST/tcp/PORT/...
        for address in addresses:
            _, its_ip, its_host, its_transport, its_port, *its_rest = [*address.split("/"), *padding]
            same_kind = (ip, transport, rest) == (its_ip, its_transport, its_rest)
            same_host = host in (its_host, "0.0.0.0", "::")  # The last two mean all hosts.
            if same_kind and same_host and port == "0":
                listened = "/".join([*listened.split("/")[:4], its_port, *listened.split("/")[5:]])
                break
        result.append(listened)
    return tuple(result)
