"""Which way a stream goes, in memory: directly where that can be had, else through a relay."""

import asyncio

import pytest
from relayed import CIRCUIT, DIRECT, HIDDEN, stream_pair

from peers.lab.world.virtual_time import run as run_virtual
from protocols.daemon.multiaddr import multiaddr_bytes
from protocols.daemon.p2pd import Stream
from protocols.errors import PeerGone, Unreachable
from protocols.p2pd import connect as dialling
from protocols.p2pd.connect import Dialling


class Way:
    """p2pd, as far as dialling goes: who answers where, after how long."""

    def __init__(self, answers, connection=""):
        self.answers, self.connection = answers, connection
        self.dialled, self.knocked = [], []

    async def connect(self, peer, addresses, deadline_seconds):
        if self.connection:
            return
        self.dialled.append(tuple(addresses))
        reached = [each for each in addresses if self.answers.get(each, 100.0) < deadline_seconds]
        if not reached:
            await asyncio.sleep(deadline_seconds)
            raise Unreachable(f"{peer} does not answer")
        self.connection = min(reached, key=self.answers.get)
        await asyncio.sleep(self.answers[self.connection])

    async def stream(self, peer, protocol, deadline_seconds):
        if not self.connection:
            raise PeerGone(f"no stream to {peer}")
        return Stream(*stream_pair()[0], multiaddr_bytes(self.connection))

    async def disconnect(self, peer, deadline_seconds):
        self.connection = ""

    async def knock(self, address):
        self.knocked.append(address)
        return address in self.answers


def dialled(way, monkeypatch, addresses, times=1):
    """The connection that a stream is opened on, as an address; and after how many seconds."""
    monkeypatch.setattr(dialling, "probe_address", way.knock)

    async def scenario():
        begun = Dialling(way)
        for _ in range(times):
            stream = await begun.stream(HIDDEN, "/x", addresses, 8.0)
        assert stream.address == multiaddr_bytes(way.connection)
        return way.connection, asyncio.get_running_loop().time()

    return run_virtual(scenario())


def test_who_can_be_dialled_directly_is_not_dialled_through_a_relay(monkeypatch):
    way = Way({DIRECT: 0.4, CIRCUIT: 0.1})
    assert dialled(way, monkeypatch, [DIRECT, CIRCUIT]) == (DIRECT, 0.4)
    assert way.dialled == [(DIRECT,)]


def test_who_cannot_is_dialled_through_the_relay_after_a_head_start_and_next_time_at_once(monkeypatch):
    way = Way({CIRCUIT: 0.2})
    found, seconds = dialled(way, monkeypatch, [DIRECT, CIRCUIT])
    assert (found, way.knocked) == (CIRCUIT, [DIRECT])
    assert seconds == pytest.approx(dialling.HEAD_START_SECONDS + 0.2)
    way = Way({CIRCUIT: 0.2})
    assert dialled(way, monkeypatch, [DIRECT, CIRCUIT], times=3)[0] == CIRCUIT
    assert way.knocked == [DIRECT], "doors that are shut are left alone for a while"


def test_a_circuit_is_given_up_where_a_direct_connection_can_be_had(monkeypatch):
    way = Way({DIRECT: 0.1}, connection=CIRCUIT)
    assert dialled(way, monkeypatch, [DIRECT])[0] == DIRECT
    assert way.knocked == [DIRECT]
    way = Way({CIRCUIT: 0.1}, connection=CIRCUIT)
    assert dialled(way, monkeypatch, [DIRECT])[0] == CIRCUIT, "nobody opens at its door"


def test_a_link_leaves_its_circuit_when_a_direct_connection_stands_beside_it():
    ended = []

    class Link:
        closed = False

        def fail(self, reason):
            ended.append((asyncio.get_running_loop().time(), reason))
            self.closed = True

    async def scenario():
        way = Way({}, connection=CIRCUIT)
        begun = Dialling(way)
        begun.leave_circuit(HIDDEN, Link())
        await asyncio.sleep(12.0)
        assert ended == []
        way.connection = DIRECT
        await asyncio.sleep(12.0)
        await begun.close()

    run_virtual(scenario())
    assert [(seconds, "direct connection" in reason) for seconds, reason in ended] == [(15.0, True)]


def test_where_nothing_answers_in_time_the_peer_is_gone(monkeypatch):
    with pytest.raises(PeerGone, match="does not answer"):
        dialled(Way({}), monkeypatch, [DIRECT, CIRCUIT])


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", b"", b"\x13/multistream/1.0.0\n"])
async def test_a_knock_is_answered_by_libp2p_alone(monkeypatch, answer):
    async def connected(host, port):
        assert (host, port) == ("8.8.4.4", 31331)
        (reader, writer), (_, theirs) = stream_pair()
        theirs.write(answer)
        theirs.close()
        return reader, writer

    monkeypatch.setattr(asyncio, "open_connection", connected)
    assert await dialling.probe_address(DIRECT) == answer.startswith(b"\x13")
    assert not await dialling.probe_address("/ip4/127.0.0.1/tcp/31331"), "that would be our own house"
    assert not await dialling.probe_address("/ip4/8.8.4.4/udp/31331/quic-v1")
