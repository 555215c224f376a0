"""Real peers' rounds computed again: honest ones always agree, to the bit, and no lie does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from swarm import TINY_MODEL, corpus

from peers.lab.bench.work.audits import (
    AuditedPeers,
    Peer,
    Question,
    SettledWork,
    render,
    rounds_until_found,
)
from peers.lab.bench.work.lies import LIES
from peers.lab.bench.work.many import honest, play_of
from peers.lab.bench.work.other_numbers import ComparedPeers, Looks, rows
from swarmnet.audits.standing import ENOUGH
from swarmnet.audits.verdict import Evidence
from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.run.manifest import Data, Manifest, Rounds, Sync

PEERS, MICROBATCH = 4, 2 * 16
ROUNDS = 11


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def manifest_of(steps=2, **sync) -> Manifest:
    keys = {"method": "local-steps", "learning_rate": 8e-3, "afresh_rounds": 2, **sync}
    return Manifest(
        "tiny", "owner", stages=(1,), model=replace(TINY_MODEL, layers=1),
        data=Data(sequence_tokens=16, microbatch_sequences=2),
        rounds=Rounds(target_tokens=PEERS * steps * MICROBATCH), sync=Sync(**keys),
    )  # fmt: skip


def group(liars=0, lie="", share=1.0, **keys) -> AuditedPeers:
    return AuditedPeers(manifest_of(**keys), corpus(), PEERS, liars, lie, share, seed=0)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"steps": 5, "step_tokens": 3 * MICROBATCH},
        {"method": "diloco", "learning_rate": 2e-3},
        {"method": "sparse-loco", "afresh_rounds": 3},
    ],
    ids=["local-steps", "steps-of-several", "diloco", "sparse-loco"],
)
def test_what_honest_peers_did_is_found_to_agree_whatever_their_steps(keys):
    played = group(share=PEERS - 1, **keys).play(8)
    assert played.verdicts.keys() == {"agrees"}
    assert played.verdicts["agrees"] >= 2 * PEERS, "every window by all"


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_is_found_in_whatever_window_somebody_looks_into(lie):
    played = group(1, lie).play(ROUNDS)
    assert len(played.caught) == 1
    assert played.of_liars.keys() == {"lied"}
    assert played.verdicts.keys() == {"agrees"}
    assert lie in render([played])


def test_what_passes_a_cosine_of_nine_tenths_does_not_pass_an_audit():
    played = group(1, "cosine-0.9").play(ROUNDS)
    assert min(played.cosines) > 0.9
    assert played.of_liars == {"lied": played.of_liars["lied"]}


def test_auditors_with_other_numbers_tell_lies_from_rounding_but_one_that_knows_how_much_they_allow():
    found = {}
    for lie in ("", "cosine-0.9", "carrier", "within"):
        question = Question(Path(), (), PEERS, 1, ROUNDS, 1)
        world = ComparedPeers(manifest_of(), corpus(), question, Looks(Computing("bf16")), lie, 0)
        world.play(ROUNDS + 2)
        found[lie] = world.compared
        found[lie].loss = 2.0
    assert found[""].wrong <= len(found[""].means) // 10, "one window of an honest peer is not enough"
    assert max(found["cosine-0.9"].alike) < ENOUGH
    assert max(found["carrier"].alike) < ENOUGH
    assert min(found["within"].means) >= ENOUGH, "it is not found"
    assert found["within"].wrong == len(found["within"].means)
    assert len(list(rows(found.values()))) == 2 + len(found)


def test_a_peer_that_saw_other_sets_than_settled_is_not_judged():
    world = group()
    for round in range(4):
        world._round(round)
    accused, auditor = world.peers[0], world.auditor
    evidence = next(found for round in (2, 3) if (found := accused.evidence(round)) is not None)
    assert auditor.judge(evidence).verdict == "agrees"
    window = list(evidence.window)
    saw = [replace(each, settled=each.applied - 1) for each in window[-1].stretches]
    window[-1] = replace(window[-1], stretches=tuple(saw))
    evidence = replace(evidence, window=tuple(window))
    assert auditor.judge(evidence).verdict == "inconclusive"


def test_what_is_applied_before_a_contribution_changes_nothing_of_what_was_computed_before_it():
    manifest = manifest_of(step_tokens=2 * MICROBATCH, afresh_rounds=8)
    known = SettledWork(manifest, corpus())
    peer = Peer(manifest, known, b"one", PLAIN, None)
    known.settled(-1, peer.replica.settled_units(), {})
    for round in range(6):
        for _ in range(3):  # One waits for a step yet, when the round before is applied.
            peer.compute()
        if round:
            counts = {peer.me: peer.told[round - 1]}
            peer.end(round - 1, counts)
            known.settled(round - 1, peer.replica.settled_units(), counts)
        peer.contribute(round, {})
    world = group(step_tokens=2 * MICROBATCH, afresh_rounds=8)
    world.auditor._known = known
    begun = peer.commitments[5].begun
    window = tuple(peer.commitments[each] for each in range(begun, 6))
    assert len(window) == 2
    assert world.auditor.judge(Evidence(peer.me, window, peer.carried_into(begun))).verdict == "agrees"


def test_what_is_given_back_ends_a_window_and_the_next_one_agrees_again():
    manifest = manifest_of()
    known = SettledWork(manifest, corpus())
    peer = Peer(manifest, known, b"one", PLAIN, None)
    known.settled(-1, peer.replica.settled_units(), {})
    world = group()
    for round in range(4):
        for _ in range(2):
            peer.compute()
        peer.contribute(round, {})
        if round == 1:
            peer.lose(0)
        counts = {peer.me: peer.told[round]} if round else {}
        peer.end(round, counts)
        known.settled(round, peer.replica.settled_units(), counts)
    world.auditor._known = known
    begun = peer.commitments[3].begun
    window = tuple(peer.commitments[each] for each in range(begun, 4))
    assert world.auditor.judge(Evidence(peer.me, window, peer.carried_into(begun))).verdict == "agrees"


def test_honest_peers_of_all_kinds_are_found_to_agree_in_every_window():
    plays = [play for play in map(play_of, range(60)) if play.threads == 1]
    late = next(play for play in plays if play.late and play.manifest.sync.afresh_rounds > 1)
    carrying = next(play for play in plays if play.manifest.sync.own_steps.rest != "dropped")
    found = [honest(seed, corpus()) for seed in {late.seed, carrying.seed}]
    assert {verdict for each in found for verdict in each.verdicts} == {"agrees"}
    assert sum(each.broken for each in found) > 0
    assert sum(each.carrying for each in found) > 0
    assert torch.get_num_threads() == 1, "as it was"


def test_plays_of_honest_peers_differ_in_what_must_not_matter_and_follow_from_their_numbers():
    plays = [play_of(seed) for seed in range(60)]
    assert plays == [play_of(seed) for seed in range(60)]
    assert {(play.dtype, play.threads) for play in plays} == {
        (dtype, threads) for dtype in ("fp32", "bf16") for threads in (1, 2, 4, 8, 16)
    }
    for of in ("method", "afresh_rounds", "step_tokens"):
        assert len({getattr(play.manifest.sync, of) for play in plays}) > 3, of


def test_liars_are_found_the_sooner_the_more_is_looked_into():
    often, seldom = (rounds_until_found(16, 4, share, range(300)) for share in (0.2, 0.05))
    assert sum(often) / 300 == pytest.approx(4 / (0.2 * 12 / 15), rel=0.2)
    assert sum(seldom) / 300 == pytest.approx(4 / (0.05 * 12 / 15), rel=0.2)
