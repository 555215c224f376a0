"""Faults that concern moving: peers are ordered to other stages, and stages lose all their peers."""

from __future__ import annotations

from dataclasses import dataclass

from peers.lab.world.world import World
from peers.lab.world.world_events import StageLost, ToldToMove


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
        member = world.alive(self.name)
        if member is None or member.told_to_leave or self.name in world.siblings:
            return False  # Siblings do not move.
        if member.worker.state not in ("joining", "training"):
            return False
        others = [stage for stage in range(len(world.manifest.stages)) if stage != member.worker.stage]
        if not others or not world.spare(member):
            return False
        stage = others[self.turn % len(others)]
        world.note(member.name, member.life, ToldToMove(stage))
        member.worker.leave()
        member.worker.goes_to = stage  # As `Moving` does.
        return True

    async def heal(self, world: World) -> None: ...


@dataclass(frozen=True, slots=True)
class LostStage:
    """All peers of the stage that `name` holds are killed, and for so long or for ever nobody of them comes
    back: only peers that move there by their own decision help. Whatever they had settled may be lost. If it
    is for ever, people give its weights up, as peers that wait for them say, and begin from the seed."""

    at: float
    until: float
    name: str

    async def inject(self, world: World) -> bool:
        member = world.alive(self.name)
        if not world.moves or member is None or member.worker.stage < 0:
            return False
        stage = member.worker.stage
        others = [number for number in range(len(world.manifest.stages)) if number != stage]
        trains = [sum(other.trains for other in world.living(number)) for number in others]
        if not trains or min(trains) < 1 or max(trains) < 2:
            return False  # Nobody could come.
        killed = world.living(stage)
        if not world.survives(killed):
            return False
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
