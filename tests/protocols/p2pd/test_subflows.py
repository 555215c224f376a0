"""Links of several streams: who gets a message, what is sent again, who may carry for whom.

Most of it on socket pairs; what only p2pd can show is marked."""

import asyncio
import os
import signal
import socket

import pytest
from freezing import freeze
from hypothesis import given
from hypothesis import strategies as st
from on_p2pd import DEADLINE, transports

from protocols.daemon.p2pd import LOOPBACK
from protocols.errors import Backlog, BadSignature, Malformed, PeerGone
from protocols.framing.frames import FrameReader
from protocols.messages.table import Act, Busy
from protocols.p2pd import multipath_dialer, multipath_link
from protocols.p2pd import transport as p2pd
from protocols.p2pd.carriers import INTRODUCTION_BYTES, Carriers, carried_peer, introduction
from protocols.p2pd.multipath_dialer import MAX_CARRIERS, SUBFLOW_PROTOCOL
from protocols.p2pd.multipath_link import LONG_BYTES, P2pdLink, acknowledgement
from protocols.signed.identity import Identity

ALICE, BOB, CARRIER = (Identity.from_seed(name) for name in (b"alice", b"bob", b"carrier"))


def act(counter):
    return Act("12D3KooW", counter, 1, 2, 4.0, (4, 128, 256))


class FarEnd:
    """The other end of one stream of a link: reads messages, acknowledges when told to."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.frames, self.counters = FrameReader(), []

    async def read(self, count):
        """The counters of the messages that have come, once there are so many."""
        async with asyncio.timeout(DEADLINE):
            while len(self.counters) < count:
                messages = self.frames.feed(await self.reader.read(1 << 16))
                self.counters += [message.counter for message, _, _ in messages]
        return self.counters

    def acknowledge(self, count=None):
        self.writer.write(acknowledgement(self.frames.messages if count is None else count))


class World:
    """A link, its far ends, and what the link told."""

    def __init__(self):
        self.ends, self.asked, self.far, self.writers = [], [], [], []

    async def pair(self):
        near, far = socket.socketpair()
        stream = await asyncio.open_unix_connection(sock=near)
        end = FarEnd(*await asyncio.open_unix_connection(sock=far))
        self.far.append(end)
        self.writers += [stream[1], end.writer]
        return stream

    async def link(self, lane="data", more=0):
        def ended(link, reason, error):
            self.ends.append((reason, error))

        stream = await self.pair()
        self.link_ = P2pdLink(
            peer=BOB.peer_id,
            lane=lane,
            stream=stream,
            ended=ended,
            slow=self.asked.append,
            addresses=(),
            backlog_bytes=10_000_000,
        )
        for number in range(more):
            self.link_.add(Identity.from_seed(bytes([number])).peer_id, await self.pair())
        return self.link_


async def until(holds):
    async with asyncio.timeout(DEADLINE):
        while not holds():  # noqa: ASYNC110 - sockets tell nobody when they were read
            await asyncio.sleep(0.002)


@pytest.fixture
async def world():
    world = World()
    yield world
    world.link_.close()
    for writer in world.writers:
        writer.transport.abort()
    await world.link_.gone()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_message_goes_where_the_least_is_on_its_way(world):
    link = await world.link(more=1)
    for counter in range(6):
        link.post(act(counter), bytes(1000))
    assert await world.far[0].read(3) == [0, 2, 4]
    assert await world.far[1].read(3) == [1, 3, 5]
    world.far[1].acknowledge()
    await until(lambda: link.on_its_way < 4000)
    for counter in range(6, 9):
        link.post(act(counter), bytes(1000))
    assert await world.far[1].read(6) == [1, 3, 5, 6, 7, 8]


async def test_what_a_broken_subflow_did_not_deliver_is_sent_again_and_the_link_lives(world):
    link = await world.link(more=1)
    for counter in range(6):
        link.post(act(counter), bytes(1000))
    await world.far[1].read(3)
    world.far[1].acknowledge(1)
    await until(lambda: link.on_its_way < 6000)
    world.far[1].writer.transport.abort()
    assert sorted(await world.far[0].read(5)) == [0, 2, 3, 4, 5]
    assert link.repeated == 2
    assert not link.closed
    assert link.carriers == []
    assert world.ends == []


async def test_an_urgent_message_that_overtakes_is_acknowledged_as_itself(world):
    link = await world.link(more=1)
    first, second = world.far
    link.post(act(0), bytes(1000))
    link.post(act(1), bytes(3_000_000))
    second.frames.feed(await second.reader.read(1))  # The long one is being written,
    link._subflows[1].post(Busy("12D3KooW", 2, 1), b"")  # and a short one ends before it.
    assert await second.read(1) == [2]
    second.acknowledge()
    await until(lambda: len(link._subflows[1].undelivered()) == 1)
    second.writer.transport.abort()
    assert await first.read(2) == [0, 1]
    assert link.repeated == 1


async def test_a_subflow_that_acknowledges_nothing_for_long_is_given_up(world, monkeypatch):
    link = await world.link(more=1)
    link.post(act(0), bytes(1000))
    link.post(act(1), bytes(1000))
    monkeypatch.setattr(multipath_link, "STALLED_SECONDS", -1.0)
    link.post(act(2), bytes(1000))
    assert sorted(await world.far[0].read(3)) == [0, 1, 2]
    assert link.carriers == []


async def test_who_acknowledges_nothing_is_not_sent_more_than_may_be_kept(world):
    link = await world.link()
    body = bytes(1_000_000)
    for counter in range(9):
        link.post(act(counter), body)
        await world.far[0].read(counter + 1)
    with pytest.raises(Backlog, match="not acknowledged"):
        link.post(act(9), body)
    world.far[0].acknowledge()
    await until(lambda: not link.on_its_way)
    link.post(act(9), body)


async def test_a_link_ends_with_its_first_stream(world):
    link = await world.link(more=2)
    world.far[0].writer.transport.abort()
    await until(lambda: link.closed)
    assert len(world.ends) == 1
    async with asyncio.timeout(DEADLINE):
        assert [await end.reader.read() for end in world.far[1:]] == [b"", b""]
    with pytest.raises(PeerGone):
        link.post(act(1))


async def test_who_closes_takes_acknowledgements_until_the_other_side_has_ended_too(world):
    link = await world.link()
    link.post(act(0))
    far = world.far[0]
    await far.read(1)
    link.close()
    assert far.frames.feed(await far.reader.read()) == []
    assert far.frames.closed, "the goodbye has come, and the stream's end"
    far.acknowledge()
    await far.writer.drain()
    assert not far.writer.is_closing(), "p2pd would reset the stream, and with it what is not read yet"
    far.writer.close()
    async with asyncio.timeout(DEADLINE):
        await link.gone()


async def test_who_closes_does_not_wait_for_ever_for_one_that_does_not_end(world, monkeypatch):
    monkeypatch.setattr(multipath_link, "DEPARTURE_GRACE_SECONDS", 0.05)
    link = await world.link()
    link.close()
    async with asyncio.timeout(DEADLINE):
        await link.gone()
    assert not world.far[0].writer.is_closing(), "it has not said a word"


@pytest.mark.parametrize("told", [2, 0xFFFFFFFF])
async def test_acknowledging_more_than_was_sent_ends_the_link_and_is_refused(world, told):
    link = await world.link(more=1)
    link.post(act(0), bytes(1000))
    await world.far[0].read(1)
    world.far[0].acknowledge(told)
    await until(lambda: link.closed)
    ((_, error),) = world.ends
    assert isinstance(error, Malformed)


@given(st.lists(st.binary(min_size=1, max_size=9), max_size=6))
def test_any_bytes_as_acknowledgements_are_taken_or_refused(pieces):
    async def scenario():
        world = World()
        link = await world.link()
        for counter in range(3):
            link.post(act(counter), bytes(100))
        await world.far[0].read(3)
        for piece in pieces:
            world.far[0].writer.write(piece)
        world.far[0].writer.close()
        await until(lambda: link.closed)
        assert 0 <= link.on_its_way <= 3 * 200
        await link.gone()

    asyncio.run(scenario())


async def test_lanes_where_order_matters_take_no_word_back(world):
    link = await world.link("group")
    link.post(act(0))
    await world.far[0].read(1)
    world.far[0].acknowledge(1)
    await until(lambda: link.closed)
    ((_, error),) = world.ends
    assert isinstance(error, Malformed)


async def test_a_link_whose_long_messages_are_slow_for_two_epochs_asks_for_more(world, monkeypatch):
    monkeypatch.setattr(multipath_link, "EPOCH_SECONDS", 0.0)
    link = await world.link()

    async def epoch(size, slow):
        monkeypatch.setattr(multipath_link, "SLOW_SECONDS", 0.0 if slow else 1000.0)
        first = len(world.far[0].counters)
        for counter in range(first, first + multipath_link.EPOCH_MESSAGES):
            link.post(act(counter), bytes(size))
        await world.far[0].read(first + multipath_link.EPOCH_MESSAGES)
        world.far[0].acknowledge()
        await until(lambda: link.on_its_way == 0)

    for slow in (False, True, False, True):
        await epoch(LONG_BYTES, slow)
        await epoch(100, slow)  # Short ones tell nothing.
        assert world.asked == []
    await epoch(LONG_BYTES, slow=True)
    assert world.asked == [link]


# -- introductions ------------------------------------------------------------------------------------------


def test_a_carrier_speaks_for_whoever_signed_that():
    shown = introduction(ALICE, CARRIER.peer_id, BOB.peer_id)
    assert len(shown) == INTRODUCTION_BYTES
    assert carried_peer(shown, CARRIER.peer_id, BOB.peer_id) == ALICE.peer_id


@pytest.mark.parametrize(("carrier", "receiver"), [(ALICE, BOB), (CARRIER, ALICE), (BOB, CARRIER)])
def test_an_introduction_is_worth_nothing_from_another_carrier_or_to_another_peer(carrier, receiver):
    shown = introduction(ALICE, CARRIER.peer_id, BOB.peer_id)
    with pytest.raises(BadSignature):
        carried_peer(shown, carrier.peer_id, receiver.peer_id)


@given(st.integers(0, 8 * INTRODUCTION_BYTES - 1))
def test_no_flipped_bit_of_an_introduction_is_taken(bit):
    shown = bytearray(introduction(ALICE, CARRIER.peer_id, BOB.peer_id))
    shown[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadSignature):
        carried_peer(bytes(shown), CARRIER.peer_id, BOB.peer_id)


@given(st.binary(max_size=200))
def test_garbage_introduces_nobody(shown):
    with pytest.raises(BadSignature):
        carried_peer(shown, CARRIER.peer_id, BOB.peer_id)


# -- on p2pd ------------------------------------------------------------------------------------------------


@pytest.fixture
async def start(tmp_path):
    async with transports(tmp_path) as start:
        yield start


async def grown(a, b):
    """A link from a to b with one subflow."""
    link = await a.open(b.peer, "data", DEADLINE, b.addresses)
    link.post(act(0), bytes(1000))
    await b.listener.until(lambda heard: heard.messages)
    a._subflow_dialer.want(link)
    a._subflow_dialer.want(link)  # Asking twice opens one.
    await until(lambda: link.carriers)
    return link


@pytest.mark.loopback
async def test_a_subflow_delivers_in_its_owners_name_and_ends_with_the_link(start):
    a, b = await start(), await start()
    link = await grown(a, b)
    for counter in range(1, 21):
        link.post(act(counter), bytes(200_000))
    await b.listener.until(lambda heard: len(heard.messages) == 21)
    assert {peer for peer, *_ in b.listener.received_} == {a.peer}
    assert sorted(message.counter for message in b.listener.messages) == list(range(21))
    assert (len(link.carriers), a._subflow_dialer.carriers, a.subflows["opened"]) == (1, 1, 1)
    (accepted,) = b._subflows.values()
    assert len(accepted.writers) == 1
    link.close()
    await b.listener.until(lambda heard: heard.lost_)
    ((peer, lane, _),) = b.listener.lost_  # Why: by which of the streams ends first.
    assert (peer, lane) == (a.peer, "data")
    await until(lambda: not b._accepted)
    assert b._subflows == {}
    assert b.listener.refused_ == []


@pytest.mark.loopback
async def test_a_killed_carrier_loses_no_message_and_another_one_takes_its_place(start, monkeypatch):
    a, b = await start(), await start()
    link = await grown(a, b)
    freeze(b.daemon.pid)  # So that nothing is acknowledged.
    for counter in range(1, 11):
        link.post(act(counter), bytes(100_000))
    (carrier,) = a._subflow_dialer._carriers.running
    os.kill(carrier.pid, signal.SIGKILL)
    await until(lambda: not link.carriers)
    os.kill(b.daemon.pid, signal.SIGCONT)
    wanted = set(range(11))
    await b.listener.until(lambda heard: {message.counter for message in heard.messages} >= wanted)
    assert link.repeated == 5
    assert not link.closed
    a._subflow_dialer.want(link)
    assert a._subflow_dialer._tasks == {}, "it just broke: not so soon"
    monkeypatch.setattr(multipath_dialer, "RETRY_SECONDS", 0.0)
    # Its stream breaks before its end is seen, and a dead one would dial in vain.
    await until(lambda: not a._subflow_dialer.carriers)
    a._subflow_dialer.want(link)
    await until(lambda: link.carriers)


@pytest.mark.loopback
async def test_nobody_carries_for_a_peer_without_its_signature_or_without_a_link(
    start, monkeypatch, tmp_path
):
    monkeypatch.setattr(p2pd, "FIRST_MESSAGE_SECONDS", 1.0)
    a, b = await start(), await start()
    link = await a.open(b.peer, "data", DEADLINE, b.addresses)
    link.post(act(0))
    await b.listener.until(lambda heard: heard.messages)
    carriers = Carriers(LOOPBACK)
    try:
        (carrier,) = await carriers.start(1)
        await carrier.connect(b.peer, b.addresses, DEADLINE)

        async def show(data):
            """What the other side says to an introduction; its end."""
            reader, writer = await carrier.open_stream(b.peer, SUBFLOW_PROTOCOL, DEADLINE)
            writer.write(data)
            async with asyncio.timeout(DEADLINE):
                ended = await reader.read()
            writer.transport.abort()
            return ended

        forged = Identity.from_seed(b"forger").public_key + bytes(64)
        assert await show(forged) == b""
        assert b.listener.refused_[0][:2] == (carrier.peer, "bad_signature")
        # In order, but of a peer that has no link here.
        assert await show(introduction(ALICE, carrier.peer, b.peer)) == b""
        # Says nothing.
        assert await show(b"") == b""
        assert len(b.listener.refused_) == 1
        assert len(b.listener.messages) == 1
    finally:
        await carriers.close()
    assert not link.closed


@pytest.mark.loopback
async def test_a_link_gets_as_many_subflows_as_there_may_be_carriers_and_no_more(start):
    a, b = await start(), await start()
    link = await grown(a, b)
    for _ in range(MAX_CARRIERS):
        a._subflow_dialer.want(link)
        await asyncio.gather(*a._subflow_dialer._tasks.values())
    assert len(link.carriers) == MAX_CARRIERS == a._subflow_dialer.carriers
