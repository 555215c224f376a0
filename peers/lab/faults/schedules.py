"""Draw the faults of a schedule, and their times, from a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Literal

from peers.lab.faults.bootstrap_faults import draw_bootstrap_away
from peers.lab.faults.faults import (
    Crash,
    DirectoryOutage,
    Flap,
    Freeze,
    Join,
    Lie,
    Noise,
    OneWay,
    Partition,
    PoliteLeave,
    Restart,
    ScheduledFault,
    Skew,
    Slow,
)
from peers.lab.faults.moves import LostStage, Move, OnlyHolder
from protocols.memory.conditions import Conditions

Draw = Callable[[Random, float, Sequence[str]], list[ScheduledFault]]


def _crash(chance: Random, at: float, names: Sequence[str]) -> list[ScheduledFault]:
    back: Literal["never", "old disk", "empty disk"]
    back = chance.choice(["never", "old disk", "old disk", "empty disk", "empty disk"])
    pause = chance.choice([0.05, 1.0, 3.0, 8.0, 20.0])
    return [Crash(at, at if back == "never" else at + pause, chance.choice(names), back)]


def _freeze(chance: Random, at: float, names: Sequence[str]) -> list[ScheduledFault]:
    return [Freeze(at, at + chance.choice([0.5, 2.0, 5.0, 12.0, 30.0]), chance.choice(names))]


def _slow(chance: Random, at: float, names: Sequence[str]) -> list[ScheduledFault]:
    return [Slow(at, at + chance.uniform(2.0, 25.0), chance.choice(names))]


def _partition(chance: Random, at: float, names: Sequence[str]) -> list[ScheduledFault]:
    shuffled = chance.sample(names, len(names))
    cuts = sorted(chance.sample(range(1, len(names)), chance.choice([1, 1, 2])))
    sides = [tuple(shuffled[a:b]) for a, b in zip([0, *cuts], [*cuts, len(names)], strict=True)]
    return [Partition(at, at + chance.choice([1.0, 3.5, 6.0, 12.0, 25.0, 45.0]), tuple(sides))]


def _one_way(chance: Random, at: float, names: Sequence[str]) -> list[ScheduledFault]:
    source, target = chance.sample(names, 2)
    return [OneWay(at, at + chance.choice([1.0, 5.0, 15.0, 45.0]), source, target)]


def _flap(chance: Random, at: float, names: Sequence[str]) -> list[ScheduledFault]:
    name, faults, time = chance.choice(names), [], at
    for _ in range(chance.randrange(2, 6)):
        until = time + chance.uniform(0.3, 6.0)
        faults.append(Flap(time, until, name))
        time = until + chance.uniform(0.3, 4.0)
    return list[ScheduledFault](faults)


def _noise(chance: Random, at: float, names: Sequence[str]) -> list[ScheduledFault]:
    kind = chance.choice(["lost", "repeated", "reordered", "corrupted", "latency_seconds"])
    most = {"lost": 0.2, "repeated": 0.3, "reordered": 0.3, "corrupted": 0.01, "latency_seconds": 2.0}[kind]
    conditions = Conditions(**{kind: chance.uniform(most / 10, most)})
    these = () if chance.random() < 0.4 else tuple(chance.sample(names, chance.randrange(1, 4)))
    return [Noise(at, at + chance.uniform(2.0, 20.0), these, conditions)]


def _skew(chance: Random, at: float, names: Sequence[str]) -> list[ScheduledFault]:
    return [Skew(at, at + chance.uniform(5.0, 60.0), chance.choice(names), chance.uniform(-200.0, 200.0))]


def _join(chance: Random, at: float, names: Sequence[str]) -> list[ScheduledFault]:
    first = Join(at, f"n{chance.randrange(10**6)}")
    return [first] if chance.random() < 0.6 else [first, Join(at, f"n{chance.randrange(10**6)}")]


def _leave(chance: Random, at: float, names: Sequence[str]) -> list[ScheduledFault]:
    return [PoliteLeave(at, chance.choice(names))]


def _lie(chance: Random, at: float, names: Sequence[str]) -> list[ScheduledFault]:
    return [Lie(at, at, chance.choice(names), chance.random() < 0.5)]


def _outage(chance: Random, at: float, names: Sequence[str]) -> list[ScheduledFault]:
    return [DirectoryOutage(at, at + chance.uniform(2.0, 40.0))]


def _restart(chance: Random, at: float, names: Sequence[str]) -> list[ScheduledFault]:
    pause = chance.choice([0.5, 2.0, 8.0])
    return [Restart(at, at + pause, chance.choice(names), chance.choice([0, 0, 1]))]


def _move(chance: Random, at: float, names: Sequence[str]) -> list[ScheduledFault]:
    """Draw a move, and sometimes a fault during it: a second move, a crash, a freeze or a cut-off."""
    name, soon = chance.choice(names), at + chance.choice([0.01, 0.3, 2.0, 6.0, 15.0])
    first: list[ScheduledFault] = [Move(at, name, chance.randrange(3))]
    match chance.choice(["", "", "", "again", "crash", "freeze", "flap"]):
        case "again":
            first.append(Move(soon, name, chance.randrange(3)))
        case "crash":
            first.append(Crash(soon, soon + chance.choice([0.05, 3.0]), name, "old disk"))
        case "freeze":
            first.append(Freeze(soon, soon + chance.choice([2.0, 5.0, 12.0]), name))
        case "flap":
            first.append(Flap(soon, soon + chance.choice([2.0, 5.0, 12.0]), name))
    return first


def _lost_stage(chance: Random, at: float, names: Sequence[str]) -> list[ScheduledFault]:
    return [LostStage(at, at + chance.choice([0.0, 0.0, 15.0, 40.0]), chance.choice(names))]


def _only_holder(chance: Random, at: float, names: Sequence[str]) -> list[ScheduledFault]:
    pause = chance.choice([2.0, 8.0, 15.0])
    return [OnlyHolder(at, at + pause, chance.choice(names), f"n{chance.randrange(10**6)}")]


KINDS: dict[str, tuple[Draw, int]] = {
    "crash": (_crash, 6),
    "freeze": (_freeze, 5),
    "slow": (_slow, 2),
    "partition": (_partition, 4),
    "one way": (_one_way, 2),
    "flap": (_flap, 2),
    "noise": (_noise, 4),
    "skew": (_skew, 1),
    "join": (_join, 4),
    "leave": (_leave, 2),
    "lie": (_lie, 1),
    "outage": (_outage, 1),
    "restart": (_restart, 0),
    "only holder": (_only_holder, 0),
    "bootstrap": (draw_bootstrap_away, 0),
}
"""Function that draws each kind of fault, and the kind's weight; weight 0: drawn separately."""
RESTART_SHARE = 0.2
"""Share of the schedules with a stage restart; a separate draw keeps the other faults of known seeds."""
ONLY_HOLDER_SHARE = 0.05
"""Share of the schedules in which the only holder of a stage restarts; a separate draw, too."""
BOOTSTRAP_SHARE = 0.03
"""Share of the schedules in which the bootstrap is away: about thirty absences in 1,000 schedules."""
NAMED_KINDS: dict[str, Draw] = {"move": _move, "lost stage": _lost_stage}
"""Kinds that are drawn only by name or with `moves`; separate draws keep the other faults of known seeds."""
LOST_STAGE_SHARE = 0.3
"""Share of the schedules with `moves` in which a stage is lost."""


def schedule(
    seed: int, names: Sequence[str], seconds: float, kinds: Sequence[str] = (), moves: bool = False
) -> list[ScheduledFault]:
    """Draw 2 to 10 faults in the first `seconds`, ordered by time, and sometimes a restart.

    `kinds`: draw only these kinds. `moves`: draw 1 to 6 moves as well, and sometimes the loss of a stage.
    """
    chance = Random(f"faults {seed}")
    chosen = [name for name in KINDS if not kinds or name in kinds]
    weights = [KINDS[name][1] for name in chosen]
    faults: list[ScheduledFault] = []
    if any(weights):
        for kind in chance.choices(chosen, weights, k=chance.randrange(2, 11)):
            faults += KINDS[kind][0](chance, chance.uniform(4.0, seconds), names)
    chance = Random(f"kills {seed}")
    if "restart" in chosen and (chosen == ["restart"] or chance.random() < RESTART_SHARE):
        faults += _restart(chance, chance.uniform(15.0, seconds), names)
    chance = Random(f"single holder {seed}")
    if "only holder" in chosen and (chosen == ["only holder"] or chance.random() < ONLY_HOLDER_SHARE):
        faults += _only_holder(chance, chance.uniform(20.0, seconds), names)
    chance = Random(f"bootstrap {seed}")
    if "bootstrap" in chosen and (chosen == ["bootstrap"] or chance.random() < BOOTSTRAP_SHARE):
        faults += draw_bootstrap_away(chance, chance.uniform(15.0, seconds), names)
    chance = Random(f"moves {seed}")
    if "move" in kinds or (moves and not kinds):
        for _ in range(chance.randrange(1, 7)):
            faults += _move(chance, chance.uniform(4.0, seconds), names)
    if "lost stage" in kinds or (moves and not kinds and chance.random() < LOST_STAGE_SHARE):
        faults += _lost_stage(chance, chance.uniform(15.0, seconds), names)
    return sorted(faults, key=lambda fault: fault.at)
