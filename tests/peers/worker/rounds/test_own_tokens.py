"""What a peer counts of its own contributions: at once, and for all its life."""

import asyncio
from types import SimpleNamespace

from swarm import sign, tiny_manifest

from peers.worker.rounds import receipt_service
from peers.worker.rounds.operations import RoundSettled
from peers.worker.rounds.receipt_service import Receipts, own_tokens, summary
from protocols.signed.identity import Identity

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
