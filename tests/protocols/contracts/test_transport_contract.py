"""What every `Transport` must do, asked of each of them."""

import asyncio
import contextlib
import hashlib
import os
import signal
from pathlib import Path
from random import Random

import pytest
from freezing import frozen
from on_p2pd import DEADLINE, Listener

from protocols.daemon.p2pd import LOOPBACK
from protocols.errors import Backlog, PeerGone, TooLarge
from protocols.framing.frames import PIECE_BYTES, FrameWriter, wire_bytes
from protocols.memory.transport import Conditions, MemoryNetwork
from protocols.messages.table import Act, Busy, Bye, Chunk, Contribution, encode
from protocols.messages.terms import Terms
from protocols.p2pd import transport as p2pd
from protocols.p2pd.transport import P2pdTransport
from protocols.signed.envelope import EnvelopeKind, open_envelope, seal
from protocols.signed.identity import Identity, create
from swarmnet.identifiers import RunId

RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
CHUNK = Chunk(b"digest", 5)
ACT = Act("12D3KooW", 3, 1, 2, 4.0, (4, 128, 256))
BUSY = Busy("12D3KooW", 3, 1)


class MemoryWorld:
    def __init__(self, folder: Path):
        # Like a fast local network, so that a long body takes a while.
        self.network = MemoryNetwork(Random(1), Conditions(latency_seconds=1e-4, bytes_per_second=500e6))
        self._count = 0

    def _identity(self):
        self._count += 1
        return Identity.from_seed(bytes([self._count]))

    async def peer(self, **options):
        transport = self.network.transport(self._identity().peer_id, **options)
        listener = Listener()
        transport.listen(listener)
        return transport, listener

    async def silent_peer(self):
        return self.network.transport(self._identity().peer_id)

    async def attack(self, attacker, target, data):
        self.network.inject(attacker.peer, target.peer, "data", data)

    def kill(self, transport):
        self.network.crash(transport.peer)

    @contextlib.contextmanager
    def frozen(self, transport):
        self.network.freeze(transport.peer)
        yield
        self.network.thaw(transport.peer)

    async def end(self):
        for transport in self.network.transports.values():
            await transport.close()


class P2pdWorld:
    def __init__(self, folder: Path):
        self._folder, self._count, self._running, self._writers = folder, 0, [], []

    async def silent_peer(self, **options):
        self._count += 1
        path = self._folder / f"identity{self._count}"
        create(path)
        transport = await P2pdTransport.start(path, LOOPBACK, **options)
        self._running.append(transport)
        return transport

    async def peer(self, **options):
        transport = await self.silent_peer(**options)
        listener = Listener()
        transport.listen(listener)
        return transport, listener

    async def attack(self, attacker, target, data):
        await attacker.daemon.connect(target.peer, target.addresses, DEADLINE)
        _, writer = await attacker.daemon.open_stream(target.peer, p2pd.protocol_name("data"), DEADLINE)
        self._writers.append(writer)
        writer.write(data)

    def kill(self, transport):
        os.kill(transport.daemon.pid, signal.SIGKILL)

    def frozen(self, transport):
        return frozen(transport.daemon.pid)

    async def end(self):
        for writer in self._writers:
            writer.transport.abort()
        for transport in self._running:
            await transport.close()


@pytest.fixture(params=["memory", pytest.param("p2pd", marks=pytest.mark.loopback)])
async def world(request, tmp_path):
    world = {"memory": MemoryWorld, "p2pd": P2pdWorld}[request.param](tmp_path)
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    yield world
    await world.end()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await asyncio.sleep(0)
    assert complaints == []


async def linked(world, **options):
    a, heard_by_a = await world.peer(**options)
    b, heard_by_b = await world.peer(**options)
    link = await a.open(b.peer, "data", DEADLINE, b.addresses)
    return a, heard_by_a, b, heard_by_b, link


async def test_messages_arrive_in_order_with_their_bodies_and_the_bytes_that_were_promised(world):
    a, _, _, heard, link = await linked(world)
    promised = [link.post(ACT, bytes([n]) * 1000 * n) for n in range(1, 20)]
    await heard.until(lambda heard: len(heard.received_) == 19)
    for n, (peer, lane, message, body, taken) in enumerate(heard.received_, start=1):
        assert (peer, lane, message, body) == (a.peer, "data", ACT, bytes([n]) * 1000 * n)
        assert taken == promised[n - 1] == wire_bytes(len(encode(ACT)), 1000 * n)


async def test_a_long_body_arrives_intact_and_small_messages_overtake_it(world):
    _, _, _, heard, link = await linked(world)
    body = Random(1).randbytes(20_000_000)
    link.post(CHUNK, body)
    await link.drained(20_000_000 - PIECE_BYTES, DEADLINE)
    assert link.queued_bytes > 0
    link.post(BUSY)
    link.post(ACT, b"x" * 100)
    await heard.until(lambda heard: len(heard.received_) == 3)
    assert [type(message).__name__ for message in heard.messages] == ["Busy", "Act", "Chunk"]
    assert hashlib.sha256(heard.received_[2][3]).digest() == hashlib.sha256(body).digest()


async def test_links_in_both_directions_are_separate(world):
    a, heard_by_a, b, heard_by_b, there = await linked(world)
    back = await b.open(a.peer, "group", DEADLINE)
    there.post(Bye("there"))
    back.post(Bye("back"))
    await heard_by_b.until(lambda heard: heard.messages == [Bye("there")])
    await heard_by_a.until(lambda heard: heard.messages == [Bye("back")])
    assert heard_by_a.received_[0][1] == "group"


async def test_the_death_of_the_other_side_is_noticed_by_sender_and_receiver(world):
    a, heard, b, _, there = await linked(world)
    back = await b.open(a.peer, "data", DEADLINE)
    back.post(BUSY)
    there.post(BUSY)
    await heard.until(lambda heard: heard.messages)
    world.kill(b)
    await heard.until(lambda heard: len(heard.lost_) == 2)
    assert {(peer, lane) for peer, lane, _ in heard.lost_} == {(b.peer, "data")}
    assert there.closed
    with pytest.raises(PeerGone):
        there.post(BUSY)
    with pytest.raises(PeerGone):
        await there.drained(0, DEADLINE)
    with pytest.raises(PeerGone):
        await a.open(b.peer, "data", DEADLINE, b.addresses)


async def test_the_death_of_the_other_side_ends_a_wait(world):
    _, _, b, _, link = await linked(world)
    with world.frozen(b):
        link.post(CHUNK, bytes(30_000_000))
        waiting = asyncio.create_task(link.drained(0, DEADLINE))
        await asyncio.sleep(0)
        world.kill(b)
    with pytest.raises(PeerGone):
        await waiting


async def test_a_closed_link_tells_the_other_side_but_not_us(world):
    a, heard_by_a, _, heard_by_b, link = await linked(world)
    link.post(BUSY)
    await heard_by_b.until(lambda heard: heard.messages)
    link.close()
    link.close()
    await heard_by_b.until(lambda heard: heard.lost_)
    assert heard_by_b.lost_ == [(a.peer, "data", "closed by the other side")]
    assert heard_by_a.lost_ == []
    with pytest.raises(PeerGone):
        link.post(BUSY)


async def test_what_was_drained_arrives_though_the_link_is_closed_at_once(world):
    _, _, _, heard, link = await linked(world)
    link.post(ACT, bytes(300_000))
    await link.drained(0, DEADLINE)
    link.close()
    await heard.until(lambda heard: heard.lost_)
    assert heard.messages == [ACT]


async def test_more_than_the_backlog_is_refused_and_fits_again_later(world):
    _, _, b, heard, link = await linked(world, backlog_bytes=10_000_000)
    with world.frozen(b):
        for _ in range(10):
            link.post(CHUNK, bytes(1_000_000 - 100))
        with pytest.raises(Backlog):
            link.post(CHUNK, bytes(1_000_000))
        assert not link.closed
    await link.drained(0, DEADLINE)
    link.post(BUSY)
    await heard.until(lambda heard: BUSY in heard.messages)


async def test_waiting_for_a_peer_that_reads_nothing_ends_at_the_deadline(world):
    _, _, b, _, link = await linked(world)
    with world.frozen(b):
        link.post(CHUNK, bytes(60_000_000))
        with pytest.raises(PeerGone, match="still wait"):
            await link.drained(0, 0.2)
    assert not link.closed


async def test_a_peer_that_does_not_exist_or_does_not_listen_is_gone(world):
    a, _ = await world.peer()
    nobody = Identity.from_seed(b"nobody").peer_id
    with pytest.raises(PeerGone):
        await a.open(nobody, "data", 1.0, ["/ip4/127.0.0.1/tcp/1"])


async def test_a_peer_can_open_a_link_to_itself(world):
    a, heard = await world.peer()
    link = await a.open(a.peer, "data", DEADLINE)
    taken = link.post(ACT, b"x" * 200_000)
    link.post(BUSY)
    await heard.until(lambda heard: len(heard.received_) == 2)
    assert heard.messages == [BUSY, ACT]
    assert heard.received_[1][4] == taken


async def test_a_body_over_the_receivers_limit_is_refused_and_the_link_closed(world):
    a, _ = await world.peer()
    b, heard = await world.peer()
    b.listen(heard, Terms({Act: 1000}))
    link = await a.open(b.peer, "data", DEADLINE, b.addresses)
    link.post(ACT, bytes(1001))
    await heard.until(lambda heard: heard.refused_)
    assert heard.refused_[0][:2] == (a.peer, TooLarge.code)
    assert heard.received_ == []


async def test_a_receiver_refuses_what_another_run_has_signed_and_goes_on(world):
    a, heard_by_a, b, heard, link = await linked(world)
    other, _ = await world.peer()
    good = await other.open(b.peer, "data", DEADLINE, b.addresses)
    heard.judge = lambda peer, message, body: open_envelope(body, RUN, EnvelopeKind.CONTRIBUTION, 1000)
    identity = Identity.from_seed(b"signer")
    link.post(Contribution(), seal(identity, OTHER_RUN, EnvelopeKind.CONTRIBUTION, 0, 0, 0, b"votes"))
    await heard.until(lambda heard: heard.refused_)
    assert heard.refused_[0][:2] == (a.peer, "wrong_run")
    await heard_by_a.until(lambda heard: heard.lost_)
    good.post(Contribution(), seal(identity, RUN, EnvelopeKind.CONTRIBUTION, 0, 0, 0, b"votes"))
    await heard.until(lambda heard: heard.received_)


async def test_closing_a_transport_tells_the_others_and_ends_its_own_links(world):
    a, _, b, heard, link = await linked(world)
    link.post(BUSY)
    await heard.until(lambda heard: heard.messages)
    back = await b.open(a.peer, "data", DEADLINE)
    await a.close()
    await a.close()
    await heard.until(lambda heard: len(heard.lost_) == 2)
    assert link.closed
    assert back.closed
    with pytest.raises(PeerGone):
        await a.open(b.peer, "data", DEADLINE, b.addresses)


def honest(message=ACT, body=b"x" * 500):
    writer = FrameWriter()
    writer.post(message, body)
    return writer.next_piece()


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


GARBAGE = {
    "random bytes": Random(7).randbytes(5000),
    "zeros": bytes(4000),
    "a wrong length": flipped(honest(), 8),
    "a wrong check": flipped(honest(), -1 + len(honest())),
    "a damaged body": flipped(honest(), 200),
    "deep nesting": b"\x80\x00\xea\x66" + b"\xea\x60" + bytes(4) + b"\x91" * 60_000,
    "a message nobody knows": b"\x80\x00\x00\x10" + b"\x00\x02" + bytes(4) + b"\x91\x7f" + bytes(8),
    "a huge body": b"\x82\x00\x00\x50" + len(encode(ACT)).to_bytes(2, "big") + b"\xff" * 4 + encode(ACT) * 4,
    "an html page": b"HTTP/1.1 200 OK\r\n\r\n<html></html>",
}


async def test_garbage_is_refused_and_counted_and_the_peer_goes_on(world):
    a, _, b, heard, link = await linked(world)
    attacker = await world.silent_peer()
    for count, (name, garbage) in enumerate(GARBAGE.items(), start=1):
        await world.attack(attacker, b, garbage)
        await heard.until(lambda heard, count=count: len(heard.refused_) == count)
        peer, code, _ = heard.refused_[-1]
        assert peer == attacker.peer, name
        assert code in ("malformed", "too_large"), name
        link.post(ACT, name.encode())
        await heard.until(lambda heard, count=count: len(heard.received_) == count)
    assert [(peer, body.decode()) for peer, _, _, body, _ in heard.received_] == [
        (a.peer, name) for name in GARBAGE
    ]
