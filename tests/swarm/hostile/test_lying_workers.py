"""A peer that contributes something else than its work: it is found over the wire, and counts no more. And
one that says so of others who did theirs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from swarm import Swarm, nothing_is_committed_twice, shared_rounds, tiny_manifest

from peers.lab.world.virtual_time import run
from protocols.memory.transport import Conditions
from swarmnet.identifiers import MicrobatchId
from swarmnet.run.manifest import Rounds, Sync

HONEST = ("a", "b", "c")
MANIFEST = tiny_manifest(
    (3,),
    sync=Sync(
        method="local-steps", learning_rate=1e-2, warmup_rounds=1, decay_rounds=1000, step_tokens=64,
        afresh_rounds=2, audits=1.0,
    ),
    rounds=Rounds(
        target_tokens=256, longest_seconds=5.0, deadline_seconds=1.0, settle_seconds=3.0, snapshot_rounds=8
    ),
)  # fmt: skip
FOUND_WITHIN = 60
"""Rounds from the first lie on: until a window of them is over, drawn, computed again by two (at half of a
peer's time), and settled. Rounds are short here, and each auditor has one window at a time in its hands."""


@dataclass
class Played:
    swarm: Swarm
    first_lie: int = -1
    first_out: set[int] = field(default_factory=set)
    """From which rounds on it counts no more, as each honest peer has it."""
    sets: dict[int, set[str]] = field(default_factory=dict)
    """Who was in the rounds after that."""

    def workers(self, *names: str):
        return [self.swarm.members[name].worker for name in names]

    def makers(self, round: int) -> set[str]:
        return set(self.swarm.members["a"].worker.update.rounds.history[round].held)

    def audited(self, *names: str) -> set[tuple[str, str]]:
        return {(note.fields["code"], note.fields["peer"]) for note in self.swarm.of("audited", *names)}


def lies_from_now_on(played: Played, name: str) -> None:
    """Its last signs are the opposite of those that it found."""
    own = played.swarm.members[name].worker.part.method.own
    real = own.tell

    def tell(round, peer):
        played.first_lie = round if played.first_lie < 0 else played.first_lie
        honest = real(round, peer)
        return honest[:-8] + bytes(each ^ 0xFF for each in honest[-8:])

    own.tell = tell


class AnotherText:
    """With which nothing follows that others did."""

    def __init__(self, text) -> None:
        self._text = text

    def microbatch(self, key):
        return self._text.microbatch(MicrobatchId(key.origin, key.counter + 1))


def test_a_peer_that_lies_about_its_work_is_found_and_counts_no_more():
    swarm = Swarm(MANIFEST)
    played = Played(swarm)

    async def story():
        swarm.open()
        for name in (*HONEST, "liar"):
            swarm.start(name, 0, in_flight=2)
        await swarm.until(lambda: len(swarm.of("in_step")) == 4 and swarm.rounds()["liar"][1] >= 2, 60.0)
        lies_from_now_on(played, "liar")
        liar, honest = swarm.members["liar"].peer, played.workers(*HONEST)
        await swarm.until(lambda: all(liar in each.makers.convicted for each in honest), 60.0)
        played.first_out = {each.makers.convicted[liar] for each in honest}
        first = max(played.first_out)
        await swarm.until(lambda: min(swarm.rounds()[name][1] for name in HONEST) > first + 3, 60.0)
        played.sets = {round: played.makers(round) for round in range(first, first + 4)}
        late = swarm.start("late", 0, in_flight=1)
        await swarm.until(lambda: swarm.of("in_step", "late") and late.worker.makers.convicted, 60.0)
        played.first_out.add(late.worker.makers.convicted[liar])
        await swarm.close()

    run(story())
    nothing_is_committed_twice(swarm)
    assert shared_rounds(swarm) > 10, "and all digests are equal"
    liar, honest = swarm.members["liar"].peer, {swarm.members[name].peer for name in HONEST}
    assert len(played.first_out) == 1, "all have it from the same set, and who came later from theirs"
    assert max(played.first_out) < played.first_lie + FOUND_WITHIN
    assert all(liar not in makers and makers & honest for makers in played.sets.values())
    found = played.audited(*HONEST)
    assert ("lied", liar) in found
    assert {peer for code, peer in found if code in ("lied", "false_proof")} == {liar}
    assert {peer for code, peer in found if code == "agrees"} >= honest
    assert {note.fields["code"] for note in swarm.of("refused_by", "liar")} == {"false_work"}


def test_who_accuses_falsely_loses_its_voice_and_nothing_else():
    swarm = Swarm(MANIFEST)
    played = Played(swarm)

    def heard() -> list[str]:
        false = [note for note in swarm.of("audited", "a", "b") if note.fields["code"] == "false_proof"]
        return [note.name for note in false]

    async def story():
        swarm.open()
        for name in ("a", "b", "slanderer"):
            swarm.start(name, 0, in_flight=2)
        await swarm.until(lambda: len(swarm.of("in_step")) == 3, 30.0)
        (slanderer,) = played.workers("slanderer")
        works = slanderer.update.works
        auditor = replace(works.means.auditor, text=lambda: AnotherText(swarm.text))
        works.means = replace(works.means, auditor=auditor)
        await swarm.until(lambda: set(heard()), 60.0)
        first = swarm.rounds()["a"][1]
        await swarm.until(lambda: swarm.rounds()["a"][1] > first + 20, 60.0)
        last = swarm.rounds()["a"][1]
        played.sets = {round: played.makers(round) for round in range(last - 4, last)}
        await swarm.close()

    run(story())
    assert shared_rounds(swarm) > 10
    assert len(heard()) == len(set(heard())), "each of them hears it once"
    peer = swarm.members["slanderer"].peer
    assert all(worker.makers.convicted == {} for worker in played.workers("a", "b"))
    assert any(peer in makers for makers in played.sets.values()), "its work counts as before"
    assert swarm.of("refused_by") == []


def test_honest_peers_on_bad_lines_that_crash_and_come_back_are_accused_by_nobody():
    swarm = Swarm(MANIFEST, seed=1, conditions=Conditions(latency_seconds=0.1, lost=0.03, reordered=0.05))
    played = Played(swarm)

    async def story():
        swarm.open()
        for name in HONEST:
            swarm.start(name, 0, in_flight=2)
        await swarm.until(lambda: len(swarm.of("in_step")) == 3 and swarm.rounds()["b"][1] >= 3, 60.0)
        await swarm.crash("b")
        await swarm.during(1.0)
        swarm.start("b", 0, in_flight=2)
        agreed = len(swarm.of("audited"))
        await swarm.until(lambda: len(swarm.of("audited")) >= agreed + 9, 120.0)
        await swarm.close()

    run(story())
    nothing_is_committed_twice(swarm)
    found = played.audited()
    # What is asked for comes in pieces, and these lines change their order, which a stream does not.
    assert {code for code, _ in found} <= {"agrees", "inconclusive", "unanswered", "not_in_order"}
    assert len({peer for code, peer in found if code == "agrees"}) >= 2
    assert all(worker.makers.convicted == {} for worker in played.workers(*HONEST))
