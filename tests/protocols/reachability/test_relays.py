"""Circuits, in memory: who gets a slot and is carried, what strangers can do, and how a slot is kept."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relayed import (
    ASKER,
    CIRCUIT,
    CONNECT,
    DIRECT,
    DOOR,
    HIDDEN,
    OTHER,
    RELAY,
    RESERVE,
    Relay,
    accepts,
    stream_pair,
)

from peers.config.peer_file import PeerFile
from peers.lab.world.virtual_time import run as run_virtual
from peers.process.sessions import daemon_options, keeps_slots
from protocols.daemon.multiaddr import multiaddr_bytes, through_relay
from protocols.errors import Malformed, PeerGone, TooLarge, Unreachable
from protocols.reachability import circuit_relay, relay_client, relay_service
from protocols.reachability.circuit_relay import (
    HOP_PROTOCOL,
    PING_PROTOCOL,
    encode,
    read_fields,
)
from protocols.reachability.relay_client import Relays, circuits_through, usable_relays
from protocols.signed.identity import Identity
from swarmnet.resources.circuit_table import IDLE_SECONDS, CircuitLimits


def test_what_was_reserved_is_carried_both_ways_until_one_side_ends_it():
    async def scenario():
        relay = Relay()
        relay.reached[HIDDEN], ends = accepts()
        reserved, (_, writer) = await relay.asked(HIDDEN, RESERVE)
        writer.close()
        assert circuit_relay.decode(reserved[3])[1] == 1000 + relay_service.SLOT_SECONDS
        answer, (reader, writer) = await relay.asked(ASKER, CONNECT)
        assert (answer[5], circuit_relay.decode(answer[4])) == (circuit_relay.OK, circuit_relay.NO_LIMIT)
        (there, back), _ = ends[0]
        writer.write(b"x" * 300_000)
        assert await there.readexactly(300_000) == b"x" * 300_000
        back.write(b"yes")
        assert await reader.readexactly(3) == b"yes"
        assert (relay.service.circuits, relay.service.carried_bytes) == (1, 300_003)
        writer.close()
        assert await there.read() == b""
        await asyncio.gather(*relay.serving)
        assert relay.service.circuits == 0

    run_virtual(scenario())


def test_what_is_carried_waits_for_its_turn_in_the_owners_upload_limit():
    async def scenario():
        relay = Relay()
        relay.reached[HIDDEN], ends = accepts()
        relay.service.upload = SimpleNamespace(turn=lambda size, _: asyncio.sleep(size / 1e5))
        await relay.status(HIDDEN, RESERVE)
        _, (_, writer) = await relay.asked(ASKER, CONNECT)
        writer.write(b"x" * 500_000)
        await ends[0][0][0].readexactly(500_000)
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)
        writer.close()

    run_virtual(scenario())


def test_who_has_no_slot_or_one_that_ran_out_or_is_gone_is_not_connected():
    async def scenario():
        relay = Relay()
        assert await relay.status(ASKER, CONNECT) == circuit_relay.NO_RESERVATION
        assert await relay.status(HIDDEN, RESERVE) == circuit_relay.OK
        assert await relay.status(HIDDEN, CONNECT) == circuit_relay.NO_RESERVATION, "to itself"
        assert await relay.status(ASKER, CONNECT) == circuit_relay.CONNECTION_FAILED
        relay.reached[HIDDEN], _ = accepts(circuit_relay.REFUSED)
        assert await relay.status(ASKER, CONNECT) == circuit_relay.CONNECTION_FAILED
        assert relay.service.circuits == 0
        relay.clock += relay_service.SLOT_SECONDS
        assert await relay.status(ASKER, CONNECT) == circuit_relay.NO_RESERVATION
        await relay.end()

    run_virtual(scenario())


def test_a_circuit_through_a_circuit_is_refused():
    async def scenario():
        relay = Relay()
        assert await relay.status(HIDDEN, RESERVE, CIRCUIT) == circuit_relay.REFUSED
        assert relay.service.slots == 0

    run_virtual(scenario())


def test_slots_and_circuits_and_streams_are_bounded_and_free_again(monkeypatch):
    monkeypatch.setattr(relay_service, "SLOTS", 2)
    monkeypatch.setattr(relay_service, "CIRCUITS_PER_PEER", 3)
    monkeypatch.setattr(relay_service, "STREAMS_PER_PEER", 5)

    async def scenario():
        relay = Relay()
        relay.reached[HIDDEN], _ = accepts()
        assert [await relay.status(peer, RESERVE) for peer in (HIDDEN, OTHER, ASKER)] == [100, 100, 200]
        assert await relay.status(HIDDEN, RESERVE) == circuit_relay.OK, "prolonged"
        relay.clock += relay_service.SLOT_SECONDS + 1
        assert await relay.status(ASKER, RESERVE) == circuit_relay.OK
        assert await relay.status(HIDDEN, RESERVE) == circuit_relay.OK
        carried = [await relay.asked(ASKER, CONNECT) for _ in range(4)]
        assert [answer[5] for answer, _ in carried] == [100, 100, 100, circuit_relay.LIMIT_EXCEEDED]
        silent = [relay.opened(ASKER) for _ in range(3)]
        assert await silent[2][0].read() == b"", "it has five streams open already"
        for _, (_, writer) in carried:
            writer.close()
        await asyncio.sleep(1.0)
        assert relay.service.circuits == 0
        assert await relay.status(ASKER, CONNECT) == circuit_relay.OK
        await relay.end()

    run_virtual(scenario())


def test_one_house_does_not_take_all_slots(monkeypatch):
    monkeypatch.setattr(relay_service, "SLOTS_PER_RANGE", 1)

    async def scenario():
        relay = Relay()
        asked = [(HIDDEN, DIRECT), (OTHER, DIRECT), (HIDDEN, DIRECT), (OTHER, DOOR)]
        assert [await relay.status(peer, RESERVE, seen) for peer, seen in asked] == [100, 200, 100, 100]
        await relay.end()

    run_virtual(scenario())


def test_a_circuit_without_a_byte_ends_after_a_minute_and_one_with_a_byte_now_and_then_stays():
    async def scenario():
        relay = Relay()
        relay.reached[HIDDEN], ends = accepts()
        await relay.status(HIDDEN, RESERVE)
        _, (silent, _) = await relay.asked(ASKER, CONNECT)
        _, (spoken, writer) = await relay.asked(ASKER, CONNECT)
        for _ in range(3):
            await asyncio.sleep(IDLE_SECONDS - 1.0)
            ends[1][0][1].write(b"x")
        assert await silent.read() == b""
        assert relay.service.circuits == 1
        assert await spoken.readexactly(3) == b"xxx"
        writer.close()
        await relay.end()

    run_virtual(scenario())


def test_where_all_circuits_are_taken_the_newest_of_the_range_with_most_gives_way():
    async def scenario():
        relay = Relay()
        relay.service.table.limits = CircuitLimits(most=3, most_of_peer=9, most_of_range=9)
        relay.reached[HIDDEN], _ = accepts()
        await relay.status(HIDDEN, RESERVE)
        taken = [await relay.asked(ASKER, CONNECT) for _ in range(3)]
        assert await relay.status(ASKER, CONNECT) == circuit_relay.LIMIT_EXCEEDED, "its own range has most"
        answer, (_, writer) = await relay.asked(ASKER, CONNECT, DOOR)
        assert answer[5] == circuit_relay.OK
        assert await taken[2][1][0].read() == b""
        assert relay.service.circuits == 3
        for _, (_, each) in (*taken, (None, (None, writer))):
            each.close()
        await relay.end()

    run_virtual(scenario())


def test_streams_that_are_no_circuits_yet_give_way_too(monkeypatch):
    monkeypatch.setattr(relay_service, "STREAMS", 3)

    async def scenario():
        relay = Relay()
        silent = [relay.opened(ASKER) for _ in range(3)]
        await asyncio.sleep(0)
        assert await relay.status(HIDDEN, RESERVE, DOOR) == circuit_relay.OK
        assert await silent[2][0].read() == b""
        await relay.end()

    run_virtual(scenario())


def test_who_says_nothing_is_cut_off():
    async def scenario():
        relay = Relay()
        reader, _ = relay.opened(ASKER)
        assert await reader.read() == b""
        assert asyncio.get_running_loop().time() == circuit_relay.STEP_SECONDS

    run_virtual(scenario())


@given(st.binary(max_size=200))
def test_nothing_that_a_stranger_says_stops_a_relay(data):
    async def scenario():
        relay = Relay()
        reader, writer = relay.opened(ASKER)
        writer.write(data)
        await asyncio.sleep(0.0)
        writer.close()
        await reader.read()
        assert await relay.status(HIDDEN, RESERVE) == circuit_relay.OK
        await relay.end()

    run_virtual(scenario())


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_malformed(data):
    async def scenario():
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        try:
            fields = await read_fields(reader)
            circuit_relay.number_in(fields, 1)
            circuit_relay.peer_in(fields)
        except (Malformed, PeerGone):
            pass

    run_virtual(scenario())


def test_a_long_message_is_refused_before_it_is_read():
    async def scenario():
        for length in (b"\xff\xff\x7f", b"\xff\xff\xff\xff\xff\x7f"):
            reader = asyncio.StreamReader()
            reader.feed_data(length)
            with pytest.raises(TooLarge):
                await read_fields(reader)

    run_virtual(scenario())


def test_a_circuit_is_known_by_its_end():
    assert through_relay(multiaddr_bytes(CIRCUIT))
    assert not through_relay(multiaddr_bytes("/ip4/1.2.3.4/tcp/41474")), "a port with the same bytes"
    assert not through_relay(multiaddr_bytes(DOOR))


# -- keeping a slot --------------------------------------------------------------------------------------


class Daemon:
    """p2pd beside a relay that answers as it is told."""

    def __init__(self, status=circuit_relay.OK, most=0):
        self.status, self.most = status, most
        self.connected = True
        self.reservations = 0
        self.pings = []
        """Our ends of the ping streams."""

    async def connect(self, peer, addresses, deadline_seconds):
        if not self.connected:
            raise Unreachable(f"{peer} does not answer")

    async def open_stream(self, peer, protocol, deadline_seconds):
        ours, theirs = stream_pair()
        if protocol == HOP_PROTOCOL:
            self.reservations += 1
            limit = {2: self.most} if self.most else {}
            theirs[1].write(encode({1: circuit_relay.HOP_STATUS, 3: {1: 5000}, 4: limit, 5: self.status}))
        else:
            assert protocol == PING_PROTOCOL
            self.pings.append(theirs)
            self.echoing = asyncio.create_task(self.echo(*theirs))
        return ours

    async def echo(self, reader, writer):
        while data := await reader.read(100):
            writer.write(data)


def kept(daemon, then):
    """`then(slots, moved)` while a peer keeps a slot; what it said."""
    said, moved = [], []

    async def scenario():
        slots = Relays(daemon)
        slots.moved = lambda: moved.append(slots.addresses)

        def tell(_text, _relay, addresses):
            said.append("relayed" if addresses else "not_relayed")

        slots.use([f"{DOOR}/p2p/{RELAY}"], tell)
        try:
            await then(slots, moved)
        finally:
            await slots.close()

    run_virtual(scenario())
    return said


def test_a_slot_is_announced_renewed_and_had_again_when_its_connection_ended():
    daemon = Daemon()

    async def then(slots, moved):
        assert await slots.first(1.0)
        assert slots.addresses == (CIRCUIT,)
        await asyncio.sleep(relay_client.RENEW_SECONDS + 30.0)
        assert (daemon.reservations, moved) == (2, [(CIRCUIT,)])
        daemon.connected = False
        daemon.pings[-1][1].close()
        await asyncio.sleep(0.1)
        assert moved == [(CIRCUIT,), ()]
        daemon.connected = True
        await asyncio.sleep(3.0)
        assert moved == [(CIRCUIT,), (), (CIRCUIT,)]

    assert kept(daemon, then) == ["relayed", "not_relayed", "relayed"]


def test_a_relay_that_no_longer_answers_pings_is_left_within_half_a_minute():
    daemon = Daemon()

    async def then(slots, moved):
        await slots.first(1.0)
        daemon.connected = False
        daemon.echoing.cancel()
        await asyncio.sleep(relay_client.PING_SECONDS + circuit_relay.STEP_SECONDS + 1.0)
        assert slots.addresses == ()

    assert kept(daemon, then) == ["relayed", "not_relayed"]


@pytest.mark.parametrize("daemon", [Daemon(most=131072), Daemon(status=circuit_relay.REFUSED)])
def test_a_relay_that_cuts_circuits_soon_or_has_no_slot_is_not_announced_and_said_once(daemon):
    async def then(slots, moved):
        assert not await slots.first(3.0)
        await asyncio.sleep(100.0)
        assert (slots.addresses, moved) == ((), [])
        assert 5 < daemon.reservations < 20, "with growing pauses"

    assert kept(daemon, then) == ["not_relayed"]


def test_relays_are_a_few_peers_that_others_could_dial():
    here = f"/ip4/127.0.0.1/tcp/1/p2p/{OTHER}"
    through = f"{CIRCUIT}/p2p/{OTHER}"
    assert usable_relays([here, through]) == {}
    again = "/dns4/boot.example.org/tcp/31330"
    assert circuits_through([f"{DOOR}/p2p/{RELAY}", here]) == (CIRCUIT,)
    assert usable_relays([f"{DOOR}/p2p/{RELAY}", here, f"{again}/p2p/{RELAY}"]) == {RELAY: (DOOR, again)}
    many = [f"{DOOR}/p2p/{Identity.from_seed(bytes([n])).peer_id}" for n in range(9)]
    assert len(usable_relays(many)) == relay_client.MAX_RELAYS


@pytest.mark.parametrize(
    ("keys", "keeps", "serves"),
    [
        ({"run": "00" * 32}, True, False),
        ({"run": "00" * 32, "relay": False}, False, False),
        ({"run": "00" * 32, "announce": (DIRECT,)}, False, False),
        ({"run": "00" * 32, "role": "observer"}, False, False),
        ({"role": "bootstrap"}, False, True),
        ({"role": "bootstrap", "relay": False}, False, False),
    ],
)
def test_who_is_to_be_dialled_keeps_slots_and_bootstraps_carry(tmp_path, keys, keeps, serves):
    config = PeerFile(state=tmp_path, **keys)
    assert (keeps_slots(config), daemon_options(config, config.listen).carries) == (keeps, serves)
