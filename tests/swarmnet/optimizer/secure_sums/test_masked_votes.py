"""Secure sums: the masked step is that of the plain votes to the bit, and a missing owner voids its round."""

import hashlib
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from method_cases import manifest, shapes_of

from protocols.signed.identity import Identity
from protocols.signed.pair_secrets import PairSecrets, montgomery_bytes
from swarmnet.identifiers import RunId
from swarmnet.model.flat_layout import layout_of
from swarmnet.optimizer.index_code import packed_bytes
from swarmnet.optimizer.method import ContributionError, method_of
from swarmnet.optimizer.secure_sums.masked_votes import HEAD_BYTES, MaskedVotes
from swarmnet.optimizer.secure_sums.member_sets import NONCE_BYTES
from swarmnet.optimizer.sign_muon import VOTE_CHUNK, SignMuon
from swarmnet.optimizer.step import dense
from swarmnet.run.schema import Rounds

LAYOUT = layout_of(shapes_of(1))
SECURE = replace(manifest(method="sign-muon", secure_owners=7), rounds=Rounds(window=1))
PLAIN = manifest(method="sign-muon")
RUN = RunId("0" * 64)
IDENTITIES = [Identity.from_seed(f"owner {number}".encode()) for number in range(6)]
LAG = method_of(SECURE, LAYOUT).sets._lag


@pytest.fixture(autouse=True)
def drawn_votes(monkeypatch):
    """Votes by chance in the place of those that a gradient gives, which take a thousand times as long."""

    def contribute(method, seed, tokens, round, peer):
        size = packed_bytes(method._plane.chunks, VOTE_CHUNK)
        return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()

    monkeypatch.setattr(SignMuon, "contribute", contribute)


class Owner:
    """One process of an owner: what it contributes masked, and its votes in the open."""

    def __init__(self, number, life):
        self.identity = IDENTITIES[number]
        self.masked = method_of(SECURE, LAYOUT)
        self.masked.keystream = PairSecrets(self.identity, RUN).keystream
        self.masked.nonce = hashlib.sha256(f"{number} {life}".encode()).digest()[:NONCE_BYTES]
        self.open = SignMuon(PLAIN, LAYOUT, torch.device("cpu"))
        self.tallies = {}

    @property
    def peer(self):
        return self.identity.peer_id

    def contribute(self, seed, round):
        plain = self.open.contribute(seed, 7, round, self.peer)
        return self.masked.contribute(seed, 7, round, self.peer), plain


def play(seed, owners, rounds, dropped):
    """A schedule of owners that miss rounds, restart, and settle at different times. Returns how many rounds
    had a sum and how many were void; asserts that each sum is exact."""
    chance, summed, void = Random(seed), 0, 0
    group = {number: Owner(number, 0) for number in range(owners)}
    sets, open_rounds = {}, []
    for round in range(rounds):
        for number in range(owners):
            if chance.random() < dropped / 4:  # Its process restarts and knows no set.
                group[number] = Owner(number, round)
        here = [number for number in group if chance.random() >= dropped]
        made = {}
        for number in here:
            made[number] = group[number].contribute(seed + 1000 * round + number, round)
        sets[round] = {group[number].peer: payloads[0] for number, payloads in made.items()}
        steps = []
        for owner in group.values():
            tally = owner.tallies[round] = owner.masked.tally(round)
            for peer in chance.sample(sorted(sets[round]), len(sets[round])):  # In any order, some twice.
                tally.add(peer, sets[round][peer])
                if chance.random() < 0.1:
                    tally.remove(peer)
                    tally.add(peer, sets[round][peer])
            steps.append(dense(tally.step(), LAYOUT))
        assert all(torch.equal(step, steps[0]) for step in steps)
        members = {number for number in here if any(made[number][0][NONCE_BYTES:HEAD_BYTES])}
        named = {bytes(made[number][0][NONCE_BYTES:HEAD_BYTES]) for number in members}
        if steps[0].any():
            plain = SignMuon(PLAIN, LAYOUT, torch.device("cpu")).tally(round)
            for number in members:
                plain.add(group[number].peer, made[number][1])
            assert torch.equal(steps[0], dense(plain.step(), LAYOUT))
            assert len(named) == 1
            summed += 1
        elif members:
            void += 1
        open_rounds.append(round)
        while open_rounds and (len(open_rounds) > LAG - 1 or chance.random() < 0.5):
            settled = open_rounds.pop(0)
            for owner in group.values():
                if settled in owner.tallies:
                    owner.masked.sets.settle(settled, list(sets[settled]))
    return summed, void


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), owners=st.integers(3, 5), dropped=st.sampled_from([0.0, 0.05, 0.2]))
def test_masked_sums_are_exact_in_any_schedule(seed, owners, dropped):
    summed, void = play(seed, owners, LAG + 8, dropped)
    if not dropped:
        assert (summed, void) == (8, 0), "all rounds after the first settled set"


def test_an_owner_that_drops_out_costs_some_rounds_and_not_the_sum():
    group = [Owner(number, 0) for number in range(4)]
    moved = []
    for round in range(3 * LAG):
        here = group if round < LAG + 2 else group[:3]
        payloads = {owner.peer: owner.contribute(round, round)[0] for owner in here}
        tallies = [owner.masked.tally(round) for owner in here]
        for tally in tallies:
            for peer, payload in payloads.items():
                tally.add(peer, payload)
        moved.append(bool(dense(tallies[0].step(), LAYOUT).any()))
        for owner in here:
            owner.masked.sets.settle(round, list(payloads))
    assert moved == [False] * LAG + [True] * 2 + [False] * LAG + [True] * (LAG - 2)


def test_a_masked_contribution_says_nothing_of_its_votes():
    votes = []
    for life in range(2):
        group = [Owner(number, life) for number in range(3)]
        for round in range(LAG + 1):
            payloads = {owner.peer: owner.contribute(5, round) for owner in group}
            for owner in group:
                tally = owner.masked.tally(round)
                for peer, (payload, _) in payloads.items():
                    tally.add(peer, payload)
                owner.masked.sets.settle(round, list(payloads))
        masked = group[0].masked.masked_of(payloads[group[0].peer][0])
        plain = group[0].open.votes_of(payloads[group[0].peer][1])
        votes.append((masked, (next(plain).signs.numpy() < 0)))
    (first, of_first), (second, of_second) = votes
    assert np.array_equal(of_first, of_second), "equal votes"
    assert (first != second).mean() == pytest.approx(7 / 8, abs=0.02), "and other masks in another life"
    for negative in (False, True):
        counts = np.bincount(first[of_first == negative], minlength=8) / (of_first == negative).sum()
        assert counts == pytest.approx([1 / 8] * 8, abs=0.02), "each masked value is as likely"


def test_a_round_is_masked_once():
    group = [Owner(number, 0) for number in range(3)]
    for round in range(LAG + 1):
        payloads = {owner.peer: owner.contribute(round, round)[0] for owner in group}
        for owner in group:
            tally = owner.masked.tally(round)
            for peer, payload in payloads.items():
                tally.add(peer, payload)
            owner.masked.sets.settle(round, list(payloads))
    assert any(payloads[group[0].peer][HEAD_BYTES:])
    again = group[0].contribute(1, LAG)[0]
    assert not any(again[NONCE_BYTES:]), "after a fork it contributes no votes to the same round"
    group[0].masked.check(again)
    with pytest.raises(ContributionError, match="votes of no members"):
        group[0].masked.check(again[:-40] + b"\1" * 40)
    with pytest.raises(ContributionError, match="bytes where"):
        group[0].masked.check(again[:-1])


def test_pairs_agree_on_secrets_from_their_peer_ids_alone():
    one, two, three = (PairSecrets(identity, RUN) for identity in IDENTITIES[:3])
    first, second = IDENTITIES[0].peer_id, IDENTITIES[1].peer_id
    assert one.keystream(second, b"x", 99) == two.keystream(first, b"x", 99)
    streams = {
        one.keystream(second, b"x", 99), one.keystream(second, b"y", 99), three.keystream(first, b"x", 99),
        PairSecrets(IDENTITIES[0], RunId("1" * 64)).keystream(second, b"x", 99),
    }  # fmt: skip
    assert len(streams) == 4
    assert montgomery_bytes(first) == one._key.public_key().public_bytes_raw(), "the map of RFC 7748"


def test_a_vote_takes_the_bits_of_the_count():
    for owners, bits in ((3, 2), (4, 3), (7, 3), (8, 4), (255, 8)):
        method = method_of(manifest(method="sign-muon", secure_owners=owners), LAYOUT)
        assert isinstance(method, MaskedVotes)
        assert method.bits == bits
        assert (
            method.payload_bytes
            == HEAD_BYTES + bits * SignMuon(PLAIN, LAYOUT, torch.device("cpu")).payload_bytes
        )
