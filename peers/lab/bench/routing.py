"""How close routing comes to the most that a swarm could carry: random swarms, three rules, one table.

A swarm is drawn from a seed: 4 to 64 peers in 2 to 8 stages (each at least one peer), compute of a forward
from 0.05 to 0.5 s (evenly in the logarithm: 10 times), one-way latency of each pair from 5 to 200 ms
(evenly), lines of any speed. Backward takes twice as long as forward, every piece of compute scatters by 10
%. So a microbatch keeps a peer busy for 0.15 to 1.5 s, and a round trip to the next stage takes up to 0.4 s.

Nobody knows more than a real peer knows; origins decide with `Flow` how many to keep under way. Measured is
what comes back to the origins in the time in which the bound allows `MEASURED_MICROBATCHES`, divided by the
maximum flow (lab/planner/max_flow.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, log
from random import Random
from statistics import mean

from peers.lab.planner import max_flow
from peers.lab.planner.baseline_routers import LatencyRouter, RandomRouter
from peers.lab.planner.layout import Layout, PeerSpec, Work
from peers.lab.planner.simulator import Swarm
from peers.lab.world.parallel import pool
from swarmnet.routing.load_balancer import Router

FEWEST_PEERS, MOST_PEERS = 4, 64
FEWEST_STAGES, MOST_STAGES = 2, 8
FASTEST_SECONDS, SPREAD = 0.05, 10.0
LATENCY_SECONDS = (0.005, 0.2)
WARM_SECONDS = 30.0
WARM_MICROBATCHES, MEASURED_MICROBATCHES = 500, 1500
"""By the bound: slow swarms are watched longer."""
SLOTS = 64
"""Enough for the fastest peer in front of the longest way: 6.7 microbatches/s that are 8 s under way
below."""
MOST_IN_FLIGHT = 1024
RULES: dict[str, Callable[[Random], Router]] = {
    "virtual time, charged by what peers tell": Router,
    "virtual time, charged by latency (reference)": LatencyRouter,
    "uniform random": RandomRouter,
}


@dataclass(frozen=True, slots=True)
class Played:
    """One swarm under one rule."""

    seed: int
    peers: int
    stages: int
    rate: float
    """Microbatches per second."""
    most: float
    """The bound."""
    answer_seconds: float
    """From sending to the answer, on average over the origins."""
    in_flight: float
    """Microbatches under way per peer."""
    repeated: float
    """Microbatches that a peer computed in vain or sent again, per one that came back."""

    @property
    def share(self) -> float:
        return self.rate / self.most


def draw(seed: int, slots: int = SLOTS, in_flight: int = MOST_IN_FLIGHT) -> Layout:
    """The swarm of a seed."""
    chance = Random(seed)
    stages = chance.randint(FEWEST_STAGES, MOST_STAGES)
    count = chance.randint(max(FEWEST_PEERS, stages), MOST_PEERS)
    stage = sorted([*range(stages), *(chance.randrange(stages) for _ in range(count - stages))])
    specs = tuple(
        PeerSpec(number, FASTEST_SECONDS * exp(chance.random() * log(SPREAD)), slots=slots,
                 in_flight=in_flight)
        for number in stage
    )  # fmt: skip
    latency = [[0.0] * count for _ in range(count)]
    for a in range(count):
        for b in range(a):
            latency[a][b] = latency[b][a] = chance.uniform(*LATENCY_SECONDS)
    return Layout(specs, lambda a, b: latency[a][b], Work(body_bytes=0))


def play(seed: int, rule: str, slots: int = SLOTS, in_flight: int = MOST_IN_FLIGHT) -> Played:
    layout = draw(seed, slots, in_flight)
    swarm = Swarm(layout, RULES[rule], seed)
    most = max_flow.most(layout.stages(), layout.capacity())
    warm, measured = WARM_SECONDS + WARM_MICROBATCHES / most, MEASURED_MICROBATCHES / most
    swarm.start()
    swarm.run(warm)
    before = swarm.finished
    swarm.run(warm + measured)
    finished = swarm.finished - before
    origins = [peer for peer in swarm.peers if not peer.spec.stage]
    answers = [peer.pipeline.answers.usual or 0.0 for peer in origins]
    ledgers = [peer.pipeline.ledger for peer in swarm.peers]
    again = sum(sum(ledger.rerouted.values()) for ledger in ledgers)
    return Played(
        seed, len(swarm.peers), len(layout.stages()), finished / measured, most,
        mean(answers),
        sum(peer.own for peer in origins) / len(swarm.peers), again / max(1, swarm.finished),
    )  # fmt: skip


def bench(
    seeds: Sequence[int],
    slots: int = SLOTS,
    in_flight: int = MOST_IN_FLIGHT,
    jobs: int = 1,
    rules: Iterable[str] = tuple(RULES),
) -> Iterator[tuple[str, list[Played]]]:
    """Every rule on the same swarms, in the order of `rules`."""
    for rule in rules:
        one = partial(play, rule=rule, slots=slots, in_flight=in_flight)
        if jobs == 1:
            yield rule, list(map(one, seeds))
        else:
            with pool(jobs) as processes:
                yield rule, list(processes.map(one, seeds, chunksize=4))


HEADER = (
    f"{'rule':<46}{'mean':>7}{'worst':>7}{'5 %':>7}{'half':>7}"
    f"{'answer s':>10}{'in flight':>11}{'re-routed':>11}"
)


def render(rule: str, played: Sequence[Played]) -> str:
    """One row; shares of the bound: mean, worst, what 95 % of the swarms reach, and half of them."""
    shares = sorted(one.share for one in played)
    return (
        f"{rule:<46}{mean(shares):>7.3f}{shares[0]:>7.3f}{shares[len(shares) // 20]:>7.3f}"
        f"{shares[len(shares) // 2]:>7.3f}{mean(one.answer_seconds for one in played):>10.1f}"
        f"{mean(one.in_flight for one in played):>11.1f}{mean(one.repeated for one in played):>11.3f}"
    )
