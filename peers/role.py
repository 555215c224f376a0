"""What all roles of a peer process share, and what the process asks of a role."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version

from peers.config.peer_file import PeerFile
from peers.network.counted_directory import CountedDirectory
from peers.network.discovery.bootstrap import ANSWER_SECONDS, PeerCache, join_directory
from peers.network.discovery.mdns import Lan
from peers.runtime.control_server import Control
from peers.runtime.liveness import Pulse
from peers.telemetry.console import Reporter
from peers.telemetry.event_log import EventLog
from peers.telemetry.events import Notice, TextNotice, Topic
from peers.telemetry.metrics import PeerMetrics
from protocols.dht.directory import DhtDirectory
from protocols.errors import Unreachable
from protocols.p2pd.transport import P2pdTransport
from protocols.signed.identity import Identity
from swarmnet.membership.own_start import OwnStart

NEIGHBOURS_SECONDS = 3.0
"""For whoever is on the local network to be heard of: they answer within 0.12 s, and are asked again."""


@dataclass(frozen=True, slots=True)
class Process:
    """What stays the same from session to session."""

    config: PeerFile
    identity: Identity
    report: Reporter
    metrics: PeerMetrics
    log: EventLog
    pulse: Pulse
    stop: asyncio.Event
    """Set when a person or the system asks the process to end."""
    control: Control
    """What commands can ask of it; roles add their own answers."""
    own_start: OwnStart = field(default_factory=OwnStart)
    joined: Callable[[], str] = str
    """Called when some bootstrap has answered; what to say of it, if anything."""

    def notify(self, topic: Topic, text: str) -> None:
        """One line for people, and the event log."""
        self.tell(TextNotice(text, topic))

    def tell(self, said: Notice) -> None:
        """The same, with fields."""
        self.report.notify(said.name, level="info", **said.fields)
        self.log.record(said)

    def known_as(self, run: str, device: str = "none") -> None:
        """Tell the metrics which run this peer belongs to."""
        who = (run, self.identity.peer_id, self.config.role, device, version("swarmnet"))
        self.metrics.about.peer(*who).set(1)


@dataclass(frozen=True, slots=True)
class Network:
    """What lives as long as one p2pd."""

    transport: P2pdTransport
    dht: DhtDirectory
    directory: CountedDirectory
    """The same, counted for the metrics."""
    cache: PeerCache
    lan: Lan | None = None
    """Peers of the run on the local network."""

    @property
    def ways_in(self) -> list[str]:
        """This peer's multiaddrs, to join through: those that lead here from elsewhere, if any do."""
        addresses = self.transport.addresses
        public = [address for address in addresses if "/127.0.0.1/" not in address and "/::1/" not in address]
        return [f"{address}/p2p/{self.transport.peer}" for address in public or addresses]

    async def join(self, process: Process) -> None:
        """Return when some bootstrap, remembered peer or neighbour answers. Who names no bootstrap asks those
        that it remembers and those nearby, and waits for nobody."""
        bootstraps = process.config.bootstrap
        if bootstraps:
            nearby = self.lan.found if self.lan is not None else tuple
            await join_directory(self.directory, bootstraps, self.cache, process.notify, nearby)
            if line := process.joined():
                process.notify("kept", line)
            return
        near: list[str] = []
        if self.lan is not None and await self.lan.anybody(NEIGHBOURS_SECONDS):
            near = self.lan.found()
        known = list(dict.fromkeys([*near, *self.cache.read()]))
        if not known:
            return
        try:
            await self.directory.bootstrap(known, ANSWER_SECONDS)
        except Unreachable as error:
            process.notify("unreachable", f"{error}; goes on alone")
        else:
            counts = {"on the local network": len(near), "remembered": len(known) - len(near)}
            through = " and ".join(f"{count} addresses {which}" for which, count in counts.items() if count)
            process.notify("joined", f"joined the swarm through {through}")


class Role(ABC):
    """Made once per process; `run` is called for every session, and ends or is cancelled with it.

    What is not abstract is as it is for a role that computes nothing and keeps nothing."""

    @abstractmethod
    async def run(self, network: Network) -> None: ...

    def not_ready(self) -> str | None:
        """Why /readyz says no; None: ready."""
        return None

    def leave(self) -> bool:
        """Asked to end politely; False: there is nothing under way, `run` may be cancelled."""
        return False

    def working_seconds(self) -> float:
        """How long the present piece of work has taken; 0: none (the watchdog asks)."""
        return 0.0

    async def save(self) -> None:  # noqa: B027 - keeping nothing is what most roles do
        """p2pd has died: bring to disk what would be missed."""
