"""Strangers against the DHT and the handlers of a real peer: nothing they send is kept, or ends it."""

import asyncio
import functools
import hashlib
import math
import time

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm import canonical_and_signature

from protocols.daemon.hivemind_imports import (
    DHTID,
    DictionaryDHTValue,
    MSGPackSerializer,
    P2PHandlerError,
    PeerID,
    dht_pb2,
)
from protocols.daemon.p2pd import LOOPBACK, Daemon
from protocols.dht.directory import DhtDirectory
from protocols.dht.storage import STORAGE_LIMIT
from protocols.dht.stored_values import (
    DICTIONARY,
    PEERS_PER_KEY,
    PLAIN,
    Item,
    key_id,
    node_id,
    node_id_of,
    split_values,
    stored_value,
    unpack_subkey,
    verify_value,
)
from protocols.dht.validator import ValidatedP2P
from protocols.errors import WireError
from protocols.messages.table import PeerRecord
from protocols.signed.identity import Identity, create, verify
from protocols.signed.opinions import OpinionDocument, opinions_key, seal_opinion
from protocols.signed.orders import seal_order
from protocols.signed.records import RECORD_SECONDS, manifest_key, seal_record, stage_key
from protocols.signed.registry_entry import RUNS_KEY, seal_listing
from protocols.signed.stored_orders import order_key, stored_order
from swarmnet.identifiers import RunId
from swarmnet.resources.allowances import CHECKS_AT_ONCE, Checks
from swarmnet.run.canonical_form import owner_statement
from swarmnet.run.owner_orders import OwnerOrders

RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
KEY = key_id(stage_key(RUN, 0))
ALICE, BOB = Identity.from_seed(b"alice"), Identity.from_seed(b"bob")
DEADLINE = 60.0


def record(identity=ALICE, run=RUN, stage=0, issued=None):
    issued = time.time() if issued is None else issued
    content = PeerRecord(identity.peer_id, stage, "worker", [], 1, 1.0, "0")
    return stored_value(bytes.fromhex(run) + seal_record(identity, run, content, issued))


def tag(peer=ALICE.peer_id):
    return MSGPackSerializer.dumps(peer)


def packed(entries, code=0x50):
    inner = msgpack.packb([None, 0.0, [list(entry) for entry in entries]])
    return msgpack.packb(msgpack.ExtType(code, inner))


def nested_extension(levels):
    data = b"\xc0"
    for _ in range(levels):
        data = b"\xc9" + len(data).to_bytes(4, "big") + b"\x40" + data
    return data


def soon(seconds=60.0):
    return time.time() + seconds


class StillDaemon:
    """A p2pd for tests of the gate alone: nothing runs."""

    ending = None

    def __init__(self):
        self.connected = {}
        """Peer -> the address that it is connected from."""

    async def connections(self, deadline_seconds):
        return list(self.connected.items())


@pytest.fixture
async def gate():
    refusals = []
    gate = ValidatedP2P(StillDaemon(), lambda peer, reason: refusals.append(reason))
    gate.refusals = refusals
    gate.gone = []
    gate.evicted = gate.gone.append
    return gate


async def stored(gate, *columns, by=BOB, at=""):
    """Ask the gate to store (key, subkey, value, expiry) items, as `by` connected from `at`; what it lets
    through to hivemind."""
    gate._daemon.connected[by.peer_id] = at
    gate._ranges.clear()
    reached = []

    async def hivemind(request, context):
        reached.extend(
            zip(request.keys, request.subkeys, request.values, request.expiration_time, strict=True)
        )
        return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys))

    keys, tags, values, expiries = zip(*columns, strict=True)
    request = dht_pb2.StoreRequest(
        keys=keys, subkeys=tags, values=values, expiration_time=expiries, in_cache=[False] * len(keys)
    )

    class Context:
        remote_id = PeerID.from_base58(by.peer_id)

    response = await gate._serve_store(hivemind, request, Context())
    return list(response.store_ok), reached


async def test_an_honest_record_and_manifest_pass(gate):
    canonical = b'{"owner":"%s"}' % ALICE.peer_id.encode()
    run = RunId(hashlib.sha256(canonical).hexdigest())
    manifest = stored_value(canonical_and_signature(ALICE, canonical))
    ok, reached = await stored(
        gate,
        (KEY, tag(), record(), soon()),
        (key_id(manifest_key(run)), PLAIN, manifest, soon()),
        (KEY, DICTIONARY, packed([(BOB.peer_id, record(BOB), soon())]), soon()),
    )
    assert ok == [True, True, True]
    assert len(reached) == 3


def order(identity=ALICE, run=RUN, sequence=None, paused=True):
    sequence = int(time.time() * 1e6) if sequence is None else sequence
    sealed = seal_order(identity, run, OwnerOrders(sequence=sequence, paused=paused))
    return stored_value(stored_order(run, sealed.data))


def order_place(owner=ALICE):
    return key_id(order_key(RUN, owner.peer_id))


def listing(identity=ALICE, run=RUN):
    signature = identity.sign(owner_statement(run))
    return stored_value(seal_listing(run, identity.peer_id, signature))


async def test_an_order_and_a_listing_pass_and_an_older_order_replaces_nothing(gate):
    now = time.time()
    place, earlier = order_place(), order(sequence=int((now - 60) * 1e6), paused=False)
    listed = (key_id(RUNS_KEY), tag(RUN), listing(), soon())
    newer = order()
    assert (await stored(gate, (place, PLAIN, newer, now + 500), listed))[0] == [True, True]
    assert (await stored(gate, (place, PLAIN, earlier, now + 590)))[0] == [False]
    find, response = dht_pb2.FindRequest(keys=[place]), dht_pb2.FindResponse()
    response.results.add(type=dht_pb2.FOUND_REGULAR, value=earlier, expiration_time=now + 590)
    gate._filter_values("who has not heard", find, response)
    assert gate.orders[place][1] == newer, "readers keep the newest that anybody showed"


def opinion(identity=ALICE, document="", age=0.0):
    return seal_opinion(identity, RUN, OpinionDocument(document, "good"), time.time() - age)


def opinion_item(opinion, key=None, subkey=None, expires=None):
    return (
        key_id(key or opinions_key(RUN, opinion.kind)),
        tag(subkey or opinion.subkey),
        stored_value(opinion.data),
        expires or opinion.expires_seconds - 1,
    )


async def test_opinions_pass_and_an_older_one_of_the_same_author_replaces_nothing(gate):
    newer, older = opinion(), opinion(age=60.0)
    objections = [opinion(document=f"place {number}") for number in range(20)]
    ok, reached = await stored(gate, opinion_item(newer), *map(opinion_item, objections))
    assert ok == [True] * 21
    assert len(reached) == 21
    assert (await stored(gate, opinion_item(older)))[0] == [False]


FORGERIES = {
    "an endorsement as an objection": lambda: opinion_item(opinion(), key=opinions_key(RUN, "objection")),
    "an opinion on another run": lambda: opinion_item(opinion(), key=opinions_key(OTHER_RUN, "endorsement")),
    "another's opinion": lambda: opinion_item(opinion(), subkey=opinion(BOB).subkey),
    "an opinion of tomorrow": lambda: opinion_item(opinion(age=-86400.0)),
    "an opinion for ever": lambda: opinion_item(opinion(), expires=soon(1e8)),
    "an opinion of last year": lambda: opinion_item(opinion(age=3e7), expires=soon()),
    "another owner's order": lambda: (order_place(), PLAIN, order(BOB), soon()),
    "an order for another run": lambda: (order_place(), PLAIN, order(run=OTHER_RUN), soon()),
    "an order in the place of a record": lambda: (KEY, tag(), order(), soon()),
    "an order of tomorrow": lambda: (order_place(), PLAIN, order(sequence=int(soon(86400) * 1e6)), soon()),
    "an order for ever": lambda: (order_place(), PLAIN, order(), soon(1e6)),
    "a listing of another run": lambda: (key_id(RUNS_KEY), tag(OTHER_RUN), listing(), soon()),
    "a listing elsewhere": lambda: (KEY, tag(RUN), listing(), soon()),
    "a listing that nobody signed": lambda: (key_id(RUNS_KEY), tag(RUN), stored_value(bytes(128)), soon()),
    "another's name": lambda: (KEY, tag(BOB.peer_id), record(ALICE), soon()),
    "another stage's key": lambda: (key_id(stage_key(RUN, 1)), tag(), record(), soon()),
    "another run's record": lambda: (KEY, tag(), record(run=OTHER_RUN), soon()),
    "no subkey": lambda: (KEY, PLAIN, record(), soon()),
    "a plain value that would wipe the stage": lambda: (KEY, PLAIN, stored_value(b"gone"), soon(1e6)),
    "unsigned": lambda: (KEY, tag(), stored_value(b"x" * 300), soon()),
    "a flipped bit": lambda: (KEY, tag(), record()[:-1] + bytes([record()[-1] ^ 1]), soon()),
    "a far expiry": lambda: (KEY, tag(), record(), soon(RECORD_SECONDS + 60)),
    "the year 5138": lambda: (KEY, tag(), record(), 1e11),
    "an infinite expiry": lambda: (KEY, tag(), record(), math.inf),
    "an expiry that is no number": lambda: (KEY, tag(), record(), math.nan),
    "signed in the future": lambda: (KEY, tag(), record(issued=soon(3600)), soon(3600)),
    "too old": lambda: (KEY, tag(), record(issued=soon(-3600)), soon()),
    "too long": lambda: (KEY, tag(), stored_value(bytes(5000)), soon()),
    "text": lambda: (KEY, tag(), msgpack.packb("x" * 300), soon()),
    "nothing": lambda: (KEY, tag(), b"", soon()),
    "a short key": lambda: (KEY[:19], tag(), record(), soon()),
    "nested arrays": lambda: (KEY, tag(), b"\x91" * 3000 + b"\xc0", soon()),
    "nested extensions": lambda: (KEY, DICTIONARY, nested_extension(5_000), soon()),
    "nested extensions as subkey": lambda: (KEY, nested_extension(5_000), record(), soon()),
    "a dictionary of nested extensions": lambda: (
        KEY, DICTIONARY, msgpack.packb(msgpack.ExtType(0x50, nested_extension(5_000))), soon()),
    "a dictionary of another type": lambda: (KEY, DICTIONARY, packed([], code=0x40), soon()),
    "a dictionary in a dictionary": lambda: (
        KEY, DICTIONARY, msgpack.packb(msgpack.ExtType(0x50, packed([]))), soon()),
    "a dictionary without parts": lambda: (
        KEY, DICTIONARY, msgpack.packb(msgpack.ExtType(0x50, b"\x90")), soon()),
    "entries of the wrong types": lambda: (KEY, DICTIONARY, packed([(1, 2, 3)]), soon()),
    "an entry that cannot be hashed": lambda: (KEY, DICTIONARY, packed([([], b"", 1.0)]), soon()),
    "one forgery among honest records": lambda: (
        KEY, DICTIONARY, packed([(BOB.peer_id, record(ALICE), soon())]), soon()),
    "a million empty maps": lambda: (
        KEY, DICTIONARY, b"\xdd" + (1_000_000).to_bytes(4, "big") + b"\x80" * 1_000_000, soon()),
    "not MessagePack": lambda: (KEY, DICTIONARY, b"\xc1" * 10, soon()),
}  # fmt: skip


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES.keys())
async def test_a_forgery_never_reaches_hivemind_and_is_counted(gate, forgery):
    ok, reached = await stored(gate, forgery())
    assert (ok, reached) == ([False], [])
    assert len(gate.refusals) == 1


async def test_the_cache_is_not_for_strangers_and_columns_must_be_equal(gate):
    async def hivemind(request, context):
        assert not request.keys
        return dht_pb2.StoreResponse()

    class Context:
        remote_id = PeerID.from_base58(BOB.peer_id)

    request = dht_pb2.StoreRequest(
        keys=[KEY], subkeys=[tag()], values=[record()], expiration_time=[soon()], in_cache=[True]
    )
    assert list((await gate._serve_store(hivemind, request, Context())).store_ok) == [False]
    del request.in_cache[:]
    with pytest.raises(WireError):
        await gate._serve_store(hivemind, request, Context())


async def test_an_older_record_is_refused_before_it_can_end_the_newer_one(gate):
    now = time.time()
    old, new = record(issued=now - 50), record(issued=now)
    assert (await stored(gate, (KEY, tag(), new, now + 110)))[0] == [True]
    assert (await stored(gate, (KEY, tag(), old, now + 60)))[0] == [False]
    assert (await stored(gate, (KEY, tag(), new, now + 20)))[0] == [False]
    assert (await stored(gate, (KEY, tag(), new, now + 110)))[0] == [True]


async def test_storage_is_bounded_per_peer_and_in_all(gate, monkeypatch):
    many = [(key_id(stage_key(RUN, n)), tag(), record(stage=n), soon()) for n in range(20)]
    assert sum((await stored(gate, *many))[0]) == 16
    gate.storage._pools[False].limit = gate.storage.kept_bytes + 100
    assert (await stored(gate, (KEY, tag(BOB.peer_id), record(BOB), soon())))[0] == [True]
    assert len(gate.gone) == 1, "another one has made room"
    assert gate.storage.kept_bytes <= gate.storage._pools[False].limit
    gate.clock_offset = 1000.0  # later all of it has expired
    fresh = time.time() + 1000.0
    ok, _ = await stored(gate, (KEY, tag(BOB.peer_id), record(BOB, issued=fresh), fresh + 60))
    assert ok == [True]
    assert len(gate.storage) == 1


async def test_a_request_is_refused_at_its_first_forged_record(gate):
    forged = [(KEY, tag(), record()[:-2] + number.to_bytes(2, "big"), soon()) for number in range(1, 101)]
    ok, reached = await stored(gate, (KEY, tag(BOB.peer_id), record(BOB), soon()), *forged)
    assert (ok, len(reached), len(gate.refusals)) == ([True] + [False] * 100, 1, 1)


async def test_what_one_storer_makes_a_node_check_has_the_rate_of_links_and_others_are_not_hurt(gate):
    gate._checks = Checks(per_second=0.001, at_once=8)
    rows = crowd(0, 20)
    verify.cache_clear()  # Who made them here has checked them.
    ok, _ = await stored(gate, *rows, by=BOB)
    assert ok == [True] * 9 + [False] * 11, "the last one overdraws"
    assert (await stored(gate, (KEY, tag(), record(), soon()), by=ALICE))[0] == [True]
    ok, _ = await stored(gate, *crowd(0, 8), by=ALICE)
    assert all(ok), "what was checked before costs nobody anything"


async def test_a_node_may_hand_over_all_records_of_a_full_stage_at_once(gate):
    assert PEERS_PER_KEY < CHECKS_AT_ONCE
    entries = [(unpack_subkey(subkey), value, until) for _, subkey, value, until in crowd(0, PEERS_PER_KEY)]
    assert (await stored(gate, (KEY, DICTIONARY, packed(entries), soon())))[0] == [True]
    assert len(gate.storage) == PEERS_PER_KEY


CROWD, HOME = "/ip4/198.51.100.7/tcp/9", "/ip4/203.0.113.5/tcp/31337"
"""Where the many come from, and where somebody else does."""


@functools.cache
def crowd(first, count):
    """Records of so many fresh keys, all under one stage's key."""
    keys = [Identity.from_seed(b"fresh %d" % number) for number in range(first, first + count)]
    return [(KEY, tag(each.peer_id), record(each), soon()) for each in keys]


async def test_who_fills_a_stages_place_from_one_network_shuts_nobody_out_from_another(gate):
    assert all((await stored(gate, *crowd(0, PEERS_PER_KEY), at=CROWD))[0])
    home = (KEY, tag(), record(), soon())
    assert (await stored(gate, home, by=ALICE, at=HOME))[0] == [True]
    assert len(gate.gone) == 1
    ok, reached = await stored(gate, *crowd(PEERS_PER_KEY, 200), at=CROWD)
    assert sum(ok) == len(reached) >= 150, "some push out others of the same request"
    assert (KEY, tag()) in gate.storage, "the crowd only pushes out itself"
    assert set().union(*gate.storage._per_key[KEY].values()) == {name[1] for name in gate.storage._values}
    assert len(gate.storage) == PEERS_PER_KEY


async def test_where_all_share_one_network_who_stored_most_makes_room(gate):
    await stored(gate, *crowd(0, PEERS_PER_KEY), at="/ip4/127.0.0.1/tcp/5")
    home = (KEY, tag(), record(), soon())
    assert (await stored(gate, home, by=ALICE, at="/ip4/127.0.0.1/tcp/6"))[0] == [True]
    await stored(gate, *crowd(PEERS_PER_KEY, 200), at="/ip4/127.0.0.1/tcp/5")
    assert (KEY, tag()) in gate.storage


async def test_a_crowd_of_many_networks_pushes_out_no_record_of_a_linked_peer(gate):
    gate.linked = lambda: [ALICE.peer_id]
    await stored(gate, (KEY, tag(), record(), soon()), by=ALICE, at=HOME)
    for number in range(4):
        part = crowd(0, 4 * (PEERS_PER_KEY // 3))[number::4]
        await stored(gate, *part, at=f"/ip4/198.51.{number}.7/tcp/9")
    assert len(gate.storage) == PEERS_PER_KEY
    assert (KEY, tag()) in gate.storage


async def test_who_stores_again_what_another_has_stored_cannot_have_it_pushed_out(gate):
    await stored(gate, (KEY, tag(), record(), soon()), by=ALICE, at=HOME)
    await stored(gate, *crowd(0, PEERS_PER_KEY - 1), (KEY, tag(), record(), soon()), at=CROWD)
    await stored(gate, *crowd(PEERS_PER_KEY, 200), at=CROWD)
    assert (KEY, tag()) in gate.storage


async def test_records_without_end_leave_room_for_orders_and_manifests(gate):
    records, shared = gate.storage._pools[False], gate.storage._pools[True]
    assert records.limit + shared.limit == STORAGE_LIMIT
    records.limit = 40_000
    assert all((await stored(gate, *crowd(0, PEERS_PER_KEY), at=CROWD))[0][-100:])
    assert 39_000 < records.size <= records.limit
    canonical = b'{"owner":"%s"}' % ALICE.peer_id.encode()
    run = RunId(hashlib.sha256(canonical).hexdigest())
    manifest = stored_value(canonical_and_signature(ALICE, canonical))
    wanted = (order_place(), PLAIN, order(), soon()), (key_id(manifest_key(run)), PLAIN, manifest, soon())
    assert (await stored(gate, *wanted, by=ALICE, at=HOME))[0] == [True, True]
    shared.limit = shared.size + 2000
    others = [Identity.from_seed(b"owner %d" % number) for number in range(60)]
    orders = [(order_place(each), PLAIN, order(each), soon()) for each in others]
    await stored(gate, *orders, at=CROWD)
    assert {(key, each) for key, each, _, _ in wanted} <= gate.storage._values.keys()


async def test_an_answer_that_grows_too_long_is_cut(gate):
    longest = DictionaryDHTValue()
    for n in range(PEERS_PER_KEY):
        longest.store(f"{n:052}", bytes(4096 + 5), soon())

    async def hivemind(request, context):
        response = dht_pb2.FindResponse()
        for _ in request.keys:
            value = MSGPackSerializer.dumps(longest)
            response.results.add(type=dht_pb2.FOUND_DICTIONARY, value=value, expiration_time=soon())
        return response

    class Context:
        remote_id = PeerID.from_base58(BOB.peer_id)

    keys = [KEY, bytes(20), bytes(19) + b"1"]
    gate.neighbours = lambda: [Context.remote_id]
    response = await gate._serve_find(hivemind, dht_pb2.FindRequest(keys=keys), Context())
    assert [result.type for result in response.results] == [dht_pb2.FOUND_DICTIONARY] + [
        dht_pb2.NOT_FOUND
    ] * 2
    assert response.ByteSize() < 4 * 1024 * 1024 - 100
    with pytest.raises(WireError):  # Or 20 kB would make it build the same megabytes a thousand times.
        await gate._serve_find(hivemind, dht_pb2.FindRequest(keys=[KEY] * 2), Context())


async def test_an_entry_under_a_name_that_is_none_does_not_hide_the_others(gate):
    mine = record()
    response = dht_pb2.FindResponse()
    entries = [(ALICE.peer_id.encode(), mine, soon()), (ALICE.peer_id, mine, soon())]
    response.results.add(type=dht_pb2.FOUND_DICTIONARY, value=packed(entries), expiration_time=soon())
    gate._filter_values("stranger", dht_pb2.FindRequest(keys=[KEY]), response)
    assert list(MSGPackSerializer.loads(response.results[0].value).data) == [ALICE.peer_id]


@pytest.mark.parametrize("tag", [msgpack.packb(b"name"), b"\xd9\x04name", b"\xa4nam\xff", b"\x01"])
def test_a_subkey_has_one_spelling(tag):
    assert unpack_subkey(msgpack.packb("name")) == "name"
    with pytest.raises(WireError):
        unpack_subkey(tag)


async def test_a_name_of_a_megabyte_takes_no_time(gate):
    response = dht_pb2.FindResponse()
    result = response.results.add(type=dht_pb2.NOT_FOUND)
    for raw in (bytes(1 << 20), b"\0" + bytes(1 << 20)):
        result.nearest_peer_ids.append(raw)
        result.nearest_node_ids.append(node_id_of(raw))
    gate._filter_values("stranger", dht_pb2.FindRequest(keys=[KEY]), response)
    assert not response.results[0].nearest_peer_ids


async def test_what_a_hostile_node_answers_is_filtered(gate):
    honest, forged = record(), record(BOB)
    find = dht_pb2.FindRequest(keys=[KEY, KEY, KEY, KEY])
    response = dht_pb2.FindResponse()
    answers = [
        (dht_pb2.FOUND_DICTIONARY, packed([(ALICE.peer_id, honest, soon()), ("someone", forged, soon())])),
        (dht_pb2.FOUND_DICTIONARY, packed([])),  # with an endless expiry, it would end the search unfound
        (dht_pb2.FOUND_DICTIONARY, nested_extension(5_000)),
        (dht_pb2.FOUND_REGULAR, stored_value(b"gone")),
    ]
    honest_peer, liar = PeerID.from_base58(ALICE.peer_id), PeerID.from_base58(BOB.peer_id)
    for kind, value in answers:
        result = response.results.add(type=kind, value=value, expiration_time=1e11)
        result.nearest_peer_ids.extend([honest_peer.to_bytes(), liar.to_bytes()])
        result.nearest_node_ids.extend([node_id(honest_peer), b"\x01" * 20])
    gate._filter_values("stranger", find, response)
    kinds = [result.type for result in response.results]
    assert kinds == [dht_pb2.FOUND_DICTIONARY] + [dht_pb2.NOT_FOUND] * 3
    kept = MSGPackSerializer.loads(response.results[0].value)
    assert isinstance(kept, DictionaryDHTValue)
    assert list(kept.data) == [ALICE.peer_id]
    assert response.results[0].expiration_time < soon(61)
    assert all(list(result.nearest_peer_ids) == [honest_peer.to_bytes()] for result in response.results)


@given(st.binary(max_size=600), st.booleans())
def test_random_values_are_refused_without_a_crash(value, plain):
    with pytest.raises(WireError):
        verify_value(value, plain=plain)


@given(st.data())
def test_no_flipped_bit_of_a_record_is_accepted(data):
    value = bytearray(record(issued=1e9))
    at = data.draw(st.integers(0, len(value) - 1))
    value[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(WireError):
        verify_value(bytes(value), plain=False)


@given(st.binary(max_size=300))
def test_random_dictionaries_are_refused_without_a_crash(value):
    try:
        items = list(split_values(0, KEY, DICTIONARY, value, 1.0))
    except WireError:
        return
    assert all(isinstance(item, Item) for item in items)


@pytest.mark.loopback
async def test_what_makes_room_is_gone_from_hiveminds_storage_and_where_a_storer_sits_is_known(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("protocols.dht.storage.PEERS_PER_KEY", 3)
    peers = []
    for name in ("node", "stranger"):
        create(tmp_path / name)
        peers.append(await Daemon.start(tmp_path / name, LOOPBACK))
    directory = await DhtDirectory.start(peers[0])
    await peers[1].connect(peers[0].peer, peers[0].addresses, DEADLINE)
    rows = crowd(0, 5)
    keys, tags, values, expiries = zip(*rows, strict=True)
    request = dht_pb2.StoreRequest(
        keys=keys, subkeys=tags, values=values, expiration_time=expiries, in_cache=[False] * len(rows)
    )
    for _ in range(2):
        async with asyncio.timeout(DEADLINE):
            answer = await peers[1].p2p.call_protobuf_handler(
                PeerID.from_base58(peers[0].peer), "DHTProtocol.rpc_store", request, dht_pb2.StoreResponse
            )
    account = directory._gate.storage
    assert sum(answer.store_ok) >= 1
    assert {kept.storer.range for kept in account._values.values()} == {"127.0.0.0/24"}
    kept = directory._node.protocol.storage.get(DHTID.from_bytes(KEY)).value
    assert {MSGPackSerializer.dumps(peer) for peer, _ in kept.items()} == {tag for _, tag in account._values}
    assert len(account) == 3
    await directory.close()
    for daemon in peers:
        await daemon.stop()


@pytest.mark.loopback
async def test_a_real_node_survives_hostile_calls_and_still_finds_the_honest(tmp_path):
    peers = []
    for name in ("victim", "honest", "stranger"):
        identity = create(tmp_path / name)
        daemon = await Daemon.start(tmp_path / name, LOOPBACK)
        peers.append((identity, daemon, await DhtDirectory.start(daemon) if name != "stranger" else None))
    (_, victim, directory), (identity, _, announcing), (_, stranger, _) = peers
    await announcing.bootstrap([f"{victim.addresses[0]}/p2p/{victim.peer}"], DEADLINE)
    await stranger.connect(PeerID.from_base58(victim.peer).to_base58(), victim.addresses, DEADLINE)

    async def call(name, request, response):
        async with asyncio.timeout(DEADLINE):
            return await stranger.p2p.call_protobuf_handler(
                PeerID.from_base58(victim.peer), f"DHTProtocol.{name}", request, response
            )

    for name, forgery in FORGERIES.items():
        key, subkey, value, expiry = forgery()
        request = dht_pb2.StoreRequest(
            keys=[key], subkeys=[subkey], values=[value], expiration_time=[expiry], in_cache=[False]
        )
        request.peer.node_id = b"\x01" * 20  # a place in the id space of its own choice
        response = await call("rpc_store", request, dht_pb2.StoreResponse)
        assert list(response.store_ok) == [False], name
    with pytest.raises(P2PHandlerError):
        await call("rpc_find", dht_pb2.FindRequest(keys=[b"short"]), dht_pb2.FindResponse)
    assert sum(directory.refusals.values()) == len(FORGERIES) + 1
    assert directory.known_nodes == 1
    content = PeerRecord(identity.peer_id, 0, "worker", [], 1, 1.0, "0")
    honest_record = seal_record(identity, RUN, content, announcing.now())
    assert await announcing.announce(RUN, 0, honest_record, DEADLINE)
    assert await directory.look_up(RUN, 0, DEADLINE) == {identity.peer_id: honest_record}
    for _, daemon, one in peers:
        if one is not None:
            await one.close()
        await daemon.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}
