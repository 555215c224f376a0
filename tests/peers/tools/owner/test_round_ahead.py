"""From which round on an order is to hold, by what peers say of themselves in the directory."""

from __future__ import annotations

import pytest
from swarm import tiny_manifest

from peers.cli.owner.course import _thousandths
from peers.config.errors import UserError
from peers.tools.owner.round_ahead import RecordedProgress, chosen, seen
from protocols.signed.peer_record import PeerRecord


def record(stage, round, speed=0.0, state="training"):
    return PeerRecord("p", stage, "worker", [], round, speed, "", state=state)


def test_the_round_is_that_of_the_middle_peer_of_the_stage_that_is_furthest():
    records = [record(0, 40, 64.0), record(0, 41, 64.0), record(0, 3, 900.0, "joining")]
    records += [record(1, 39, 99.0), record(1, 10**6, 1e9), record(1, 42, 98.0)]
    assert seen(tiny_manifest(), records) == RecordedProgress(42, 0.5)
    assert seen(tiny_manifest(), []) is None


def test_an_order_holds_some_minutes_ahead_from_the_beginning_of_a_block_on():
    manifest = tiny_manifest()  # Snapshots every 4 rounds.
    assert chosen(manifest, RecordedProgress(42, 0.5), None).round == 132
    assert "42" in chosen(manifest, RecordedProgress(42, 0.5), None).why
    assert chosen(manifest, RecordedProgress(42, 0.0), None).round == 48
    assert chosen(manifest, RecordedProgress(42, 0.5), 43).round == 43
    assert chosen(manifest, None, 43).round == 43


def test_a_round_that_is_past_is_refused_with_one_that_is_not():
    with pytest.raises(UserError, match=r"round 42 is past: the run is at round 42\. .* round 132"):
        chosen(tiny_manifest(), RecordedProgress(42, 0.5), 42)
    with pytest.raises(UserError, match="name one with --from-round"):
        chosen(tiny_manifest(), None, None)


def test_a_factor_is_a_number_of_thousandths():
    assert [_thousandths(text) for text in ("0.5", "1", "0.001", "2.5e1")] == [500, 1000, 1, 25000]
    for text, said in (
        ("half", "no factor"),
        ("0.0005", "three decimals"),
        ("nan", "no factor"),
        ("inf", "no factor"),
    ):
        with pytest.raises(UserError, match=said):
            _thousandths(text)
