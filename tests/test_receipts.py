"""Receipts: who signs what, what they add up to, what is refused, and that they come in a swarm."""

import base64
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm import Swarm, sign, tiny_manifest

from peers.contributed import lines
from peers.receipts import Receipts, read, summary
from peers.update_work import Settled
from peers.virtual_time import run
from protocols.errors import WireError
from protocols.identity import Identity
from protocols.messages import ReceiptIs, decode, encode
from protocols.receipts import open_receipt, seal_receipt
from swarmnet.identifiers import ContributionId
from swarmnet.receipts import (
    BLOCKS_KEPT,
    SIGNERS_KEPT,
    Receipt,
    ReceiptBook,
    ReceiptError,
    SettledMakers,
    accepted,
    check,
)
from swarmnet.round_events import Reference

SIGNED = sign(tiny_manifest())  # snapshot_rounds: 4
ME, A, B = (Identity.from_seed(name.encode() * 8) for name in ("mine", "aaaa", "bbbb"))
RUN = SIGNED.run_id


def receipt(signer=A, maker=ME, first=0, last=3, contributions=4, stage=0):
    return Receipt(signer.peer_id, maker.peer_id, stage, first, last, contributions)


# -- what is signed ---------------------------------------------------------------------------------------


def test_at_the_end_of_a_block_every_other_maker_gets_what_was_counted():
    makers = SettledMakers(A.peer_id, 2, 4)
    sets = [[ME.peer_id, A.peer_id], [ME.peer_id], [B.peer_id, ME.peer_id], []]
    due = [makers.settled(round, makers_of) for round, makers_of in enumerate(sets)]
    assert due[:3] == [[], [], []]
    assert {(r.maker, r.first, r.last, r.contributions, r.stage) for r in due[3]} == {
        (ME.peer_id, 0, 3, 3, 2),
        (B.peer_id, 0, 3, 1, 2),
    }


def test_a_newcomer_signs_from_where_it_came_and_a_round_that_settles_again_counts_once():
    makers = SettledMakers(A.peer_id, 0, 4)
    makers.settled(6, [ME.peer_id])
    makers.settled(6, [ME.peer_id])
    (due,) = makers.settled(7, [ME.peer_id])
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
    message = decode(encode(ReceiptIs(sealed())))
    assert open_receipt(message.receipt, RUN, 4) == (receipt(), 1000.0)


def test_a_message_of_the_largest_receipt_fits_and_a_larger_one_is_no_message():
    big = Receipt(A.peer_id, ME.peer_id, 32767, 2**32 - 4, 2**32 - 1, 4, 2**62 - 1)
    data = seal_receipt(A, RUN, big, 1e12)
    assert open_receipt(decode(encode(ReceiptIs(data))).receipt, RUN, 4)[0] == big
    with pytest.raises(WireError):
        decode(encode(ReceiptIs(bytes(300))))


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

    def __init__(self):
        self.sent, self.refusals, self.there = [], [], True

    def post(self, peer, lane, message, body=b""):
        if self.there:
            self.sent.append((peer, message))
        return self.there

    def refused(self, peer, code, reason):
        self.refusals.append((peer, code))


def one(identity, path=None, posts=None):
    return Receipts(identity, SIGNED, 0, path, posts or Posts(), lambda: 1000.0, lambda *a, **k: None)


def settle(receipts, rounds, makers):
    for round in rounds:
        references = tuple(Reference(round, peer.peer_id, ContributionId(b"x" * 16), 1) for peer in makers)
        receipts.settled(Settled(round, b"", b"", references))


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
    mine = one(ME)
    mine.message(A.peer_id, message)
    assert summary(mine.kept)["accepted"] == 4


def test_one_for_somebody_else_or_not_by_its_sender_is_refused_and_counted():
    posts = Posts()
    mine = one(ME, posts=posts)
    mine.message(B.peer_id, ReceiptIs(sealed(A)))
    mine.message(A.peer_id, ReceiptIs(sealed(A, maker=B)))
    mine.message(A.peer_id, ReceiptIs(b"noise"))
    assert [code for _, code in posts.refusals] == ["malformed"] * 3
    assert summary(mine.kept)["accepted"] == 0


def test_they_are_kept_on_disk_with_the_own_tokens_and_verified_when_read(tmp_path):
    path = tmp_path / "receipts.jsonl"
    mine = one(ME, path)
    for round in range(4):
        mine.made(round, 100 + round)
    settle(mine, range(4), [ME, A])
    mine.message(A.peer_id, ReceiptIs(sealed(A)))
    mine.message(B.peer_id, ReceiptIs(sealed(B, contributions=3)))
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
    mine = one(ME, path)
    for contributions in (1, 2, 3, 4):
        mine.message(A.peer_id, ReceiptIs(sealed(A, first=4 - contributions, contributions=contributions)))
    assert len(path.read_text().splitlines()) == 4
    one(ME, path)
    assert len(path.read_text().splitlines()) == 1


# -- what is told -----------------------------------------------------------------------------------------

TOLD = {
    "peer": "12D3", "run": "ab" * 32, "name": "tiny", "every": 16, "accepted": 0, "tokens": 0, "signers": 0,
    "receipts": 0, "blocks": 0, "since": None, "unusable": 0, "made": 0, "group": True, "stage": 1,
    "uptime_seconds": 7500.0, "moves": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": "not running"}, "start it"),
        ({"state": "paused (user)"}, "swarmnet resume"),
        ({"state": "joining"}, "once it trains"),
        ({"state": "training", "group": False}, "no other peer holds its stage"),
        ({"state": "training"}, "after every 16 settled rounds"),
        ({"state": "training", "made": 3}, "swarmnet doctor"),
        ({"state": "training", "accepted": 1234, "tokens": 99, "since": 0.0}, "1,234 contributions accepted"),
    ],
)
def test_nought_is_explained_with_what_to_do(change, words):
    text = "\n".join(lines({**TOLD, **change}))
    assert words in text
    assert ("why 0" in text) == (not change.get("accepted"))
    assert "up 2 h 5 min" in text


def test_in_a_swarm_every_peer_of_a_group_is_counted_by_the_others():
    swarm = Swarm(tiny_manifest(stages=(3,)))

    async def story():
        swarm.open()
        members = [swarm.start(name, stage=0) for name in ("a", "b", "c")]

        def counted():
            sums = [summary(member.worker.receipts.kept) for member in members]
            return all(one["accepted"] >= 4 and one["signers"] == 2 and one["tokens"] > 0 for one in sums)

        await swarm.until(lambda: all(member.worker.state == "training" for member in members), 60.0)
        await swarm.until(counted, 120.0)
        ids = [member.worker.receipts.kept for member in members]
        for kept in ids:
            for (stage, block), held in kept.book.blocks.items():
                assert stage == 0
                assert accepted(held.values()) <= 4, f"block {block}"
        await swarm.close()

    run(story())
