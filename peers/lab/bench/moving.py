"""What moving between stages is worth on a trace of preemptions, beside SWARM's own rule and no moving."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from peers.lab.bench.moving_play import Outcome, Setting, World
from peers.lab.bench.preemption_trace import HOUR, Climate, preemptions
from swarmnet.placement.policy import MoveRules


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    stages: int
    outcomes: tuple[Outcome, ...]


def policies(stages: int, download_seconds: float) -> dict[str, Setting]:
    """By the names of the table's rows."""
    rules = MoveRules((1.0,) * stages)
    return {
        "nobody moves, newcomers anywhere": Setting(
            stages, download_seconds=download_seconds, random_newcomers=True
        ),
        "nobody moves, newcomers by our rule": Setting(stages, download_seconds=download_seconds),
        "SWARM's rule, newcomers anywhere": Setting(
            stages, download_seconds=download_seconds, one_per_period=True, random_newcomers=True
        ),
        "SWARM's rule, newcomers by ours": Setting(
            stages, download_seconds=download_seconds, one_per_period=True
        ),
        "ours, newcomers anywhere": Setting(
            stages, rules, download_seconds=download_seconds, random_newcomers=True
        ),
        "ours": Setting(stages, rules, download_seconds=download_seconds),
    }


def bench(climate: Climate, stages: int, seeds: int, download_seconds: float) -> Iterator[Row]:
    """A row per policy; each plays the same traces, one per seed."""
    traces = [preemptions(climate, seed) for seed in range(1, seeds + 1)]
    for name, setting in policies(stages, download_seconds).items():
        worlds = [World(setting, trace, climate.hours * HOUR, seed) for seed, trace in enumerate(traces)]
        yield Row(name, stages, tuple(world.play() for world in worlds))


HEADER = (
    f"{'stages':>6}  {'':<35} {'of the optimum':>14}  {'moves per':>10}  {'most of one':>11}  "
    f"{'of these':>8}  {'time lost':>9}  {'stages':>7}\n"
    f"{'':>6}  {'':<35} {'mean':>7} {'least':>6}  {'peer and h':>10}  {'in an hour':>11}  "
    f"{'back':>8}  {'moving':>9}  {'emptied':>7}"
)


def render(row: Row) -> str:
    """One line under HEADER."""
    outcomes = row.outcomes
    hours = sum(outcome.peer_hours for outcome in outcomes)
    moves = sum(outcome.moves for outcome in outcomes)
    return (
        f"{row.stages:>6}  {row.name:<35} {fmean(o.share for o in outcomes):>7.1%} "
        f"{min(o.share for o in outcomes):>6.1%}  {moves / hours:>10.3f}  "
        f"{max(o.most_moves_in_an_hour for o in outcomes):>11}  "
        f"{sum(o.returns for o in outcomes) / max(1, moves):>8.1%}  "
        f"{sum(o.moving_hours for o in outcomes) / hours:>9.2%}  {sum(o.emptied for o in outcomes):>7}"
    )


def describe(climate: Climate, seeds: int) -> str:
    """What the traces are like."""
    traces = [preemptions(climate, seed) for seed in range(1, seeds + 1)]
    end = climate.hours * HOUR
    present = fmean(
        sum(min(machine.goes_at, end) - machine.comes_at for machine in trace) / end for trace in traces
    )
    return (
        f"{seeds} traces of {climate.hours:g} h: {climate.machines} machines wanted, {present:.0f} there on "
        f"average, {fmean(map(len, traces)):,.0f} lives"
    )
