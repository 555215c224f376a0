"""A synthetic trace of preemptible machines: who is there when, from a seed (docs/benchmarks/moving.md).

Machines stand in zones. Now and then a zone needs its capacity back: within minutes it takes a good part of
its machines at once, and gives none for a while; then machines come back in batches. Besides, single machines
are taken at any time. Times in seconds from the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Climate:
    """How rough it is. The figures are ours, set so that SWARM's rule and no moving at all come out near what
    its paper reports for a real log of preemptible T4 (docs/benchmarks/moving.md)."""

    machines: int = 400
    """Wanted at all times."""
    hours: float = 32.0
    zones: int = 6
    life_hours: float = 10.0
    """Mean life of a single machine, bursts apart; machines of a preemptible kind live 24 h at most."""
    burst_hours: float = 0.6
    """Mean time between bursts, of all zones together."""
    burst_share: tuple[float, float] = (0.3, 0.9)
    """Of a zone's machines that one burst takes, drawn."""
    burst_seconds: tuple[float, float] = (30.0, 300.0)
    """From its first to its last, drawn."""
    dry_hours: float = 1.0
    """Mean time for which a zone gives none after a burst."""
    batch_seconds: float = 300.0
    """Between batches of machines that come back."""
    batch: tuple[int, int] = (4, 24)
    batch_spread_seconds: float = 60.0
    slowest_share: float = 1.0
    """Speeds are drawn from here to 1; 1: all alike, as in the paper."""


@dataclass(slots=True)
class Machine:
    """One life: a machine that comes back later is another one."""

    number: int
    zone: int
    speed: float
    comes_at: float
    goes_at: float


def preemptions(climate: Climate, seed: int) -> list[Machine]:
    """All machines of a trace, in the order in which they come."""
    chance = Random(f"preemptions/{seed}")
    end = climate.hours * HOUR
    machines: list[Machine] = []
    bursts = _bursts(climate, chance, end)
    share = climate.machines / climate.zones
    for zone in range(climate.zones):
        wanted = round((zone + 1) * share) - round(zone * share)
        _zone(climate, chance, zone, wanted, [burst for burst in bursts if burst[1] == zone], machines)
    machines.sort(key=lambda machine: machine.comes_at)
    for number, machine in enumerate(machines):
        machine.number = number
    return machines


def _bursts(climate: Climate, chance: Random, end: float) -> list[tuple[float, int]]:
    """(when, zone)"""
    bursts, at = [], 0.0
    while (at := at + chance.expovariate(1 / (climate.burst_hours * HOUR))) < end:
        bursts.append((at, chance.randrange(climate.zones)))
    return bursts


def _zone(
    climate: Climate, chance: Random, zone: int, wanted: int, bursts: list[tuple[float, int]],
    machines: list[Machine],
) -> None:  # fmt: skip
    """One zone from the start to the end, in steps of a batch's time."""
    end, dry_until, pending = climate.hours * HOUR, 0.0, list(bursts)
    here = [_machine(climate, chance, zone, 0.0) for _ in range(wanted)]
    machines += here
    at = 0.0
    while at < end:
        here = [machine for machine in here if machine.goes_at > at]
        if at >= dry_until and len(here) < wanted:
            size = min(chance.randint(*climate.batch), wanted - len(here))
            when = at + chance.uniform(0.0, climate.batch_seconds - climate.batch_spread_seconds)
            batch = [
                _machine(climate, chance, zone, when + chance.uniform(0.0, climate.batch_spread_seconds))
                for _ in range(size)
            ]
            here += batch
            machines += batch
        while pending and pending[0][0] < at + climate.batch_seconds:
            began, _ = pending.pop(0)
            lasts = chance.uniform(*climate.burst_seconds)
            taken = chance.uniform(*climate.burst_share)
            for machine in here:
                if machine.comes_at < began < machine.goes_at and chance.random() < taken:
                    machine.goes_at = min(machine.goes_at, began + chance.uniform(0.0, lasts))
            dry_until = began + lasts + chance.expovariate(1 / (climate.dry_hours * HOUR))
        at += climate.batch_seconds


def _machine(climate: Climate, chance: Random, zone: int, at: float) -> Machine:
    life = min(24 * HOUR, chance.expovariate(1 / (climate.life_hours * HOUR)))
    return Machine(0, zone, chance.uniform(climate.slowest_share, 1.0), at, at + life)
