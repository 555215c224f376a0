"""What a peer remembers of the microbatches whose gradient it has added."""

from __future__ import annotations

import pytest

from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.pipeline import ledger
from swarmnet.pipeline.ledger import CommittedTwice, MicrobatchLedger, RecentLoss

HONEST, LIAR = PeerId("honest"), PeerId("liar")


def test_a_microbatch_is_committed_once():
    count = MicrobatchLedger()
    count.commit(MicrobatchId(HONEST, 7), 32)
    assert count.is_committed(MicrobatchId(HONEST, 7))
    assert not count.is_committed(MicrobatchId(HONEST, 6))
    assert not count.is_committed(MicrobatchId(LIAR, 7))
    with pytest.raises(CommittedTwice, match=r"honest.*7"):
        count.commit(MicrobatchId(HONEST, 7), 32)
    assert (count.committed, count.tokens) == (1, 32)


def test_made_up_microbatches_do_not_speak_for_the_others_of_their_origin(monkeypatch):
    monkeypatch.setattr(ledger, "REMEMBERED", 100)
    count = MicrobatchLedger()
    count.commit(MicrobatchId(HONEST, 3), 32)
    for counter in range(10**6, 10**6 + 99):
        count.commit(MicrobatchId(HONEST, counter), 32)
    assert not count.is_committed(MicrobatchId(HONEST, 4))
    assert count.is_committed(MicrobatchId(HONEST, 3))
    count.commit(MicrobatchId(HONEST, 4), 32)


def test_only_the_newest_are_remembered(monkeypatch):
    monkeypatch.setattr(ledger, "REMEMBERED", 100)
    count = MicrobatchLedger()
    for counter in range(250):
        count.commit(MicrobatchId(HONEST, counter), 1)
    known = [count.is_committed(MicrobatchId(HONEST, counter)) for counter in (149, 150, 249)]
    assert known == [False, True, True]
    assert count.committed == count.tokens == 250


def test_the_loss_that_is_told_is_a_mean_by_tokens_of_the_newest_hundred():
    losses = RecentLoss()
    assert (losses.mean, losses.newest) == (None, None)
    losses.add(30.0, 10)
    losses.add(10.0, 30)
    losses.add(5.0, 0)
    assert losses.mean == pytest.approx(1.0)
    assert losses.newest == pytest.approx(1 / 3)
    for _ in range(100):
        losses.add(7.0, 1)
    assert losses.mean == pytest.approx(7.0)
