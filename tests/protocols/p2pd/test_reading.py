"""Streams of others, read on a virtual clock: what is unfinished, slow, strange or too much work."""

import asyncio
import gc
import struct
import weakref

from clocks import on_virtual_clock

from protocols.framing.frames import CLOSING, KEEPALIVE, FrameReader, FrameWriter
from protocols.framing.intake import Intake
from protocols.framing.send_queue import ReceiverSlot
from protocols.messages.table import Act, Busy, Chunk, GetManifest, Grad, Heartbeat, Hello, Statements, encode
from protocols.messages.terms import Terms
from protocols.p2pd import reading
from protocols.p2pd.reading import FIRST_MESSAGE_SECONDS, HELD_BACK_SECONDS, StreamReader
from protocols.signed.envelope import run_bytes
from protocols.signed.identity import Identity, verify
from swarmnet.identifiers import RunId
from swarmnet.resources.allowances import (
    CHECKS_AT_ONCE,
    CHECKS_PER_SECOND,
    PACE_SECONDS,
    SMALLEST_SHARE_BYTES,
)
from swarmnet.run.schema import WIRE_VERSION

ACT = Act("x", 1, 1, 1, 1.0, (1, 1, 1))
GRAD = Grad("x", 1, 1, 1.0, 1, 0.0, 0.0, (1, 1, 1))
HELLO = Hello(WIRE_VERSION, run_bytes(RunId("0" * 64)), b"")
MIB = 1 << 20


class Heard:
    """Greets back whoever says Hello; checks as many signatures as a message of statements names."""

    def __init__(self):
        self.messages, self.at, self.greeted, self.checked = [], [], set(), 0
        self.identity = Identity.from_seed(b"signer")

    def received(self, peer, lane, message, body, wire_bytes):
        self.messages.append((peer, message, len(body)))
        self.at.append(asyncio.get_running_loop().time())
        if isinstance(message, Hello):
            self.greeted.add(peer)
        if isinstance(message, Statements):
            for statement in message.statements:
                self.checked += 1
                verify(self.identity.peer_id, statement, b"forged".ljust(64))

    def count(self, kind):
        return sum(isinstance(message, kind) for _, message, _ in self.messages)


class Stream:
    """One stream of a peer: what a test feeds is read."""

    def __init__(self, intake, ear, peer="peer", lane="data"):
        self.reader, self.cut_at = asyncio.StreamReader(limit=1 << 30), None
        self.transport = self
        self.reading = StreamReader(intake=intake, slot=ear, peer=peer, lane=lane, stream=(self.reader, self))
        self.done = asyncio.create_task(self.reading.read())

    def abort(self):
        if self.cut_at is None:
            self.cut_at = asyncio.get_running_loop().time()
            self.reader.feed_eof()

    def write(self, data):
        pass

    def get_write_buffer_size(self):
        return 0

    def send(self, *messages):
        for message, body in messages:
            writer = FrameWriter()
            writer.post(message, body)
            while self.cut_at is None and (piece := writer.next_piece()) is not None:
                self.reader.feed_data(piece)

    def begin(self, message, body_bytes, part=b""):
        header = encode(message)
        content = struct.pack(">HI", len(header), body_bytes) + header + part
        self.piece(0x80 | message.priority, content)

    def more(self, message, part):
        self.piece(message.priority, part)

    def piece(self, flags, content):
        if self.cut_at is None:
            head = struct.pack(">BBH", flags, len(content) >> 16, len(content) & 0xFFFF)
            self.reader.feed_data(head + content)

    async def refused(self, seconds=0.0):
        """The code for which it was cut by then."""
        if seconds:
            await asyncio.sleep(seconds)
        for _ in range(40):
            await asyncio.sleep(0)
        if not self.done.done():
            return None
        error, _ = self.done.result()
        return error.code if error is not None else ""


def world(bodies=None):
    heard = Heard()
    limits = {Act: 2 * MIB, Grad: 2 * MIB, Chunk: 2 * MIB} if bodies is None else bodies
    return heard, Intake(), ReceiverSlot(heard, Terms(limits, heard.greeted.__contains__))


@on_virtual_clock
async def test_of_who_has_not_greeted_nothing_but_headers_is_taken():
    heard, intake, ear = world()
    stream = Stream(intake, ear)
    stream.send((GetManifest(), b""))
    stream.begin(ACT, 60 * MIB, bytes(60_000))
    assert await stream.refused() == "too_large"
    assert [message for _, message, _ in heard.messages] == [GetManifest()]
    greeted = Stream(intake, ear)
    greeted.send((HELLO, b""), (ACT, bytes(MIB)))
    assert await greeted.refused() is None
    assert heard.messages[-1] == ("peer", ACT, MIB)


@on_virtual_clock
async def test_a_stranger_that_does_not_greet_is_cut_after_seconds_whatever_else_it_says():
    heard, intake, ear = world()
    asks, drips, greets = (Stream(intake, ear, peer) for peer in ("asks", "drips", "greets"))
    for second in range(int(FIRST_MESSAGE_SECONDS)):
        asks.send((GetManifest(), b""))
        drips.reader.feed_data(KEEPALIVE)
        if second == 9:
            greets.send((HELLO, b""))
        await asyncio.sleep(1.0)
    await asyncio.sleep(0.1)
    assert await asks.refused() == "malformed"
    assert await drips.refused() == "malformed"
    assert await greets.refused() is None
    assert heard.count(GetManifest) > 0


@on_virtual_clock
async def test_who_has_greeted_once_is_not_asked_to_greet_again_on_that_stream():
    heard, intake, ear = world()
    stream = Stream(intake, ear)
    stream.send((HELLO, b""))
    await asyncio.sleep(0.1)
    heard.greeted.clear()  # It has said Bye.
    await asyncio.sleep(2 * FIRST_MESSAGE_SECONDS)
    stream.send((Busy("x", 1, 1), b""), (ACT, bytes(1000)))
    assert await stream.refused(0.1) is None
    assert heard.messages[-1] == ("peer", ACT, 1000)


@on_virtual_clock
async def test_a_body_that_stands_still_is_cut_though_keep_alives_and_short_words_come():
    _heard, intake, ear = world()
    stream = Stream(intake, ear)
    stream.send((HELLO, b""))
    stream.begin(ACT, 2 * MIB, bytes(1000))
    for _ in range(int(PACE_SECONDS) - 1):
        await asyncio.sleep(1.0)
        stream.reader.feed_data(KEEPALIVE)
        stream.send((Busy("x", 1, 1), b""))
    assert await stream.refused() is None
    assert await stream.refused(2.0) == "backlog"
    assert intake.unfinished.total == 0


@on_virtual_clock
async def test_a_body_that_waits_while_more_urgent_ones_pass_is_not_slow():
    heard, intake, ear = world()
    stream = Stream(intake, ear)
    stream.send((HELLO, b""))
    stream.begin(ACT, 100_000, bytes(60_000))
    for _ in range(10):
        await asyncio.sleep(PACE_SECONDS / 2)
        stream.send((GRAD, bytes(64 * 1024)))
    stream.piece(0x40 | ACT.priority, bytes(40_000) + check_of(ACT, 100_000))
    assert await stream.refused(1.0) is None
    assert heard.messages[-1] == ("peer", ACT, 100_000)


def check_of(message, body_bytes):
    writer = FrameWriter()
    writer.post(message, bytes(body_bytes))
    pieces = b""
    while (piece := writer.next_piece()) is not None:
        pieces = piece
    return pieces[-8:]


@on_virtual_clock
async def test_a_peer_has_one_budget_of_unfinished_bytes_over_all_its_streams():
    _heard, intake, ear = world()
    streams = [Stream(intake, ear, "hog") for _ in range(10)]
    peak = 0
    for stream in streams:
        stream.send((HELLO, b""))
        for message in (GRAD, ACT, Chunk(b"x" * 32, 0)):
            stream.begin(message, 2 * MIB)
            for _ in range(16):
                stream.more(message, bytes(64 * 1024))
                await stream.refused()
                peak = max(peak, intake.unfinished.total)
    codes = [await stream.refused() for stream in streams]
    assert set(codes) == {None, "backlog"}
    assert peak <= max(SMALLEST_SHARE_BYTES, 4 * 2 * MIB) + 64 * 1024
    assert intake.unfinished.total <= max(SMALLEST_SHARE_BYTES, 4 * 2 * MIB)
    for stream in streams:
        stream.abort()
    await streams[0].refused()
    assert intake.unfinished.total == 0


@on_virtual_clock
async def test_all_peers_together_have_one_budget_and_the_greediest_give_way_to_the_honest():
    heard, intake, ear = world()
    hogs = [Stream(intake, ear, f"hog {number}") for number in range(40)]
    honest = Stream(intake, ear, "honest")
    honest.send((HELLO, b""))
    honest.begin(ACT, 100_000, bytes(60_000))
    for hog in hogs:
        hog.send((HELLO, b""))
        hog.begin(ACT, 2 * MIB)
        for _ in range(24):
            hog.more(ACT, bytes(64 * 1024))
        await hog.refused()
    assert intake.unfinished.total <= 32 * MIB
    assert sum(hog.done.done() for hog in hogs) >= 15
    honest.piece(0x40 | ACT.priority, bytes(40_000) + check_of(ACT, 100_000))
    assert await honest.refused() is None
    assert heard.messages[-1] == ("honest", ACT, 100_000)


@on_virtual_clock
async def test_what_a_stream_held_is_let_go_of_at_once_when_it_ends_in_the_middle():
    _, intake, ear = world()
    stream = Stream(intake, ear)
    stream.send((HELLO, b""))
    stream.begin(ACT, 2 * MIB, bytes(60_000))
    for _ in range(10):
        stream.more(ACT, bytes(64 * 1024))
    await stream.refused()
    frames = stream.reading.inflow.frames
    assert intake.unfinished.total == frames.held_bytes > 600_000
    stream.abort()
    assert await stream.refused() == ""
    assert (intake.unfinished.total, frames.held_bytes, frames._partial) == (0, 0, {})


def test_a_reader_that_is_closed_keeps_nothing_alive():
    gc.disable()
    try:
        frames = FrameReader()
        header = encode(ACT)
        content = struct.pack(">HI", len(header), MIB) + header + bytes(60_000)
        flags = 0x80 | ACT.priority
        frames.feed(struct.pack(">BBH", flags, len(content) >> 16, len(content) & 0xFFFF) + content)
        assert frames.held_bytes == 60_000
        gone = weakref.ref(frames)
        frames.close()
        assert frames.held_bytes == 0
        del frames
        assert gone() is None
    finally:
        gc.enable()


def statements(number, count=256):
    return Statements([number.to_bytes(4, "big") + each.to_bytes(4, "big") for each in range(count)])


@on_virtual_clock
async def test_a_peer_whose_signatures_take_too_much_is_read_no_further_until_it_has_paid():
    heard, intake, ear = world()
    flood, honest = Stream(intake, ear, "flood", "group"), Stream(intake, ear, "honest", "group")
    for stream in (flood, honest):
        stream.send((HELLO, b""))
    flood.send(*((statements(number), b"") for number in range(5)))
    for _ in range(20):
        honest.send((Heartbeat(1, -1, 0.0, 1, True, 1, 0.0, 0, True), b""))
        await asyncio.sleep(1.0)
    assert heard.count(Heartbeat) == 20, "others are read as ever"
    assert await flood.refused() is None, "it is held back, not refused"
    assert heard.count(Statements) == 5, "nothing that it sent is lost"
    assert heard.checked == 5 * 256


@on_virtual_clock
async def test_a_peer_that_has_to_be_held_back_for_long_is_refused_and_the_others_are_read_as_ever():
    heard, intake, ear = world()
    flood, honest = Stream(intake, ear, "flood", "group"), Stream(intake, ear, "honest", "group")
    for stream in (flood, honest):
        stream.send((HELLO, b""))
    flood.send(*((statements(number), b"") for number in range(10**6, 10**6 + 100)))
    for _ in range(20):
        honest.send((Heartbeat(1, -1, 0.0, 1, True, 1, 0.0, 0, True), b""))
        await asyncio.sleep(1.0)
    assert heard.count(Heartbeat) == 20
    assert heard.checked <= CHECKS_AT_ONCE + HELD_BACK_SECONDS * CHECKS_PER_SECOND + 256
    assert await flood.refused() == "backlog"


@on_virtual_clock
async def test_many_streams_of_a_peer_share_its_checks():
    heard, intake, ear = world()
    streams = [Stream(intake, ear, "flood", "group") for _ in range(16)]
    for place, stream in enumerate(streams):
        stream.send((HELLO, b""))
        stream.send(*((statements(10**8 + 100 * place + number), b"") for number in range(10)))
    await asyncio.sleep(10.0)
    assert heard.checked <= CHECKS_AT_ONCE + 10 * CHECKS_PER_SECOND + 256


@on_virtual_clock
async def test_signatures_that_are_known_already_cost_nothing():
    heard, intake, ear = world()
    stream = Stream(intake, ear, "honest", "group")
    stream.send((HELLO, b""), (statements(10**6), b""))
    stream.send(*((statements(10**6), b"") for _ in range(50)))
    await asyncio.sleep(1.0)
    assert heard.count(Statements) == 51


@on_virtual_clock
async def test_other_work_has_its_turn_after_each_message_of_one_read():
    heard, intake, ear = world()
    stream = Stream(intake, ear)
    stream.send((HELLO, b""), *((Busy("x", number, 1), b"") for number in range(100)))
    turns = 0
    while heard.count(Busy) < 100:
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 100


@on_virtual_clock
async def test_what_waits_to_be_paid_for_counts_as_unfinished():
    _heard, intake, ear = world()
    stream = Stream(intake, ear, "flood", "group")
    stream.send((HELLO, b""), *((statements(10**7 + number), b"") for number in range(40)))
    await asyncio.sleep(5.0)
    assert 0 < intake.unfinished.of("flood") <= reading._READ_BYTES
    await asyncio.sleep(300.0)
    assert intake.unfinished.total == 0


@on_virtual_clock
async def test_who_said_that_it_closes_has_closed_though_nobody_takes_the_last_acknowledgement():
    _, intake, ear = world()
    stream = Stream(intake, ear)
    stream.send((HELLO, b""))
    stream.reader.feed_data(CLOSING)
    assert await stream.refused() is None
    stream.reader.set_exception(BrokenPipeError(32, "Broken pipe"))
    assert await stream.refused() == ""
    assert stream.done.result() == (None, "closed by the other side")
