"""Receipts: who signs what, what they add up to, what is refused, and that they come in a swarm."""

import asyncio
import base64
import json
import threading
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
from clocks import on_virtual_clock
from hypothesis import given
from hypothesis import strategies as st
from swarm import Swarm, sign, tiny_manifest

from peers.lab.world.virtual_time import run
from peers.tools.credit import lines
from peers.worker.rounds import receipt_service as shell
from peers.worker.rounds.operations import RoundSettled
from peers.worker.rounds.receipt_service import (
    EARLY_SIGNERS,
    MAX_UNDUE,
    RECEIPTS_OWED,
    Receipts,
    read,
    summary,
)
from protocols.errors import Backlog, WireError
from protocols.messages.table import ReceiptMessage, decode, encode
from protocols.signed import envelope
from protocols.signed.identity import Identity
from protocols.signed.signed_receipts import open_receipt, seal_receipt
from swarmnet.identifiers import ContributionId
from swarmnet.rounds import receipt_rules as core
from swarmnet.rounds.events import Reference
from swarmnet.rounds.receipt_rules import (
    BLOCKS_BACK,
    BLOCKS_KEPT,
    CHECKS_OF_A_BLOCK,
    CHECKS_OF_A_PEER,
    SIGNERS_KEPT,
    ContributionCounter,
    Receipt,
    ReceiptBook,
    ReceiptError,
    SettledContributors,
    accepted,
    check,
)

SIGNED = sign(tiny_manifest())  # snapshot_interval: 4
ME, A, B = (Identity.from_seed(name.encode() * 8) for name in ("mine", "aaaa", "bbbb"))
RUN = SIGNED.run_id


def receipt(signer=A, contributor=ME, first=0, last=3, contributions=4, stage=0):
    return Receipt(signer.peer_id, contributor.peer_id, stage, first, last, contributions)


# -- what is signed ---------------------------------------------------------------------------------------


def test_at_the_end_of_a_block_every_other_maker_gets_what_was_counted():
    contributors = SettledContributors(A.peer_id, 2, 4)
    sets = [[ME.peer_id, A.peer_id], [ME.peer_id], [B.peer_id, ME.peer_id], []]
    due = [contributors.settled(round, makers_of) for round, makers_of in enumerate(sets)]
    assert due[:3] == [[], [], []]
    assert {(r.contributor, r.first, r.last, r.contributions, r.stage) for r in due[3]} == {
        (ME.peer_id, 0, 3, 3, 2),
        (B.peer_id, 0, 3, 1, 2),
    }


def test_a_newcomer_signs_from_where_it_came_and_a_round_that_settles_again_counts_once():
    contributors = SettledContributors(A.peer_id, 0, 4)
    contributors.settled(6, [ME.peer_id])
    contributors.settled(6, [ME.peer_id])
    (due,) = contributors.settled(7, [ME.peer_id])
    assert (due.first, due.last, due.contributions) == (6, 7, 2)


# -- what they add up to ----------------------------------------------------------------------------------


def test_a_block_counts_what_half_of_its_signers_stand_for():
    assert accepted([]) == 0
    assert accepted([receipt(A, contributions=3)]) == 3
    assert accepted([receipt(A, contributions=4), receipt(B, contributions=2)]) == 4
    three = [receipt(signer, contributions=n) for signer, n in ((A, 4), (B, 2), (ME, 2))]
    assert accepted(three) == 2, "one that exaggerates is outvoted"


def test_the_same_block_again_adds_nothing_and_the_book_stays_small():
    book = ReceiptBook(4)
    assert book.take(receipt(first=2, contributions=1))
    assert book.take(receipt()), "it has seen the whole block after all"
    assert not book.take(receipt())
    assert book.total().contributions == 4
    for number in range(20):
        signer = Identity.from_seed(b"s%031d" % number)
        book.take(receipt(signer, contributions=1))
    assert book.total().receipts == SIGNERS_KEPT
    for block in range(1, BLOCKS_KEPT + 10):
        book.take(receipt(first=4 * block, last=4 * block + 3, contributions=1))
    assert book.total().blocks == BLOCKS_KEPT
    assert book.older > 0
    assert book.total().contributions == 1 + BLOCKS_KEPT + 9, "what is dropped stays counted"


@pytest.mark.parametrize(
    "change",
    [
        {"first": 3, "last": 4}, {"first": 3, "last": 2}, {"first": -1, "last": -1},
        {"contributions": 5}, {"contributions": 0}, {"signer": ME.peer_id},
    ],
)  # fmt: skip
def test_what_cannot_be_true_is_refused(change):
    with pytest.raises(ReceiptError):
        check(replace(receipt(), **change), 4)


# -- what travels -----------------------------------------------------------------------------------------


def sealed(signer=A, **changes):
    return seal_receipt(signer, RUN, receipt(signer, **changes), 1000.0)


def test_a_receipt_survives_the_wire_and_says_when():
    message = decode(encode(ReceiptMessage(sealed())))
    assert open_receipt(message.receipt, RUN, 4) == (receipt(), 1000.0)


def test_a_message_of_the_largest_receipt_fits_and_a_larger_one_is_no_message():
    big = Receipt(A.peer_id, ME.peer_id, 32767, 2**32 - 4, 2**32 - 1, 4, 2**62 - 1)
    data = seal_receipt(A, RUN, big, 1e12)
    assert open_receipt(decode(encode(ReceiptMessage(data))).receipt, RUN, 4)[0] == big
    with pytest.raises(WireError):
        decode(encode(ReceiptMessage(bytes(300))))


@given(st.binary(max_size=250), st.integers(0, 200), st.integers(1, 255))
def test_no_bytes_of_strangers_are_a_receipt(noise, at, flip):
    with pytest.raises(WireError):
        open_receipt(noise, RUN, 4)
    forged = bytearray(sealed())
    forged[at % len(forged)] ^= flip
    with pytest.raises(WireError):
        open_receipt(bytes(forged), RUN, 4)


class Posts:
    """A neighbourhood that notes what is posted and refused."""

    def __init__(self, *linked, stage=0):
        self.sent, self.refusals, self.there = [], [], True
        self.traffic = SimpleNamespace(refused=Counter())
        self.peers = {}
        for peer in (A, B, *linked):
            self.meet(peer, stage)

    def meet(self, peer, stage=0, linked=True):
        self.peers[peer.peer_id] = SimpleNamespace(stage=stage, linked=linked)

    def known(self):
        return self.peers

    def post(self, peer, lane, message, body=b""):
        if self.there:
            self.sent.append((peer, message))
        return self.there

    def refused(self, peer, code, reason):
        self.refusals.append((peer, code))


def one(identity, path=None, posts=None, stage=0, log_event=lambda _: None):
    return Receipts(
        identity=identity,
        signed=SIGNED,
        stage=stage,
        path=path,
        neighbourhood=posts or Posts(),
        now=lambda: 1000.0,
        log_event=log_event,
    )


def contributed(path=None, posts=None, rounds=range(4)):
    """One whose own contributions settled in those rounds."""
    mine = one(ME, path, posts)
    settle(mine, rounds, [ME])
    return mine


def settle(receipts, rounds, contributors):
    for round in rounds:
        references = tuple(
            Reference(round, peer.peer_id, ContributionId(b"x" * 16), 1) for peer in contributors
        )
        names = tuple(reference.peer for reference in references)
        receipts.settled(RoundSettled(round, b"", b"", references, contributors=names))


def test_a_receipt_reaches_its_maker_also_when_that_is_linked_only_later():
    posts = Posts()
    signer = one(A, posts=posts)
    posts.there = False
    settle(signer, range(4), [ME, A])
    assert posts.sent == []
    posts.there = True
    signer.linked(ME.peer_id)
    signer.linked(ME.peer_id)
    ((peer, message),) = posts.sent
    assert peer == ME.peer_id
    mine = contributed()
    mine.message(A.peer_id, message)
    assert summary(mine.kept)["accepted"] == 4


def test_one_for_somebody_else_or_not_by_its_sender_is_refused_and_counted():
    posts = Posts()
    mine = contributed(posts=posts)
    mine.message(B.peer_id, ReceiptMessage(sealed(A)))
    mine.message(A.peer_id, ReceiptMessage(sealed(A, contributor=B)))
    mine.message(A.peer_id, ReceiptMessage(b"noise"))
    assert [code for _, code in posts.refusals] == ["malformed"] * 3
    assert summary(mine.kept)["accepted"] == 0


def test_they_are_kept_on_disk_with_the_own_tokens_and_verified_when_read(tmp_path):
    path = tmp_path / "receipts.jsonl"
    mine = one(ME, path)
    for round in range(4):
        mine.made(round, 100 + round)
    settle(mine, range(4), [ME, A])
    mine.message(A.peer_id, ReceiptMessage(sealed(A)))
    mine.message(B.peer_id, ReceiptMessage(sealed(B, contributions=3)))
    run(mine.close())
    again = summary(one(ME, path).kept)
    assert again == summary(mine.kept) | {"unusable": 0}
    assert (again["accepted"], again["tokens"], again["signers"], again["made"]) == (4, 406, 2, 4)

    content = path.read_text().splitlines()
    forged = json.loads(content[-1])
    data = bytearray(base64.b64decode(forged["receipt"]))
    data[-1] ^= 1
    forged["receipt"] = base64.b64encode(bytes(data)).decode()
    path.write_text("\n".join([*content[:-1], json.dumps(forged), "no json", '{"receipt": 3}', "[1]"]) + "\n")
    kept = read(path, SIGNED, ME.peer_id)
    assert kept.unusable == 4
    assert kept.book.total().signers == 1


def test_the_file_does_not_grow_by_what_is_superseded(tmp_path):
    path = tmp_path / "receipts.jsonl"
    mine = contributed(path)
    for contributions in (1, 2, 3, 4):
        mine.message(
            A.peer_id, ReceiptMessage(sealed(A, first=4 - contributions, contributions=contributions))
        )
    run(mine.close())
    assert len(path.read_text().splitlines()) == 1 + 4, "the own count, and four receipts"
    one(ME, path)
    assert len(path.read_text().splitlines()) == 2


# -- what strangers send ----------------------------------------------------------------------------------


@pytest.fixture
def verified(monkeypatch):
    """The peers whose signatures were verified."""
    calls, real = [], envelope.verify
    monkeypatch.setattr(envelope, "verify", lambda peer, *rest: calls.append(peer) or real(peer, *rest))
    return calls


def of_block(block, signer=A, **changes):
    return ReceiptMessage(sealed(signer, first=4 * block, last=4 * block + 3, **changes))


def test_a_stranger_cannot_leave_a_receipt_and_no_signature_of_it_is_verified(tmp_path, verified):
    stranger, posts, path = Identity.from_seed(b"s" * 32), Posts(), tmp_path / "receipts.jsonl"
    mine = contributed(path, posts)
    run(mine.close())
    before = path.read_bytes()
    for _ in range(MAX_UNDUE - 2):
        mine.message(stranger.peer_id, of_block(0, stranger))
    posts.meet(stranger, stage=1)
    mine.message(stranger.peer_id, of_block(0, stranger))
    mine.message(stranger.peer_id, of_block(0, stranger, stage=1))
    assert posts.refusals == [], "an honest one may come late: its link stays"
    for _ in range(300):
        with pytest.raises(Backlog):
            mine.message(stranger.peer_id, of_block(0, stranger))
    run(mine.close())
    assert (mine.kept.book.blocks, path.read_bytes(), verified) == ({}, before, [])
    assert posts.traffic.refused == {"not_due": MAX_UNDUE + 300}


def test_blocks_without_an_own_contribution_are_not_taken_nor_those_more_than_two_back(verified):
    mine = one(ME)
    for block in (10, 12, 13, 14):
        settle(mine, range(4 * block, 4 * block + 4), [ME, A])
    settle(mine, range(60, 64), [A])
    for block in (0, 9, 10, 11, 15, 16, 10**6):
        mine.message(A.peer_id, of_block(block))
    assert (mine.kept.book.blocks, verified) == ({}, [])
    for block in (12, 13, 14):
        mine.message(A.peer_id, of_block(block))
    assert {block for _, block in mine.kept.book.blocks} == {12, 13, 14}


def test_what_is_owed_after_a_long_partition_is_what_is_still_taken():
    posts = Posts(ME)
    posts.there = False
    signer, mine = one(A, posts=posts), one(ME)
    for block in range(7):
        for peer in (signer, mine):
            settle(peer, range(4 * block, 4 * block + 4), [ME, A])
    mine.made(28, 5)
    settle(mine, [28], [ME])
    posts.there = True
    signer.linked(ME.peer_id)
    for _, message in posts.sent:
        mine.message(A.peer_id, message)
    assert len(posts.sent) == RECEIPTS_OWED == BLOCKS_BACK
    assert mine.kept.book.total().contributions == 4 * RECEIPTS_OWED
    assert mine.neighbourhood.traffic.refused == {}


def test_a_signer_that_is_ahead_is_believed_for_rounds_that_have_not_settled_here_yet():
    mine = one(ME)
    settle(mine, range(4), [A])
    mine.made(4, 100)
    mine.message(A.peer_id, of_block(1, contributions=1))
    mine.message(A.peer_id, of_block(2, contributions=1))
    assert [block for _, block in mine.kept.book.blocks] == [1]
    settle(mine, range(4, 8), [A])
    mine.message(B.peer_id, of_block(1, B, contributions=1))
    assert len(mine.kept.book.blocks[0, 1]) == 1, "it has settled without an own one: nobody can owe it"


def test_a_receipt_that_comes_before_the_own_link_is_whole_waits_for_it():
    posts = Posts()
    posts.meet(A, linked=False)
    mine = contributed(posts=posts)
    mine.message(A.peer_id, of_block(0))
    assert mine.kept.book.blocks == {}
    posts.meet(A)
    mine.linked(A.peer_id)
    mine.linked(A.peer_id)
    assert mine.kept.book.total().contributions == 4


def test_of_peers_that_never_get_linked_a_bounded_number_waits(verified):
    posts = Posts()
    mine = contributed(posts=posts)
    crowd = [Identity.from_seed(b"c%031d" % number) for number in range(EARLY_SIGNERS + 10)]
    for peer in crowd:
        posts.meet(peer, linked=False)
        for _ in range(5):
            mine.message(peer.peer_id, of_block(0, peer))
    assert len(mine._early) == EARLY_SIGNERS
    assert all(len(held) == RECEIPTS_OWED for held in mine._early.values())
    assert verified == []


def test_a_peer_that_starts_again_takes_receipts_of_its_former_life(tmp_path):
    path = tmp_path / "receipts.jsonl"
    first = one(ME, path)
    first.made(8, 100)
    settle(first, [8], [ME, A])
    first.made(12, 100)
    run(first.close())
    again = one(ME, path)
    for block in (2, 3):
        again.message(A.peer_id, of_block(block, contributions=1))
    assert summary(again.kept) | {"since": None} == {
        "accepted": 2, "tokens": 100, "signers": 1, "receipts": 2, "blocks": 2, "since": None, "unusable": 0,
        "made": 1,
    }  # fmt: skip


def test_a_peer_that_moved_takes_what_its_old_stage_still_owes_it_and_of_the_new_one_nothing_yet(tmp_path):
    path = tmp_path / "receipts.jsonl"
    run(contributed(path).close())
    posts = Posts()
    posts.meet(B, stage=1)
    moved = one(ME, path, posts, stage=1)
    moved.message(A.peer_id, of_block(0))
    moved.message(B.peer_id, of_block(0, B, stage=1))
    moved.message(B.peer_id, of_block(0, B, stage=0))
    assert {key: set(held) for key, held in moved.kept.book.blocks.items()} == {(0, 0): {A.peer_id}}


def test_a_linked_peer_cannot_have_signatures_verified_without_end(verified):
    crowd = [Identity.from_seed(b"c%031d" % number) for number in range(CHECKS_OF_A_BLOCK)]
    posts = Posts(*crowd)
    mine = contributed(posts=posts)
    for _ in range(10):
        mine.message(A.peer_id, ReceiptMessage(sealed(A)[:-1] + b"\x07"))
    assert len(verified) == CHECKS_OF_A_PEER
    for peer in crowd:
        for _ in range(10):
            mine.message(peer.peer_id, ReceiptMessage(sealed(peer)[:-1] + b"\x07"))
    assert len(verified) == CHECKS_OF_A_BLOCK
    settle(mine, range(4, 8), [ME])
    mine.message(A.peer_id, of_block(1))
    assert mine.kept.book.total().contributions == 4, "in the next block it starts anew"


# -- what they cost ---------------------------------------------------------------------------------------

ANY_RECEIPT = st.builds(
    Receipt, st.sampled_from("abcdef"), st.just(ME.peer_id), st.integers(0, 1),
    st.integers(0, 9).map(lambda block: 4 * block), st.just(3), st.integers(1, 4),
)  # fmt: skip


@given(st.lists(ANY_RECEIPT, max_size=80))
def test_the_running_sum_is_what_adding_up_anew_gives_after_any_receipts(receipts):
    with mock.patch.object(core, "BLOCKS_KEPT", 3):
        book = ReceiptBook(4)
        for one_more in receipts:
            known = book.blocks.get((one_more.stage, one_more.first // 4), {}).get(one_more.signer)
            taken = book.take(one_more)
            kept = [held for block in book.blocks.values() for held in block.values()]
            total = book.total()
            newly = sum(accepted(block.values()) for block in book.blocks.values())
            assert total.contributions == book.older + newly
            assert (total.receipts, total.signers) == (len(kept), len({held.signer for held in kept}))
            assert total.blocks == len(book.blocks) <= 3
            assert all(len(block) <= SIGNERS_KEPT for block in book.blocks.values())
            assert taken or one_more not in kept or known == one_more


def test_one_more_receipt_adds_up_no_block_but_its_own(monkeypatch):
    book, sums = ReceiptBook(4), []
    for block in range(1000):
        book.take(receipt(first=4 * block, last=4 * block + 3))
    monkeypatch.setattr(core, "accepted", lambda held: sums.append(1) or accepted(held))
    book.take(receipt(B, first=0))
    assert book.total().contributions == 4000
    assert len(sums) <= 2


def test_own_contributions_are_written_with_the_first_of_a_block_and_when_the_block_ends():
    own, written = ContributionCounter(0, 4), []
    for round in range(8):
        own.made(round, 10)
        written.append([(one.block, one.contributions, one.tokens) for one in own.settled(round, own=True)])
    assert written == [[(0, 1, 10)], [], [], [(0, 3, 30)], [(1, 1, 10)], [], [], [(1, 3, 30)]]


@given(st.lists(st.tuples(st.integers(0, 19), st.booleans(), st.booleans()), max_size=60))
def test_every_own_contribution_that_settled_is_told_once_and_no_older_block_is_taken(story):
    """Rounds may settle again, jump and go back, as after forks."""
    own, told, expected, made = ContributionCounter(0, 4), [], 0, set()
    for round, contributes, settles in story:
        if contributes:
            own.made(round, 7)
            made.add(round)
        if settles:
            expected += contributes and round in made
            told += own.settled(round, contributes)
            made.discard(round)
        settled = {one.block for one in told}
        for block in range(5):
            if own.takes(0, 4 * block):
                assert block in settled or block in {at // 4 for at in made}
        assert len({block for block in range(5) if own.takes(0, 4 * block)} - {at // 4 for at in made}) <= 3
    told += own.rest()
    assert sum(one.contributions for one in told) == expected
    assert sum(one.tokens for one in told) == 7 * expected


def test_the_file_is_written_beside_the_event_loop_and_once_for_all_that_has_come_in(tmp_path, monkeypatch):
    writes, real, written = [], shell._append_to, threading.Event()

    def write(path, lines):
        writes.append((threading.get_ident(), len(lines)))
        real(path, lines)
        written.set()

    monkeypatch.setattr(shell, "_append_to", write)
    monkeypatch.setattr(shell, "WRITE_SECONDS", 0.01)

    async def story():
        mine = contributed(tmp_path / "receipts.jsonl")
        keeping = asyncio.create_task(mine.keep_forever())
        mine.message(A.peer_id, of_block(0))
        mine.message(B.peer_id, of_block(0, B))
        assert await asyncio.to_thread(written.wait, 10.0)
        settle(mine, range(4, 8), [ME])
        mine.message(A.peer_id, of_block(1))
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await mine.close()
        return summary(mine.kept)

    told = asyncio.run(story())
    assert [lines for _, lines in writes] == [3, 2], "the own count and two receipts, then one of each"
    assert threading.get_ident() not in {thread for thread, _ in writes}
    assert summary(one(ME, tmp_path / "receipts.jsonl").kept) == told
    assert told["accepted"] == 8


def test_the_file_and_the_memory_stay_bounded_while_the_peer_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(core, "BLOCKS_KEPT", 20)
    monkeypatch.setattr(shell, "BLOCKS_KEPT", 20)
    monkeypatch.setattr(shell, "LINES_ADDED", 50)
    path = tmp_path / "receipts.jsonl"
    mine, most = one(ME, path), 0
    for block in range(200):
        for round in range(4 * block, 4 * block + 4):
            mine.made(round, 10)
            settle(mine, [round], [ME, A, B])
        mine.message(A.peer_id, of_block(block))
        mine.message(B.peer_id, of_block(block, B))
        run(mine._write())
        most = max(most, len(path.read_text().splitlines()))
    run(mine.close())
    assert most <= 20 * (SIGNERS_KEPT + 1) + 1 + 50
    assert len(mine.kept.lines) == len(mine.kept.book.blocks) == 20
    assert max(len(mine.kept.made), len(mine.kept.tokens)) <= 20 + 50
    assert mine.kept.book.total().contributions == 800
    again = summary(one(ME, path).kept)
    assert (again["accepted"], again["tokens"]) == (800, 20 * 40)


def test_a_disk_that_was_full_costs_no_receipt_once_there_is_room(tmp_path):
    room, notes = tmp_path / "state", []
    mine = one(ME, room / "receipts.jsonl", log_event=lambda event: notes.append(event.name))
    room.write_text("a file where the folder belongs")
    settle(mine, range(4), [ME])
    mine.message(A.peer_id, of_block(0))
    run(mine._write())
    assert notes[-1] == "receipt_not_kept"
    room.unlink()
    mine.message(B.peer_id, of_block(0, B))
    run(mine.close())
    assert summary(one(ME, room / "receipts.jsonl").kept)["receipts"] == 2


# -- what is told -----------------------------------------------------------------------------------------

TOLD = {
    "peer": "12D3", "run": "ab" * 32, "name": "tiny", "every": 16, "accepted": 0, "tokens": 0, "signers": 0,
    "receipts": 0, "blocks": 0, "since": None, "unusable": 0, "made": 0, "group": True, "stage": 1,
    "uptime_seconds": 7500.0, "moves": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": "not running", "start": "swarmnet join --state X"}, "`swarmnet join --state X`"),
        ({"state": "paused (user)"}, "swarmnet resume"),
        ({"state": "joining"}, "once it trains"),
        ({"state": "training", "group": False}, "no other peer holds its stage"),
        ({"state": "training"}, "after every 16 settled rounds"),
        ({"state": "training", "made": 3}, "swarmnet doctor"),
        ({"state": "training", "made": 3, "uptime_seconds": 30.0}, "nothing to count yet"),
        ({"state": "training", "made": 3, "warnings": ["Stage 0 is stuck"]}, "why 0     Stage 0 is stuck"),
        ({"state": "training", "accepted": 1234, "tokens": 99, "since": 0.0}, "1,234 contributions accepted"),
    ],
)
def test_nought_is_explained_with_what_to_do(change, words):
    text = "\n".join(lines({**TOLD, **change}))
    assert words in text
    assert ("why 0" in text) == (not change.get("accepted"))
    assert text.count("why 0") <= 1, "one reason is enough"
    assert ("up 2 h 5 min" in text) == ("uptime_seconds" not in change)


@on_virtual_clock
async def test_in_a_swarm_every_peer_of_a_group_is_counted_by_the_others():
    swarm = Swarm(tiny_manifest(stages=(3,)))
    swarm.open()
    members = [swarm.start(name, stage=0) for name in ("a", "b", "c")]

    def counted():
        sums = [summary(member.worker.services.receipts.kept) for member in members]
        return all(one["accepted"] >= 4 and one["signers"] == 2 and one["tokens"] > 0 for one in sums)

    await swarm.until(lambda: all(member.worker.state == "training" for member in members), 60.0)
    await swarm.until(counted, 120.0)
    ids = [member.worker.services.receipts.kept for member in members]
    for kept in ids:
        for (stage, block), held in kept.book.blocks.items():
            assert stage == 0
            assert accepted(held.values()) <= 4, f"block {block}"
    await swarm.close()
