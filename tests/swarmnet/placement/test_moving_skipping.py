"""Who is needed where in a run whose microbatches leave stages out."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from swarm import TINY_MODEL, tiny_manifest

from swarmnet.identifiers import PeerId
from swarmnet.placement.policy import (
    Intent,
    MoveRules,
    ObservedPeer,
    View,
    choose_move,
    choose_stage,
    move_rules,
    summarize_records,
)
from swarmnet.run.path_rules import PathRules, begin, choices, visit
from swarmnet.run.schema import Paths

ME = PeerId("me")
SIX = MoveRules((1.0,) * 6, paths=PathRules(6, most_skipped=2, full_path_warmup_rounds=10))
"""Two of the four stages between the first and the last are left out, from round 10 on."""


def seen(*peers: int, round: int = 10, rules: MoveRules = SIX) -> View:
    """So many peers at each stage, all equally fast."""
    stages = [stage for stage, count in enumerate(peers) for _ in range(count)]
    records = [ObservedPeer(stage, 1.0 / rules.work[stage], round=round) for stage in stages]
    return summarize_records(((PeerId(f"p{number}"), record) for number, record in enumerate(records)), rules)


def test_a_stage_that_half_of_the_microbatches_visit_carries_twice_as_many_of_the_runs():
    view = seen(4, 2, 2, 2, 2, 4)
    assert view.capacities == (4.0,) * 6
    assert view.usual == 1.0, "a peer is as fast as it was"
    assert seen(4, 2, 2, 2, 2, 4, round=9).capacities == (4.0, 2.0, 2.0, 2.0, 2.0, 4.0), "still whole"


def test_the_share_of_a_stage_is_what_paths_drawn_among_all_ways_visit():
    rules, chance, visits, drawn = PathRules(6, most_skipped=2), Random(1), [0] * 6, 3000
    for _ in range(drawn):
        header = begin(rules)
        while header.hops_left:
            header = visit(header, chance.choice(choices(header, rules)), rules)
        for stage in header.visited:
            visits[stage] += 1
    shares = [rules.visit_share(stage, 0) for stage in range(6)]
    assert shares == [1.0, 0.5, 0.5, 0.5, 0.5, 1.0]
    assert sum(visits) == drawn * sum(shares)
    assert visits[0] == visits[5] == drawn


def test_the_round_is_the_first_stages_as_most_say_it_who_take_part_there():
    def shares(*first: ObservedPeer) -> tuple[float, ...]:
        others = [ObservedPeer(stage, 1.0, round=3) for stage in range(1, 6)]
        return summarize_records(
            ((PeerId(f"p{n}"), one) for n, one in enumerate([*first, *others])), SIX
        ).shares

    skips, whole = (1.0, 0.5, 0.5, 0.5, 0.5, 1.0), (1.0,) * 6
    joining, liar = ObservedPeer(0, 0.0, round=0), ObservedPeer(0, 1.0, round=1 << 40)
    assert shares(ObservedPeer(0, 1.0, round=10), joining, joining) == skips
    assert shares(ObservedPeer(0, 1.0, round=9), ObservedPeer(0, 1.0, round=9), liar) == whole
    assert shares() == whole, "nobody begins a microbatch"


def test_newcomers_and_peers_of_the_middle_go_to_the_ends():
    assert choose_stage(seen(3, 2, 2, 2, 2, 4), SIX, Random(1)) == 0
    view = seen(4, 4, 2, 2, 2, 2)
    assert choose_move(view, ME, 1, 1.0, SIX, 10.0, Random(1)) == Intent(ME, 1, 5, leaves=2.0, brings=1.0)
    assert choose_move(view, ME, 0, 1.0, SIX, 10.0, Random(1)) is None
    even = seen(4, 2, 2, 2, 2, 4)
    assert all(choose_move(even, ME, stage, 1.0, SIX, 10.0, Random(1)) is None for stage in range(6))


def test_announced_moves_count_in_the_runs_microbatches_as_well():
    peers = [ObservedPeer(1, 1.0, moving_to=5, round=10), ObservedPeer(0, 1.0, round=10)]
    view = summarize_records(((PeerId(f"p{number}"), record) for number, record in enumerate(peers)), SIX)
    assert view.intents == (Intent(PeerId("p0"), 1, 5, leaves=2.0, brings=1.0),)


def test_a_stage_of_twice_the_work_and_half_of_the_microbatches_needs_as_much_as_the_first():
    model = replace(TINY_MODEL, num_hidden_layers=7)
    rules = move_rules(tiny_manifest((1, 1, 2, 1, 1, 1), model=model, paths=Paths(1 / 3)))
    assert rules.work[:5] == (1.0, 1.0, 2.0, 1.0, 1.0)
    assert seen(4, 2, 4, 2, 2, 4, rules=rules).capacities[:5] == (4.0,) * 5
