"""Verify everything that passes between hivemind's DHT and the network.

`DHTNode` gets this gate (`ValidatedP2P`) instead of its `P2P`. The gate sees every request and response as
protobuf before hivemind decodes the MessagePack inside. It removes everything except signed values: a peer's
record, a run's manifest, an owner's order, a registry entry, an opinion (protocols/signed). The validators of
hivemind run too late: it decodes dictionaries first, and a deeply nested one kills the process (measured).

A value stands under a key. Several values under one key form a dictionary by subkey; a tag is a packed
subkey. A value without subkey is plain. The storer is the peer that sent a value to be stored. The gate also
enforces these rules:
- A node's DHT id (`node_id`) is the hash of its peer id.
- Expiries are bounded, by the swarm's time and not this machine's (swarm_time.py).
- An older value never replaces a newer one.
- Storage is limited and shared fairly (storage.py).
- Responses stay below 4 MiB, at which hivemind hangs, and each requester has a budget (answers.py).
- Each storer has a budget of signature checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from itertools import islice
from math import isfinite
from typing import Any, TypeAlias

from protocols.daemon.hivemind_imports import (
    MSGPackSerializer,
    Multiaddr,
    P2PContext,
    P2PDaemonError,
    PeerID,
    dht_pb2,
)
from protocols.daemon.p2pd import DAEMON_ERRORS, Daemon
from protocols.dht.answers import Answers, Requester
from protocols.dht.storage import Name, Storage, StoredValue, Storer
from protocols.dht.stored_values import (
    DICTIONARY,
    PLAIN,
    Item,
    VerifiedValue,
    dictionary,
    node_id,
    node_id_of,
    shifted_dictionary,
    split_values,
    unpack_subkey,
    verify_value,
)
from protocols.errors import Backlog, BadSignature, Malformed, PeerGone, Unreachable, WireError
from protocols.signed.identity import CHECKED, Checked
from protocols.signed.records import MANIFEST_SECONDS, SKEW_SECONDS
from swarmnet.identifiers import PeerId
from swarmnet.membership.address_ranges import range_of
from swarmnet.resources.allowances import Checks

KEYS_PER_REQUEST = 1024
"""Maximum keys per request. On meeting a new node, a node sends all values that it should store at once."""
NEAREST, PEER_ID_BYTES = 20, 64
"""Maximum nodes per result (hivemind's bucket size) and bytes of a peer id; libp2p's ids have at most 42. The
second is needed because hivemind parses an id in time quadratic in its length."""
PING, PING_SECONDS = "DHTProtocol.rpc_ping", 3.0
"""hivemind's name of the ping call, and its timeout in seconds."""
CIRCUIT_SECONDS = 1.5
"""Timeout in seconds for opening a relay circuit, out of the 3 s that a call has."""
RANGE_SECONDS, RANGE_ANSWER_SECONDS = 60.0, 1.0
"""How long a peer's address range is cached, and how long p2pd may take to report it, in seconds."""
NOTHING = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
"""The result for a key that is not answered: no value and no nearer nodes."""
_VERIFIED = 4096
_ORDERS = 256

Request: TypeAlias = Any
"""A PingRequest, StoreRequest or FindRequest of hivemind's dht.proto, which has no types."""
Response: TypeAlias = Any
"""A response to one of these."""
Handler = Callable[[Request, P2PContext], Awaitable[Response]]


class ValidatedP2P:
    """The gate between a hivemind DHT node and p2pd. It replaces `P2P` in `DHTNode.create(p2p=...)`."""

    def __init__(self, daemon: Daemon, refused: Callable[[str, str], None], ways: Sequence[str] = ()) -> None:
        """Create the gate. `refused(peer, reason)` is called for everything that is removed. `ways` are relay
        circuits by which peers may be reached that cannot be dialled directly."""
        self._daemon = daemon
        self._circuits = ways
        self._refused = refused
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._verified: OrderedDict[bytes, VerifiedValue] = OrderedDict()
        self.evicted: Callable[[Name], None] = lambda name: None
        """Removes a value from hivemind's storage."""
        self.linked: Callable[[], Collection[PeerId]] = tuple
        """Returns the peers with links to this one, whose records are never evicted."""
        self.storage = Storage(
            lambda name: self.evicted(name), lambda: {MSGPackSerializer.dumps(peer) for peer in self.linked()}
        )
        self.answers = Answers(self.storage.bytes_of)
        """Limits responses by each requester's budget and this peer's upload limit."""
        self.neighbours: Callable[[], Collection[PeerID]] = tuple
        """Returns the nodes in the routing table."""
        self._checks = Checks()
        """Budgets of signature checks, one for each storer."""
        self._ranges: dict[str, tuple[str, float]] = {}
        """Maps peer to the address range that it is connected from, and when p2pd reported it."""
        self.clock_offset = 0.0
        """The swarm's time minus this machine's, in seconds."""
        self.witnesses: Collection[str] = frozenset()
        """Peers whose clocks are believed."""
        self.offsets: dict[str, float] = {}
        """The last offset that each witness reported, like `clock_offset`."""
        self.sent_bytes = 0
        self.received_bytes = 0
        """Bytes of DHT requests and responses, without libp2p's overhead."""
        self.acknowledged: Counter[bytes] = Counter()
        """Number of other nodes that stored each key that this node is storing now."""
        self.orders: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()
        """Maps key to sequence and value of the newest order seen. The storage of hivemind keeps the value
        that expires last, and peers without a newer order store the older one again."""

    # The part of P2P that hivemind's DHT uses.

    @property
    def peer_id(self) -> PeerID:
        return self._daemon.p2p.peer_id

    async def get_visible_maddrs(self, latest: bool = False) -> list[Multiaddr]:
        addresses: list[Multiaddr] = await self._daemon.p2p.get_visible_maddrs(latest)
        return addresses

    async def add_protobuf_handler(
        self, name: str, handler: Handler, input_type: type, **options: bool
    ) -> None:
        """Register hivemind's `handler` for requests of this type, wrapped in this gate's checks. A false DHT
        id of the sender is removed before. A ping with `validate` asks whether its sender can be called.
        Hivemind does not find that out for a sender without id, so this gate calls it back."""
        serve = {
            dht_pb2.PingRequest: self._serve_ping,
            dht_pb2.StoreRequest: self._serve_store,
            dht_pb2.FindRequest: self._serve_find,
        }[input_type]

        async def guarded(request: Request, context: P2PContext) -> Response:
            claimed_id = request.peer.node_id
            self.received_bytes += request.ByteSize()
            self._clear_false_id(request.peer, context.remote_id)
            response = await serve(handler, request, context)
            was_cleared = claimed_id != request.peer.node_id
            if was_cleared and input_type is dht_pb2.PingRequest and request.validate:
                response.available = await self._answers_with_id(context.remote_id, claimed_id)
            self.sent_bytes += response.ByteSize()
            return response

        await self._daemon.p2p.add_protobuf_handler(name, guarded, input_type, **options)

    async def remove_protobuf_handler(self, name: str, **options: bool) -> None:
        await self._unless_ended(self._daemon.p2p.remove_protobuf_handler(name, **options))

    async def call_protobuf_handler(
        self, peer: PeerID, name: str, request: Request, output_type: type
    ) -> Response:
        """Send a request of hivemind's DHT to a peer, and return the checked and filtered response. A store
        request with other peers' values is cut to the receiver's budget."""
        if output_type is dht_pb2.StoreResponse:
            # Hivemind sends a new node other peers' values. `acknowledged` has the keys of this peer's own.
            if not all(key in self.acknowledged for key in request.keys):
                key_count = len(request.keys)
                request = await self.answers.hand_over(request, await self._describe_requester(peer))
                if not request.keys:  # Nothing may be sent.
                    return dht_pb2.StoreResponse(store_ok=[False] * key_count)
            request = self._shifted_store(request)  # Expiries become the swarm's time.
        if self._circuits:  # A node that cannot be dialled may have a slot at one of these relays.
            with contextlib.suppress(Unreachable):
                await self.connect(PeerId(peer.to_base58()), self._circuits, CIRCUIT_SECONDS)
        sent = time.time()
        self.sent_bytes += request.ByteSize()
        call = self._daemon.p2p.call_protobuf_handler(peer, name, request, output_type)
        response = await self._unless_ended(call)
        self.received_bytes += response.ByteSize()
        self._clear_false_id(response.peer, peer)
        if output_type is dht_pb2.PingResponse:
            self._measure_clock(peer, response, sent, time.time())
        elif output_type is dht_pb2.StoreResponse:
            for key, stored in zip(request.keys, response.store_ok, strict=False):
                if key in self.acknowledged:
                    self.acknowledged[key] += stored
        elif output_type is dht_pb2.FindResponse:
            self._filter_values(str(peer), request, response)
        return response

    @property
    def addresses(self) -> Sequence[str]:
        """Multiaddrs at which this peer is reached, as p2pd last reported."""
        return self._daemon.addresses

    async def connect(self, peer: PeerId, addresses: Sequence[str], deadline_seconds: float) -> None:
        """Dial a peer. Raises Unreachable if it does not answer."""
        await self._daemon.connect(peer, addresses, deadline_seconds)

    async def range_of(self, peer: str) -> str:
        """Return the address range that a peer is connected from, or its relay's range; cached for
        `RANGE_SECONDS`. Returns an empty string if it is not connected or p2pd does not report it."""
        now = asyncio.get_running_loop().time()
        address_range, reported_at = self._ranges.get(peer, ("", float("-inf")))
        if reported_at + RANGE_SECONDS < now:
            try:
                connections = await self._daemon.connections(RANGE_ANSWER_SECONDS)
            except PeerGone:
                return ""
            self._ranges = {peer: ("", now)}  # Stays empty if the peer is not connected.
            for connected_peer, address in connections:
                self._ranges[connected_peer] = (range_of(address), now)
            address_range, _ = self._ranges[peer]
        return address_range

    async def _describe_requester(self, peer: PeerID) -> Requester:
        """Return a peer with its address range, and whether it is in the routing table or linked."""
        name = str(peer)
        near = peer in self.neighbours() or name in self.linked()
        return Requester(PeerId(name), await self.range_of(name), near)

    async def _unless_ended(self, call: Awaitable[Response]) -> Response:
        """Return the call's result. Raises P2PDaemonError as soon as p2pd ends or this gate is closed."""
        task = asyncio.ensure_future(call)
        try:
            ends = (task, self._daemon.ending, self._closing)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise P2PDaemonError("p2pd has ended, or this node is closing")
            return task.result()
        finally:
            task.cancel()

    def close(self) -> None:
        """Make all calls in progress fail now."""
        if not self._closing.done():
            self._closing.set_result(None)

    # Requests from other nodes.

    async def _serve_ping(
        self, handler: Handler, request: dht_pb2.PingRequest, context: P2PContext
    ) -> dht_pb2.PingResponse:
        """Answer a ping. The time in the answer is the swarm's instead of this machine's."""
        response = await handler(request, context)
        response.dht_time += self.clock_offset
        return response

    async def _answers_with_id(self, peer: PeerID, claimed: bytes) -> bool:
        """Call a node back and return True if it answers with the DHT id that it claims. An ordinary hivemind
        node requires this check from the node through which it joins, and ends if the check fails. Its id,
        which is not the hash of its peer id, enters no routing table here even if the check succeeds."""
        try:
            async with asyncio.timeout(PING_SECONDS):
                call = self._daemon.p2p.call_protobuf_handler
                ping = call(peer, PING, dht_pb2.PingRequest(), dht_pb2.PingResponse)
                answer = await self._unless_ended(ping)
        except (*DAEMON_ERRORS, TimeoutError):
            return False
        return bool(answer.peer.node_id == claimed)

    async def _serve_store(
        self, handler: Handler, request: dht_pb2.StoreRequest, context: P2PContext
    ) -> dht_pb2.StoreResponse:
        """Check each value of a store request, and pass the accepted ones to hivemind. The response says for
        each key whether its value was stored. After a bad signature or an exceeded budget, the rest is
        refused unchecked. A request has parallel lists (columns); Malformed if their lengths differ."""
        count = len(request.keys)
        sender = str(context.remote_id)
        stored = [True] * count
        accepted: list[Item] = []
        columns = (request.subkeys, request.values, request.expiration_time, request.in_cache)
        if count > KEYS_PER_REQUEST or any(len(column) != count for column in columns):
            self._refused(sender, f"a store request of {count} keys with unequal or too many columns")
            raise Malformed("refused")
        storer = Storer(await self.range_of(sender), sender)
        for index in range(count):
            try:
                if request.in_cache[index]:
                    raise Malformed("it asks for the cache, which is not used")
                for item in split_values(
                    index,
                    request.keys[index],
                    request.subkeys[index],
                    request.values[index],
                    request.expiration_time[index],
                ):
                    self._check(item, storer)
                    accepted.append(item)
            except WireError as error:
                stored[index] = False
                self._refused(sender, str(error))
                if isinstance(error, (BadSignature, Backlog)):  # An honest node verifies before it sends.
                    stored[index:] = [False] * (count - index)
                    break
        for item in accepted:
            if (item.key, item.tag) not in self.storage:  # A later item of this request has evicted it.
                stored[item.index] = False
        accepted = [item for item in accepted if (item.key, item.tag) in self.storage]
        reduced = dht_pb2.StoreRequest(peer=request.peer)
        for item in accepted:
            reduced.keys.append(item.key)
            reduced.subkeys.append(item.tag)
            reduced.values.append(item.value)
            reduced.expiration_time.append(item.expires - self.clock_offset)
            reduced.in_cache.append(False)
        response = await handler(reduced, context)
        for item, ok in zip(accepted, response.store_ok, strict=True):
            stored[item.index] = stored[item.index] and ok
        del response.store_ok[:]
        response.store_ok.extend(stored)
        return response

    async def _serve_find(
        self, handler: Handler, request: dht_pb2.FindRequest, context: P2PContext
    ) -> dht_pb2.FindResponse:
        """Look up the keys of a find request, and answer within the requester's budget. Keys whose answers
        exceed it get "not found". Expiries are converted to the swarm's time. Raises Malformed for repeated
        or invalid keys."""
        keys = request.keys
        # A repeated key would repeat its answer, which takes memory before it is cut to the budget.
        if len(keys) > KEYS_PER_REQUEST or len(set(keys)) < len(keys) or any(len(key) != 20 for key in keys):
            self._refused(str(context.remote_id), "a find request with impossible keys")
            raise Malformed("refused")
        requester = await self._describe_requester(context.remote_id)
        limit = self.answers.limit(requester)
        fitting_count = self.answers.fitting(keys, limit)
        response = dht_pb2.FindResponse()
        if fitting_count:
            reduced = dht_pb2.FindRequest(keys=keys[:fitting_count], peer=request.peer)
            response = await handler(reduced, context)
        for result in response.results:
            if result.type == dht_pb2.FOUND_DICTIONARY:
                result.value = shifted_dictionary(result.value, self.clock_offset)
            result.expiration_time += self.clock_offset
        self.answers.cut(response, limit)
        response.results.extend(NOTHING for _ in keys[fitting_count:])
        if await self.answers.may_send(response.ByteSize(), requester):
            return response
        return dht_pb2.FindResponse(results=[NOTHING] * len(keys))

    # Responses of other nodes.

    def _filter_values(self, peer: str, request: dht_pb2.FindRequest, response: dht_pb2.FindResponse) -> None:
        """Filter `peer`'s response to a find request, in place. Nodes with wrong ids and values that do not
        verify are removed. After a bad signature, the key's later values are removed too. Expiries are
        converted to this machine's time."""
        for key, result in zip(request.keys, response.results, strict=False):
            nearest = zip(result.nearest_node_ids, result.nearest_peer_ids, strict=False)
            valid_nodes = [
                (node, peer_id)
                for node, peer_id in islice(nearest, NEAREST)
                if len(peer_id) <= PEER_ID_BYTES and node == node_id_of(peer_id)
            ]
            del result.nearest_node_ids[:], result.nearest_peer_ids[:]
            result.nearest_node_ids.extend(node for node, _ in valid_nodes)
            result.nearest_peer_ids.extend(peer_id for _, peer_id in valid_nodes)
            if result.type == dht_pb2.NOT_FOUND:
                continue
            tag = DICTIONARY if result.type == dht_pb2.FOUND_DICTIONARY else PLAIN
            verified: list[Item] = []
            try:
                for item in split_values(0, key, tag, result.value, result.expiration_time):
                    try:
                        self._prove(item)
                        verified.append(item)
                    except BadSignature as error:
                        self._refused(peer, str(error))
                        break  # An honest node has verified everything that it sends.
                    except WireError as error:
                        self._refused(peer, str(error))
            except WireError as error:
                self._refused(peer, str(error))
            if not verified:
                result.type = dht_pb2.NOT_FOUND
                result.ClearField("value")
                continue
            result.expiration_time = max(item.expires for item in verified) - self.clock_offset
            if tag == DICTIONARY:
                result.value = dictionary(verified, -self.clock_offset)

    def _measure_clock(
        self, peer: PeerID, response: dht_pb2.PingResponse, sent: float, received: float
    ) -> None:
        """If the peer is a clock witness, record its clock's offset from its ping response. `sent` and
        `received` are this machine's times of the call; the answer is taken to be from halfway between."""
        if str(peer) in self.witnesses and isfinite(response.dht_time) and response.dht_time > 0:
            self.offsets[str(peer)] = response.dht_time - (sent + received) / 2

    def _shifted_store(self, request: dht_pb2.StoreRequest) -> dht_pb2.StoreRequest:
        """Return a copy of this node's store request with its expiries in the swarm's time."""
        shifted = dht_pb2.StoreRequest()
        shifted.CopyFrom(request)
        for index, tag in enumerate(shifted.subkeys):
            shifted.expiration_time[index] += self.clock_offset
            if tag == DICTIONARY:
                shifted.values[index] = shifted_dictionary(shifted.values[index], self.clock_offset)
        return shifted

    # The checks.

    @staticmethod
    def _clear_false_id(info: dht_pb2.NodeInfo, peer: PeerID) -> None:
        """Clear a DHT id that is not the peer's. hivemind then puts the node into no routing table."""
        if info.node_id and info.node_id != node_id(peer):
            info.ClearField("node_id")

    def now(self) -> float:
        """Return the swarm's time in seconds since 1970."""
        return time.time() + self.clock_offset

    def _prove(self, item: Item) -> VerifiedValue:
        """Verify a value and return its signed facts; results are cached by the value's hash. Raises a
        WireError unless the signature, key, subkey and expiry are valid. A new order is remembered."""
        digest = hashlib.sha256(item.value).digest()
        proof = self._verified.get(digest)
        if proof is None:
            proof = verify_value(item.value, plain=item.tag == PLAIN)
            self._verified[digest] = proof
            if len(self._verified) > _VERIFIED:
                self._verified.popitem(last=False)
        # A value is refused only if it is invalid by both clocks: this machine's and the swarm's. Other peers
        # set the latter and might lie.
        earlier_now, now = sorted((time.time(), self.now()))
        subkey = None if item.tag == PLAIN else unpack_subkey(item.tag)
        latest = proof.expires_seconds
        if latest is None:
            latest = now + MANIFEST_SECONDS + SKEW_SECONDS
        if item.key != proof.key or subkey != proof.subkey:
            raise Malformed("a value under a key or subkey that is not its own")
        if proof.issued_seconds > now + SKEW_SECONDS:
            raise Malformed(f"a record signed {proof.issued_seconds - now:.0f} s in the future")
        if not earlier_now - SKEW_SECONDS < item.expires <= latest + 1e-3:  # 1e-3 for rounding.
            expires, end = item.expires - now, latest - now
            raise Malformed(f"an expiry {expires:.0f} s from now, where {end:.0f} is the end")
        is_order = subkey is None and proof.sequence != 0  # A manifest, also without subkey, has sequence 0.
        if is_order:
            self._remember_order(item, proof.sequence)
        return proof

    def _check(self, item: Item, storer: Storer) -> None:
        """Verify and account for a value that another peer wants to store here. Charge that storer for the
        signature checks. Raises Backlog if its budget is used up, or a WireError to refuse the value."""
        now = asyncio.get_running_loop().time()
        seconds_to_wait = self._checks.wait(PeerId(storer.peer), now)
        if seconds_to_wait:
            raise Backlog("more signatures than are checked for one peer")
        checked = Checked()
        token = CHECKED.set(checked)  # `verify` counts its checks in this context variable.
        try:
            self._admit(item, storer)
        finally:
            CHECKED.reset(token)
            self._checks.spend(PeerId(storer.peer), checked.count, now)

    def _remember_order(self, item: Item, sequence: int) -> None:
        """Keep an order if it is the newest seen under its key. At most `_ORDERS` orders are kept."""
        known_sequence, _ = self.orders.get(item.key, (-1, b""))
        if known_sequence < sequence:
            self.orders[item.key] = (sequence, item.value)
            while len(self.orders) > _ORDERS:
                self.orders.popitem(last=False)

    def _admit(self, item: Item, storer: Storer | None) -> None:
        """Verify a value and account for its storage, which may evict other values. `storer` is None if this
        node stores it for itself. Raises a WireError for an invalid or outdated value, or without space."""
        proof = self._prove(item)
        self.storage.sweep(self.now())
        name = (item.key, item.tag)
        old = self.storage.get(name)
        if old is not None and (proof.sequence, item.expires) < (old.sequence, old.expires):
            raise Malformed("an older record than the one that is kept")
        if old is not None and storer is not None and item.tag != MSGPackSerializer.dumps(storer.peer):
            storer = old.storer  # A peer that passes on another peer's value does not become its storer.
        self.storage.put(name, StoredValue(proof.sequence, item.expires, len(item.value), storer))

    def note(self, key: bytes, tag: bytes, value: bytes, expires: float) -> None:
        """Account for a value that this node itself stores. Raises a WireError as for other peers' values."""
        self._admit(Item(0, key, tag, value, expires), None)
