"""What all roles of a peer process (worker, observer, archivist) share, and what the process asks of a role.

A session is the life of one p2pd, the libp2p daemon through which a peer reaches others. The directory is the
DHT. Bootstraps are the configured peers through which a peer joins it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version

from peers.config.peer_file import PeerFile
from peers.config.run_file import SignedManifest
from peers.network.counted_directory import CountedDirectory
from peers.network.discovery.announcer import RecordAnnouncer
from peers.network.discovery.bootstrap import ANSWER_SECONDS, PeerCache, join_directory
from peers.network.discovery.mdns import Lan
from peers.process.live_limits import LiveLimits
from peers.runtime.control_server import Control
from peers.runtime.liveness import Pulse
from peers.telemetry.console import Reporter
from peers.telemetry.event import Topic
from peers.telemetry.event_log import EventLog
from peers.telemetry.log_events import Notice, TextNotice
from peers.telemetry.metrics import PeerMetrics
from protocols.dht.directory import DhtDirectory
from protocols.errors import Unreachable
from protocols.p2pd.transport import P2pdTransport
from protocols.signed.identity import Identity
from swarmnet.membership.own_start import OwnStart

NEIGHBOURS_SECONDS = 3.0
"""Seconds to wait for peers on the local network. They answer within 0.12 s, and the request is repeated."""


@dataclass(frozen=True, slots=True)
class Process:
    """Objects of the peer process that stay the same from session to session."""

    live: LiveLimits
    """The peer file, with the limits that hold now."""
    identity: Identity
    report: Reporter
    metrics: PeerMetrics
    log: EventLog
    pulse: Pulse
    stop: asyncio.Event
    """Set when a person or the system asks the process to end."""
    control: Control
    """Control socket of the process; roles register their own answers."""
    own_start: OwnStart = field(default_factory=OwnStart)
    joined: Callable[[], str] = str
    """Called when a bootstrap has answered. Returns a line for the user, or an empty string."""

    @property
    def config(self) -> PeerFile:
        return self.live.config

    def notify(self, topic: Topic, text: str) -> None:
        """Print one line for the user and record it in the event log."""
        self.notify_event(TextNotice(text, topic))

    def notify_event(self, notice: Notice) -> None:
        """Print a notice and record it in the event log with its fields."""
        self.report.notify(notice.name, level="info", **notice.fields)
        self.log.record(notice)

    def known_as(self, run: str, device: str = "none") -> None:
        """Set the metrics that say which run this peer belongs to."""
        self.metrics.run = run
        self.metrics.about.peer(self.identity.peer_id, self.config.role, device, version("swarmnet")).set(1)


@dataclass(frozen=True, slots=True)
class Network:
    """Objects that live as long as one p2pd process."""

    transport: P2pdTransport
    dht: DhtDirectory
    directory: CountedDirectory
    """The directory `dht`, with its calls counted for the metrics."""
    cache: PeerCache
    lan: Lan | None = None
    """Finder of the run's peers on the local network; None if it is off."""

    @property
    def ways_in(self) -> list[str]:
        """Return multiaddrs for others to join through: those outside of loopback, if there are any."""
        addresses = self.transport.addresses
        public = [address for address in addresses if "/127.0.0.1/" not in address and "/::1/" not in address]
        return [f"{address}/p2p/{self.transport.peer}" for address in public or addresses]

    def announcer(self, process: Process, signed: SignedManifest) -> RecordAnnouncer:
        """Return what announces this peer in the directory of a run."""
        return RecordAnnouncer(
            signed=signed,
            identity=process.identity,
            transport=self.transport,
            directory=self.directory,
            version=version("swarmnet"),
            log_event=process.log.record,
            own_start=process.own_start,
        )

    async def join(self, process: Process) -> None:
        """Join the directory through the configured bootstraps, remembered peers and those on the local
        network.

        With configured bootstraps, all are tried again and again until one answers. Without bootstraps, the
        others are tried once, and this peer continues alone if none answers."""
        bootstraps = process.config.bootstrap
        if bootstraps:
            nearby = self.lan.found if self.lan is not None else tuple  # `tuple()` is no addresses.
            await join_directory(self.directory, bootstraps, self.cache, process.notify, nearby)
            if line := process.joined():
                process.notify("kept", line)
            return
        local: list[str] = []
        if self.lan is not None and await self.lan.anybody(NEIGHBOURS_SECONDS):
            local = self.lan.found()
        addresses = list(dict.fromkeys([*local, *self.cache.read()]))
        if not addresses:
            return
        try:
            await self.directory.bootstrap(addresses, ANSWER_SECONDS)
        except Unreachable as error:
            process.notify("unreachable", f"{error}; continues alone")
        else:
            counts = {"on the local network": len(local), "remembered": len(addresses) - len(local)}
            parts = [f"{count} addresses {origin}" for origin, count in counts.items() if count]
            process.notify("joined", f"joined the swarm through {' and '.join(parts)}")


class Role(ABC):
    """Base class of roles. One instance serves the process; `run` is called for every session and ends with
    it.

    The methods that are not abstract suit a role that computes nothing and stores nothing."""

    @abstractmethod
    async def run(self, network: Network) -> None: ...

    def not_ready(self) -> str | None:
        """Return why /readyz answers that the peer is not ready; None: it is ready."""
        return None

    def leave(self) -> bool:
        """Ask the role to leave politely. Return False if nothing is under way and `run` may be cancelled."""
        return False

    def working_seconds(self) -> float:
        """Return the seconds that the present piece of work has taken; 0: none. The watchdog calls this."""
        return 0.0

    async def save(self) -> None:  # noqa: B027 - keeping nothing is what most roles do
        """Write to disk what would be lost. Called when p2pd has died."""
