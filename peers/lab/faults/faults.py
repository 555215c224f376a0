"""Faults of a simulated world: each is data that can be injected and healed.

A fault never removes the last peer of a stage that trains and stays; it is skipped then. Only `Restart`
kills a whole stage and brings it back, and so does `LostStage` (moves.py), if peers move between stages.
schedules.py draws the faults of a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from peers.lab.world.link_conditions import Disturbance
from peers.lab.world.world import Member, World
from peers.lab.world.world_events import LeaveRequested, StageBack, StageKilled
from peers.state.snapshot_store import Snapshot, Snapshots
from protocols.memory.conditions import Conditions
from swarmnet.identifiers import PeerId


class ScheduledFault(Protocol):
    """A fault with its times in seconds from the start; it is not healed if `until` equals `at`."""

    @property
    def at(self) -> float: ...

    @property
    def until(self) -> float: ...

    async def inject(self, world: World) -> bool:
        """Inject the fault; return False if it would have ended a stage, or if its peer is not there."""

    async def heal(self, world: World) -> None: ...


@dataclass(frozen=True, slots=True)
class MomentaryFault:
    """A fault that nothing heals."""

    at: float

    @property
    def until(self) -> float:
        return self.at

    async def heal(self, world: World) -> None: ...


@dataclass(frozen=True, slots=True)
class LastingFault:
    """A fault with an end, at which it may be healed."""

    at: float
    until: float

    async def heal(self, world: World) -> None: ...


@dataclass(frozen=True, slots=True)
class CutLinks(LastingFault):
    """Messages are lost on some links in one direction."""

    def _ways(self, world: World) -> list[tuple[PeerId, PeerId]]:
        raise NotImplementedError

    async def inject(self, world: World) -> bool:
        world.links.block(self._ways(world))
        return True

    async def heal(self, world: World) -> None:
        world.links.unblock(self._ways(world))


@dataclass(frozen=True, slots=True)
class Crash(LastingFault):
    """A peer is killed; it may start again, with or without its disk."""

    name: str
    back: Literal["never", "old disk", "empty disk"]

    async def inject(self, world: World) -> bool:
        member = world.alive(self.name)
        if member is None or not world.spare(member) or not _truth_stays(world, member):
            return False
        await world.crash(member)
        return True

    async def heal(self, world: World) -> None:
        if self.back != "never" and world.alive(self.name) is None:
            world.start_again(self.name, self.back == "old disk")


@dataclass(frozen=True, slots=True)
class Restart(LastingFault):
    """All peers of `name`'s stage are killed and come back together; `lost` of them lose their disk."""

    name: str
    lost: int

    async def inject(self, world: World) -> bool:
        member = world.alive(self.name)
        if member is None or member.worker.stage < 0:
            return False
        stage = member.worker.stage
        killed = world.living(stage)
        world.killed[self] = [member.name for member in killed]
        world.note("world", 0, StageKilled(stage, [f"{m.name}.{m.life}" for m in killed]))
        for member in killed:
            await world.crash(member)
        return True

    async def heal(self, world: World) -> None:
        names = [name for name in world.killed[self] if world.alive(name) is None]
        lost, stage = names[: min(self.lost, len(names) - 1)], world.members[self.name].worker.stage
        whole = [name for name in names if world.has_checkpoint(name)]
        if whole and not set(whole) - set(lost):  # At least one checkpoint must survive.
            lost.remove(whole[-1])
        for name in names:
            world.start_again(name, name not in lost)
        world.note("world", 0, StageBack(stage, names, lost))


@dataclass(frozen=True, slots=True)
class Freeze(LastingFault):
    """A peer's process is stopped, and continued later."""

    name: str

    async def inject(self, world: World) -> bool:
        member = world.alive(self.name)
        if member is None or member.gate.shut:
            return False
        world.freeze(member)
        return True

    async def heal(self, world: World) -> None:
        member = world.alive(self.name)
        if member is not None and member.gate.shut:
            world.thaw(member)


@dataclass(frozen=True, slots=True)
class Slow(LastingFault):
    """A peer computes `factor` times slower."""

    name: str
    factor: float = 10.0

    async def inject(self, world: World) -> bool:
        world.members[self.name].slow = self.factor
        return True

    async def heal(self, world: World) -> None:
        world.members[self.name].slow = 1.0


@dataclass(frozen=True, slots=True)
class Partition(CutLinks):
    """The network is split into sides, given by peer names; a newcomer is on no side and reaches all."""

    sides: tuple[tuple[str, ...], ...]

    def _ways(self, world: World) -> list[tuple[PeerId, PeerId]]:
        peers = [[world.members[name].peer for name in side] for side in self.sides]
        return [(a, b) for side in peers for other in peers if side is not other for a in side for b in other]


@dataclass(frozen=True, slots=True)
class OneWay(CutLinks):
    """Messages from one peer to another are lost; the other direction works."""

    source: str
    target: str

    def _ways(self, world: World) -> list[tuple[PeerId, PeerId]]:
        return [(world.members[self.source].peer, world.members[self.target].peer)]


@dataclass(frozen=True, slots=True)
class Flap(CutLinks):
    """One peer is cut off from all others and comes back; `schedule` draws several in a row."""

    name: str

    def _ways(self, world: World) -> list[tuple[PeerId, PeerId]]:
        me = world.members[self.name].peer
        first = [m.peer for name, m in world.members.items() if name.startswith("p") and m.peer != me]
        return [(me, other) for other in first] + [(other, me) for other in first]


@dataclass(frozen=True, slots=True)
class Noise(LastingFault):
    """Loss, repetition, reordering, corruption or latency on all links of `names`; empty: of all peers."""

    names: tuple[str, ...]
    conditions: Conditions

    async def inject(self, world: World) -> bool:
        world.links.disturbances.append(self._disturbance(world))
        world.apply_link_conditions()
        return True

    async def heal(self, world: World) -> None:
        world.links.disturbances.remove(self._disturbance(world))
        world.apply_link_conditions()

    def _disturbance(self, world: World) -> Disturbance:
        these = frozenset(world.members[name].peer for name in self.names) if self.names else None
        return Disturbance(these, self.conditions)


@dataclass(frozen=True, slots=True)
class Skew(LastingFault):
    """A peer's clock is wrong by `seconds`."""

    name: str
    seconds: float

    async def inject(self, world: World) -> bool:
        world.members[self.name].skew = self.seconds
        return True

    async def heal(self, world: World) -> None:
        world.members[self.name].skew = 0.0


@dataclass(frozen=True, slots=True)
class Join(MomentaryFault):
    """A new peer joins."""

    name: str

    async def inject(self, world: World) -> bool:
        world.start(self.name, None)
        return True


@dataclass(frozen=True, slots=True)
class PoliteLeave(MomentaryFault):
    """A peer leaves in order."""

    name: str

    async def inject(self, world: World) -> bool:
        member = world.alive(self.name)
        if member is None or not world.spare(member) or not _truth_stays(world, member):
            return False
        world.note(member.name, member.life, LeaveRequested())
        member.told_to_leave = True
        member.worker.leave()
        return True


@dataclass(frozen=True, slots=True)
class _FalseSnapshot(Snapshot):
    """A snapshot that serves false chunks."""

    truncated: bool = False

    def chunk(self, index: int) -> memoryview:
        true = Snapshot.chunk(self, index)
        return true[:-5] if self.truncated else memoryview(bytes(len(true)))


class _FaultySnapshots(Snapshots):
    """A snapshot store that serves false chunks of the peer's true snapshots."""

    def __init__(self, honest: Snapshots, truncated: bool) -> None:
        self.__dict__ = honest.__dict__
        self._truncated = truncated

    def find(self, digest: bytes) -> Snapshot | None:
        found = super().find(digest)
        if found is None:
            return None
        return _FalseSnapshot(found.root, found.signed, found.data, truncated=self._truncated)


def _lies(member: Member) -> bool:
    services = member.worker.services
    return services is not None and isinstance(services.snapshot_service.snapshots, _FaultySnapshots)


def _truth_prevails(stage: Sequence[Member], liars: int = 0) -> bool:
    """Return whether more peers of a stage serve true snapshots than false ones.

    `liars` further peers count as serving false ones.
    """
    liars += sum(map(_lies, stage))
    return not liars or sum(other.trains and not _lies(other) for other in stage) > liars


def _truth_stays(world: World, gone: Member) -> bool:
    """Return whether the peer's stage would still have more true than false snapshots without it."""
    return _truth_prevails([other for other in world.living(gone.worker.stage) if other is not gone])


@dataclass(frozen=True, slots=True)
class Lie(LastingFault):
    """From `at` on a peer serves snapshots with wrong or missing bytes.

    Faulty peers are never half of a stage or more, and other faults remove no peer if that would make them
    so. Otherwise a peer that must abandon its branch could not fetch the other one (docs/consistency.md). The
    fault is skipped if peers move between stages, because honest peers may leave.
    """

    name: str
    truncated: bool

    async def inject(self, world: World) -> bool:
        member = world.alive(self.name)
        services = member.worker.services if member is not None else None
        if member is None or services is None or world.moves:
            return False
        stage = world.living(member.worker.stage)
        if not _truth_prevails([other for other in stage if other is not member], liars=1):
            return False
        services.snapshot_service.snapshots = _FaultySnapshots(services.snapshots, self.truncated)
        return True


@dataclass(frozen=True, slots=True)
class DirectoryOutage(LastingFault):
    """The DHT answers no request."""

    async def inject(self, world: World) -> bool:
        world.outages.begin()
        return True

    async def heal(self, world: World) -> None:
        world.outages.end(world.loop.time())
