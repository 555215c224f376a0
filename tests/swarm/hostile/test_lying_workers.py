"""A peer that contributes something else than its work: it is found over the wire, and counts no more."""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarm import Swarm, nothing_is_committed_twice, tiny_manifest

from peers.lab.world.virtual_time import run
from swarmnet.run.manifest import Rounds, Sync

HONEST = ("a", "b", "c")
EVERY = 2
MANIFEST = tiny_manifest(
    (3,),
    sync=Sync(
        method="local-steps", learning_rate=1e-2, warmup_rounds=1, decay_rounds=1000, step_tokens=64,
        afresh_rounds=EVERY, audits=1.0,
    ),
    rounds=Rounds(
        target_tokens=256, longest_seconds=5.0, deadline_seconds=1.0, settle_seconds=3.0, snapshot_rounds=8
    ),
)  # fmt: skip
FOUND_WITHIN = 16
"""Rounds from the first lie on: a window, the draw, a replay, and what settles."""


def flipped(payload: bytes) -> bytes:
    """The signs at its end."""
    return payload[:-8] + bytes(each ^ 0xFF for each in payload[-8:])


@dataclass
class Played:
    swarm: Swarm
    first_lie: int = -1

    def audits(self, name: str) -> dict[str, int]:
        return dict(self.swarm.members[name].worker.audits.outcomes)

    def settled(self, name: str) -> dict[int, str]:
        return {note.fields["round"]: note.fields["digest"] for note in self.swarm.of("settled", name)}

    def makers(self, round: int) -> set[str]:
        update = self.swarm.members["a"].worker.update
        state = update.rounds.history.get(round)
        return set() if state is None else set(state.held)


def lie(member, played: Played) -> None:
    """From its next contribution on."""
    own = member.worker.part.method.own
    real = own.tell

    def tell(round, peer):
        if played.first_lie < 0:
            played.first_lie = round
        return flipped(real(round, peer))

    own.tell = tell


def test_a_peer_that_lies_about_its_work_is_found_and_counts_no_more():
    swarm = Swarm(MANIFEST)
    played = Played(swarm)
    counted = {}

    async def story():
        swarm.open()
        for name in (*HONEST, "liar"):
            swarm.start(name, 0, in_flight=2)
        await swarm.until(lambda: len(swarm.of("in_step")) == 4, 30.0)
        await swarm.until(lambda: min(done for _, done in swarm.rounds().values()) >= 4, 60.0)
        liar = swarm.members["liar"]
        lie(liar, played)
        honest = [swarm.members[name].worker for name in HONEST]
        await swarm.until(lambda: all(liar.peer in each.makers.convicted for each in honest), 120.0)
        first = max(each.makers.convicted[liar.peer] for each in honest)
        await swarm.until(lambda: min(swarm.rounds()[name][1] for name in HONEST) > first + 4, 60.0)
        counted.update({round: played.makers(round) for round in range(first, first + 4)})
        counted["first"] = {each.makers.convicted[liar.peer] for each in honest}
        await swarm.close()

    run(story())
    nothing_is_committed_twice(swarm)
    print(played.first_lie, counted["first"], [played.audits(name) for name in (*HONEST, "liar")])
    assert False
