"""The capacity simulator: events in order, the bound exact, routing near it, plans that add up."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest

from peers.lab.planner.layout import PeerSpec, SwarmLayout, Work
from peers.lab.planner.simulated_machine import Events
from peers.lab.planner.simulator import Swarm
from swarmnet.routing.load_balancer import Router


def draw(seed: int) -> SwarmLayout:
    """Returns a random swarm: 2 to 8 stages, 4 to 64 peers, forward passes of 0.05 to 0.5 s, 5 to 200 ms."""
    chance = Random(seed)
    stages = chance.randint(2, 8)
    count = chance.randint(max(4, stages), 64)
    stage = sorted([*range(stages), *(chance.randrange(stages) for _ in range(count - stages))])
    specs = tuple(PeerSpec(each, 0.05 * 10 ** chance.random(), slots=64, in_flight=1024) for each in stage)
    latency = [[0.0] * count for _ in range(count)]
    for a in range(count):
        for b in range(a):
            latency[a][b] = latency[b][a] = chance.uniform(0.005, 0.2)
    return SwarmLayout(specs, lambda a, b: latency[a][b], Work(body_bytes=0))


def share_of_max_flow(seed: int) -> float:
    """Returns the throughput of the swarm of this seed, as a share of its maximum flow.

    Slow swarms are watched longer: for 1,500 microbatches at the bound, after 500 of warm-up.
    """
    layout = draw(seed)
    swarm = Swarm(layout, Router, seed)
    capacity = layout.capacity()
    most = min(sum(capacity[peer] for peer in peers) for peers in layout.stages())
    warm_seconds = 30.0 + 500 / most
    measured_seconds = 1500 / most
    swarm.start()
    swarm.run(warm_seconds)
    before = swarm.finished
    swarm.run(warm_seconds + measured_seconds)
    return (swarm.finished - before) / measured_seconds / most


def near(a: int, b: int) -> float:
    return 0.01


def line(*seconds: float, **keys: float) -> SwarmLayout:
    """One peer per stage."""
    return SwarmLayout(tuple(PeerSpec(stage, forward, **keys) for stage, forward in enumerate(seconds)), near,
                  Work(body_bytes=1000, scatter=0.0))  # fmt: skip


def test_events_happen_in_the_order_of_time_and_equal_ones_as_they_were_set():
    events, seen = Events(), []
    for name, time in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        events.at(time, seen.append, name)
    events.at(1.0, lambda: events.after(0.5, seen.append, "later"))
    events.run(1.2)
    assert (seen, events.now) == (["a", "b"], 1.2)
    events.run(5.0)
    assert (seen, events.now) == (["a", "b", "later", "c"], 5.0)
    events.at(3.0, seen.append, "past")
    events.run(5.0)
    assert seen[-1] == "past"


def test_a_chain_runs_at_the_speed_of_its_slowest_peer():
    layout = line(0.01, 0.05, 0.02)
    swarm = Swarm(layout, Router, 1)
    swarm.start()
    swarm.run(40.0)
    before = swarm.finished
    swarm.run(140.0)
    assert swarm.finished - before == pytest.approx(100.0 / 0.15, rel=0.02)
    committed = {peer.pipeline.ledger.committed for peer in swarm.peers}
    assert max(committed) - min(committed) < 80, "no stage runs away from another"


def test_a_thin_line_is_a_bound_too():
    layout = line(0.01, 0.01, 0.01, up=20_000.0, down=20_000.0)
    assert min(layout.capacity()) == pytest.approx(10.0)
    swarm = Swarm(layout, Router, 1)
    swarm.start()
    swarm.run(20.0)
    before = swarm.finished
    swarm.run(60.0)
    assert 8.5 < (swarm.finished - before) / 40.0 <= 10.2


def test_peers_that_share_cores_share_their_speed():
    alone = SwarmLayout(tuple(PeerSpec(stage, 0.1) for stage in (0, 0, 1, 1)), near, Work(0))
    shared = SwarmLayout(tuple(PeerSpec(stage, 0.1) for stage in (0, 0, 1, 1)), near, Work(0), cores=1)
    rates = []
    for layout in (alone, shared):
        swarm = Swarm(layout, Router, 1)
        swarm.start()
        swarm.run(120.0)
        rates.append(swarm.finished / 120.0)
    assert rates[0] == pytest.approx(2 / 0.3, rel=0.06)
    assert rates[1] == pytest.approx(1 / 0.6, rel=0.06)


def test_a_peer_that_dies_costs_its_stage_its_share_and_nothing_is_counted_twice():
    layout = SwarmLayout(tuple(PeerSpec(stage, 0.1) for stage in (0, 0, 0, 1, 1, 1)), near, Work(0))
    swarm = Swarm(layout, Router, 3)
    swarm.start()
    swarm.run(60.0)
    swarm.kill(4)
    swarm.run(90.0)
    before = swarm.finished
    swarm.run(150.0)
    assert (swarm.finished - before) / 60.0 == pytest.approx(2 / 0.3, rel=0.06)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_routing_comes_near_the_maximum_flow():
    shares = [share_of_max_flow(seed) for seed in range(10)]
    assert fmean(shares) >= 0.95
    assert min(shares) >= 0.88
    assert max(shares) < 1.05, "more than the bound would be a fault of the simulator"
