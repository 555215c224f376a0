"""Plans that add up: what is placed, played and computed of a swarm that does not exist yet."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from typed import refused

from peers.config.errors import ConfigError, UserError
from peers.lab.planner import planned_links as links
from peers.lab.planner.churn import Play, Turnover, thinnest_share
from peers.lab.planner.layout import PeerSpec, SwarmLayout, Work
from peers.lab.planner.placing import placed
from peers.lab.planner.plan import plan
from peers.lab.planner.plan_report import render
from peers.lab.planner.plan_request import PlanRequest
from peers.lab.planner.playing import course, play, playable
from peers.lab.planner.simulator import Swarm
from peers.lab.planner.speeds import MEGABIT, peer_classes
from peers.lab.processes.demo_report import contribution_bytes
from swarmnet.identifiers import PeerId
from swarmnet.routing.load_balancer import Router
from swarmnet.run.manifest import Manifest
from swarmnet.run.path_rules import PathRules
from swarmnet.run.schema import ModelShape, Paths

DAY = 86400.0
CONFIGS = Path(__file__).parents[4] / "configs"
MANIFEST = Manifest("run", PeerId("owner"), stages=(2, 1, 1), model=ModelShape())
SIX = Manifest("run", PeerId("owner"), stages=(1,) * 6, model=ModelShape(num_hidden_layers=6))
SKIPPING = replace(SIX, paths=Paths(skip_ratio=1 / 3))
LINKS = """
regions:
  eu: {down: 100, up: 40}
  us: {down: 300}
links:
  - {between: [eu, eu], latency: 5ms-30ms}
  - {between: [us, eu], latency: 45ms-70ms, mbit: 30}
  - {between: [us, us], latency: 7ms}
"""


def test_classes_of_peers_are_read_and_wrong_ones_named():
    assert [one.count for one in peer_classes("3x200tps, 1x2.5ktps@1000/500")] == [3, 1]
    fast = peer_classes("1x2.5ktps@1000/500")[0]
    assert (fast.tokens_per_second, fast.down, fast.up) == (2500.0, 1000 * MEGABIT, 500 * MEGABIT)
    for wrong in ("", "x", "0x5tps", "3x0tps", "3x5tps@1", "3x5tps@0/1", "3x5", "8"):
        with pytest.raises(ValueError, match=r"peers|nothing"):
            peer_classes(wrong)


def test_a_plan_adds_up():
    question = PlanRequest(peer_classes("9x2000tps@1000/1000"), (0.001, 0.01), tokens=10**9)
    answer = plan(MANIFEST, question)
    assert sum(answer.peers) == 9
    assert 0.9 * answer.most < answer.tokens_per_second <= 1.05 * answer.most
    assert answer.most == pytest.approx(min(answer.capacity))
    assert answer.days == pytest.approx(10**9 / answer.tokens_per_second / 86400)
    assert answer.churned == answer.tokens_per_second
    text = render(answer)
    assert "weakest stage" in text
    assert f"{answer.weakest}:" in text


def churning(churn):
    return PlanRequest(peer_classes("24x500tps@1000/1000"), (0.005, 0.02), churn=churn)


@pytest.fixture(scope="module")
def half_leave():
    """The plan of a swarm half of which leaves in an hour."""
    return plan(MANIFEST, churning(0.5))


def test_churn_costs_and_more_churn_costs_more(half_leave):
    kept = [half_leave, plan(MANIFEST, churning(5.0))]
    shares = [one.churned / one.tokens_per_second for one in kept]
    assert 1.0 > shares[0] > shares[1] > 0.9


def test_missing_peers_hold_up_the_swarm_by_the_stage_that_misses_most():
    assert thinnest_share([4.0] * 3, [4] * 3, [0.0] * 3) == pytest.approx(1.0)
    assert thinnest_share([9.0], [100], [1.0]) == pytest.approx(0.99, abs=1e-3)
    assert thinnest_share([4.0] * 3, [4] * 3, [0.001] * 3) == pytest.approx(1 - 3 * 0.001 / 4, abs=1e-5)
    uneven = thinnest_share([4.0, 40.0], [4, 4], [0.01, 0.01])
    assert uneven == pytest.approx(1 - 0.01 / 4, abs=1e-4), "the larger stage has room"
    large = 1 - thinnest_share([1.0] * 3, [3333] * 3, [2.0] * 3)
    assert 2 / 3333 < large < 3 * 2 / 3333, "the worst of three, not their sum"


def test_too_few_peers_are_refused():
    with pytest.raises(UserError, match="2 peers cannot hold 3 stages"):
        plan(MANIFEST, PlanRequest(peer_classes("2x5tps")))


def test_a_swarm_of_which_nothing_comes_is_refused():
    model = ModelShape(num_hidden_layers=3, hidden_size=1024, intermediate_size=4096)
    large = Manifest("run", PeerId("owner"), stages=(1, 1, 1), model=model)
    with pytest.raises(UserError, match="with so much churn"):
        plan(large, PlanRequest(peer_classes("3x500tps@0.5/0.5"), churn=100.0))
    with pytest.raises(UserError, match="over such links"):
        plan(large, PlanRequest(peer_classes("3x0.01tps@0.5/0.5")))


# -- contributions -----------------------------------------------------------------------------------


# -- stages that are left out ------------------------------------------------------------------------


def test_a_run_that_skips_is_planned_as_one():
    """Two of the four stages between the first and the last are visited: so half of the peers do there."""
    question = PlanRequest(peer_classes("48x500tps@1000/1000"), (0.005, 0.01))
    whole, skips = plan(SIX, question), plan(SKIPPING, question)
    assert whole.visited == (1.0,) * 6
    assert skips.visited[0] == skips.visited[-1] == 1.0
    assert sum(skips.visited) == pytest.approx(4.0, abs=0.1)
    assert set(whole.peers) == {8}
    assert max(skips.peers[1:5]) <= 6 < 11 <= skips.peers[0]
    assert skips.most == pytest.approx(1.5 * whole.most, rel=0.06)
    assert skips.tokens_per_second == pytest.approx(1.5 * whole.tokens_per_second, rel=0.1)
    for stage in range(1, 5):
        microbatches = skips.visited[stage] * skips.churned / whole.churned
        part = microbatches * whole.peers[stage] / skips.peers[stage]
        assert skips.data_bytes[stage] == pytest.approx(part * whole.data_bytes[stage])
        assert skips.round_seconds[stage] == pytest.approx(skips.round_seconds[0] / skips.visited[stage])
        contributors = min(4, skips.peers[stage]) * (skips.peers[stage] - 1) / skips.peers[stage]
        size = contribution_bytes(SKIPPING, stage)
        expected = contributors * size / skips.round_seconds[stage] * DAY
        assert skips.update_bytes[stage] == pytest.approx(expected)
    assert "visits" in render(skips)
    assert "visits" not in render(whole)


def test_where_only_the_middle_is_thin_skipping_is_worth_what_it_leaves_out():
    layout = SwarmLayout(
        tuple(PeerSpec(stage, 0.1) for stage, count in enumerate((4, 2, 2, 2, 2, 4)) for _ in range(count)),
        lambda a, b: 0.01, Work(0), rules=PathRules.of(6, 1 / 3),
    )  # fmt: skip
    ways = [course(one, 0) for one in (layout, replace(layout, rules=None))]
    skips, whole = (play(one, way, 32, 0, None).rate for one, way in zip(
        (layout, replace(layout, rules=None)), ways, strict=True))  # fmt: skip
    assert ways[0].most == pytest.approx(2 * ways[1].most)
    assert skips == pytest.approx(2 * whole, rel=0.1)
    assert 0.85 * ways[0].most < skips <= 1.02 * ways[0].most


# -- peers that leave and join -----------------------------------------------------------------------


def test_so_many_are_away_as_leave_and_come_back():
    layout = SwarmLayout(tuple(PeerSpec(stage, 30.0) for stage in (0, 1) for _ in range(400)),
                    lambda a, b: 0.01, Work(0))  # fmt: skip
    swarm = Swarm(layout, Router, 1)
    turnover = Turnover(0.1 / 3600, (20.0,) * 800)
    playing = Play(swarm=swarm, turnover=turnover, seed=1, until=100.0)
    away = []
    for second in range(0, 100, 5):
        swarm.run(float(second))
        away.append(sum(not peer.alive for peer in swarm.here) / 800)
    assert fmean(away) == pytest.approx(0.05, abs=0.01)
    assert abs(away[0] - 0.05) < 0.02, "from the beginning"
    assert playing.deaths == pytest.approx(100 * 800 * 0.05 / 20, rel=0.25)


def test_what_churn_costs_is_played_and_computed_alike(half_leave):
    answer = half_leave
    assert answer.churn.leaving == 12
    assert answer.churn.deaths >= 30
    assert answer.churn.hastened > 20
    played, computed = answer.churn.costs, answer.churn.computed
    assert 0.4 * computed < played < 1.2 * computed, "there is some slack in every stage"
    assert answer.churned == answer.tokens_per_second * (1 - answer.churn.costs)
    assert "simulated" in render(answer)


# -- how many are played -----------------------------------------------------------------------------


def test_all_are_played_while_a_minute_is_enough_and_then_a_sample():
    for text, everybody in (("100x500tps", True), ("10000x500tps@1000/1000", False)):
        question = PlanRequest(peer_classes(text))
        peers = placed(MANIFEST, question).peers
        layout = SwarmLayout(tuple(peers), question.between().between([""] * len(peers), 0), Work(130_000))
        way = course(layout, 0)
        count = playable(layout, way, 32, 1, True)
        assert (count >= len(peers)) == everybody
        assert count >= 300
        assert 3 * count >= len(peers), "home computers: thousands of ten thousand"
        assert playable(layout, way, 32, 2, True) <= count
    assert plan(MANIFEST, PlanRequest(peer_classes("50x500tps"), simulated=12)).simulated == 12


# -- what lies between -------------------------------------------------------------------------------


def written(tmp_path, text):
    path = tmp_path / "links.yaml"
    path.write_text(text)
    return path


def test_a_table_of_links_says_what_lies_between_regions(tmp_path):
    table = links.load(written(tmp_path, LINKS))
    regions = ["eu", "us", "eu", "us"]
    latency, carried = table.between(regions, 0), table.carried(regions)
    assert 0.045 <= latency(0, 1) == latency(1, 0) <= 0.07
    assert 0.005 <= latency(0, 2) <= 0.03
    assert latency(1, 3) == 0.007
    assert carried(0, 1) == carried(3, 2) == 30 * MEGABIT
    assert carried(0, 2) == float("inf")
    near, far = peer_classes("3x5tps:eu,2x5tps@50/10:us", table.lines)
    assert (near.down, near.up, near.region) == (100 * MEGABIT, 40 * MEGABIT, "eu")
    assert (far.down, far.up) == (50 * MEGABIT, 10 * MEGABIT)
    assert peer_classes("3x5tps:us", table.lines)[0].down == 300 * MEGABIT


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[us, us], latency: 7ms", "[us, asia], latency: 7ms", "'asia' is no region"),
        ("  - {between: [us, us], latency: 7ms}\n", "", "0 rows between us and us"),
        ("[us, us]", "[eu, us]", "2 rows between eu and us"),
        ("latency: 7ms", "latency: fast", "expected a duration"),
        ("latency: 7ms", "latency: 9ms-7ms", "from the shorter to the longer"),
        ("down: 300", "down: 0", "more than 0"),
        ("down: 300", "doom: 300", "unknown key; known here: down, up"),
    ],
)
def test_a_table_that_says_less_or_more_is_refused(tmp_path, old, new, words):
    with pytest.raises(ConfigError, match=words):
        links.load(written(tmp_path, LINKS.replace(old, new)))


def test_regions_and_tables_belong_together():
    with pytest.raises(ValueError, match="--links"):
        peer_classes("3x5tps:eu")
    with pytest.raises(ValueError, match="which region of the table"):
        peer_classes("3x5tps", {"eu": (1.0, 1.0)})


@pytest.mark.parametrize(
    ("keys", "connection"),
    [({"down": 20_000.0}, None), ({"up": 20_000.0}, None), ({}, lambda a, b: 20_000.0)],
    ids=["down", "up", "connection"],
)
def test_a_body_takes_its_time_on_whatever_is_slow(keys, connection):
    """A thousand bytes: 50 ms there, once for every body, however long nothing came before."""
    layout = SwarmLayout(tuple(PeerSpec(stage, 0.01, **keys) for stage in (0, 1)), lambda a, b: 0.01,
                    Work(body_bytes=1000, scatter=0.0), connection=connection)  # fmt: skip
    swarm = Swarm(layout, Router, 1)
    one, other = swarm.here
    swarm.run(100.0)
    came = bodies_sent(swarm, (one, other), (one, other))
    assert came == [pytest.approx(100.06), pytest.approx(100.11)]


def bodies_sent(swarm: Swarm, *ways) -> list[float]:
    """When each is there, if all are sent now; in the order in which they are sent."""
    came = [0.0] * len(ways)
    for number, (sender, receiver) in enumerate(ways):
        swarm._send_body(sender, receiver, lambda one: came.__setitem__(one, swarm.events.now), number)
    swarm.run(swarm.events.now + 60.0)
    return came


def test_the_command_takes_a_table(swarmnet, tmp_path):
    table, run = written(tmp_path, LINKS), str(CONFIGS / "demo-run.yaml")
    peers = "--peers", "4x500tps:eu,4x500tps@1000/1000:us"
    code, out, _ = swarmnet("plan", run, *peers, "--links", str(table), "--churn", "0.1")
    assert code == 0
    assert "8 of 8 peers" in out
    assert "leave an hour; simulated" in out
    refused(swarmnet("plan", run, *peers), "--links")
    refused(swarmnet("plan", run, *peers, "--links", str(table), "--latency", "1ms-2ms"), "--latency")
    refused(swarmnet("plan", run, "--peers", "8x5tps", "--latency", "9ms-2ms"), "--latency")
