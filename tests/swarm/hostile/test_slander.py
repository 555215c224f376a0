"""One peer of a group says that rounds are settled with nothing but its own contribution, to everybody."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest

from peers.lab.faults.invariants import check
from peers.lab.faults.play import Options, ScheduleRecord, play
from peers.lab.world.world import Member, World
from peers.worker.rounds.round_service import RoundService
from protocols.messages.table import Announce, ContributionRef, OpenRound, Progress
from swarmnet.rounds.contribution_sets import set_digest

BEGINS, ENDS = 12.0, 42.0
LIAR = "p0"


@dataclass(frozen=True, slots=True)
class Slander:
    """A fault as those of peers/lab/faults/faults.py: all else that this peer does and says is true."""

    at: float
    until: float
    name: str

    async def inject(self, world: World) -> bool:
        member = world.alive(self.name)
        if member is None or member.worker.services is None:
            return False
        around = member.worker.services.links
        true = around.post

        def post(peer, lane, message, body=b""):
            if isinstance(message, Progress):
                message, proof = self._lie(member, message)
                if proof is not None:
                    true(peer, "group", proof)
            return true(peer, lane, message, body)

        around.post = post
        return True

    async def heal(self, world: World) -> None:
        member = world.alive(self.name)
        if member is not None and member.worker.services is not None:
            member.worker.services.links.post = member.worker.services.links._link_pool.post

    def _lie(self, member: Member, told: Progress) -> tuple[Progress, Announce | None]:
        update: RoundService | None = member.worker.services.round_service
        assert update is not None
        mine = {
            number: state.held[member.peer]
            for number, state in update.rounds.rounds.items()
            if member.peer in state.held
        }
        settled, sets = told.settled, {entry.round: entry for entry in told.sets}
        while settled + 1 in mine and settled + 1 in sets:
            settled += 1
            sets[settled] = OpenRound(settled, 9, 9, 1, set_digest([mine[settled].id]))
        claimed = [mine[number] for number in range(told.settled + 1, settled + 1)]
        if not claimed:
            return told, None
        references = [ContributionRef(one.round, one.peer, one.id, one.size) for one in claimed]
        lie = msgspec.structs.replace(told, settled=settled, sets=[sets[number] for number in sorted(sets)])
        return lie, Announce(references, [one.round for one in claimed])


def share_of_liar(seen: ScheduleRecord, begin: float, end: float) -> float:
    """Of all contributions that the others of its stage settled meanwhile."""
    its = {
        note.fields["id"] for note in seen.notes if note.event == "contribution_made" and note.name == LIAR
    }
    settled = [
        identity
        for note in seen.notes
        if note.event == "settled" and begin < note.time < end and note.name != LIAR
        and seen.living.get(f"{note.name}.{note.life}") == 0
        for identity in note.fields["ids"]
    ]  # fmt: skip
    assert settled, "it cannot stop them"
    return sum(identity in its for identity in settled) / len(settled)


@pytest.mark.parametrize("seed", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_a_liar_does_not_choose_what_the_others_settle(seed):
    seen = play(
        Options(seed, peers=10, stages=2, faults=(Slander(BEGINS, ENDS, LIAR),), rounds=20, seconds=ENDS)
    )
    assert check(seen) == [], "what all held is settled among others"
    assert 0.05 < share_of_liar(seen, BEGINS + 5.0, ENDS) < 0.4, "of five peers one"
