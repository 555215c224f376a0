"""sign-muon: what differs from other votes. Fragments, the polar factor, and a momentum that keeps what it
sent."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_cases import PEERS, bent, gradient_of, manifest, replica_of, shapes_of

from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import layout_of, views_of
from swarmnet.optimizer.method import ContributionError, method_of
from swarmnet.optimizer.polar_factor import orthogonal
from swarmnet.optimizer.sign_muon import VOTE_CHUNK, lead_factor
from swarmnet.optimizer.step import dense, rate_units
from swarmnet.optimizer.vote_agreement import VoteAgreement
from swarmnet.run.method_config import MUON_RMS
from swarmnet.run.rates import WHOLE

LAYOUT = layout_of(shapes_of(2))
FRAGMENTS = [1, 4, 64]
QUERY, EMBEDDING = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"


def run(fragments=4, **sync):
    return manifest(method="sign-muon", fragments=fragments, **sync)


def step_of(method, payloads, round=0):
    tally = method.tally(round)
    for peer, payload in payloads.items():
        tally.add(peer, payload)
    return dense(tally.step(), LAYOUT)


def parameters():
    """Where the flat vector holds parameters: the rest is padding."""
    inside = torch.zeros(LAYOUT.size, dtype=torch.bool)
    for entry in LAYOUT.entries:
        inside[entry.place] = True
    return inside


def sized(units, settings, round=0):
    """Signs of a step: each number by what its parameter moves in a round."""
    steps = views_of(units, LAYOUT)
    signs = torch.zeros(LAYOUT.size)
    for entry in LAYOUT.entries:
        size = rate_units(settings, entry.name, round, WHOLE, MUON_RMS * settings.sync.config.fragments)
        signs[entry.place] = (steps[entry.name] / size).flatten()
    return signs


@pytest.mark.parametrize("fragments", FRAGMENTS)
def test_a_bit_of_each_number_of_the_fragment_is_sent(fragments):
    method = method_of(run(fragments), LAYOUT)
    mean = LAYOUT.parameters / fragments
    assert mean <= 8 * method.payload_bytes <= 4 / 3 * mean + VOTE_CHUNK


@pytest.mark.parametrize("fragments", FRAGMENTS)
def test_each_number_has_its_turn_once_in_as_many_rounds_as_there_are_fragments(fragments):
    method = method_of(run(fragments), LAYOUT)
    turns = torch.zeros(LAYOUT.size)
    for round in range(fragments):
        payload = method.contribute(gradient_of(LAYOUT, round), 7, round, PEERS[0])
        turns += step_of(method, {PEERS[0]: payload}, round) != 0
    assert torch.equal(turns, parameters().float())


@pytest.mark.parametrize("fragments", FRAGMENTS)
def test_a_matrix_votes_by_its_polar_factor_and_others_by_the_momentum_itself(fragments):
    settings = run(fragments, max_grad_norm=1e6)
    method, gradient = method_of(settings, LAYOUT), gradient_of(LAYOUT, 1)
    columns = views_of(gradient, LAYOUT)[QUERY]
    columns[:, 0] += 5 * columns[:, 1]  # Nearly parallel columns, which a polar factor parts.
    direction = torch.sign(gradient)
    for entry in LAYOUT.entries:
        if entry.name.startswith("model.layers.") and len(entry.shape) == 2:
            factor = orthogonal(views_of(gradient, LAYOUT)[entry.name])
            direction[entry.place] = torch.sign(factor).flatten()
    assert (views_of(direction, LAYOUT)[QUERY] != torch.sign(columns)).float().mean() > 0.1
    payload = method.contribute(gradient, 7, 0, PEERS[0])
    signs = sized(step_of(method, {PEERS[0]: payload}), settings)
    moved = signs != 0
    assert moved.sum() >= 0.9 * LAYOUT.parameters / fragments
    assert (signs[moved] == -direction[moved]).float().mean() > 0.999, "a mean of 7 tokens rounds"


def test_the_majority_of_signs_steps_by_one_size_and_a_tie_does_not():
    settings = run(2)
    gradient = gradient_of(LAYOUT, 1)
    methods = [method_of(settings, LAYOUT) for _ in PEERS]
    same = [each.contribute(gradient, 7, 0, peer) for each, peer in zip(methods[:3], PEERS, strict=False)]
    against = [
        each.contribute(-1000 * gradient, 7, 0, peer)
        for each, peer in zip(methods[3:], PEERS[3:], strict=True)
    ]
    three, two = dict(zip(PEERS, same, strict=False)), dict(zip(PEERS[3:], against, strict=True))
    one = step_of(methods[0], {PEERS[0]: same[0]})
    assert set(sized(one, settings).unique().tolist()) == {-1.0, 0.0, 1.0}
    assert torch.equal(step_of(methods[0], three | two), one), "whoever is louder counts once"
    assert torch.equal(step_of(methods[0], two), -one)
    tie = step_of(methods[0], {PEERS[0]: same[0], PEERS[3]: against[0]})
    assert not tie.any()
    assert not step_of(methods[0], {}).any()


@pytest.mark.parametrize("fragments", FRAGMENTS)
def test_what_comes_late_leaves_the_weights_as_if_it_had_been_in_time(fragments):
    settings = run(fragments)
    methods = {peer: method_of(settings, LAYOUT) for peer in PEERS}
    in_time, late = (replica_of(methods[PEERS[0]], LAYOUT) for _ in range(2))
    held_back = []
    for round in range(3):
        for number, (peer, method) in enumerate(methods.items()):
            payload = method.contribute(gradient_of(LAYOUT, 10 * round + number), 7, round, peer)
            in_time.add(round, peer, payload)
            if (round + number) % 3 == 0:
                held_back.append((round, peer, payload))
            else:
                late.add(round, peer, payload)
        in_time.apply(round)
        late.apply(round)
    assert not torch.equal(in_time.live_floats(ahead=False), late.live_floats(ahead=False))
    for round, peer, payload in held_back:
        late.add(round, peer, payload)
    assert torch.equal(in_time.live_floats(ahead=False), late.live_floats(ahead=False))
    assert [in_time.settle(round) for round in range(3)] == [late.settle(round) for round in range(3)]


def test_the_momentum_keeps_what_was_sent_and_nothing_returns_to_it():
    settings = run(4, momentum=0.9)
    method, untouched = method_of(settings, LAYOUT), method_of(settings, LAYOUT)
    gradient, nothing = gradient_of(LAYOUT, 1), torch.zeros(LAYOUT.size)
    inside = parameters()
    first = [each.contribute(gradient, 7, 0, PEERS[0]) for each in (method, untouched)]
    assert method.momentum_norm is None, "nothing waits to be sent"
    method.give_back(first[0], 0, PEERS[0])
    for round in range(1, 5):
        payload, other = (each.contribute(nothing, 7, round, PEERS[0]) for each in (method, untouched))
        assert payload == other, "give_back changes nothing"
    # Without a new gradient the fragment's second turn has the votes of its first.
    again = step_of(method, {PEERS[0]: payload}, 4)
    signs = sized(again, settings, 4)
    assert torch.equal(signs[inside], sized(step_of(method, {PEERS[0]: first[0]}), settings)[inside])


def test_the_newest_gradient_counts_twice_in_the_direction():
    layout = layout_of({"lm_head.weight": (64, 64)})
    method = method_of(run(1, momentum=0.9), layout)
    gradient = torch.full((layout.size,), 1e-3)
    method.contribute(gradient, 1, 0, PEERS[0])
    payload = method.contribute(-0.85 * gradient, 1, 1, PEERS[0])
    assert method.momentum.min() > 0, "alone, the momentum would vote the other way"
    (votes,) = method.votes_of(payload)
    assert votes.signs.max() == -1


def test_ahead_is_the_step_of_the_own_votes():
    settings = run(4)
    method = method_of(settings, LAYOUT)
    for round in range(3):
        payload = method.contribute(gradient_of(LAYOUT, round), 7, round, PEERS[0])
        step = step_of(method, {PEERS[0]: payload}, round)
        assert torch.equal(dense(method.lookahead(round), LAYOUT), step)
        half = dense(method.lookahead(round, WHOLE // 2), LAYOUT)
        assert torch.allclose(half.float(), step / 2, atol=1)
        among_sixteen = dense(method.lookahead(round, contributors=16), LAYOUT)
        assert torch.equal(among_sixteen, 2 * step), "the mean of sixteen peers' votes is short"


def test_the_lead_grows_with_the_contributors():
    assert [lead_factor(contributors) for contributors in (0, 1, 2, 4, 16, 64)] == [
        WHOLE,
        WHOLE,
        WHOLE * 5 // 4,
        WHOLE * 3 // 2,
        2 * WHOLE,
        WHOLE * 5 // 2,
    ]


def test_a_peer_computes_ahead_by_all_its_votes_that_are_not_applied_and_exactly_with_the_group_afterwards():
    settings = run(4)
    mine, others = method_of(settings, LAYOUT), method_of(settings, LAYOUT)
    replica = replica_of(mine, LAYOUT)
    assert torch.equal(replica.live_floats(ahead=True), replica.live_floats(ahead=False))
    own_steps = []
    for round in range(3):
        payload = mine.contribute(gradient_of(LAYOUT, round), 7, round, PEERS[0])
        own_steps.append(step_of(mine, {PEERS[0]: payload}, round))
        replica.add(round, PEERS[0], payload)
        for number in (1, 2):
            other = others.contribute(gradient_of(LAYOUT, 10 * number + round), 7, round, PEERS[number])
            replica.add(round, PEERS[number], other)
    for round in range(4):
        pending = to_floats(sum(own_steps[round:], torch.zeros(LAYOUT.size, dtype=torch.int32)))
        pending *= lead_factor(3 if round else 1) / WHOLE  # Nobody is known before a round is applied.
        ahead = replica.live_floats(ahead=True)
        torch.testing.assert_close(ahead, replica.live_floats(ahead=False) + pending, rtol=0, atol=1e-6)
        if round < 3:
            assert pending.any()
            replica.apply(round)
    assert torch.equal(ahead, replica.live_floats(ahead=False)), "nothing is pending"


def test_own_votes_that_no_round_applies_do_not_gather():
    settings = run(4)
    method = method_of(settings, LAYOUT)
    rounds = 3 * settings.rounds.window
    for round in range(rounds):
        method.contribute(gradient_of(LAYOUT, round), 7, round, PEERS[0])
    assert method.own_votes(rounds - 1 - settings.rounds.window)
    assert method.own_votes(rounds - 3 - settings.rounds.window) is None


def test_agreement_is_counted_over_the_fragment_of_the_round():
    settings = run(4)
    mine, theirs = method_of(settings, LAYOUT), method_of(settings, LAYOUT)
    gradient = gradient_of(LAYOUT, 1)
    tally = mine.tally(0)
    tally.add(PEERS[0], mine.contribute(gradient, 7, 0, PEERS[0]))
    tally.add(PEERS[1], theirs.contribute(gradient, 7, 0, PEERS[1]))
    found = tally.vote_agreement(PEERS[0])
    votes = 8 * mine.payload_bytes
    padding = int((dense(mine.lookahead(0), LAYOUT) == 0).sum()) - LAYOUT.size + votes
    assert found == VoteAgreement(votes - padding, 0, padding)
    assert mine.lookahead(1) is None
    assert tally.vote_agreement(PEERS[0]) is None, "its votes of an applied round are forgotten"


def test_exact_zeros_get_pseudo_random_signs():
    layout = layout_of({"lm_head.weight": (64, 64)})
    method = method_of(run(4), layout)
    payloads = [method.contribute(torch.zeros(layout.size), 1, round, PEERS[0]) for round in range(4)]
    assert len(set(payloads)) == 4
    for payload in payloads:
        assert 400 < int(np.unpackbits(np.frombuffer(payload, np.uint8)).sum()) < 624


@given(st.sampled_from(FRAGMENTS), st.data())
def test_bent_payloads_are_refused_or_count_as_one_vote_each(fragments, data):
    method = method_of(run(fragments), LAYOUT)
    payload = bent(method.contribute(gradient_of(LAYOUT, 0), 1, 0, PEERS[0]), data)
    try:
        method.check(payload)
    except ContributionError:
        return
    for votes in method.votes_of(payload):
        assert set(votes.signs.flatten().tolist()) <= {-1, 1}
