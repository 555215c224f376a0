"""What the owner sees of votes and answers: what records say of other peers, also if some lie."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observed import NOON, record
from prometheus_client.parser import text_string_to_metric_families
from swarm import sign, tiny_manifest

from peers.stageless.observer.judged_peers import SHOWN_DOUBTS, SHOWN_VERDICTS
from peers.stageless.observer.page_json import Board
from peers.stageless.observer.sightings import PeerObservations
from peers.stageless.observer.snapshot_of_records import snapshot_of
from peers.stageless.observer.swarm_metrics import SwarmMetrics
from peers.telemetry.snapshot import as_json, from_json
from swarmnet.identifiers import PeerId
from swarmnet.optimizer.agreement.comparison import FULL_WEIGHT
from swarmnet.optimizer.agreement.weight_report import (
    MAX_REPORTED,
    NEWCOMER,
    REPORT_BYTES,
    REPORTERS,
    encode_report,
    is_reporter,
    open_report,
    short_tag,
)
from swarmnet.rounds.result_table import tag_key, tag_of

SIGNED = sign(tiny_manifest())


def short_name(peer):
    return short_tag(tag_key(tag_of(PeerId(peer))))


def report(round, **marks):
    return encode_report(round, [(short_name(peer), mark) for peer, mark in marks.items()])


def seen(*records):
    sightings = PeerObservations(len(SIGNED.manifest.stages))
    for each in records:
        sightings.recorded(each, NOON)
        sightings.answered(each.peer, NOON)
    return snapshot_of(sightings, SIGNED, NOON)


def row_of(snapshot, peer):
    return next(row for row in snapshot.rows if row.peer == peer)


def metrics_of(snapshot):
    text = SwarmMetrics(lambda: snapshot).text().decode()
    names = ("light_peers", "dissenting_peers", "avoiding_peers")
    return {
        (name, sample.labels["stage"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        for name in names
        if sample.name == f"swarmnet_swarm_{name}" and sample.value
    }


USUAL = report(95, a=15, b=15, c=15, liar=0, new=NEWCOMER)
STAGE = [record(peer, 1, vote_weights=USUAL) for peer in ("a", "b", "c", "liar", "new")]


def test_each_peer_has_the_weight_that_its_stage_reports_and_who_weighs_little_is_named():
    shown = seen(*STAGE, record("other", 0))
    assert [row_of(shown, peer).vote_weight for peer in ("a", "liar", "new")] == [1.0, 0.0, 0.0]
    assert [row.peer for row in shown.rows if row.is_new_voter] == ["new"]
    assert row_of(shown, "other").vote_weight is None, "nobody reports the weights of stage 0"
    assert shown.doubts[0].startswith("liar (liar, stage 1): its votes weigh 0%")
    assert shown.doubts[1].endswith(f"swarmnet order ban {SIGNED.run_id} PEER")
    assert metrics_of(shown) == {("light_peers", "1"): 1.0}
    assert from_json(as_json(shown)) == shown


def test_a_peer_that_reports_other_weights_changes_none_and_is_named():
    slander = report(95, a=0, b=0, c=0, liar=15, new=15)
    shown = seen(*STAGE[:3], record("liar", 1, vote_weights=slander), STAGE[4])
    assert [row_of(shown, peer).vote_weight for peer in ("a", "liar", "new")] == [1.0, 0.0, 0.0]
    assert shown.weight_conflicts == {1: 1}
    assert shown.doubts[0].startswith("stage 1: 1 peer (liar) and the others report different weights")
    assert metrics_of(shown)["dissenting_peers", "1"] == 1.0


def test_in_a_stage_of_too_few_to_compare_all_votes_count():
    shown = seen(*(record(peer, 1, vote_weights=report(95)) for peer in "ab"))
    assert [(row.vote_weight, row.is_new_voter) for row in shown.rows] == [(1.0, False)] * 2


def test_reports_on_different_rounds_are_no_conflict_but_two_halves_are():
    later = report(103, a=15, b=14, c=15, liar=0, new=15)
    assert seen(*STAGE[:3], record("d", 1, vote_weights=later)).weight_conflicts == {}
    other = report(95, a=15, b=15)
    halves = [record(peer, 1, vote_weights=other) for peer in ("d", "e")]
    assert seen(*STAGE[:2], *halves).weight_conflicts == {1: 2}


def test_who_is_avoided_is_named_with_who_says_so_how_often_it_differed_and_in_what():
    above = record("above", 0, avoids=(("bad", 2, 3),))
    below = record("below", 2, avoids=(("bad", 4, 9),))
    shown = seen(above, below, *STAGE[:3], record("bad", 1))
    bad = row_of(shown, "bad")
    assert bad.avoided_by == 2
    assert {(one.by, one.what, one.differed, one.compared) for one in bad.verdicts} == {
        ("above", "gradients", 2, 3), ("below", "hidden states", 4, 9),
    }  # fmt: skip
    sentence = next(line for line in shown.doubts if line.startswith("bad"))
    assert "avoided by 2 peers (above: gradients differed in 2 of 3 comparisons" in sentence
    assert metrics_of(shown) == {("avoiding_peers", "1"): 2.0}


@pytest.mark.parametrize("stage", [1, -1])
def test_who_cannot_have_compared_a_peer_says_nothing_of_it(stage):
    shown = seen(record("slander", stage, avoids=(("a", 3, 3),)), record("a", 1), record("c", 0))
    assert row_of(shown, "a").verdicts == ()
    assert shown.doubts == ()


def test_many_that_accuse_or_are_accused_are_counted():
    crowd = [record(f"s{n}", 0, avoids=(("a", 3, 3),)) for n in range(30)]
    shown = seen(*crowd, record("a", 1))
    assert (row_of(shown, "a").avoided_by, len(row_of(shown, "a").verdicts)) == (30, SHOWN_VERDICTS)
    assert "and 26 more" in shown.doubts[0]
    slanderers = [
        record(f"s{n}", 0, avoids=tuple((f"v{8 * n + k}", 3, 3) for k in range(8))) for n in range(4)
    ]
    shown = seen(*slanderers, *(record(f"v{n}", 1) for n in range(32)))
    assert len(shown.doubts) == SHOWN_DOUBTS + 2
    assert "and 20 sentences more." in shown.doubts


def test_the_page_gets_weights_verdicts_and_sentences():
    board = Board(SIGNED, "swarmnet join RUN --bootstrap A", "0.1.0")
    board.show(seen(record("above", 0, avoids=(("liar", 2, 3),)), *STAGE))
    told = json.loads(board.answer(""))
    liar = next(row for row in told["rows"] if row["peer"] == "liar")
    assert (liar["vote_weight"], liar["avoided_by"], liar["verdicts"][0]["by"]) == (0.0, 1, "above")
    assert len(told["doubts"]) == 2


def test_of_many_contributors_those_that_weigh_least_are_reported():
    marks = [(short_name(f"p{n}"), FULL_WEIGHT if n % 2 else n % 15) for n in range(300)]
    data = encode_report(7, marks)
    opened = open_report(data)
    assert len(data) == REPORT_BYTES
    assert (len(opened.marks), opened.is_complete) == (MAX_REPORTED, False)
    assert max(opened.marks.values()) < FULL_WEIGHT
    some = record("p1", 1, vote_weights=data)
    assert row_of(seen(some), "p1").vote_weight is None, "left out is not new"


@given(st.binary(max_size=REPORT_BYTES))
def test_any_bytes_are_a_report_or_none(data):
    opened = open_report(data)
    assert opened is None or len(opened.marks) <= MAX_REPORTED
    seen(record("a", 1, vote_weights=data), record("b", 1, vote_weights=USUAL))


def test_all_of_a_small_stage_report_and_a_few_of_a_large_one():
    peers = [PeerId(f"peer {n}") for n in range(2000)]
    assert all(is_reporter(peer, REPORTERS) for peer in peers)
    assert sum(is_reporter(peer, 2000) for peer in peers) < 3 * REPORTERS
