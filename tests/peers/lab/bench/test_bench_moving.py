"""Moving on a trace of preemptions: what it is worth, what it costs, and that the trace is what it says."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import pytest

from peers.cli import main as cli
from peers.lab.bench.moving import policies
from peers.lab.bench.moving_play import Setting, World
from peers.lab.bench.preemption_trace import HOUR, Climate, preemptions
from swarmnet.placement.policy import MoveRules

STAGES = 8
EIGHT_HOURS = Climate(hours=8.0)


def played(name, climate=EIGHT_HOURS, seed=1, stages=STAGES):
    trace = preemptions(climate, seed)
    return World(policies(stages, 60.0)[name], trace, climate.hours * HOUR, seed).play()


def test_a_swarm_that_moves_does_96_percent_of_the_optimum_and_more_than_swarms_own_rule():
    ours, theirs = played("ours"), played("SWARM's rule, newcomers by ours")
    anywhere, nobody = played("SWARM's rule, newcomers anywhere"), played("nobody moves, newcomers anywhere")
    assert ours.share > 0.96
    assert ours.share > theirs.share > anywhere.share > nobody.share
    assert ours.emptied == 0
    assert ours.most_moves_in_an_hour <= 4
    assert ours.moves / ours.peer_hours < 0.5
    assert ours.returns < 0.1 * ours.moves
    assert nobody.moves == 0
    assert ours.best == pytest.approx(nobody.best), "all are measured against the same optimum"


def test_the_same_seed_plays_the_same_and_another_does_not():
    climate = Climate(machines=24, hours=2.0)
    once, again, other = (played("ours", climate, seed) for seed in (1, 1, 2))
    assert once == again
    assert once != other


def test_a_swarm_that_nobody_leaves_is_left_as_it_is():
    calm = Climate(machines=32, hours=12.0, life_hours=1e9, burst_hours=1e9, slowest_share=0.9)
    lives = [dataclasses.replace(machine, goes_at=1e9) for machine in preemptions(calm, 3)]
    outcome = World(policies(STAGES, 60.0)["ours"], lives, calm.hours * HOUR, 3).play()
    assert outcome.moves <= 2
    assert outcome.share > 0.97


def test_a_swarm_that_starts_lopsided_is_evened_out_once_and_stays_so():
    calm = Climate(machines=40, hours=6.0, life_hours=1e9, burst_hours=1e9)
    lives = [dataclasses.replace(machine, goes_at=1e9) for machine in preemptions(calm, 3)]
    for machine in lives:  # Of the first stage of four only three are left after ten minutes.
        if machine.number % 4 == 0 and machine.number > 8:
            machine.goes_at = 600.0
    outcome = World(policies(4, 60.0)["ours"], lives, calm.hours * HOUR, 3).play()
    assert 4 <= outcome.moves <= 8
    assert outcome.returns == 0
    assert outcome.share > 0.97


@pytest.mark.parametrize("seed", range(12))
def test_small_swarms_under_heavy_preemption_never_empty_a_stage_by_a_move(seed):
    rough = Climate(
        machines=6 + seed, hours=12.0, life_hours=1.0, burst_hours=0.3, zones=2, slowest_share=0.2
    )
    world = World(Setting(3, MoveRules((1.0,) * 3)), preemptions(rough, seed), rough.hours * HOUR, seed)
    outcome = world.play()
    assert outcome.moves > 0
    assert outcome.emptied == 0


def test_machines_go_in_bursts_of_one_zone_and_come_back_in_batches():
    trace = preemptions(Climate(), 4)
    end = 32 * HOUR
    gone = sorted((machine.goes_at, machine.zone) for machine in trace if machine.goes_at < end)
    in_five_minutes = Counter((int(at // 300), zone) for at, zone in gone)
    assert max(in_five_minutes.values()) > 20, "a burst"
    assert sum(count for count in in_five_minutes.values() if count >= 8) > 0.2 * len(gone)
    assert all(0 < machine.goes_at - machine.comes_at < 24 * HOUR + 1 for machine in trace)
    assert [machine.number for machine in trace] == list(range(len(trace)))
    times = sorted([(m.comes_at, 1) for m in trace] + [(m.goes_at, -1) for m in trace])
    here, most = 0, 0
    for _, change in times:
        here += change
        most = max(most, here)
    assert most == 400, "never more than are wanted"


def test_the_command_prints_a_row_per_policy(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "moving", "--seeds", "1", "--machines", "32", "--hours", "1", "--stages", "4"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"1 traces? of 1 h: 32 machines wanted", lines[0])
    rows = {line[8:43].strip(): line[43:].split() for line in lines[4:]}
    assert rows.keys() == policies(4, 60.0).keys()
    assert all(0.0 < float(row[0].rstrip("%")) <= 101.0 for row in rows.values())
