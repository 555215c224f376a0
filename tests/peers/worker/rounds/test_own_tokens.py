"""What a peer counts of its own contributions: at once, and for all its life."""

import asyncio
import re
from types import SimpleNamespace

from swarm import sign, tiny_manifest

from peers.worker.rounds import receipt_service
from peers.worker.rounds.operations import RoundSettled
from peers.worker.rounds.receipt_service import Receipts, confirmed_tokens, own_tokens, summary, take
from peers.worker.watch.own_record import OwnRecord
from protocols.signed.identity import Identity
from protocols.signed.signed_receipts import seal_receipt
from swarmnet.rounds.receipt_rules import Receipt

SIGNED = sign(tiny_manifest())  # snapshot_interval: 4
ME = Identity.from_seed(b"mine" * 8)


def receipts(path):
    return Receipts(
        identity=ME,
        signed=SIGNED,
        stage=0,
        path=path,
        neighbourhood=SimpleNamespace(post=lambda *_: True),
        now=lambda: 1000.0,
        log_event=lambda _: None,
    )


def settle(mine, rounds):
    for round in rounds:
        mine.settled(RoundSettled(round, b"", b"", (), contributors=(ME.peer_id,)))


def counted(mine):
    return own_tokens(mine.kept) + mine.own.unreported_tokens


def test_at_the_end_of_a_stage_the_user_reads_what_others_have_confirmed(tmp_path):
    mine, told = receipts(tmp_path / "receipts.jsonl"), []
    for round in range(6):
        mine.made(round, 100)
    services = SimpleNamespace(
        receipts=mine,
        context=SimpleNamespace(signed=SIGNED),
        stage=0,
        round_service=SimpleNamespace(tokens=1200),
    )
    record = OwnRecord(tmp_path, ME.peer_id, lambda: 0.0)
    record.end_stage(services, lambda event, text: told.append(text))
    assert told == [], "nothing has settled"
    settle(mine, range(6))
    signer = Identity.from_seed(b"sign" * 8)
    confirming = seal_receipt(signer, SIGNED.run_id, Receipt(signer.peer_id, ME.peer_id, 0, 0, 3, 4), 1000.0)
    assert take(mine.kept, confirming, SIGNED, ME.peer_id)
    assert (confirmed_tokens(mine.kept), summary(mine.kept)["tokens"]) == (400, 400), "the first block"
    record.end_stage(services, lambda event, text: told.append(text))
    assert [re.sub(r" \(5.*tokens\)", "", text) for text in told] == [
        "This computer has trained 600 tokens in 0 s. Others have confirmed 400 tokens (`swarmnet credit`)."
    ]


def test_own_tokens_count_before_others_confirm_them_and_old_blocks_stay_as_a_sum(tmp_path, monkeypatch):
    path = tmp_path / "receipts.jsonl"
    mine = receipts(path)
    for round in range(10):
        mine.made(round, 100)
    settle(mine, range(1))
    assert counted(mine) == 100, "the first one counts at once"
    settle(mine, range(1, 3))
    assert counted(mine) == 300, "the block is not over yet"
    settle(mine, range(3, 10))
    assert (counted(mine), summary(mine.kept)["tokens"]) == (1000, 0)
    asyncio.run(mine.close())
    monkeypatch.setattr(receipt_service, "BLOCKS_KEPT", 1)
    for _ in range(2):  # What became a sum is read as one, and stays.
        again = receipts(path)
        assert (own_tokens(again.kept), own_tokens(again.kept, 0)) == (1000, 200)
        assert len(again.kept.tokens) == 1
