"""The fault that the bootstrap is away, and the check that a newcomer finds other peers afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from peers.lab.faults.faults import Join, LastingFault, MomentaryFault, ScheduledFault
from peers.lab.world.world import World

AWAY_SECONDS = (5.0, 5.0, 20.0, 20.0, 65.0, 180.0, 600.0)
"""Lengths of the absence to draw from, 5 to 600 s; long ones are rare, since the schedule lasts as long."""
JOIN_SECONDS = 60.0
"""Time in which a newcomer must find another peer after the bootstrap's return."""


@dataclass(frozen=True, slots=True)
class BootstrapAway(LastingFault):
    """The bootstrap is killed, and comes back with the same key and port."""

    async def inject(self, world: World) -> bool:
        if world.bootstrap.away:
            return False
        world.bootstrap.leave()
        return True

    async def heal(self, world: World) -> None:
        world.bootstrap.come_back()


@dataclass(frozen=True, slots=True)
class NewcomerFinds(MomentaryFault):
    """A check, not a fault: this newcomer must be linked to a peer now. Skipped after a silent directory."""

    name: str

    async def inject(self, world: World) -> bool:
        member = world.alive(self.name)
        if member is None or world.outages.lasted_until(self.at - JOIN_SECONDS) or len(world.living()) < 2:
            return False
        services = member.worker.services
        if services is None or not any(peer.reached for peer in services.links.known().values()):
            late = AssertionError(f"has found no peer within {JOIN_SECONDS:g} s of the bootstrap's return")
            world.journal.escaped.append((self.name, late))
        return True


def draw_bootstrap_away(chance: Random, at: float, names: Sequence[str]) -> list[ScheduledFault]:
    """Draw an absence, a newcomer at its end, and the check that the newcomer finds a peer."""
    back = at + chance.choice(AWAY_SECONDS)
    newcomer = f"n{chance.randrange(10**6)}"
    return [BootstrapAway(at, back), Join(back + 0.1, newcomer), NewcomerFinds(back + JOIN_SECONDS, newcomer)]
