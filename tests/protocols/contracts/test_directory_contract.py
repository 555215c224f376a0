"""What every `Directory` must do, asked of each of them."""

import asyncio
import contextlib
import hashlib
import json
from dataclasses import dataclass
from random import Random

import msgspec
import pytest
from swarm import canonical_and_signature

from protocols.daemon.p2pd import LOOPBACK, Daemon
from protocols.dht.directory import DhtDirectory, split_multiaddr
from protocols.errors import BadSignature, Malformed, TooLarge, Unreachable, WireError, WrongRun
from protocols.memory.transport import MemoryNetwork
from protocols.messages.table import PeerRecord
from protocols.signed import records
from protocols.signed.envelope import EnvelopeKind, seal
from protocols.signed.identity import Identity, create
from protocols.signed.opinions import OpinionDocument, seal_opinion
from protocols.signed.orders import seal_order
from protocols.signed.records import (
    RECORD_LIMIT,
    RECORD_SECONDS,
    VERIFIED_AT_ONCE,
    Remembered,
    open_manifest,
    open_record,
    seal_record,
)
from protocols.signed.registry_entry import seal_listing
from swarmnet.identifiers import RunId
from swarmnet.run.canonical_form import owner_statement
from swarmnet.run.owner_orders import OwnerOrders

RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
DEADLINE = 60.0


@dataclass
class Member:
    identity: Identity
    directory: object

    def record(self, run=RUN, age=0.0, **fields):
        return seal_record(self.identity, run, self.plain(**fields), self.directory.now() - age)

    def plain(self, stage=0, round=1, role="worker", addresses=("/ip4/127.0.0.1/tcp/1",)):
        return PeerRecord(self.identity.peer_id, stage, role, list(addresses), round, 100.0, "0.1.0")


class MemoryWorld:
    def __init__(self, folder):
        self.network = MemoryNetwork()

    async def members(self, count):
        members = []
        for n in range(count):
            identity = Identity.from_seed(bytes([n + 1]))
            self.network.transport(identity.peer_id)
            members.append(Member(identity, self.network.directory(identity.peer_id)))
        return members

    async def end(self): ...


class DhtWorld:
    def __init__(self, folder):
        self.folder, self.daemons, self.directories = folder, [], []

    async def members(self, count):
        members = []
        for n in range(count):
            identity = create(self.folder / str(n))
            self.daemons.append(await Daemon.start(self.folder / str(n), LOOPBACK))
            directory = await DhtDirectory.start(self.daemons[-1])
            self.directories.append(directory)
            members.append(Member(identity, directory))
            if n:
                first = f"{self.daemons[0].addresses[0]}/p2p/{self.daemons[0].peer}"
                assert await directory.bootstrap([first], DEADLINE) == 1
        return members

    async def end(self):
        for directory in self.directories:
            await directory.close()
            await directory.close()
        for daemon in self.daemons:
            await daemon.stop()


@pytest.fixture(params=["memory", pytest.param("dht", marks=pytest.mark.loopback)])
async def world(request, tmp_path):
    world = {"memory": MemoryWorld, "dht": DhtWorld}[request.param](tmp_path)
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    yield world
    await world.end()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await asyncio.sleep(0)
    assert complaints == []


async def test_what_one_announces_all_find_and_the_newest_counts(world):
    members = await world.members(3)
    for member in members:
        assert await member.directory.announce(RUN, 0, member.record(round=1), DEADLINE)
    newer = members[0].record(round=2)
    assert await members[0].directory.announce(RUN, 0, newer, DEADLINE)
    for member in members:
        found = await member.directory.look_up(RUN, 0, DEADLINE)
        assert set(found) == {other.identity.peer_id for other in members}
        assert found[members[0].identity.peer_id] == newer
        assert open_record(found[members[1].identity.peer_id], RUN).record.round == 1
        assert await member.directory.look_up(RUN, 1, DEADLINE) == {}
        assert await member.directory.look_up(OTHER_RUN, 0, DEADLINE) == {}


async def test_who_moves_to_another_stage_is_found_there_only(world):
    mover, other = await world.members(2)
    await mover.directory.announce(RUN, 0, mover.record(stage=0, age=1.0), DEADLINE)
    assert set(await other.directory.look_up(RUN, 0, DEADLINE)) == {mover.identity.peer_id}
    await mover.directory.announce(RUN, 1, mover.record(stage=1), DEADLINE)
    assert set(await other.directory.look_up(RUN, 1, DEADLINE)) == {mover.identity.peer_id}
    assert await other.directory.look_up(RUN, 0, DEADLINE) == {}


async def test_an_older_record_does_not_replace_or_end_a_newer_one(world):
    member, other = await world.members(2)
    old, new = member.record(age=60.0, round=1), member.record(round=2)
    await member.directory.announce(RUN, 0, new, DEADLINE)
    with contextlib.suppress(Malformed):  # the replayer's own node may refuse it already
        await other.directory.announce(RUN, 0, old, DEADLINE)
    found = await other.directory.look_up(RUN, 0, DEADLINE)
    assert found == {member.identity.peer_id: new}


async def test_a_record_that_has_expired_or_was_signed_in_the_future_is_refused(world):
    member, _ = await world.members(2)
    for age in (RECORD_SECONDS + 5, -60.0):
        with pytest.raises(Malformed):
            await member.directory.announce(RUN, 0, member.record(age=age), DEADLINE)


async def test_what_nobody_would_take_is_refused_where_it_is_made(world):
    member, other = await world.members(2)
    with pytest.raises(WrongRun):
        await member.directory.announce(RUN, 0, member.record(run=OTHER_RUN), DEADLINE)
    with pytest.raises(Malformed):
        await member.directory.announce(RUN, 1, member.record(stage=0), DEADLINE)
    for_another = msgspec.msgpack.encode(other.plain())
    sequence = int(member.directory.now() * 1e6)
    data = seal(member.identity, RUN, EnvelopeKind.RECORD, 0, 1, sequence, for_another)
    with pytest.raises(Malformed, match="another peer"):
        await member.directory.announce(RUN, 0, data, DEADLINE)
    with pytest.raises(TooLarge):
        member.record(addresses=["/dns/" + "x" * 251] * 16)
    damaged = bytearray(member.record())
    damaged[-1] ^= 1
    with pytest.raises(BadSignature):
        await member.directory.announce(RUN, 0, bytes(damaged), DEADLINE)


async def test_a_manifest_is_found_by_its_run_id_and_checked(world):
    owner, other, third = await world.members(3)
    canonical = json.dumps({"name": "toy", "owner": owner.identity.peer_id}).encode()
    run = RunId(hashlib.sha256(canonical).hexdigest())
    signed = canonical_and_signature(owner.identity, canonical)
    assert await third.directory.get_manifest(run, DEADLINE) is None
    assert await owner.directory.put_manifest(run, signed, DEADLINE)
    for member in (owner, other, third):
        assert await member.directory.get_manifest(run, DEADLINE) == signed
    with pytest.raises(WrongRun):
        await owner.directory.put_manifest(RUN, signed, DEADLINE)
    with pytest.raises(BadSignature):
        await owner.directory.put_manifest(run, canonical_and_signature(other.identity, canonical), DEADLINE)


async def test_a_manifest_that_many_put_at_once_is_kept_for_each_of_them(world):
    members = await world.members(4)
    canonical = json.dumps({"name": "toy", "owner": members[0].identity.peer_id}).encode()
    run = RunId(hashlib.sha256(canonical).hexdigest())
    signed = canonical_and_signature(members[0].identity, canonical)
    for _ in range(5):
        puts = (member.directory.put_manifest(run, signed, DEADLINE) for member in members)
        assert await asyncio.gather(*puts) == [True] * 4


async def test_the_newest_order_of_the_owner_is_found_by_all(world):
    owner, other, third = await world.members(3)
    now = owner.directory.now()

    def signed(identity, age, **fields):
        return seal_order(identity, RUN, OwnerOrders(sequence=int((now - age) * 1e6) + 1, **fields))

    older, newer = signed(owner.identity, 60.0), signed(owner.identity, 30.0, paused=True)
    whose = owner.identity.peer_id
    assert await third.directory.get_order(RUN, whose, DEADLINE) is None
    assert await owner.directory.put_order(RUN, older.data, DEADLINE)
    assert await other.directory.put_order(RUN, newer.data, DEADLINE)
    with contextlib.suppress(Malformed):  # Its own node may refuse it.
        await third.directory.put_order(RUN, older.data, DEADLINE)
    await other.directory.put_order(RUN, signed(other.identity, 1.0).data, DEADLINE)
    for member in (owner, other, third):
        assert await member.directory.get_order(RUN, whose, DEADLINE) == newer
    with pytest.raises(WireError):
        await owner.directory.put_order(OTHER_RUN, newer.data, DEADLINE)


async def test_runs_that_want_to_be_found_are(world):
    owner, other = await world.members(2)
    assert await other.directory.listings(DEADLINE) == []
    for run in (RUN, OTHER_RUN):
        entry = seal_listing(run, owner.identity.peer_id, owner.identity.sign(owner_statement(run)))
        assert await owner.directory.put_listing(entry, DEADLINE)
        assert await other.directory.put_listing(entry, DEADLINE)
    for member in (owner, other):
        assert await member.directory.listings(DEADLINE) == [RUN, OTHER_RUN]
    with pytest.raises(BadSignature):
        await owner.directory.put_listing(entry[:-1] + bytes([entry[-1] ^ 1]), DEADLINE)


async def test_opinions_are_found_by_all_and_an_older_one_replaces_nothing(world):
    curator, other, third = await world.members(3)
    now = curator.directory.now()

    def opinion(identity, text="", document="", age=0.0, withdrawn=False):
        return seal_opinion(identity, RUN, OpinionDocument(document, text, withdrawn), now - age)

    first, second = opinion(curator.identity, "good", age=9.0), opinion(curator.identity, "better", age=5.0)
    against = opinion(other.identity, "mine", "ef" * 32)
    assert await third.directory.opinions(RUN, "endorsement", DEADLINE) == []
    assert await curator.directory.put_opinion(second, DEADLINE)
    with contextlib.suppress(Malformed):  # Its own node may refuse it.
        await third.directory.put_opinion(first, DEADLINE)
    assert await other.directory.put_opinion(against, DEADLINE)
    for member in (curator, other, third):
        assert await member.directory.opinions(RUN, "endorsement", DEADLINE) == [second]
        assert await member.directory.opinions(RUN, "objection", DEADLINE) == [against]
        assert await member.directory.opinions(OTHER_RUN, "endorsement", DEADLINE) == []
    assert await curator.directory.put_opinion(opinion(curator.identity, withdrawn=True), DEADLINE)
    assert await third.directory.opinions(RUN, "endorsement", DEADLINE) == []
    with pytest.raises(Malformed):
        await other.directory.put_opinion(opinion(other.identity, "of tomorrow", age=-60.0), DEADLINE)


async def test_who_is_alone_is_told_that_nobody_stored_it(world):
    (member,) = await world.members(1)
    assert not await member.directory.announce(RUN, 0, member.record(), DEADLINE)
    assert set(await member.directory.look_up(RUN, 0, DEADLINE)) == {member.identity.peer_id}


# Only the DHT.


@pytest.mark.loopback
async def test_a_bootstrap_that_is_silent_is_named_and_another_one_is_enough(tmp_path):
    world = DhtWorld(tmp_path)
    first, _second = await world.members(2)
    identity = create(tmp_path / "late")
    daemon = await Daemon.start(tmp_path / "late", LOOPBACK)
    world.daemons.append(daemon)
    late = await DhtDirectory.start(daemon)
    world.directories.append(late)
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.from_seed(b'dead').peer_id}"
    with pytest.raises(Unreachable, match=r"/ip4/127\.0\.0\.1/tcp/1"):
        await late.bootstrap([dead], 3.0)
    with pytest.raises(Unreachable, match="none was given"):
        await late.bootstrap([], 3.0)
    for text in ("hello", "/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/1/p2p/QmWrong"):
        with pytest.raises(ValueError, match=r"12D3Koo|Ed25519"):
            await late.bootstrap([text], 3.0)
    alive = f"{world.daemons[0].addresses[0]}/p2p/{first.identity.peer_id}"
    assert await late.bootstrap([dead, alive, alive], DEADLINE) == 1
    member = Member(identity, late)
    assert await late.announce(RUN, 0, member.record(), DEADLINE)
    assert set(await first.directory.look_up(RUN, 0, DEADLINE)) == {identity.peer_id}
    await world.end()


@pytest.mark.loopback
async def test_records_survive_the_death_of_a_node_and_of_the_own_p2pd(tmp_path):
    world = DhtWorld(tmp_path)
    a, b, c = await world.members(3)
    for member in (a, b, c):
        await member.directory.announce(RUN, 0, member.record(), DEADLINE)
    everyone = {member.identity.peer_id for member in (a, b, c)}
    world.daemons[0].p2p._child.kill()
    await world.daemons[0].ended()
    assert set(await b.directory.look_up(RUN, 0, DEADLINE)) == everyone
    world.daemons[1].p2p._child.kill()
    await world.daemons[1].ended()
    async with asyncio.timeout(DEADLINE):
        assert set(await b.directory.look_up(RUN, 0, DEADLINE)) == everyone
        assert not await b.directory.announce(RUN, 0, b.record(), DEADLINE)
    await world.end()


@pytest.mark.loopback
async def test_a_peer_that_stood_still_and_forgot_every_node_comes_back_by_who_it_was_told_of(tmp_path):
    world = DhtWorld(tmp_path)
    first, second = await world.members(2)
    table = second.directory._node.protocol.routing_table  # whoever did not answer within 3 s is out of it
    for node in list(table.peer_id_to_uid.values()):
        del table[node]
    assert second.directory.known_nodes == 0
    assert await second.directory.announce(RUN, 0, second.record(), DEADLINE)
    assert set(await first.directory.look_up(RUN, 0, DEADLINE)) == {second.identity.peer_id}
    await world.end()


@pytest.mark.loopback
async def test_a_peer_whose_clock_is_minutes_off_joins_and_uses_the_swarms_time(tmp_path, caplog):
    world = DhtWorld(tmp_path)
    (first,) = await world.members(1)
    minutes = 240.0
    first.directory._gate.clock_offset = minutes  # the others' clocks, seen from this machine, are ahead
    late = Member(create(tmp_path / "late"), None)
    world.daemons.append(await Daemon.start(tmp_path / "late", LOOPBACK))
    late.directory = await DhtDirectory.start(world.daemons[-1])
    world.directories.append(late.directory)
    assert late.directory.clock_offset == 0.0
    await late.directory.bootstrap(
        [f"{world.daemons[0].addresses[0]}/p2p/{first.identity.peer_id}"], DEADLINE
    )
    assert abs(late.directory.clock_offset - minutes) < 3.0
    assert "240 s behind" in caplog.text
    for member in (first, late):
        assert await member.directory.announce(RUN, 0, member.record(), DEADLINE)
    for member in (first, late):
        assert set(await member.directory.look_up(RUN, 0, DEADLINE)) == {
            first.identity.peer_id,
            late.identity.peer_id,
        }
    first.directory._gate.clock_offset = 0.0  # the late one's clock is set right
    await late.directory.measure_clock_offset()
    assert late.directory.clock_offset == 0.0
    assert "agrees with the swarm's again" in caplog.text
    await world.end()


@pytest.mark.loopback
async def test_a_peer_whose_clock_is_a_day_off_is_told_to_set_it_and_joins_once_it_is_set(tmp_path):
    world = DhtWorld(tmp_path)
    (first,) = await world.members(1)
    first.directory._gate.clock_offset = 86_400.0
    create(tmp_path / "late")
    world.daemons.append(await Daemon.start(tmp_path / "late", LOOPBACK))
    late = await DhtDirectory.start(world.daemons[-1])
    world.directories.append(late)
    said = []
    late.say = said.append
    bootstrap = [f"{world.daemons[0].addresses[0]}/p2p/{first.identity.peer_id}"]
    for _ in range(2):
        with pytest.raises(Unreachable, match=r"86400 s behind .* Set the clock"):
            await late.bootstrap(bootstrap, DEADLINE)
    assert (late.clock_offset, len(said)) == (0.0, 1)
    assert late.measured_offset == pytest.approx(86_400.0, abs=3.0)
    first.directory._gate.clock_offset = 0.0  # as it looks once this machine's clock is set
    assert await late.bootstrap(bootstrap, DEADLINE) == 1
    assert late.clock_offset == 0.0
    await world.end()


@pytest.mark.loopback
async def test_a_crowd_of_nodes_that_nobody_named_has_no_say_in_what_time_it_is(tmp_path):
    world = DhtWorld(tmp_path)
    first, second, *liars = await world.members(6)
    for liar in liars:
        liar.directory._gate.clock_offset = 200.0
        for honest in (first, second):  # Nodes that are new are pinged back.
            await liar.directory._node.protocol.call_ping(honest.directory._gate.peer_id)
    for _ in range(5):
        for honest in (first, second):
            await honest.directory.measure_clock_offset()
            assert honest.directory.clock_offset == 0.0
    assert second.directory.measured_offset == pytest.approx(0.0, abs=3.0)
    await world.end()


def test_a_multiaddr_is_split_into_peer_and_address():
    peer = Identity.from_seed(b"a").peer_id
    assert split_multiaddr(f" /ip4/1.2.3.4/tcp/5/p2p/{peer}\n") == (peer, "/ip4/1.2.3.4/tcp/5")


def test_a_record_expires_by_the_time_of_its_signing_and_is_forgotten():
    identity, remembered = Identity.from_seed(b"a"), Remembered(Random(1))
    record = PeerRecord(identity.peer_id, 0, "worker", [], 0, 0.0, "0")
    for signed_at in (1000.0, 999.0):
        found = {identity.peer_id: seal_record(identity, RUN, record, signed_at)}
        assert remembered.take(RUN, found) == []
    assert list(remembered.at(RUN, 0, 1000.0 + RECORD_SECONDS)) == [identity.peer_id]
    assert remembered.at(RUN, 0, 1000.1 + RECORD_SECONDS) == {}


def test_a_look_up_verifies_no_record_twice_and_of_many_only_some(monkeypatch):
    verified = []

    def count_and_open(data, run_id):
        verified.append(data)
        return open_record(data, run_id)

    monkeypatch.setattr(records, "open_record", count_and_open)
    found = {}
    for number in range(VERIFIED_AT_ONCE + 100):
        identity = Identity.from_seed(b"key %d" % number)
        record = PeerRecord(identity.peer_id, 0, "worker", [], 0, 0.0, "0")
        found[identity.peer_id] = seal_record(identity, RUN, record, 1000.0)
    verified.clear()
    remembered = Remembered(Random(1))
    for known in (VERIFIED_AT_ONCE, len(found), len(found)):
        assert remembered.take(RUN, found) == []
        assert len(verified) == len(remembered.at(RUN, 0, 1000.0)) == known
    of_another = {identity.peer_id: next(iter(found.values()))}
    assert [error.code for error in remembered.take(RUN, of_another)] == ["malformed"]


def test_the_largest_honest_record_fits_its_limit():
    identity = Identity.from_seed(b"a")
    addresses = [f"/ip4/203.0.113.{n}/udp/31337/quic-v1/webtransport" for n in range(16)]
    record = PeerRecord(identity.peer_id, 3, "worker", addresses, 2**31, 1e9, "1.2.3")
    assert 32 + len(seal_record(identity, RUN, record, 2e9)) < RECORD_LIMIT


@pytest.mark.parametrize("signed", [b"", b"x" * 64, b"x" * 65, b"[" * 10_000, b"x" * 20_000])
def test_what_is_no_manifest_is_refused(signed):
    run = RunId(hashlib.sha256(signed[:-64]).hexdigest())
    with pytest.raises(WireError):
        open_manifest(signed, run)
