"""What goes wrong in a world, drawn from a seed: each fault is data that can be injected and healed.

A fault never takes the last peer of a stage that trains: then it does nothing (`declined` in the log).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol

from peers.simulation.world import Disturbance, Member, World
from peers.snapshots import Snapshot, Snapshots
from protocols.memory_ways import Conditions
from swarmnet.identifiers import PeerId


class Fault(Protocol):
    """`at` and `until` in seconds from the start; until == at: nothing is healed."""

    @property
    def at(self) -> float: ...

    @property
    def until(self) -> float: ...

    async def inject(self, world: World) -> bool:
        """False: it would have ended a stage, or there is nobody to hit."""

    async def heal(self, world: World) -> None: ...


def _member(world: World, name: str) -> Member | None:
    member = world.members.get(name)
    return None if member is None or member.ended else member


@dataclass(frozen=True, slots=True)
class Crash:
    at: float
    until: float
    name: str
    back: Literal["never", "old disk", "empty disk"]

    async def inject(self, world: World) -> bool:
        member = _member(world, self.name)
        if member is None or not world.spare(member):
            return False
        await world.crash(member)
        return True

    async def heal(self, world: World) -> None:
        if self.back != "never" and _member(world, self.name) is None:
            old = world.members[self.name]
            stage = old.worker.stage if old.worker.stage >= 0 else None
            world.start(self.name, stage, old.life + 1, self.back == "old disk")


@dataclass(frozen=True, slots=True)
class Freeze:
    at: float
    until: float
    name: str

    async def inject(self, world: World) -> bool:
        member = _member(world, self.name)
        if member is None or member.gate.shut:
            return False
        world.freeze(member)
        return True

    async def heal(self, world: World) -> None:
        member = _member(world, self.name)
        if member is not None and member.gate.shut:
            world.thaw(member)


@dataclass(frozen=True, slots=True)
class Slow:
    at: float
    until: float
    name: str
    factor: float = 10.0

    async def inject(self, world: World) -> bool:
        world.members[self.name].slow = self.factor
        return True

    async def heal(self, world: World) -> None:
        world.members[self.name].slow = 1.0


@dataclass(frozen=True, slots=True)
class Partition:
    """Sides by name; a newcomer is on no side and reaches all."""

    at: float
    until: float
    sides: tuple[tuple[str, ...], ...]

    async def inject(self, world: World) -> bool:
        world.block(self._ways(world))
        return True

    async def heal(self, world: World) -> None:
        world.unblock(self._ways(world))

    def _ways(self, world: World) -> list[tuple[PeerId, PeerId]]:
        peers = [[world.members[name].peer for name in side] for side in self.sides]
        return [(a, b) for side in peers for other in peers if side is not other for a in side for b in other]


@dataclass(frozen=True, slots=True)
class OneWay:
    at: float
    until: float
    source: str
    target: str

    async def inject(self, world: World) -> bool:
        world.block([(world.members[self.source].peer, world.members[self.target].peer)])
        return True

    async def heal(self, world: World) -> None:
        world.unblock([(world.members[self.source].peer, world.members[self.target].peer)])


@dataclass(frozen=True, slots=True)
class Flap:
    """Cut off from everybody and back, a pulse of `Partition`s is made of it by `schedule`."""

    at: float
    until: float
    name: str

    async def inject(self, world: World) -> bool:
        world.block(self._ways(world))
        return True

    async def heal(self, world: World) -> None:
        world.unblock(self._ways(world))

    def _ways(self, world: World) -> list[tuple[PeerId, PeerId]]:
        me = world.members[self.name].peer
        first = [m.peer for name, m in world.members.items() if name.startswith("p") and m.peer != me]
        return [(me, other) for other in first] + [(other, me) for other in first]


@dataclass(frozen=True, slots=True)
class Noise:
    """Loss, repetition, reordering, corruption or latency on all ways of some peers (none named: of all)."""

    at: float
    until: float
    names: tuple[str, ...]
    conditions: Conditions

    async def inject(self, world: World) -> bool:
        world.disturbances.append(self._disturbance(world))
        world.shape()
        return True

    async def heal(self, world: World) -> None:
        world.disturbances.remove(self._disturbance(world))
        world.shape()

    def _disturbance(self, world: World) -> Disturbance:
        these = frozenset(world.members[name].peer for name in self.names) if self.names else None
        return Disturbance(these, self.conditions)


@dataclass(frozen=True, slots=True)
class Skew:
    at: float
    until: float
    name: str
    seconds: float

    async def inject(self, world: World) -> bool:
        world.members[self.name].skew = self.seconds
        return True

    async def heal(self, world: World) -> None:
        world.members[self.name].skew = 0.0


@dataclass(frozen=True, slots=True)
class Join:
    at: float
    name: str

    @property
    def until(self) -> float:
        return self.at

    async def inject(self, world: World) -> bool:
        world.start(self.name, None)
        return True

    async def heal(self, world: World) -> None: ...


@dataclass(frozen=True, slots=True)
class Leave:
    at: float
    name: str

    @property
    def until(self) -> float:
        return self.at

    async def inject(self, world: World) -> bool:
        member = _member(world, self.name)
        if member is None or not world.spare(member):
            return False
        world.note(member.name, member.life, "told_to_leave")
        member.worker.leave()
        return True

    async def heal(self, world: World) -> None: ...


@dataclass(frozen=True, slots=True)
class _False(Snapshot):
    """Whose chunks are false when they are served."""

    truncated: bool

    def chunk(self, index: int) -> memoryview:
        true = Snapshot.chunk(self, index)
        return true[:-5] if self.truncated else memoryview(bytes(len(true)))


class _Liar(Snapshots):
    """Gives false chunks of the snapshots that the honest part of the peer keeps."""

    def __init__(self, honest: Snapshots, truncated: bool) -> None:
        self.__dict__ = honest.__dict__
        self._truncated = truncated

    def find(self, digest: bytes) -> Snapshot | None:
        found = super().find(digest)
        if found is None:
            return None
        return _False(found.root, found.signed, found.data, self._truncated)


@dataclass(frozen=True, slots=True)
class Lie:
    """Its snapshots are served with wrong or missing bytes."""

    at: float
    until: float
    name: str
    truncated: bool

    async def inject(self, world: World) -> bool:
        member = _member(world, self.name)
        if member is None or member.worker.neighbourhood is None:
            return False
        if member.worker.states is None:
            return False
        liar = _Liar(member.worker.snapshots, self.truncated)
        member.worker.states.snapshots = liar
        return True

    async def heal(self, world: World) -> None: ...


@dataclass(frozen=True, slots=True)
class DirectoryOutage:
    at: float
    until: float

    async def inject(self, world: World) -> bool:
        world.directory_silent = True
        return True

    async def heal(self, world: World) -> None:
        world.directory_silent = False


Draw = Callable[[Random, float, Sequence[str]], list[Fault]]


def _crash(chance: Random, at: float, names: Sequence[str]) -> list[Fault]:
    back: Literal["never", "old disk", "empty disk"]
    back = chance.choice(["never", "old disk", "old disk", "empty disk", "empty disk"])
    pause = chance.choice([0.05, 1.0, 3.0, 8.0, 20.0])
    return [Crash(at, at if back == "never" else at + pause, chance.choice(names), back)]


def _freeze(chance: Random, at: float, names: Sequence[str]) -> list[Fault]:
    return [Freeze(at, at + chance.choice([0.5, 2.0, 5.0, 12.0, 30.0]), chance.choice(names))]


def _slow(chance: Random, at: float, names: Sequence[str]) -> list[Fault]:
    return [Slow(at, at + chance.uniform(2.0, 25.0), chance.choice(names))]


def _partition(chance: Random, at: float, names: Sequence[str]) -> list[Fault]:
    shuffled = chance.sample(names, len(names))
    cuts = sorted(chance.sample(range(1, len(names)), chance.choice([1, 1, 2])))
    sides = [tuple(shuffled[a:b]) for a, b in zip([0, *cuts], [*cuts, len(names)], strict=True)]
    return [Partition(at, at + chance.choice([1.0, 3.5, 6.0, 12.0, 25.0, 45.0]), tuple(sides))]


def _one_way(chance: Random, at: float, names: Sequence[str]) -> list[Fault]:
    source, target = chance.sample(names, 2)
    return [OneWay(at, at + chance.choice([1.0, 5.0, 15.0, 45.0]), source, target)]


def _flap(chance: Random, at: float, names: Sequence[str]) -> list[Fault]:
    name, faults, time = chance.choice(names), [], at
    for _ in range(chance.randrange(2, 6)):
        until = time + chance.uniform(0.3, 6.0)
        faults.append(Flap(time, until, name))
        time = until + chance.uniform(0.3, 4.0)
    return list[Fault](faults)


def _noise(chance: Random, at: float, names: Sequence[str]) -> list[Fault]:
    kind = chance.choice(["lost", "repeated", "reordered", "corrupted", "latency_seconds"])
    most = {"lost": 0.2, "repeated": 0.3, "reordered": 0.3, "corrupted": 0.01, "latency_seconds": 2.0}[kind]
    conditions = Conditions(**{kind: chance.uniform(most / 10, most)})
    these = () if chance.random() < 0.4 else tuple(chance.sample(names, chance.randrange(1, 4)))
    return [Noise(at, at + chance.uniform(2.0, 20.0), these, conditions)]


def _skew(chance: Random, at: float, names: Sequence[str]) -> list[Fault]:
    return [Skew(at, at + chance.uniform(5.0, 60.0), chance.choice(names), chance.uniform(-200.0, 200.0))]


def _join(chance: Random, at: float, names: Sequence[str]) -> list[Fault]:
    first = Join(at, f"n{chance.randrange(10**6)}")
    return [first] if chance.random() < 0.6 else [first, Join(at, f"n{chance.randrange(10**6)}")]


def _leave(chance: Random, at: float, names: Sequence[str]) -> list[Fault]:
    return [Leave(at, chance.choice(names))]


def _lie(chance: Random, at: float, names: Sequence[str]) -> list[Fault]:
    return [Lie(at, at, chance.choice(names), chance.random() < 0.5)]


def _outage(chance: Random, at: float, names: Sequence[str]) -> list[Fault]:
    return [DirectoryOutage(at, at + chance.uniform(2.0, 40.0))]


KINDS: dict[str, tuple[Draw, int]] = {
    "crash": (_crash, 6), "freeze": (_freeze, 5), "slow": (_slow, 2), "partition": (_partition, 4),
    "one way": (_one_way, 2), "flap": (_flap, 2), "noise": (_noise, 4), "skew": (_skew, 1),
    "join": (_join, 4), "leave": (_leave, 2), "lie": (_lie, 1), "outage": (_outage, 1),
}  # fmt: skip
"""Name -> how such a fault is drawn, and how often."""


def schedule(seed: int, names: Sequence[str], seconds: float, kinds: Sequence[str] = ()) -> list[Fault]:
    """2 to 10 faults in the first `seconds`, by time. `kinds`: only these."""
    chance = Random(f"faults {seed}")
    chosen = [name for name in KINDS if not kinds or name in kinds]
    weights = [KINDS[name][1] for name in chosen]
    faults: list[Fault] = []
    for kind in chance.choices(chosen, weights, k=chance.randrange(2, 11)):
        faults += KINDS[kind][0](chance, chance.uniform(4.0, seconds), names)
    return sorted(faults, key=lambda fault: fault.at)
