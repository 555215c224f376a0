import hashlib
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.errors import Malformed, TooLarge, WireError
from protocols.framing.frames import (
    BODY_LIMIT,
    CLOSING,
    KEEPALIVE,
    PIECE_BYTES,
    PIECE_LIMIT,
    FrameReader,
    FrameWriter,
    wire_bytes,
)
from protocols.messages.table import (
    UNGUARDED_BYTES,
    Act,
    Busy,
    Bye,
    Chunk,
    Contribution,
    Grad,
    Heartbeat,
    encode,
)

ACT = Act("12D3KooW", 3, 1, 2, 4.0, (4, 128, 256))
GRAD = Grad("12D3KooW", 3, 1, 2.5, 512, 0.1, 0.0, (4, 128, 256))
CHUNK = Chunk(b"digest", 5)
BUSY = Busy("12D3KooW", 3, 1)


def pieces(writer):
    result = []
    while (piece := writer.next_piece()) is not None:
        result.append(piece)
    return result


def stream(*messages, piece_bytes=PIECE_BYTES):
    writer = FrameWriter(piece_bytes)
    for message, body in messages:
        writer.post(message, body)
    return b"".join(pieces(writer))


def raw_piece(flags, content):
    return bytes([flags]) + len(content).to_bytes(3, "big") + content


def first_piece(header, body_bytes, content=b"", flags=0x82):
    return raw_piece(flags, len(header).to_bytes(2, "big") + body_bytes.to_bytes(4, "big") + header + content)


messages = st.one_of(
    st.builds(Bye, st.text(max_size=40)).map(lambda message: (message, b"")),
    st.builds(Busy, st.text(max_size=20), st.integers(0, 2**60), st.integers(0, 9)).map(lambda m: (m, b"")),
    st.tuples(st.sampled_from([ACT, GRAD, CHUNK, Contribution()]), st.binary(max_size=3000)),
)


@given(st.lists(messages, max_size=8), st.integers(100, 700), st.integers(1, 900))
def test_messages_survive_any_cutting_and_each_priority_keeps_its_order(sent, piece_bytes, read_bytes):
    writer = FrameWriter(piece_bytes)
    promised = sum(writer.post(message, body) for message, body in sent)
    data = b"".join(pieces(writer))
    assert len(data) == promised
    assert writer.queued_bytes == 0
    reader, received = FrameReader(), []
    for at in range(0, len(data), read_bytes):
        received += reader.feed(data[at : at + read_bytes])
    assert reader.finished
    assert sum(taken for _, _, taken in received) == promised
    for priority in range(4):
        assert [(m, bytes(b)) for m, b, _ in received if m.priority == priority] == [
            (m, b) for m, b in sent if m.priority == priority
        ]


def test_urgent_messages_overtake_long_bodies_between_two_pieces():
    writer, reader = FrameWriter(), FrameReader()
    writer.post(CHUNK, bytes(5 * PIECE_BYTES))
    received = reader.feed(writer.next_piece())
    writer.post(ACT, bytes(2 * PIECE_BYTES))
    received += reader.feed(writer.next_piece())
    writer.post(BUSY)
    for piece in pieces(writer):
        assert len(piece) <= PIECE_BYTES + 4
        received += reader.feed(piece)
    assert [type(message).__name__ for message, _, _ in received] == ["Busy", "Act", "Chunk"]


def test_the_bytes_of_a_message_are_what_the_arithmetic_says():
    for size in (0, 1, 100, PIECE_BYTES - 30, PIECE_BYTES - 15, PIECE_BYTES, 3 * PIECE_BYTES + 5):
        body = bytes(size)
        assert len(stream((CHUNK, body))) == wire_bytes(len(encode(CHUNK)), size)


@given(st.data())
def test_no_flipped_bit_reaches_the_receiver(data):
    sent = [(BUSY, b""), (ACT, bytes(range(200))), (Contribution(), b"votes" * 30)]
    wire = stream(*sent, piece_bytes=100)
    at, bit = data.draw(st.integers(0, len(wire) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(wire)
    damaged[at] ^= 1 << bit
    reader, received = FrameReader(), []
    try:
        received += reader.feed(bytes(damaged))
    except WireError:
        pass
    else:
        assert not reader.finished or reader.closed  # it waits for bytes that never come, or was told to end
    for message, body, _ in received:
        assert (message, bytes(body)) in sent


@given(st.binary(max_size=300))
def test_random_bytes_give_no_message_and_no_crash(data):
    reader = FrameReader()
    try:
        assert reader.feed(data) == []
    except WireError:
        with pytest.raises(Malformed):
            reader.feed(b"more")


@given(st.integers(0, 400))
def test_a_stream_that_ends_in_the_middle_is_not_finished(cut):
    wire = stream((CHUNK, bytes(500)), piece_bytes=200)
    reader = FrameReader()
    reader.feed(wire[: cut + 1])
    assert not reader.finished
    reader.feed(wire[cut + 1 :])
    assert reader.finished


def test_a_body_longer_than_the_receiver_allows_is_refused_before_it_comes():
    reader = FrameReader(lambda message: 1000)
    with pytest.raises(TooLarge, match="1001"):
        reader.feed(first_piece(encode(ACT), 1001))


def test_a_body_is_not_allocated_before_its_bytes_come():
    reader = FrameReader()
    reader.feed(first_piece(encode(ACT), BODY_LIMIT))
    assert reader._partial[2].parts == []


@pytest.mark.parametrize("padding", [b"", KEEPALIVE * 250], ids=["alone", "in long reads"])
def test_a_body_that_comes_in_drops_keeps_little_more_memory_than_its_bytes(padding):
    header = encode(Contribution())
    reader = FrameReader()
    priority = Contribution.priority
    reader.feed(first_piece(header, 4096, flags=0x80 | priority))
    tracemalloc.start()
    try:
        for _ in range(1000):
            reader.feed(raw_piece(priority, b"x") + padding)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 200_000, "a thousand bytes have come, and the last read"


def test_a_body_where_none_belongs_is_refused_on_both_sides():
    with pytest.raises(TooLarge):
        FrameWriter().post(BUSY, b"body")
    with pytest.raises(TooLarge):
        FrameReader().feed(first_piece(encode(BUSY), 4, flags=0x80))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (raw_piece(0x01, b"x" * 10), "continues no message"),
        (raw_piece(0x80, b""), "first piece"),
        (raw_piece(0x82, b"\xff\xff" + bytes(4)), "longer than its piece"),
        (raw_piece(0x82, bytes(6)), "empty header"),
        (b"\x82" + (PIECE_LIMIT + 1).to_bytes(3, "big"), "a piece of"),
        (first_piece(b"\x91" * 100, 0), "not a message"),
        (first_piece(b"\x91" * (UNGUARDED_BYTES + 1), 0), "nested"),
        (first_piece(b"\x92\x01\xc1", 0), "not a message"),
        (first_piece(b"\x92\x01\xc1" + bytes(UNGUARDED_BYTES), 0), "starts nothing"),
        (first_piece(b"\x92\x63\x01", 0), "not a message"),
        (first_piece(encode(BUSY), 0), "with priority 2"),
        (first_piece(encode(ACT), 10, bytes(10)) * 2, "begins inside another"),
        (first_piece(encode(ACT), 10, bytes(18), flags=0x82), "complete the message"),
        (first_piece(encode(ACT), 10, bytes(17), flags=0xC2), "complete the message"),
        (first_piece(encode(ACT), 10, bytes(15), flags=0x82), "complete the message"),
        (first_piece(encode(ACT), 10, bytes(18), flags=0xC2), "does not fit"),
        (first_piece(encode(ACT), 10, bytes(5)) + raw_piece(0x02, b""), "empty piece"),
        (CLOSING + KEEPALIVE, "after the closing"),
        (first_piece(encode(ACT), 10, bytes(5)) + CLOSING, "closing"),
        (raw_piece(0x30, b""), "closing or keep-alive"),
        (raw_piece(0x10, b"x"), "closing or keep-alive"),
    ],
)
def test_every_kind_of_wrong_piece_is_refused_and_named(data, reason):
    with pytest.raises(Malformed, match=reason):
        FrameReader().feed(data)


def test_a_check_made_for_a_header_alone_does_not_fit_with_a_body():
    header = encode(ACT)
    check = hashlib.sha256(header).digest()[:8]
    with pytest.raises(Malformed, match="does not fit"):
        FrameReader().feed(first_piece(header, 3, b"abc" + check, flags=0xC2))


def test_keep_alives_say_nothing_and_closing_ends_the_stream():
    reader = FrameReader()
    assert reader.feed(KEEPALIVE * 3) == []
    assert reader.finished
    assert not reader.closed
    reader.feed(CLOSING)
    assert reader.closed
    assert reader.finished


def test_a_header_that_does_not_fit_is_refused_by_the_writer():
    with pytest.raises(TooLarge, match="header"):
        FrameWriter().post(Bye("x" * 70_000))
    assert FrameWriter().post(Heartbeat(1, -1, 0.0, 0, True, 1, 0.1, 2, True)) < 60
