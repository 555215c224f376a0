"""An in-memory directory: all peers see an announcement unless the network is partitioned between them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from protocols.errors import Malformed, PeerGone, Unreachable
from protocols.signed.opinions import OPINION_SECONDS, OpinionKind, SignedOpinion, opinions_in_force
from protocols.signed.orders import SignedOrder
from protocols.signed.records import RECORD_SECONDS, SKEW_SECONDS, Remembered, open_manifest, open_record
from protocols.signed.registry_entry import open_listing
from protocols.signed.stored_orders import open_any_order
from swarmnet.identifiers import PeerId, RunId

if TYPE_CHECKING:
    from protocols.memory.transport import MemoryNetwork


class MemoryDirectory:
    """The `Directory` of one peer of a `MemoryNetwork`. Its time is the event loop's."""

    def __init__(self, network: MemoryNetwork, peer: PeerId) -> None:
        self._network = network
        self._peer = peer
        self._remembered = Remembered(network.random)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def met(self) -> Collection[PeerId]:
        """Return the peers that this one can reach. Every peer of this network is a node of the directory."""
        others = self._network.transports.items()
        return [peer for peer, other in others if not other.closed and self._reaches(peer)]

    async def announce(self, run: RunId, stage: int, record: bytes, deadline_seconds: float) -> bool:
        """Store this peer's signed record of a stage, unless a newer one is stored. Returns False if this
        peer reaches no other. Raises Malformed for a record of another stage, an expired one, or one signed
        in the future. A record's `sequence` is the time of signing in microseconds."""
        signed = open_record(record, run)
        if signed.record.stage != stage:
            raise Malformed(f"a record of stage {signed.record.stage} announced for stage {stage}")
        signed_at = signed.sequence / 1e6
        if not self.now() - RECORD_SECONDS <= signed_at <= self.now() + SKEW_SECONDS:
            raise Malformed("a record that has expired, or was signed in the future")
        await asyncio.sleep(0)  # Other tasks run in between, as with a real directory.
        stored = self._network.records.setdefault((run, stage), {})
        older = stored.get(signed.peer)
        if older is None or open_record(older, run).sequence <= signed.sequence:
            stored[signed.peer] = record
        return self._reaches_others()

    async def look_up(self, run: RunId, stage: int, deadline_seconds: float) -> dict[PeerId, bytes]:
        """Return a stage's unexpired records by peer: of reachable peers, and those seen before."""
        await asyncio.sleep(0)
        stored = self._network.records.get((run, stage), {})
        found = {peer: record for peer, record in stored.items() if self._reaches(peer)}
        self._remembered.take(run, found)
        return self._remembered.at(run, stage, self.now())

    async def put_manifest(self, run: RunId, signed_manifest: bytes, deadline_seconds: float) -> bool:
        """Store a signed manifest. False if this peer reaches no other; WireError if it is invalid."""
        open_manifest(signed_manifest, run)
        await asyncio.sleep(0)
        self._network.manifests[run] = signed_manifest
        return self._reaches_others()

    async def get_manifest(self, run: RunId, deadline_seconds: float) -> bytes | None:
        """Return the signed manifest of a run; None if there is none."""
        await asyncio.sleep(0)
        return self._network.manifests.get(run)

    async def put_order(self, run: RunId, order: bytes, deadline_seconds: float) -> bool:
        """Store an order of the owner or of the moderators, unless a newer one is stored. Returns False if
        this peer reaches no other. Raises a WireError if the order is invalid."""
        signed = open_any_order(order, run)
        await asyncio.sleep(0)
        if signed.newer_than(self._network.orders.get((run, signed.owner))):
            self._network.orders[run, signed.owner] = signed
        return self._reaches_others()

    async def get_order(self, run: RunId, author: PeerId, deadline_seconds: float) -> SignedOrder | None:
        """Return the newest order of the author; None if there is none."""
        await asyncio.sleep(0)
        return self._network.orders.get((run, author))

    async def put_listing(self, listing: bytes, deadline_seconds: float) -> bool:
        """Store a run's entry in the registry. Returns False if this peer reaches no other."""
        await asyncio.sleep(0)
        self._network.listings.add(open_listing(listing).run_id)
        return self._reaches_others()

    async def listings(self, deadline_seconds: float) -> list[RunId]:
        """Return the ids of the runs in the registry."""
        await asyncio.sleep(0)
        return sorted(self._network.listings)

    async def put_opinion(self, opinion: SignedOpinion, deadline_seconds: float) -> bool:
        """Store an opinion, unless a newer one of its author is stored. Returns False if this peer reaches no
        other. Raises Malformed for one that has expired or was signed in the future."""
        if not self.now() < opinion.expires_seconds <= self.now() + OPINION_SECONDS + SKEW_SECONDS:
            raise Malformed("an opinion that has expired, or was signed in the future")
        await asyncio.sleep(0)
        older = self._network.opinions.get(opinion.subkey)
        if older is None or older.sequence <= opinion.sequence:
            self._network.opinions[opinion.subkey] = opinion
        return self._reaches_others()

    async def opinions(self, run: RunId, kind: OpinionKind, deadline_seconds: float) -> list[SignedOpinion]:
        await asyncio.sleep(0)
        return opinions_in_force(self._network.opinions.values(), run, kind, self.now())

    async def ask(self, peer: PeerId, addresses: Sequence[str], deadline_seconds: float) -> None:
        """Check that the process of `peer` answers. Raises Unreachable at once if nothing listens there.
        Raises PeerGone after the deadline if the process is frozen or cannot be reached."""
        await asyncio.sleep(0)
        other = self._network.transports.get(peer)
        if other is None or other.closed:
            raise Unreachable(f"{peer} does not answer: nothing listens there")
        if other.frozen or not self._reaches(peer):
            await asyncio.sleep(deadline_seconds)
            raise PeerGone(f"{peer} takes connections, but its process does not answer")

    async def close(self) -> None: ...

    def _reaches_others(self) -> bool:
        return any(self._reaches(peer) for peer in self._network.transports if peer != self._peer)

    def _reaches(self, peer: PeerId) -> bool:
        """Return True for this peer itself, and for another one if neither direction to it is blocked."""
        if peer == self._peer:
            return True
        if self._network.direction(self._peer, peer).blocked:
            return False
        return not self._network.direction(peer, self._peer).blocked
