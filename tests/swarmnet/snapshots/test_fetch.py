"""Fetching a snapshot, on hand-set time: from whoever has it; liars and the silent are dropped."""

from __future__ import annotations

import hashlib
from random import Random

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from peers.state.snapshot_store import SNAPSHOTS_KEPT
from protocols.messages.table import HEADER_LIMIT, SnapshotOffer, SnapshotRoot, encode
from protocols.signed.envelope import ENVELOPE_BYTES
from swarmnet.identifiers import PeerId
from swarmnet.lineage import DIGEST_BYTES
from swarmnet.snapshots.fetch import (
    ASKED_AT_ONCE,
    MAX_CHUNKS,
    SMALLEST_CHUNK_BYTES,
    STALL_SECONDS,
    Dropped,
    RequestChunk,
    SnapshotFetch,
    choose_root,
    chunk_bytes,
    worth_resuming,
)

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
WRONG = hashlib.sha256(b"wrong").digest()


def hashes(count: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % index).digest() for index in range(count)]


def asks(effects) -> list[RequestChunk]:
    return [effect for effect in effects if isinstance(effect, RequestChunk)]


@given(st.integers(1, 2**45))
def test_chunks_are_few_enough_for_one_message_and_not_smaller_than_need_be(size):
    chunk = chunk_bytes(size)
    assert -(-size // chunk) <= MAX_CHUNKS
    assert chunk == SMALLEST_CHUNK_BYTES or -(-size // (chunk // 2)) > MAX_CHUNKS


def test_different_chunks_are_asked_of_every_holder_and_no_more_than_its_slots():
    fetch = SnapshotFetch(hashes=hashes(20), holders=[A, B])
    first = asks(fetch.start(0.0))
    assert len(first) == 2 * ASKED_AT_ONCE
    assert len({ask.index for ask in first}) == 2 * ASKED_AT_ONCE
    assert {ask.peer for ask in first} == {A, B}


def test_a_chunk_with_the_wrong_hash_drops_its_sender_and_others_are_asked():
    fetch = SnapshotFetch(hashes=hashes(4), holders=[A, B])
    fetch.start(0.0)
    wanted, effects = fetch.chunk(A, 0, WRONG, 0.1)
    assert not wanted
    assert isinstance(effects[0], Dropped)
    assert effects[0].peer == A
    assert "chunk 0" in effects[0].reason
    assert all(ask.peer == B for ask in asks(effects))
    wanted, effects = fetch.chunk(B, 99, WRONG, 0.2)
    assert not wanted
    assert fetch.stuck


def test_a_holder_that_sends_nothing_is_dropped_and_one_that_sends_slowly_is_not():
    fetch = SnapshotFetch(hashes=hashes(12), holders=[A, B])
    fetch.start(0.0)
    now, index = 0.0, next(iter(fetch.holders[B].asked))
    for _ in range(4):
        now += 0.9 * STALL_SECONDS
        dropped = [effect for effect in fetch.tick(now) if isinstance(effect, Dropped)]
        assert all(effect.peer == A for effect in dropped)
        fetch.chunk(B, index, fetch.hashes[index], now)
        index = next(iter(fetch.holders[B].asked))
    assert fetch.holders.keys() == {B}


def test_near_the_end_a_holder_without_work_of_its_own_is_asked_for_what_another_owes():
    fetch = SnapshotFetch(hashes=hashes(3), holders=[A, B], asked_at_once=2)
    assert {(ask.peer, ask.index) for ask in asks(fetch.start(0.0))} == {(A, 0), (A, 1), (B, 2)}
    assert asks(fetch.chunk(A, 0, fetch.hashes[0], 0.1)[1]) == [], "A has one of its own still to send"
    assert asks(fetch.chunk(B, 2, fetch.hashes[2], 0.2)[1]) == [RequestChunk(B, 1)]
    assert fetch.chunk(B, 1, fetch.hashes[1], 0.3)[0]
    assert not fetch.missing
    assert not fetch.chunk(A, 1, fetch.hashes[1], 0.4)[0], "once is enough"


def test_a_holder_that_comes_late_takes_its_share_and_one_that_was_dropped_does_not_come_back():
    fetch = SnapshotFetch(hashes=hashes(9), holders=[A, B], asked_at_once=2)
    fetch.start(0.0)
    assert len(asks(fetch.add(C, 0.5))) == 2
    assert fetch.add(C, 0.6) == []
    fetch.chunk(A, 0, WRONG, 0.7)
    assert fetch.add(A, 0.8) == []
    (dropped,) = [effect for effect in fetch.tick(STALL_SECONDS) if isinstance(effect, Dropped)]
    assert (dropped.peer, fetch.add(B, 4.0)) == (B, [])
    assert fetch.holders.keys() == {C}


def test_no_chunk_is_asked_of_three_holders():
    fetch = SnapshotFetch(hashes=hashes(1), holders=[A, B, C])
    assert [ask.peer for ask in asks(fetch.start(0.0))] == [A, B]
    assert asks(fetch.drop(A, "gone", 0.1)) == [RequestChunk(C, 0)]


def test_chunks_of_strangers_are_judged_by_their_hash():
    fetch = SnapshotFetch(hashes=hashes(2), holders=[A])
    fetch.start(0.0)
    assert fetch.chunk(C, 1, fetch.hashes[1], 0.1)[0]
    assert fetch.chunk(C, 0, WRONG, 0.1) == (False, [])
    assert not fetch.stuck


@pytest.mark.parametrize(
    ("offers", "chosen"),
    [
        ({A: [(7, b"x")], B: [(7, b"x")], C: [(7, b"y")]}, (7, b"x")),
        ({A: [(15, b"n"), (7, b"x")], B: [(7, b"x")], C: [(7, b"x")]}, (7, b"x")),
        ({A: [(15, b"n"), (7, b"x")], B: [(15, b"n"), (7, b"x")], C: [(7, b"x")]}, (15, b"n")),
        ({A: [(7, b"x")], B: [(7, b"y")]}, None),
        ({A: [(7, b"x")] * 9, B: [], C: []}, None),
        ({A: [(7, b"x")]}, (7, b"x")),
        ({}, None),
    ],
)
def test_the_newest_root_that_two_thirds_name_is_taken(offers, chosen):
    assert choose_root(offers) == chosen


def test_an_older_root_is_taken_if_it_is_worth_resuming_and_as_many_name_it():
    both, older = [(15, b"n"), (7, b"x")], [(7, b"x")]
    assert choose_root({A: both, B: both, C: both}, resumed={(7, b"x")}) == (7, b"x")
    assert choose_root({A: both, B: both, C: both}, resumed={(15, b"n"), (7, b"x")}) == (15, b"n")
    assert choose_root({A: both, B: [(15, b"n")], C: [(15, b"n")]}, resumed={(7, b"x")}) == (15, b"n")
    assert choose_root({A: older, B: older}, resumed={(3, b"gone")}) == (7, b"x")
    assert worth_resuming(50, 100)
    assert not worth_resuming(49, 100)


def test_what_is_here_is_not_asked_for():
    fetch = SnapshotFetch(hashes=hashes(6), holders=[A, B], asked_at_once=2, here={0, 3, 4, 99})
    assert [ask.index for ask in asks(fetch.start(0.0))] == [1, 2, 5]
    assert not fetch.chunk(A, 3, fetch.hashes[3], 0.1)[0], "it is not wanted again"
    for index in (1, 2, 5):
        assert fetch.chunk(B, index, fetch.hashes[index], 0.2)[0]
    assert not fetch.missing
    whole = SnapshotFetch(hashes=hashes(2), holders=[A], here={0, 1})
    assert (whole.start(0.0), whole.missing, whole.stuck) == ([], set(), False)


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 5))
@example(seed=27, chunks=1, holders=4)  # An answer comes in the instant at which another holder is due.
@example(seed=41113958, chunks=1, holders=5)  # A holder is due between two answers.
def test_any_mixture_of_holders_ends_complete_or_stuck(seed, chunks, holders):
    """Each holder is honest, lying, silent or about to leave; who is honest is never dropped."""
    chance, now = Random(seed), 0.0
    kinds = {PeerId(f"h{n}"): chance.choice(["honest", "liar", "silent", "leaves"]) for n in range(holders)}
    fetch = SnapshotFetch(hashes=hashes(chunks), holders=list(kinds))
    under_way: list[RequestChunk] = []

    def take(effects) -> None:
        for effect in effects:
            if isinstance(effect, Dropped):
                assert kinds[effect.peer] != "honest"
            else:
                assert effect.index in fetch.missing
                assert len(fetch.holders[effect.peer].asked) <= ASKED_AT_ONCE
                under_way.append(effect)

    take(fetch.start(now))
    for _ in range(1000):
        if not fetch.missing or fetch.stuck:
            break
        answering = [ask for ask in under_way if kinds[ask.peer] != "silent"]
        if not answering:
            due = fetch.next_deadline()
            assert now <= due < float("inf"), "it waits for nothing, or for what was due before"
            now = due
            take(fetch.tick(now))
            assert fetch.next_deadline() > now
            continue
        ask = chance.choice(answering)
        under_way.remove(ask)
        now += 0.01
        take(fetch.tick(now))  # The caller's timer runs before the answer is read.
        if kinds[ask.peer] == "leaves" and chance.random() < 0.2:
            take(fetch.drop(ask.peer, "gone", now))
        else:
            honest = kinds[ask.peer] != "liar"
            take(fetch.chunk(ask.peer, ask.index, fetch.hashes[ask.index] if honest else WRONG, now)[1])
    assert not fetch.missing or fetch.stuck
    assert not fetch.missing or "honest" not in kinds.values()


def test_the_roots_of_two_snapshots_of_any_size_fit_in_one_header():
    """A holder names both to a newcomer (State)."""
    newest = 2**32 - 1
    for size in (1 << 20, 103 << 20, MAX_CHUNKS * SMALLEST_CHUNK_BYTES, 128 << 20, 7 << 30):
        chunks = hashes(-(-size // chunk_bytes(size)))
        root = msgspec.msgpack.encode(SnapshotRoot(newest, 99, size, WRONG, b"x" * DIGEST_BYTES, chunks))
        roots = [b"e" * ENVELOPE_BYTES + root] * SNAPSHOTS_KEPT
        assert len(encode(SnapshotOffer(99, newest, newest, WRONG, roots, newest))) < HEADER_LIMIT
