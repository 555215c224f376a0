"""Who trains which experts, as an observer shows it, by what records say."""

import json

from observed import NOON, record
from prometheus_client.parser import text_string_to_metric_families
from swarm import expert_manifest, sign, tiny_manifest

from peers.network.discovery.expert_groups import expert_groups
from peers.stageless.observer import page_json as boards
from peers.stageless.observer.page_json import Board
from peers.stageless.observer.sightings import PeerObservations
from peers.stageless.observer.snapshot_of_records import snapshot_of
from peers.stageless.observer.swarm_metrics import SwarmMetrics
from peers.telemetry.snapshot import ExpertGroup

SIGNED = sign(expert_manifest(num_experts=6, top_k=2, groups=3))


def of(peer, stage, group, *trained, **fields):
    return record(peer, stage, experts_group=group, experts_trained=trained, **fields)


FOUR = [
    of("a", 0, 0, 95, 95, 60), of("b", 0, 1, 95, 95, 60), of("c", 0, 1, 95, 94, -1),
    of("d", 1, 2, -1, -1, 95),
]  # fmt: skip


def board(records, signed=SIGNED):
    sightings = PeerObservations(len(signed.manifest.stages))
    for each in records:
        sightings.recorded(each, NOON)
        sightings.answered(each.peer, NOON)
    made = Board(signed, "swarmnet join RUN --bootstrap A", "0.1.0")
    made.show(snapshot_of(sightings, signed, NOON))
    return made


def groups_of(*records):
    told = [each.record for each in records]
    return {(one.stage, one.group): one for one in expert_groups(SIGNED.manifest, told)}


def test_each_stage_has_its_groups_with_who_trains_them_and_since_when_nobody_does():
    found = groups_of(*FOUR)
    assert found[0, 0] == ExpertGroup(0, 0, 0, 1, holders=1, trained=95, settled=95)
    assert found[0, 1] == ExpertGroup(0, 1, 2, 3, holders=2, trained=95, settled=95)
    assert found[0, 2] == ExpertGroup(0, 2, 4, 5, holders=0, trained=60, settled=95)
    assert [found[0, group].stale_rounds for group in range(3)] == [0, 0, 35]
    assert (found[1, 0].holders, found[1, 0].trained, found[1, 0].stale_rounds) == (0, None, None)
    assert found[2, 0] == ExpertGroup(2, 0, 0, 1, holders=0, trained=None, settled=None)


def test_who_is_gone_leaving_or_joining_trains_nothing_and_a_liar_among_three_says_nothing():
    states = [of(f"p{n}", 0, 2, state=state) for n, state in enumerate(("joining", "leaving", "paused"))]
    assert groups_of(*states)[0, 2].holders == 0
    liar = of("liar", 0, 0, 2**32 - 1, 2**32 - 1, 2**32 - 1)
    assert groups_of(*FOUR[:3], liar)[0, 2].trained == 60
    short = of("short", 0, 0, 95)
    assert groups_of(short)[0, 1].trained is None


def test_who_still_makes_up_for_settled_rounds_does_not_say_when_experts_were_trained():
    newcomer = of("n", 0, 1, 7, 7, 7)
    found = groups_of(FOUR[0], newcomer)
    assert [found[0, group].trained for group in range(3)] == [95, 95, 60]
    assert groups_of(newcomer)[0, 0].trained is None, "nobody knows better"
    assert groups_of(of("n", 0, 1, 95, 7, 7))[0, 1].trained == 7


def test_the_page_is_told_of_all_groups_and_of_too_many_those_that_need_somebody(monkeypatch):
    told = json.loads(board(FOUR).answer(""))
    assert len(told["experts"]) == 9
    assert told["experts"][2] == {
        "stage": 0, "group": 2, "first": 4, "last": 5, "holders": 0, "trained": 60, "stale_rounds": 35,
    }  # fmt: skip
    assert told["more_experts"] == 0
    monkeypatch.setattr(boards, "SHOWN_GROUPS", 2)
    six = [of(f"{stage}-{group}", stage, group, 95, 95, 95) for stage in (1, 2) for group in range(3)]
    told = json.loads(board([*FOUR, *six]).answer(""))
    assert [(one["stage"], one["group"]) for one in told["experts"]] == [(0, 0), (0, 2)]
    assert told["more_experts"] == 7


def test_of_a_run_without_groups_there_is_no_table():
    for signed in (sign(tiny_manifest()), sign(expert_manifest(num_experts=4, top_k=2))):
        assert json.loads(board([record("a", 0)], signed).answer(""))["experts"] == []


def test_metrics_tell_the_group_that_needs_somebody_most_of_each_stage():
    text = SwarmMetrics(lambda: board(FOUR).snapshot).text().decode()
    found = {
        (sample.name.removeprefix("swarmnet_swarm_experts_"), sample.labels["stage"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "_experts_" in sample.name
    }
    assert found == {("min_replicas", "0"): 0.0, ("min_replicas", "1"): 0.0, ("min_replicas", "2"): 0.0}
