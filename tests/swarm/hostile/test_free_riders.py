"""Where newcomers pay with work that is found to agree: who cannot be looked into counts no more, and who
comes later counts for nothing until it has paid."""

from __future__ import annotations

from swarm import Swarm, nothing_is_committed_twice, shared_rounds, tiny_manifest

from peers.lab.world.virtual_time import run
from protocols.memory.transport import Conditions
from swarmnet.audits.standing import Terms
from swarmnet.run.manifest import Rounds, Sync

FEE = 4
PAID = tiny_manifest(
    (3,),
    sync=Sync(
        method="local-steps", learning_rate=1e-2, warmup_rounds=1, decay_rounds=1000, step_tokens=64,
        afresh_rounds=2, audits=0.25, fee=FEE,
    ),
    rounds=Rounds(
        target_tokens=256, longest_seconds=5.0, deadline_seconds=1.0, settle_seconds=3.0, snapshot_rounds=16
    ),
)  # fmt: skip
TERMS = Terms.of(PAID)
HONEST = ("a", "b", "c")


def in_sets(swarm: Swarm, name: str, since: int = 0) -> list[int]:
    """Rounds whose sets hold something of that peer."""
    made = {note.fields["id"]: note.fields["round"] for note in swarm.of("made", name)}
    settled = {ident for note in swarm.of("settled", *HONEST) for ident in note.fields["ids"]}
    return sorted(round for ident, round in made.items() if ident in settled and round >= since)


def every_contribution_is_settled_once_or_came_back_once(swarm: Swarm, *names: str) -> None:
    settled = {ident for note in swarm.of("settled") for ident in note.fields["ids"]}
    for name in names:
        came_back = [note.fields["id"] for note in swarm.of("given_back", name)]
        undecided = {ident for note in swarm.of("undecided", name) for ident in note.fields["ids"]}
        made = {note.fields["id"] for note in swarm.of("made", name)}
        assert len(came_back) == len(set(came_back))
        assert not settled & set(came_back)
        assert made <= settled | set(came_back) | undecided, f"{name} has lost something"


def standings(swarm: Swarm, *names: str) -> set[tuple[str, str, int]]:
    return {(n.fields["code"], n.fields["tag"], n.fields["round"]) for n in swarm.of("stands", *names)}


def founded(swarm: Swarm, *names: str):
    """Whether these are in step, and the rounds of founding over."""
    swarm_rounds = swarm.rounds()
    return len(swarm.of("in_step", *names)) == len(names) and all(
        swarm_rounds[name][1] >= TERMS.founding + TERMS.lag for name in names
    )


def test_who_answers_no_auditor_counts_no_more_after_a_term_and_the_others_go_on():
    swarm = Swarm(PAID)

    async def story():
        swarm.open()
        for name in (*HONEST, "rider"):
            swarm.start(name, 0, in_flight=2)
        await swarm.until(lambda: len(swarm.of("in_step")) == 4, 60.0)
        swarm.members["rider"].worker.update.works.giving.wanted = lambda peer, pieces: None
        await swarm.until(lambda: swarm.of("stands", *HONEST), 300.0)
        first = swarm.of("stands", "a")[0].fields["round"]
        await swarm.until(lambda: min(swarm.rounds()[name][1] for name in HONEST) > first + 20, 120.0)
        await swarm.close()

    run(story())
    nothing_is_committed_twice(swarm)
    ((code, _, first),) = standings(swarm, *HONEST)
    assert code == "none"
    assert shared_rounds(swarm) > first + 10
    assert first < TERMS.founding + TERMS.term + 2 * TERMS.kept
    assert in_sets(swarm, "rider", TERMS.founding)
    assert in_sets(swarm, "rider", first) == []
    assert all(in_sets(swarm, name, first) for name in HONEST)
    every_contribution_is_settled_once_or_came_back_once(swarm, *HONEST, "rider")


def test_a_newcomer_counts_for_nothing_until_it_has_paid_and_then_as_everybody():
    swarm = Swarm(PAID)

    async def story():
        swarm.open()
        for name in HONEST:
            swarm.start(name, 0, in_flight=2)
        await swarm.until(lambda: founded(swarm, *HONEST), 120.0)
        swarm.start("late", 0, in_flight=2)
        await swarm.until(lambda: swarm.of("stands", "late"), 300.0)
        first = swarm.of("stands", "late")[0].fields["round"]
        await swarm.until(lambda: min(settled for _, settled in swarm.rounds().values()) > first + 20, 120.0)
        await swarm.close()

    run(story())
    nothing_is_committed_twice(swarm)
    assert shared_rounds(swarm) > TERMS.founding
    ((code, _, first),) = standings(swarm, *HONEST, "late")
    assert code == "judged"
    counted = in_sets(swarm, "late")
    assert counted
    assert min(counted) >= first
    uncounted = [note.fields["round"] for note in swarm.of("given_back", "late")]
    assert {note.fields["code"] for note in swarm.of("given_back", "late")} == {"uncounted"}
    assert len([round for round in uncounted if round < first]) >= FEE
    every_contribution_is_settled_once_or_came_back_once(swarm, *HONEST, "late")


def test_honest_peers_on_bad_lines_that_crash_and_come_back_go_on_counting():
    lines = Conditions(latency_seconds=0.05, lost=0.02, reordered=0.05)
    swarm = Swarm(PAID, seed=1, conditions=lines)

    async def story():
        swarm.open()
        for name in HONEST:
            swarm.start(name, 0, in_flight=2)
        await swarm.until(lambda: founded(swarm, *HONEST), 120.0)
        await swarm.crash("b")
        await swarm.during(1.0)
        swarm.start("b", 0, in_flight=2)
        back = swarm.rounds()["a"][1]
        await swarm.until(lambda: swarm.rounds()["a"][1] > back + TERMS.term + 2 * TERMS.lag, 600.0)
        await swarm.close()

    run(story())
    nothing_is_committed_twice(swarm)
    assert shared_rounds(swarm) > TERMS.term
    assert standings(swarm, *HONEST) == set(), "whoever is looked into is found to agree in time"
    assert {note.fields["code"] for note in swarm.of("audited")} >= {"agrees"}
    assert not [note for note in swarm.of("audited") if note.fields["code"] in ("lied", "false_proof")]
    last = max(in_sets(swarm, "a"))
    assert all(in_sets(swarm, name, last - 5) for name in HONEST)
