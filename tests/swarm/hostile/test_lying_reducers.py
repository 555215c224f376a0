"""A reducer that publishes sums which its slices do not give: it is found, and what it made is undone."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from swarm import Swarm, nothing_is_committed_twice, sharded_manifest

from peers.lab.world.stub_stage import StubReduced
from peers.lab.world.virtual_time import run

HONEST = ("a", "b", "c", "d")
MANIFEST = sharded_manifest((3,), shards=8, global_batch_tokens=512)
FOUND_WITHIN = 10
"""Rounds in which it has lied: in others it is not drawn. Four peers look into a shard of it with a chance of
an eighth each, so 0.5 % of liars go on for so long."""


def another(slices: list[bytes]) -> list[bytes]:
    """What the first of them said becomes something else."""
    return [slices[0][:-2] + bytes([slices[0][-2] ^ 1]) + slices[0][-1:], *slices[1:]]


def left_out(slices: list[bytes]) -> list[bytes]:
    """What the first of them said is missing, though the table names it: the second one counts twice."""
    return [slices[1], *slices[1:]]


@dataclass
class Played:
    swarm: Swarm
    lies: set[int] = field(default_factory=set)
    """Rounds for which it has published false sums."""

    @property
    def liar(self):
        return self.swarm.members["liar"]

    def honest(self):
        return [self.swarm.members[name].worker for name in HONEST]

    def lying_ids(self) -> set[str]:
        results = self.swarm.of("reduced", "liar")
        return {note.fields["id"] for note in results if note.fields["round"] in self.lies}

    def settled(self, name: str) -> dict[int, tuple[str, list[str]]]:
        """Round -> digest of the settled weights, ids of the results."""
        return {
            note.fields["round"]: (note.fields["digest"], note.fields["ids"])
            for note in self.swarm.of("settled", name)
        }

    def lie(self, how) -> None:
        """From now on, in the first of its shards that two or more contributed to."""
        reduced = self.liar.worker.services.part.method.reduced

        def reduce(slices):
            bent = next((shard for shard in sorted(slices) if len(slices[shard]) > 1), None)
            if bent is None:
                return StubReduced.reduce(reduced, slices)
            self.lies.add(self.liar.worker.services.round_service.rounds.current - 1)
            contributors = sorted(slices[bent])
            said = how([slices[bent][one] for one in contributors])
            changed = {**slices, bent: dict(zip(contributors, said, strict=True))}
            return StubReduced.reduce(reduced, changed)

        reduced.reduce = reduce


def play(how) -> Played:
    """Four honest peers and one that lies as soon as it is in step; on for some rounds after it was found."""
    swarm = Swarm(MANIFEST, stub=True)
    played = Played(swarm)

    async def story() -> None:
        swarm.open()
        for name in (*HONEST, "liar"):
            swarm.start(name, 0, in_flight=1)
        await swarm.until(lambda: len(swarm.of("in_step")) == 5, 30.0)
        played.lie(how)
        await swarm.until(lambda: all(worker.services.audits.convicted for worker in played.honest()), 60.0)
        first = swarm.rounds()["a"][0]
        late = swarm.start("late", 0, in_flight=1)
        await swarm.until(lambda: swarm.of("in_step", "late") and late.worker.services.audits.convicted, 60.0)
        await swarm.until(lambda: min(swarm.rounds()[name][1] for name in HONEST) > first + 8, 60.0)
        await swarm.close()

    run(story())
    nothing_is_committed_twice(swarm)
    return played


@pytest.mark.parametrize("how", [another, pytest.param(left_out, marks=pytest.mark.soak)])
def test_a_reducer_whose_sums_are_false_is_found_within_ten_lies_and_its_results_are_undone(how):
    played = play(how)
    swarm, liar = played.swarm, played.liar.peer
    for worker in (*played.honest(), swarm.members["late"].worker):
        assert worker.services.audits.convicted.keys() == {liar}, "also by who came later"
    found = [note for note in swarm.of("audited", *HONEST) if note.fields["code"] == "lied"]
    assert {note.name for note in found} == set(HONEST), "everybody has checked the proof"
    first = min(found, key=lambda note: note.time)
    assert first.fields["peer"] == liar
    assert sum(lie <= first.fields["round"] for lie in played.lies) <= FOUND_WITHIN
    assert max(note.time for note in found) - first.time < 1.0
    lying = played.lying_ids()
    assert first.fields["id"] in lying
    settled = [played.settled(name) for name in HONEST]
    since = first.fields["round"] - MANIFEST.rounds.window + 1
    undone = sorted(number for number in set.intersection(*map(set, settled)) if number >= since)
    assert len(undone) > 6
    for number in undone:
        sets = {(digest, tuple(ids)) for digest, ids in (of[number] for of in settled)}
        assert len(sets) == 1, "they stay on one history"
        assert not lying & {identity for _, ids in sets for identity in ids}
    slander = [note.fields["peer"] for note in swarm.of("audited") if note.fields["code"] != "agrees"]
    assert set(slander) == {liar}
    assert {note.fields["code"] for note in swarm.of("refused_by", "liar")} == {"invalid_reduction"}
