"""Read a run's directory repeatedly, and ask each peer found in it whether it responds.

The directory is a DHT in which each peer announces itself by a signed record. A walk reads the records of all
stages once. A peer is *gone* if it left or no longer responds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from peers.network.discovery.announcer import OPERATION_SECONDS
from peers.runtime.supervision import until_one_ends
from peers.stageless.observer.order_reader import Orders
from peers.stageless.observer.sightings import Miss, PeerObservations
from peers.telemetry import log_events
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
"""A look-up returns each record of a stage (400 bytes) from the five nodes that keep it. A walk costs 2 kB
per peer, and so 100 kB/s however many peers there are."""
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
    """Walks the directory of one run, asks its peers, and updates the observations."""

    def __init__(
        self,
        *,
        run: RunId,
        me: PeerId,
        directory: Directory,
        sightings: PeerObservations,
        orders: Orders,
        bootstraps: Sequence[str],
        log_event: log_events.LogEvent,
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
        self._requests: set[asyncio.Task[None]] = set()
        self._refreshing = asyncio.Lock()
        self._read_again_at: dict[int, float] = {}
        """Stage -> when its records were last read again for a peer that no longer responds."""

    async def run(self) -> None:
        """Walk the directory, and ask peers and bootstraps whether they respond, until cancelled."""
        try:
            await until_one_ends(
                walk=self._walk_forever(),
                ask=self._ask_peers_forever(),
                ask_bootstraps=self._ask_bootstraps_forever(),
            )
        finally:
            for request in self._requests:
                request.cancel()
            await asyncio.gather(*self._requests, return_exceptions=True)
            for observed in self.sightings.peers.values():
                observed.asking = False

    async def _walk_forever(self) -> None:
        while True:
            await self.walk()
            await asyncio.sleep(walk_seconds(len(self.sightings.peers)))

    async def walk(self) -> None:
        """Read the records of all stages from the directory, and then the owner's newest order. A failed
        look-up is logged, and the walk does not count as complete."""
        complete = True
        for stage in (*range(self.sightings.stages), NO_STAGE):
            try:
                records = await self.directory.look_up(self.run_id, stage, OPERATION_SECONDS)
            except WireError as error:
                self.log_event(log_events.LookUpFailed(stage=stage, code=error.code, reason=str(error)))
                complete = False
                continue
            await self._add_records(records)
        self.sightings.walked()
        if complete:  # The page shows how old the newest complete walk is.
            self.walked_at = self.directory.now()
        await self.orders.look(self.directory)

    async def _add_records(self, records: dict[PeerId, bytes]) -> None:
        """Pass verified records to the observations. Invalid ones, this observer's own and those dated in the
        future are left out."""
        for number, (peer, data) in enumerate(records.items()):
            if number % 50 == 49:
                await asyncio.sleep(0)  # Verifying many signatures must not block the loop.
            if peer == self.me:
                continue
            now = self.directory.now()
            with suppress(WireError):  # The directory has verified it; it is verified again here.
                signed = open_record(data, self.run_id)
                # A record's sequence is the time of its signature in microseconds.
                if signed.sequence / 1e6 <= now + FUTURE_SECONDS:
                    self.sightings.recorded(signed, now)

    async def _ask_peers_forever(self) -> None:
        """Start requests to the peers that are due, at most MAX_ASKED at once, and drop expired records. It
        repeats every TURN_SECONDS."""
        while True:
            now = self.directory.now()
            self.sightings.look(now)
            for peer in self.sightings.due(now, MAX_ASKED - len(self._requests)):
                task = asyncio.create_task(self._ask_peer(peer), name="ask a peer")
                self._requests.add(task)
                task.add_done_callback(self._requests.discard)
            await asyncio.sleep(TURN_SECONDS)

    async def _ask_peer(self, peer: PeerId) -> None:
        """Ask a peer whether it responds, and record the outcome. If this failure makes the peer gone, the
        records of its stage are read again first: its newest record may say that it left. A departure is
        logged."""
        addresses = self.sightings.peers[peer].record.addresses[:MAX_ADDRESSES]
        failure: Miss | None = None
        try:
            await self.directory.ask(peer, addresses, ASK_DEADLINE_SECONDS)
        except Unreachable:
            failure = "not_reached"
        except WireError:
            failure = "silent"
        if failure is not None and self.sightings.would_depart(peer):
            await self._read_stage_again(self.sightings.peers[peer].record.stage)
        now = self.directory.now()
        departure_before = self._departure_of(peer)
        if failure is None:
            self.sightings.answered(peer, now)
        else:
            self.sightings.missed(peer, failure, now)
        departure = self._departure_of(peer)
        if departure and not departure_before:
            self.log_event(log_events.Departed(peer=peer, code=departure))

    async def _read_stage_again(self, stage: int) -> None:
        """Read the records of a stage again, unless this was done in the last REFRESH_SECONDS; a failure is
        ignored. The newest record of a peer that left with a goodbye has the state `leaving`."""
        async with self._refreshing:
            now = self.directory.now()
            if now < self._read_again_at.get(stage, float("-inf")) + REFRESH_SECONDS:
                return
            self._read_again_at[stage] = now
            with suppress(WireError):
                records = await self.directory.look_up(self.run_id, stage, REFRESH_SECONDS)
                await self._add_records(records)

    def _departure_of(self, peer: PeerId) -> str:
        """Return the code of a peer's departure; empty if it is present or unknown."""
        known = self.sightings.peers.get(peer)
        return known.gone if known is not None else ""

    async def _ask_bootstraps_forever(self) -> None:
        while self.bootstraps:
            await asyncio.gather(*(self._ask_bootstrap(address) for address in self.bootstraps))
            await asyncio.sleep(BOOTSTRAP_SECONDS)
        await asyncio.get_running_loop().create_future()

    async def _ask_bootstrap(self, multiaddr: str) -> None:
        """Record whether the bootstrap at this address responds."""
        peer, address = split_multiaddr(multiaddr)
        try:
            await self.directory.ask(peer, [address], ASK_DEADLINE_SECONDS)
            self.bootstraps[multiaddr] = True
        except WireError:
            self.bootstraps[multiaddr] = False
