"""Read a run's directory repeatedly, and ask each peer found in it whether it responds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from peers.network.discovery.announcer import OPERATION_SECONDS
from peers.observer.owner_orders import Orders
from peers.observer.sightings import Miss, PeerObservations
from peers.runtime.supervision import until_one_ends
from peers.telemetry import events as noted
from protocols.dht.directory import split_multiaddr
from protocols.errors import Unreachable, WireError
from protocols.ports import Directory
from protocols.signed.peer_record import NO_STAGE
from protocols.signed.records import open_record
from swarmnet.identifiers import PeerId, RunId

SHORTEST_WALK_SECONDS = 5.0
LONGEST_WALK_SECONDS = 60.0
"""Half a record's lifetime, so that each arrival and departure is seen."""
WALK_SECONDS_PER_PEER = 0.02
"""A look-up returns each record of a stage (400 bytes) from the five nodes that keep it. That is 2 kB per
peer and walk, so 100 kB/s however many peers there are."""
TURN_SECONDS = 0.25
ASK_DEADLINE_SECONDS = 3.0
REFRESH_SECONDS = 1.5
"""Deadline of a look-up for a peer that no longer responds, and interval of such look-ups of a stage."""
MAX_ASKED = 32
"""Requests in flight; each peer that is gone without a goodbye takes the whole deadline."""
MAX_ADDRESSES = 4
"""Addresses dialled per peer. A record may contain 16, and they may lead anywhere."""
BOOTSTRAP_SECONDS = 15.0
FUTURE_SECONDS = 3.0


def walk_seconds(peers: int) -> float:
    """Return the interval between two walks of a run with this many peers."""
    return min(LONGEST_WALK_SECONDS, max(SHORTEST_WALK_SECONDS, WALK_SECONDS_PER_PEER * peers))


class Crawl:
    """Walks the directory of one run and updates the observations."""

    def __init__(
        self,
        run: RunId,
        me: PeerId,
        directory: Directory,
        sightings: PeerObservations,
        orders: Orders,
        bootstraps: Sequence[str],
        log_event: noted.LogEvent,
    ) -> None:
        """`bootstraps` are the multiaddrs whose availability is shown."""
        self.run_id = run
        self.me = me
        self.directory = directory
        self.sightings = sightings
        self.orders = orders
        self.bootstraps: dict[str, bool] = dict.fromkeys(bootstraps, False)
        self.walked_at = 0.0
        """Time of the last complete walk; 0 for never."""
        self.log_event = log_event
        self._asks: set[asyncio.Task[None]] = set()
        self._refreshing = asyncio.Lock()
        self._refreshed: dict[int, float] = {}
        """Stage -> when its records were last read again for a peer that no longer responds."""

    async def run(self) -> None:
        """Walk and ask until cancelled."""
        try:
            await until_one_ends(
                walk=self._walk_forever(),
                ask=self._ask_forever(),
                ask_bootstraps=self._ask_bootstraps_forever(),
            )
        finally:
            for ask in self._asks:
                ask.cancel()
            await asyncio.gather(*self._asks, return_exceptions=True)
            for known in self.sightings.peers.values():
                known.asking = False

    async def _walk_forever(self) -> None:
        while True:
            await self.walk()
            await asyncio.sleep(walk_seconds(len(self.sightings.peers)))

    async def walk(self) -> None:
        """Look up all stages, one after another, and the owner's order."""
        complete = True
        for stage in (*range(self.sightings.stages), NO_STAGE):
            try:
                found = await self.directory.look_up(self.run_id, stage, OPERATION_SECONDS)
            except WireError as error:
                self.log_event(noted.LookUpFailed(stage=stage, code=error.code, reason=str(error)))
                complete = False
                continue
            await self._take(found)
        self.sightings.walked()
        if complete:
            self.walked_at = self.directory.now()
        await self.orders.look(self.directory)

    async def _take(self, found: dict[PeerId, bytes]) -> None:
        for number, (peer, data) in enumerate(found.items()):
            if number % 50 == 49:
                await asyncio.sleep(0)  # Verifying many signatures must not block the loop.
            if peer == self.me:
                continue
            now = self.directory.now()
            with suppress(WireError):  # The directory has verified it; it is verified again here.
                signed = open_record(data, self.run_id)
                if signed.sequence / 1e6 <= now + FUTURE_SECONDS:
                    self.sightings.recorded(signed, now)

    async def _ask_forever(self) -> None:
        while True:
            now = self.directory.now()
            self.sightings.look(now)
            for peer in self.sightings.due(now, MAX_ASKED - len(self._asks)):
                task = asyncio.create_task(self._ask(peer), name="ask a peer")
                self._asks.add(task)
                task.add_done_callback(self._asks.discard)
            await asyncio.sleep(TURN_SECONDS)

    async def _ask(self, peer: PeerId) -> None:
        """Ping a peer, and record whether it answered. Its stage's records are read again before it counts as
        gone."""
        addresses = self.sightings.peers[peer].record.addresses[:MAX_ADDRESSES]
        code: Miss | None = None
        try:
            await self.directory.ask(peer, addresses, ASK_DEADLINE_SECONDS)
        except Unreachable:
            code = "not_reached"
        except WireError:
            code = "silent"
        if code is not None and self.sightings.would_depart(peer):
            await self._refresh(self.sightings.peers[peer].record.stage)
        now, before = self.directory.now(), self._gone(peer)
        if code is None:
            self.sightings.answered(peer, now)
        else:
            self.sightings.missed(peer, code, now)
        gone = self._gone(peer)
        if gone and not before:
            self.log_event(noted.Departed(peer=peer, code=gone))

    async def _refresh(self, stage: int) -> None:
        """Read the records of a stage again: a peer that left politely says so in its newest record."""
        async with self._refreshing:
            now = self.directory.now()
            if now < self._refreshed.get(stage, float("-inf")) + REFRESH_SECONDS:
                return
            self._refreshed[stage] = now
            with suppress(WireError):
                await self._take(await self.directory.look_up(self.run_id, stage, REFRESH_SECONDS))

    def _gone(self, peer: PeerId) -> str:
        known = self.sightings.peers.get(peer)
        return known.gone if known is not None else ""

    async def _ask_bootstraps_forever(self) -> None:
        while self.bootstraps:
            await asyncio.gather(*(self._ask_bootstrap(address) for address in self.bootstraps))
            await asyncio.sleep(BOOTSTRAP_SECONDS)
        await asyncio.get_running_loop().create_future()

    async def _ask_bootstrap(self, multiaddr: str) -> None:
        peer, address = split_multiaddr(multiaddr)
        try:
            await self.directory.ask(peer, [address], ASK_DEADLINE_SECONDS)
            self.bootstraps[multiaddr] = True
        except WireError:
            self.bootstraps[multiaddr] = False
