"""Faults of stages: peers are ordered to move, and stages lose all their peers or all but one."""

from __future__ import annotations

from dataclasses import dataclass

from peers.lab.faults.faults import LastingFault, MomentaryFault
from peers.lab.world.world import World
from peers.lab.world.world_events import MoveRequested, StageLost
from peers.state.checkpoint_file import on_disk


@dataclass(frozen=True, slots=True)
class Move(MomentaryFault):
    """A peer is ordered to another stage, the `turn`th of the others, whether that one needs it or not."""

    name: str
    turn: int

    async def inject(self, world: World) -> bool:
        member = world.alive(self.name)
        if member is None or member.told_to_leave:
            return False
        if member.worker.state not in ("joining", "training"):
            return False
        others = [stage for stage in range(len(world.signed.manifest.stages)) if stage != member.worker.stage]
        if not others or not world.spare(member):
            return False
        stage = others[self.turn % len(others)]
        world.note(member.name, member.life, MoveRequested(stage))
        member.worker.leave()
        member.worker.lifecycle.move(stage)  # As `StageMover` does.
        return True


@dataclass(frozen=True, slots=True)
class LostStage(LastingFault):
    """All peers of `name`'s stage are killed; they stay away until `until`, or permanently.

    Only peers that move there by their own decision help. Rounds that the stage had settled may be lost. If
    the loss is permanent, the user allows the peers that wait for the weights to start from the seed.
    """

    name: str

    async def inject(self, world: World) -> bool:
        member = world.alive(self.name)
        if not world.moves or member is None or member.worker.stage < 0:
            return False
        stage = member.worker.stage
        others = [number for number in range(len(world.signed.manifest.stages)) if number != stage]
        trains = [sum(other.trains for other in world.living(number)) for number in others]
        if not trains or min(trains) < 1 or max(trains) < 2:
            return False  # No peer could move there.
        killed = world.living(stage)
        world.killed[self] = [member.name for member in killed]
        if self.until == self.at:
            world.given_up.add(stage)
        world.note("world", 0, StageLost(stage, [member.who for member in killed]))
        for member in killed:
            await world.crash(member)
        return True

    async def heal(self, world: World) -> None:
        for name in world.killed[self]:
            if world.alive(name) is None:
                world.start_again(name, True)


@dataclass(frozen=True, slots=True)
class OnlyHolder(LastingFault):
    """All peers of `name`'s stage are killed, and only that one comes back, with the stage's weights.

    It has its disk, and chooses a stage. Meanwhile newcomers without weights have chosen theirs: one more
    than the smallest of the other stages has peers. By these numbers its stage therefore needs no peer.
    """

    name: str
    newcomer: str

    async def inject(self, world: World) -> bool:
        member = world.alive(self.name)
        if member is None or member.worker.stage < 0:
            return False
        stage, others = member.worker.stage, [*range(len(world.signed.manifest.stages))]
        others.remove(stage)
        if not others:
            return False
        killed, disk = world.living(stage), world.disk / self.name
        if stage not in [held.stage for held in on_disk(disk, world.signed.run_id)]:
            return False
        world.note("world", 0, StageLost(stage, [each.who for each in killed]))
        for each in killed:
            await world.crash(each)
        for number in range(1 + min(len(world.living(other)) for other in others)):
            world.start(f"{self.newcomer}-{number}", None)
        return True

    async def heal(self, world: World) -> None:
        old = world.members[self.name]
        if old.ended:
            world.movers.add(self.name)  # Records of killed peers persist for a while and may mislead it.
            world.start(self.name, None, old.life + 1)
