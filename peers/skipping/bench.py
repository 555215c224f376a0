"""Skipping against the best full pipeline: the time of 30 microbatches on seeded swarms around the world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import mean
from time import perf_counter

from rich.table import Table

from peers.skipping import topologies
from peers.skipping.play import Outcome, Play
from peers.skipping.scouts import Scouts, capacity
from peers.skipping.search import places, play_chains, random_skips, search_full
from swarmnet import chains
from swarmnet.paths import Header, Rules, begin, check, visit

SHARE = 6
"""Microbatches per origin, as in SkipPipe's schedule: 30 of 5 origins."""
SKIP_RATIO = 1 / 3
SWAPS = 2
PLAYED_STEPS = 3000
"""Of the plan that is annealed by playing it: each step is a play."""


@dataclass(frozen=True, slots=True)
class Row:
    """One topology. Seconds until all microbatches are done."""

    seed: int
    memory: int
    full: float
    """Best full pipeline that the search found."""
    blind: float
    """Skipping by chance."""
    plan: float
    """Annealed disjoint chains, the slowest as fast as can be."""
    played_plan: float
    """The same, annealed by playing each change."""
    online: float
    swaps: int
    questions: int
    refusals: int
    visits: tuple[int, ...]
    """Of the online way: microbatches per stage."""
    killed: float
    """Online, with a peer killed half-way."""
    killed_held: int
    """Microbatches that were on the killed peer or on their way there."""
    rerouted: tuple[int, ...]
    """Times each microbatch that lost its way had to find another."""
    search_seconds: float

    @property
    def gain(self) -> float:
        return 1 - self.online / self.full


def bench(seeds: Sequence[int], memory: int, steps: int, placed: bool = False) -> list[Row]:
    """`steps` of the search for the full pipeline; `placed`: the stages are laid out for it."""
    return [_row(seed, memory, steps, placed) for seed in seeds]


def _row(seed: int, memory: int, steps: int, placed: bool) -> Row:
    topology = topologies.draw(seed, memory)
    if placed:
        topology = topologies.placed(topology, seed)
    rules = Rules.of(topology.stages, SKIP_RATIO, SWAPS)
    origins = len(topology.peers_of(0))
    began = perf_counter()
    full = search_full(topology, SHARE * origins, steps, Random(seed))
    took = perf_counter() - began
    seen = places(topology, rules, lambda peer: capacity(topology, peer))
    plan = play_chains(topology, chains.plan(seen, Random(seed)), SHARE)
    played = chains.plan(
        seen, Random(seed), PLAYED_STEPS, lambda _, found: play_chains(topology, found, SHARE)
    )
    scouts = Scouts(rules)
    online = Play(topology, scouts, [SHARE] * origins).run()
    assert_legal(topology, rules, online)
    killed, held = with_a_kill(topology, rules, online)
    return Row(
        seed, memory, full,
        random_skips(topology, rules, SHARE, Random(seed)),
        plan, play_chains(topology, played, SHARE), online.seconds,
        scouts.swaps, scouts.questions, scouts.refusals, _visits(topology, online),
        killed.seconds, held, tuple(sorted(killed.rerouted.values())), took,
    )  # fmt: skip


def with_a_kill(topology: topologies.Topology, rules: Rules, calm: Outcome) -> tuple[Outcome, int]:
    """The same run, but the busiest peer of the middle stages dies half-way; and how many it held then."""
    used = [peer for path in calm.paths for peer in path[1:-1]]
    victim = max(sorted(set(used)), key=used.count)
    play = Play(topology, Scouts(rules), [SHARE] * len(topology.peers_of(0)))
    held: list[int] = []

    def kill() -> None:
        held.extend(visit.microbatch for visit in play.visits if visit.peer == victim)
        play.kill(victim)

    play.at(calm.seconds / 2, kill)
    outcome = play.run()
    assert_legal(topology, rules, outcome)
    return outcome, len(held)


def assert_legal(topology: topologies.Topology, rules: Rules, outcome: Outcome) -> None:
    """No finished path breaks a rule and no peer held more than its memory."""
    for path in outcome.paths:
        header: Header = begin(rules, len(path))
        for peer in path[1:]:
            header = visit(header, topology.stage[peer], rules)
        check(header, rules.last, rules)
    if max(outcome.most_held) > topology.memory:
        raise AssertionError(f"a peer held {max(outcome.most_held)} microbatches, its memory is for "
                             f"{topology.memory}")  # fmt: skip


def _visits(topology: topologies.Topology, outcome: Outcome) -> tuple[int, ...]:
    stages = [topology.stage[peer] for path in outcome.paths for peer in path]
    return tuple(stages.count(stage) for stage in range(topology.stages))


def render(rows: Sequence[Row]) -> Table:
    """A table with the means at the end."""
    table = Table(title=f"Seconds for {SHARE} microbatches per origin, a third of the stages skipped")
    for name in ("seed", "memory", "full, searched", "blind skips", "plan", "plan, played", "online",
                 "below full", "to plan", "to played", "swaps", "asked", "refused", "per stage",
                 "with a kill", "re-routed", "search s"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.seed), str(row.memory), *_seconds(row), str(row.swaps), str(row.questions),
            str(row.refusals), " ".join(map(str, row.visits)), f"{row.killed:.1f}",
            f"{sum(row.rerouted)} of {row.killed_held}", f"{row.search_seconds:.0f}",
        )  # fmt: skip
    if len(rows) > 1:
        table.add_row("mean", str(rows[0].memory), *_seconds(_mean(rows)), end_section=True)
    return table


def _seconds(row: Row) -> list[str]:
    times = (row.full, row.blind, row.plan, row.played_plan, row.online)
    return [
        *(f"{seconds:.1f}" for seconds in times),
        f"{row.gain:.1%}",
        f"{row.online / row.plan - 1:+.1%}",
        f"{row.online / row.played_plan - 1:+.1%}",
    ]


def _mean(rows: Sequence[Row]) -> Row:
    names = ("full", "blind", "plan", "played_plan", "online")
    return replace(rows[0], **{name: mean(getattr(row, name) for row in rows) for name in names})
