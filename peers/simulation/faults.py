"""What goes wrong in a world: each fault is data that can be injected and healed.

A fault never takes the last peer of a stage that trains and stays: then it does nothing (`declined` in the
log). Only `Restart` takes a whole stage, and brings it back, and `LostStage`, where peers move by themselves.
Which faults a seed makes: schedules.py.
"""

from __future__ import annotations

from dataclasses import dataclass
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
class Restart:
    """All peers of the stage that `name` holds are killed at once and come back together, with their disks
    but for `lost` of them."""

    at: float
    until: float
    name: str
    lost: int

    async def inject(self, world: World) -> bool:
        member = _member(world, self.name)
        if member is None or member.worker.stage < 0:
            return False
        stage = member.worker.stage
        killed = world.living(stage)
        world.killed[self] = [member.name for member in killed]
        world.note("world", 0, "stage_killed", stage=stage, lives=[f"{m.name}.{m.life}" for m in killed])
        for member in killed:
            await world.crash(member)
        return True

    async def heal(self, world: World) -> None:
        names = [name for name in world.killed[self] if _member(world, name) is None]
        lost, stage = names[: min(self.lost, len(names) - 1)], world.members[self.name].worker.stage
        for name in names:
            old = world.members[name]
            world.start(name, old.worker.stage, old.life + 1, name not in lost)
        world.note("world", 0, "stage_back", stage=stage, names=names, lost=lost)


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
        member.told_to_leave = True
        member.worker.leave()
        return True

    async def heal(self, world: World) -> None: ...


@dataclass(frozen=True, slots=True)
class Move:
    """Ordered to another stage, the `turn`th of the others, whether that one needs it or not."""

    at: float
    name: str
    turn: int

    @property
    def until(self) -> float:
        return self.at

    async def inject(self, world: World) -> bool:
        member = _member(world, self.name)
        if member is None or member.told_to_leave or member.worker.state not in ("joining", "training"):
            return False
        others = [stage for stage in range(len(world.manifest.stages)) if stage != member.worker.stage]
        if not others or not world.spare(member):
            return False
        stage = others[self.turn % len(others)]
        world.note(member.name, member.life, "told_to_move", stage=stage)
        member.worker.move(stage)
        return True

    async def heal(self, world: World) -> None: ...


@dataclass(frozen=True, slots=True)
class LostStage:
    """All peers of the stage that `name` holds are killed, and for so long or for ever nobody of them comes
    back: only peers that move there by their own decision help. Whatever they had settled may be lost."""

    at: float
    until: float
    name: str

    async def inject(self, world: World) -> bool:
        member = _member(world, self.name)
        if not world.moves or member is None or member.worker.stage < 0:
            return False
        stage = member.worker.stage
        others = [number for number in range(len(world.manifest.stages)) if number != stage]
        trains = [sum(other.trains for other in world.living(number)) for number in others]
        if not trains or min(trains) < 1 or max(trains) < 2:
            return False  # Nobody could come.
        killed = world.living(stage)
        world.killed[self] = [member.name for member in killed]
        world.note("world", 0, "stage_lost", stage=stage, lives=[member.who for member in killed])
        for member in killed:
            await world.crash(member)
        return True

    async def heal(self, world: World) -> None:
        for name in world.killed[self]:
            if _member(world, name) is None:
                old = world.members[name]
                world.start(name, old.worker.stage, old.life + 1)


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


def _lies(member: Member) -> bool:
    return member.worker.states is not None and isinstance(member.worker.states.snapshots, _Liar)


@dataclass(frozen=True, slots=True)
class Lie:
    """Its snapshots are served with wrong or missing bytes, from then on. Never by half of a stage or more:
    who must give up its history there has nobody to fetch the other one from (docs/consistency.md)."""

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
        stage = world.living(member.worker.stage)
        liars = {member.name} | {other.name for other in stage if _lies(other)}
        if 2 * len(liars) >= len(stage):
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
