"""Peers that compute in other numbers than their group: honest ones are let in and stay, by how alike their
work is, and one that lies loses its standing, though nobody could prove it."""

from __future__ import annotations

from dataclasses import replace

from swarm import TINY_MODEL, Swarm, nothing_is_committed_twice, shared_rounds, tiny_manifest

from peers.lab.world.virtual_time import run
from swarmnet.audits.standing import Terms
from swarmnet.model.computing.choices import Computing
from swarmnet.rounds.result_table import tag_of
from swarmnet.run.manifest import Rounds, Sync

MANIFEST = tiny_manifest(
    (1,),
    model=replace(TINY_MODEL, layers=1),
    sync=Sync(
        method="local-steps", learning_rate=1e-2, warmup_rounds=1, decay_rounds=1000, step_tokens=64,
        afresh_rounds=2, audits=0.5, fee=4,
    ),
    rounds=Rounds(
        target_tokens=256, longest_seconds=5.0, deadline_seconds=1.0, settle_seconds=3.0, snapshot_rounds=16
    ),
)  # fmt: skip
TERMS = Terms.of(MANIFEST)
EXACT = ("a", "b", "c")
OTHER = Computing("bf16")


def quick(priority: int) -> float:
    """Seconds of whatever it computes: rounds are short here, and a replay must not take many of them."""
    return 0.004


def tells_the_opposite(swarm: Swarm, name: str) -> None:
    """From now on."""
    own = swarm.members[name].worker.part.method.own
    real = own.tell

    def tell(round, peer):
        planes = own.moves_of(real(round, peer))
        return b"".join(replace(signs, negative=~signs.negative).written() for signs in planes)

    own.tell = tell


def standings(swarm: Swarm, *names: str) -> dict[str, set[str]]:
    """What became of whom, as all of these have it."""
    by_tag = {tag_of(member.peer).hex(): name for name, member in swarm.members.items()}
    found: dict[str, set[str]] = {}
    for note in swarm.of("stands", *names):
        found.setdefault(by_tag[note.fields["tag"]], set()).add(note.fields["code"])
    return found


def in_sets(swarm: Swarm, name: str) -> list[int]:
    """Rounds whose sets hold something of that peer."""
    made = {note.fields["id"]: note.fields["round"] for note in swarm.of("made", name)}
    settled = {ident for note in swarm.of("settled", *EXACT) for ident in note.fields["ids"]}
    return sorted(round for ident, round in made.items() if ident in settled)


def test_an_honest_peer_with_other_numbers_gets_in_and_stays_and_a_liar_with_others_goes():
    swarm = Swarm(MANIFEST)

    async def story():
        swarm.open()
        for name in EXACT:
            swarm.start(name, 0, in_flight=2, compute=quick)
        swarm.start("liar", 0, in_flight=2, compute=quick, computing=OTHER)
        since = TERMS.founding + TERMS.lag
        await swarm.until(lambda: len(swarm.rounds()) == 4 and swarm.rounds()["a"][1] >= since, 120.0)
        tells_the_opposite(swarm, "liar")
        swarm.start("late", 0, in_flight=2, compute=quick, computing=OTHER)
        await swarm.until(lambda: standings(swarm, "a").keys() == {"liar", "late"}, 300.0)
        first = swarm.of("stands", "a")[-1].fields["round"]
        await swarm.until(lambda: min(swarm.rounds()[name][1] for name in EXACT) > first + 5, 60.0)
        await swarm.close()

    run(story())
    nothing_is_committed_twice(swarm)
    assert shared_rounds(swarm) > TERMS.founding
    assert standings(swarm, *EXACT) == {"liar": {"none"}, "late": {"judged"}}
    peers = {name: member.peer for name, member in swarm.members.items()}
    said = {(note.fields["code"], note.fields["peer"]) for note in swarm.of("audited", *EXACT)}
    assert ("unlike", peers["liar"]) in said
    assert ("alike", peers["late"]) in said
    assert "lied" not in {code for code, _ in said}, "with other numbers nobody can say so"
    assert in_sets(swarm, "late")[-1] == in_sets(swarm, "a")[-1] > in_sets(swarm, "liar")[-1]
    assert ("unlike", peers["late"]) not in said
