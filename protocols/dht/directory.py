"""Publish and find peers and runs in a DHT: the `Directory` on hivemind's Kademlia.

It is a `DHTNode` of hivemind on the peer's p2pd (libp2p). The gate (`ValidatedP2P`) between the two verifies
every value. The DHT stores peers' records, runs' manifests, owners' orders, and the registry: a list of runs.

The peers that were passed to `bootstrap` are *named peers*. *Linked* peers have a link to this one. Both
may be *clock witnesses*: their answers to a ping set the swarm's time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from protocols.daemon.hivemind_imports import (
    DHTID,
    DHTNode,
    DictionaryDHTValue,
    MSGPackSerializer,
    PeerID,
    ValueWithExpiration,
    dht_pb2,
)
from protocols.daemon.listening import listens_at_any
from protocols.daemon.names import resolve_dialable
from protocols.daemon.p2pd import DAEMON_ERRORS, NOT_TRIED, Daemon
from protocols.dht.answers import Uploads
from protocols.dht.storage import Name
from protocols.dht.stored_values import PLAIN, key_id, node_id, stored_value, unpack_subkey, unpack_value
from protocols.dht.swarm_time import ClockVote, agreed_offset, changed, correction
from protocols.dht.validator import ValidatedP2P
from protocols.errors import PeerGone, Unreachable, WireError
from protocols.signed.envelope import RUN_ID_BYTES, run_bytes
from protocols.signed.identity import public_key_bytes
from protocols.signed.opinions import (
    OpinionKind,
    SignedOpinion,
    open_opinion,
    opinions_in_force,
    opinions_key,
)
from protocols.signed.orders import ORDER_SECONDS, SignedOrder
from protocols.signed.records import (
    MANIFEST_SECONDS,
    SKEW_SECONDS,
    Remembered,
    SignedRecord,
    manifest_key,
    open_manifest,
    open_record,
    stage_key,
)
from protocols.signed.registry_entry import LISTING_SECONDS, RUNS_KEY, open_listing
from protocols.signed.stored_orders import open_any_order, open_stored_order, order_key, stored_order
from swarmnet.identifiers import PeerId, RunId

logger = logging.getLogger(__name__)

CALL_SECONDS = 3.0
"""Deadline of one DHT call in seconds (hivemind's default). A look-up past dead nodes took 6.0 s."""


def split_multiaddr(multiaddr: str) -> tuple[PeerId, str]:
    """Split `/ip4/1.2.3.4/tcp/31337/p2p/12D3Koo...` into (peer, address). Raises ValueError if invalid."""
    address, _, peer = multiaddr.strip().rpartition("/p2p/")
    if not address.startswith("/"):
        raise ValueError(f"{multiaddr!r} should look like /ip4/1.2.3.4/tcp/31337/p2p/12D3Koo...")
    public_key_bytes(PeerId(peer))
    return PeerId(peer), address


CLOCK_SECONDS, WITNESSES = 60.0, 5
"""Interval in seconds for asking other peers for the time, and how many are asked, by a ping."""
MAX_NAMED = 256
"""Maximum number of named peers kept, the newest: bootstraps, remembered and nearby peers."""
MAX_LISTED = 3
"""Maximum number of unreachable bootstraps in one message. A peer remembers 64."""
MAX_PINGED = 16
"""Maximum number of pings to rejoin the DHT after losing all other nodes."""


class DhtDirectory:
    """One peer's access to hivemind's DHT. Create it with `start`."""

    def __init__(self, gate: ValidatedP2P, node: DHTNode, refusals: Counter[str]) -> None:
        self._gate = gate
        self._node = node
        self._remembered = Remembered(random.Random())
        self._named: dict[str, None] = {}
        """Peers that were passed to `bootstrap`."""
        self._reasons: dict[tuple[PeerId, str], str] = {}
        """The reason why each bootstrap that was tried last did not answer."""
        self._votes = ClockVote(None, None, 0)
        self._warned_of_clock = False
        self.say: Callable[[str], None] = logger.warning
        """Called with messages for the user about this machine's clock."""
        gate.evicted = self._evict
        gate.neighbours = lambda: node.protocol.routing_table.peer_id_to_uid
        self.refusals = refusals
        """Number of refused entries by reason, for the metrics."""

    @classmethod
    async def start(cls, daemon: Daemon, *, stores: bool = True, ways: Sequence[str] = ()) -> DhtDirectory:
        """Start a DHT node on a running p2pd. It needs no other node; `bootstrap` is called later and may be
        repeated. With `stores=False` the node stores nothing for others (hivemind's client mode). `ways` are
        relay circuits by which nodes may be reached that cannot be dialled directly."""
        refusals: Counter[str] = Counter()

        def refused(peer: str, reason: str) -> None:
            """Count a refusal by the part of its reason before the colon."""
            refusals[reason.split(":")[0][:60]] += 1
            if len(refusals) > 256:  # Some reasons contain numbers that the other side chose.
                refusals.clear()
            logger.debug("refused from %s: %s", peer, reason)

        gate = ValidatedP2P(daemon, refused, ways)
        node = await DHTNode.create(
            p2p=gate,
            node_id=DHTID.from_bytes(node_id(gate.peer_id)),
            wait_timeout=CALL_SECONDS,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            reuse_get_requests=False,
            client_mode=not stores,
        )
        return cls(gate, node, refusals)

    @property
    def clock_offset(self) -> float:
        """The swarm's time minus this machine's clock in seconds; 0 if they differ by less than 3 s."""
        return self._gate.clock_offset

    @property
    def measured_offset(self) -> float | None:
        """The measured offset in seconds, however small; None if no peer has reported its time yet."""
        return self._votes.offset if self._votes.offset is not None else self._votes.implausible_offset

    @property
    def linked(self) -> Callable[[], Collection[PeerId]]:
        """Returns the peers linked to this one. They may report the time; their records are never evicted."""
        return self._gate.linked

    @linked.setter
    def linked(self, linked: Callable[[], Collection[PeerId]]) -> None:
        self._gate.linked = linked

    def met(self) -> Collection[PeerId]:
        """Return the peers in the routing table: their DHT nodes have answered this one."""
        return [PeerId(peer.to_base58()) for peer in self._node.protocol.routing_table.peer_id_to_uid]

    @property
    def known_nodes(self) -> int:
        """Number of DHT nodes in the routing table."""
        return len(self._node.protocol.routing_table.peer_id_to_uid)

    @property
    def sent_bytes(self) -> int:
        """Bytes of DHT messages sent, without libp2p's overhead."""
        return self._gate.sent_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes of DHT messages received, without libp2p's overhead."""
        return self._gate.received_bytes

    def limit_upload(self, upload: Uploads) -> None:
        """Make DHT traffic share this peer's upload limit from now on."""
        self._gate.answers.limit_upload(upload)

    def now(self) -> float:
        """Return the swarm's time in seconds since 1970, for signing records."""
        return self._gate.now()

    async def bootstrap(self, multiaddrs: Sequence[str], deadline_seconds: float) -> int:
        """Join the DHT through the given multiaddrs, all at the same time. Returns how many answered.

        Their answers also set the clock offset. Then the nearest nodes are looked up to fill the routing
        table. Raises Unreachable if none answered, with the reasons for the first `MAX_LISTED` addresses.
        Raises it also if this machine's clock is too far off to be corrected; a person must then check it.
        Raises ValueError for an invalid multiaddr."""
        targets = [split_multiaddr(multiaddr) for multiaddr in dict.fromkeys(multiaddrs)]
        own_id = self._gate.peer_id.to_base58()
        reasons = {target: reason for target, reason in self._reasons.items() if target in targets}
        self._reasons = reasons

        async def join(peer: PeerId, address: str) -> bool:
            """Dial and ping one bootstrap. Returns True if it answers, otherwise records the reason."""
            try:
                await self._gate.connect(peer, [address], deadline_seconds)
                if await self._node.protocol.call_ping(PeerID.from_base58(peer)) is None:
                    raise Unreachable("runs no directory of this kind")
            except WireError as error:
                reason = str(error).removeprefix(f"{peer} does not answer at {address}: ")
                if reason != NOT_TRIED or (peer, address) not in reasons:
                    reasons[peer, address] = reason  # "Not tried" does not replace that of a real attempt.
                return False
            return True

        others = [(peer, address) for peer, address in targets if peer != own_id]
        self._named = dict.fromkeys([*self._named, *(peer for peer, _ in others)][-MAX_NAMED:])
        self._gate.witnesses = {*self._gate.witnesses, *(peer for peer, _ in others)}
        tasks = [asyncio.create_task(join(peer, address)) for peer, address in others]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=deadline_seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        answered = sum(not task.cancelled() and task.result() for task in tasks)
        if not answered:
            attempts = [
                f"{address}: {reasons.get((peer, address), 'no answer in time')}" for peer, address in others
            ]
            more = f"; and {len(attempts) - MAX_LISTED} more" if len(attempts) > MAX_LISTED else ""
            listed = "; ".join(attempts[:MAX_LISTED]) or "none was given"
            raise Unreachable(f"no bootstrap answered: {listed}{more}")
        await self._set_clock()  # The answers to the pings contain the witnesses' time.
        if self._votes.refusal:  # The reason why the clock cannot be corrected; empty if it can.
            raise Unreachable(self._votes.refusal)
        try:
            async with asyncio.timeout(min(deadline_seconds, CALL_SECONDS)):
                await self._node.find_nearest_nodes([self._node.node_id])
        except TimeoutError:
            logger.debug("the first look around took too long; later calls fill the table")
        return answered

    async def ask_again(self, multiaddrs: Sequence[str], deadline_seconds: float) -> set[PeerId]:
        """Dial and ping these nodes, so that both sides enter each other's routing tables. Returns the peers
        that answered. If one of them is new, the nearest nodes are looked up to fill the routing table.
        Raises ValueError for an invalid multiaddr."""
        addresses_of: dict[PeerId, list[str]] = {}
        for peer, address in map(split_multiaddr, dict.fromkeys(multiaddrs)):
            addresses_of.setdefault(peer, []).append(address)
        met_before = set(self.met())

        async def ping(peer: PeerId, addresses: list[str]) -> bool:
            """Dial and ping one peer. Returns True if it answers."""
            try:
                async with asyncio.timeout(deadline_seconds):
                    if not await listens_at_any(addresses, CALL_SECONDS):
                        return False  # libp2p does not dial it, and so does not delay later dials.
                    await self._gate.connect(peer, addresses, deadline_seconds)
                    return await self._node.protocol.call_ping(PeerID.from_base58(peer)) is not None
            except (WireError, TimeoutError):
                return False

        outcomes = await asyncio.gather(*(ping(peer, addresses) for peer, addresses in addresses_of.items()))
        answered = {peer for peer, outcome in zip(addresses_of, outcomes, strict=True) if outcome}
        if answered - met_before:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CALL_SECONDS):
                    await self._node.find_nearest_nodes([self._node.node_id])
        return answered

    async def keep_time_forever(self) -> None:
        """Measure the clock offset every `CLOCK_SECONDS`, because this machine's clock may be set while the
        peer runs. For example, a computer without a clock battery may find a time server late."""
        while True:
            await asyncio.sleep(CLOCK_SECONDS)
            await self.measure_clock_offset()

    async def measure_clock_offset(self) -> None:
        """Ask `WITNESSES` random named or linked peers for the time, from as many address ranges as possible,
        and set the clock offset from their answers. If none answers, the previous offset is kept."""
        candidates = list({*self._named, *self.linked()})
        random.shuffle(candidates)
        per_range: Counter[str] = Counter()
        number_in_range: dict[str, int] = {}  # How many candidates of its range come before the peer.
        for peer in candidates:
            address_range = await self._gate.range_of(peer)
            if address_range:
                number_in_range[peer] = per_range[address_range]
                per_range[address_range] += 1
        # The first peer of each range comes before the second of any.
        witnesses = sorted(number_in_range, key=lambda peer: number_in_range[peer])[:WITNESSES]
        self._gate.witnesses = frozenset(witnesses)
        self._gate.offsets = {}
        await asyncio.gather(*(self._node.protocol.call_ping(PeerID.from_base58(peer)) for peer in witnesses))
        if self._gate.offsets:
            await self._set_clock()

    async def _set_clock(self) -> None:
        """Compute the clock offset from the witnesses' answers. It replaces the previous one, and the user is
        notified, if they differ by more than `SKEW_SECONDS`. An offset up to `SKEW_SECONDS` becomes 0. If it
        is too large to be believed, it is not used, and the user is notified once."""
        offsets = self._gate.offsets
        self._votes = agreed_offset(offsets, {peer: await self._gate.range_of(peer) for peer in offsets})
        offset = self._votes.offset
        if self._votes.refusal and not self._warned_of_clock:
            self.say(self._votes.refusal)
        self._warned_of_clock = bool(self._votes.refusal)
        if offset is not None and abs(offset - self._gate.clock_offset) > SKEW_SECONDS:
            self._gate.clock_offset = correction(offset)
            self.say(changed(offset))

    def _evict(self, name: Name) -> None:
        """Remove a value from hivemind's storage."""
        key, tag = name  # The tag is the packed subkey; `PLAIN` stands for none.
        storage, dht_id = self._node.protocol.storage, DHTID.from_bytes(key)
        stored = storage.get(dht_id)
        if tag == PLAIN:
            del storage[dht_id]
        elif stored is not None and isinstance(stored.value, DictionaryDHTValue):
            del stored.value[unpack_subkey(tag)]

    async def announce(self, run: RunId, stage: int, record: bytes, deadline_seconds: float) -> bool:
        """Store this peer's signed record, at this node and others, until its signed expiry. Returns False if
        no other node stored it. Raises a WireError if the record is invalid."""
        signed: SignedRecord = open_record(record, run)
        key = stage_key(run, stage)
        value = run_bytes(run) + record
        tag = MSGPackSerializer.dumps(signed.peer)
        # The gate accounts for this node's own values too.
        self._gate.note(key_id(key), tag, stored_value(value), signed.expires_seconds)
        return await self._store(key, value, signed.expires_seconds, signed.peer, deadline_seconds)

    async def look_up(self, run: RunId, stage: int, deadline_seconds: float) -> dict[PeerId, bytes]:
        """Return the valid records of a stage, by peer. A look-up may miss some, so records that were found
        earlier are returned too until their signed expiry. Raises Unreachable if no record is known and the
        DHT does not answer in time."""
        timed_out = False
        try:
            async with asyncio.timeout(deadline_seconds):
                found = await self._get(stage_key(run, stage))
        except TimeoutError:
            found, timed_out = None, True
        entries = found.value.items() if found is not None and isinstance(found.value, dict) else ()
        # The run id precedes each record.
        records_found = {PeerId(peer): entry.value[RUN_ID_BYTES:] for peer, entry in entries}
        for error in self._remembered.take(run, records_found):
            self.refusals[error.code] += 1
        # A record that is expired only by the swarm's time is kept: other peers may lie about the time.
        records = self._remembered.at(run, stage, min(self.now(), time.time()))
        if timed_out and not records:
            raise Unreachable(f"the directory did not answer within {deadline_seconds:g} s")
        return records

    async def put_manifest(self, run: RunId, signed_manifest: bytes, deadline_seconds: float) -> bool:
        """Store the run's signed manifest for `MANIFEST_SECONDS`. Returns False if no other node has it."""
        open_manifest(signed_manifest, run)
        key, expires = manifest_key(run), self.now() + MANIFEST_SECONDS
        self._gate.note(key_id(key), PLAIN, stored_value(signed_manifest), expires)
        return await self._store_shared(key, signed_manifest, expires, deadline_seconds)

    async def get_manifest(self, run: RunId, deadline_seconds: float) -> bytes | None:
        """Return the signed manifest, checked against the run id, or None if none is found. Raises
        Unreachable if the DHT does not answer in time."""
        try:
            async with asyncio.timeout(deadline_seconds):
                # Any copy will do, not only the one that expires last: they have the same content.
                found = await self._get(manifest_key(run), latest=False)
        except TimeoutError:
            raise Unreachable(f"the directory did not answer within {deadline_seconds:g} s") from None
        if found is None or not isinstance(found.value, bytes):
            return None
        open_manifest(found.value, run)
        return found.value

    async def put_order(self, run: RunId, order: bytes, deadline_seconds: float) -> bool:
        """Store a signed order of the owner or of the moderators in the DHT for `ORDER_SECONDS`. Returns
        False if no other node has it then. Nodes with a newer order keep that. Raises a WireError if the
        order is invalid."""
        key, value = order_key(run, open_any_order(order, run).owner), stored_order(run, order)
        expires = self.now() + ORDER_SECONDS
        self._gate.note(key_id(key), PLAIN, stored_value(value), expires)
        return await self._store_shared(key, value, expires, deadline_seconds)

    async def get_order(self, run: RunId, author: PeerId, deadline_seconds: float) -> SignedOrder | None:
        """Return the newest order of the author seen now or before; None if there is none. Raises
        Unreachable if none is known and the DHT does not answer in time."""
        key, timed_out = order_key(run, author), False
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._get(key)
        except TimeoutError:
            timed_out = True
        newest = self._gate.orders.get(key_id(key))  # The gate remembers the newest of all answers.
        if newest is not None:
            _, value = newest
            _, signed_order = open_stored_order(unpack_value(value))
            return signed_order
        if timed_out:
            raise Unreachable(f"the directory did not answer within {deadline_seconds:g} s")
        return None

    async def put_listing(self, listing: bytes, deadline_seconds: float) -> bool:
        """Store a run's entry in the registry for `LISTING_SECONDS`. Returns False if no node stored it."""
        run, expires = open_listing(listing).run_id, self.now() + LISTING_SECONDS
        self._gate.note(key_id(RUNS_KEY), MSGPackSerializer.dumps(run), stored_value(listing), expires)
        return await self._store(RUNS_KEY, listing, expires, run, deadline_seconds)

    async def listings(self, deadline_seconds: float) -> list[RunId]:
        """Return the ids of the runs in the registry. The caller must check each run's manifest. Raises
        Unreachable if the DHT does not answer in time."""
        entries = await self._values_under(RUNS_KEY, deadline_seconds)
        return sorted(open_listing(entry).run_id for entry in entries)

    async def put_opinion(self, opinion: SignedOpinion, deadline_seconds: float) -> bool:
        """Store an opinion until it expires. Returns False if no node stored it. Raises Malformed for one
        that has expired, was signed in the future, or is older than the author's that is stored here."""
        key, expires = opinions_key(opinion.run_id, opinion.kind), opinion.expires_seconds
        tag = MSGPackSerializer.dumps(opinion.subkey)
        self._gate.note(key_id(key), tag, stored_value(opinion.data), expires)
        return await self._store(key, opinion.data, expires, opinion.subkey, deadline_seconds)

    async def opinions(self, run: RunId, kind: OpinionKind, deadline_seconds: float) -> list[SignedOpinion]:
        """Return the newest opinions in force, one of each author and document. Raises Unreachable if the DHT
        does not answer in time."""
        found = await self._values_under(opinions_key(run, kind), deadline_seconds)
        return opinions_in_force(map(open_opinion, found), run, kind, min(self.now(), time.time()))

    async def _values_under(self, key: bytes, deadline_seconds: float) -> list[bytes]:
        """Return all values under a key with subkeys; the gate has verified them. Raises Unreachable if the
        DHT does not answer in time."""
        try:
            async with asyncio.timeout(deadline_seconds):
                found = await self._get(key)
        except TimeoutError:
            raise Unreachable(f"the directory did not answer within {deadline_seconds:g} s") from None
        entries = found.value.values() if found is not None and isinstance(found.value, dict) else ()
        return [entry.value for entry in entries]

    async def ask(self, peer: PeerId, addresses: Sequence[str], deadline_seconds: float) -> None:
        """Return once the peer's own process has answered a ping. The ping changes no routing table. Raises
        Unreachable if no address answers, and PeerGone if one does but the process does not."""
        until = asyncio.get_running_loop().time() + deadline_seconds
        if peer not in self._named:  # Only named peers' addresses are dialled unchecked.
            addresses = await resolve_dialable(addresses, self._gate.addresses)
        seconds_left = max(0.0, until - asyncio.get_running_loop().time())
        await self._gate.connect(peer, addresses, seconds_left)
        seconds_left = max(0.0, until - asyncio.get_running_loop().time())
        stub = self._node.protocol.get_stub(PeerID.from_base58(peer))
        try:
            await stub.rpc_ping(dht_pb2.PingRequest(validate=False), timeout=seconds_left)
        except (*DAEMON_ERRORS, TimeoutError):
            raise PeerGone(f"{peer} takes connections, but its process does not answer") from None

    async def _rejoin_if_alone(self) -> None:
        """If the routing table is empty, ping linked and named peers, so that the next call finds a node. A
        node drops others after one unanswered call, so a process that was stopped for seconds loses all."""
        if self.known_nodes:
            return
        peers = list(dict.fromkeys([*self.linked(), *self._named]))[:MAX_PINGED]
        await asyncio.gather(*(self._node.protocol.call_ping(PeerID.from_base58(peer)) for peer in peers))

    async def _get(self, key: bytes, latest: bool = True) -> ValueWithExpiration[Any] | None:
        """Return the value that the nearest nodes store under `key`, or None."""
        await self._rejoin_if_alone()
        found: ValueWithExpiration[Any] | None = await self._node.get(key, latest=latest)
        return found

    async def _store(
        self, key: bytes, value: bytes, expires: float, subkey: str | None, deadline_seconds: float
    ) -> bool:
        """Store a value at the nodes nearest to its key until `expires`, in the swarm's time. Returns True if
        at least one other node confirmed in time that it stored the value."""
        dht_key = key_id(key)
        self._gate.acknowledged[dht_key] = 0
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._rejoin_if_alone()
                await self._node.store(key, value, float(expires - self.clock_offset), subkey=subkey)
        except TimeoutError:
            logger.debug("a store took longer than %g s", deadline_seconds)
        return self._gate.acknowledged.pop(dht_key, 0) > 0

    async def _store_shared(self, key: bytes, value: bytes, expires: float, deadline_seconds: float) -> bool:
        """Store a value that all peers of a run store again regularly. Returns True if other nodes have it:
        they stored it now, or a look-up finds it. Nodes refuse to store a value that they already have with a
        later expiry, from another peer."""
        until = asyncio.get_running_loop().time() + deadline_seconds
        if await self._store(key, value, expires, None, deadline_seconds):
            return True
        try:
            async with asyncio.timeout_at(until):
                found = await self._get(key)
        except TimeoutError:
            return False
        if found is None or found.value != value:
            return False
        return bool(found.expiration_time > expires - self.clock_offset)

    async def close(self) -> None:
        """Leave the DHT; p2pd keeps running. May be called more than once."""
        if not self._node.is_alive:
            return
        if self._node.cache_refresh_task is not None:
            self._node.cache_refresh_task.cancel()
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await self._node.shutdown()
        except DAEMON_ERRORS as error:  # p2pd is gone already
            logger.debug("the DHT's handlers could not be removed: %s", error)
        self._gate.close()
