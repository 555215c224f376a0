"""Low-rank and hybrid: what differs from votes. Directions, exact orthogonal steps, error feedback, hostile
factors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_cases import PEERS, bent, gradient_of, manifest

from swarmnet.model.flat_layout import layout_of
from swarmnet.optimizer.low_rank.exact import NEWTON_SCHULZ, STEPS, orthogonal, spread
from swarmnet.optimizer.low_rank.factor import LARGEST_EXPONENT, Factor, sum_of
from swarmnet.optimizer.low_rank.subspace import subspace
from swarmnet.optimizer.method import ContributionError, method_of
from swarmnet.optimizer.step import dense
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Sync

CPU = torch.device("cpu")
QUERY, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"
LAYOUT = layout_of(
    {
        "model.embed_tokens.weight": (70, 24), "model.layers.0.input_layernorm.weight": (24,),
        QUERY: (24, 24), UP: (88, 24), "model.layers.0.mlp.down_proj.weight": (24, 88),
    }
)  # fmt: skip
BOTH = ["low-rank", "hybrid"]


def run(method, **sync):
    return manifest(method=method, rank=8, max_grad_norm=1e3, **sync)


def of(flat, name):
    entry = next(entry for entry in LAYOUT.entries if entry.name == name)
    return flat[entry.offset : entry.offset + entry.size].view(entry.shape)


def step_of(method, payloads, round=0):
    tally = method.tally(round)
    for peer, payload in payloads.items():
        tally.add(peer, payload)
    return dense(tally.step(), LAYOUT)


@pytest.mark.parametrize(("length", "columns"), [(64, 16), (176, 16), (97, 8), (24, 24), (12, 5)])
def test_directions_are_orthonormal_and_all_have_their_turn_in_a_cycle(length, columns):
    rounds = -(-length // columns)
    seen = []
    for round in range(rounds, 2 * rounds):
        found = subspace("run", round, length, columns, CPU)
        seen.append(found.signs * found.scale)
        assert torch.allclose(seen[-1].T @ seen[-1], torch.eye(columns), atol=1e-5)
    assert torch.linalg.matrix_rank(torch.cat(seen, dim=1)) == length
    assert not torch.equal(subspace("run", 0, length, columns, CPU).signs * found.scale, seen[0])
    assert not torch.equal(subspace("other", rounds, length, columns, CPU).signs * found.scale, seen[0])


def test_the_draw_of_directions_stays_what_it_is():
    """Or else the peers of a run that began with an older program would no longer agree."""
    told = subspace("run", 7, 24, 4, CPU).signs.to(torch.int8)
    assert np.packbits(told.numpy().view(np.uint8) >> 7).tobytes().hex() == "290004901000802000921201"


def _half_to_even(numbers, bits):
    """In integers of any size."""
    half, mask = 1 << (bits - 1), (1 << bits) - 1
    whole, rest = numbers >> bits, numbers & mask
    return whole + ((rest > half) | ((rest == half) & (whole & 1 == 1)))


@pytest.mark.parametrize("shape", [(24, 8), (130, 16), (5, 5)])
def test_the_orthogonal_matrix_is_that_of_integers_of_any_size(shape):
    """Newton and Schulz's steps in Python's own integers, from what the first scaling made."""
    sums = torch.randint(-(2**40), 2**40, shape, generator=torch.Generator().manual_seed(1))
    first = sums.double() / sums.double().abs().max() * 2**14
    norm = float((first.round() ** 2).sum()) ** 0.5 * float(sums.abs().max()) / 2**14
    found = np.array((sums.double() * (2.0**20 / norm)).round().long().tolist(), dtype=object)
    one, two, three = NEWTON_SCHULZ
    for _ in range(STEPS):
        gram = _half_to_even(found.T @ found, 20)
        change = _half_to_even(two * gram + three * _half_to_even(gram @ gram, 20), 10)
        found = _half_to_even(one * found + 1024 * _half_to_even(found @ change, 20), 10)
    assert np.array_equal(orthogonal(sums).long().numpy(), _half_to_even(found, 2).astype(np.int64))


def test_the_orthogonal_step_is_muons_and_forgets_how_large_the_sum_was():
    sums = torch.randint(-(2**30), 2**30, (96, 16), generator=torch.Generator().manual_seed(2))
    found = orthogonal(sums)
    sizes = torch.linalg.svdvals(found.double() / 2**18)
    assert 0.6 < sizes.min() < sizes.max() < 1.3
    assert torch.equal(orthogonal(sums * 2**20), found)
    assert not orthogonal(torch.zeros(96, 16, dtype=torch.int64)).any()


def test_a_step_is_exact_with_any_threads_and_where_products_may_be_short():
    sums = torch.randint(-(2**30), 2**30, (700, 64), generator=torch.Generator().manual_seed(3))
    directions, threads = subspace("run", 0, 704, 64, CPU), torch.get_num_threads()
    expected = spread(orthogonal(sums), directions)
    assert torch.equal(expected.double(), orthogonal(sums).double() @ directions.signs.double().T)
    torch.set_num_threads(2 if threads == 1 else 1)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(spread(orthogonal(sums), directions), expected)
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("method_name", BOTH)
def test_a_factor_is_the_momentum_in_the_rounds_directions(method_name):
    settings_ = run(method_name, momentum=0.0)
    method = method_of(settings_, LAYOUT)
    tokens = settings_.rounds.global_batch_tokens
    gradient = gradient_of(LAYOUT, 1)
    payload = method.contribute(gradient * tokens, tokens, 0, PEERS[0])
    factors, _ = method.read(payload)
    for entry, factor in zip(method.matrices, factors, strict=True):
        found = method.directions(entry, 0)
        whole = of(gradient, entry.name)
        wide = whole.T if entry.shape[0] > entry.shape[1] else whole
        told = factor.values(settings_.sync.max_grad_norm)
        assert torch.allclose(told, wide @ found.signs * found.scale, atol=float(told.abs().max()) / 100)


def test_what_low_rank_told_stays_in_its_momentum():
    settings_ = run("low-rank", momentum=0.5)
    method, gradient, tokens = method_of(settings_, LAYOUT), gradient_of(LAYOUT, 1), 2048
    payload = method.contribute(gradient * tokens, tokens, 0, PEERS[0])
    method.give_back(payload, 0, PEERS[0])
    method.contribute(gradient * tokens, tokens, 1, PEERS[0])
    for entry, matrix in zip(method.matrices, method.momenta.matrices(), strict=True):
        assert torch.allclose(matrix, 0.75 * of(gradient, entry.name), atol=1e-4)


def test_what_hybrid_told_leaves_its_momentum_and_can_be_given_back():
    settings_ = run("hybrid", momentum=0.0)
    method, gradient, tokens = method_of(settings_, LAYOUT), gradient_of(LAYOUT, 1), 2048
    payload = method.contribute(gradient * tokens, tokens, 0, PEERS[0])
    voted = [sent.values for sent in method.momenta.votes.sent(0)]
    left, whole = method.momentum_norm, float(gradient.norm())
    assert left < 0.95 * whole
    factors, _ = method.read(payload)
    told = sum(float(factor.values(settings_.sync.max_grad_norm).square().sum()) for factor in factors)
    votes = sum(float(values.square().sum()) for values in voted)
    # All three are orthogonal to one another, but for the rounding of factors.
    assert left**2 + told + votes == pytest.approx(whole**2, rel=1e-2)
    method.give_back(payload, 0, PEERS[0])
    assert method.momentum_norm > left


def test_the_votes_of_hybrid_are_of_what_the_directions_left():
    """Of a matrix that lies in the round's directions little is left: a vote is on others beside it, too."""
    settings_ = run("hybrid", momentum=0.0, topk_per_chunk=1)
    method = method_of(settings_, LAYOUT)
    tokens, gradient = settings_.rounds.global_batch_tokens, gradient_of(LAYOUT, 1)
    entry = next(entry for entry in method.matrices if entry.name == UP)
    found = method.directions(entry, 0)
    flat = of(gradient, UP)
    flat.copy_(found.signs @ (found.signs.T @ flat) * found.scale**2)
    sent = flat.norm()
    method.contribute(gradient * tokens, tokens, 0, PEERS[0])
    left = dict(zip((each.name for each in method.matrices), method.momenta.matrices(), strict=True))
    assert left[UP].norm() < 0.2 * sent
    assert left[QUERY].norm() > 0.3 * of(gradient, QUERY).norm()


@pytest.mark.parametrize("method_name", BOTH)
def test_lookahead_is_the_step_of_a_round_of_the_own_contribution(method_name):
    settings_ = run(method_name, selection="top-k", topk_per_chunk=4096)
    method = method_of(settings_, LAYOUT)
    payload = method.contribute(gradient_of(LAYOUT, 1), 8, 0, PEERS[0])
    ahead, step = dense(method.lookahead(0), LAYOUT), step_of(method, {PEERS[0]: payload})
    for entry in method.matrices:
        if method_name == "low-rank":
            assert torch.equal(of(ahead, entry.name), of(step, entry.name))
        assert of(step, entry.name).any()
    assert float((ahead == step).float().mean()) >= method.lookahead_accuracy
    if method_name == "low-rank":
        assert of(dense(method.lookahead(1), LAYOUT), UP).any(), "what waits for the next round's directions"


@pytest.mark.parametrize("method_name", BOTH)
def test_the_step_of_equals_is_the_step_of_one(method_name):
    settings_ = run(method_name)
    payloads = {}
    for peer in PEERS[:3]:
        method = method_of(settings_, LAYOUT)
        payloads[peer] = method.contribute(gradient_of(LAYOUT, 1), 8, 0, peer)
    alone = step_of(method, {PEERS[0]: payloads[PEERS[0]]})
    together = step_of(method, payloads)
    for entry in method.matrices:
        assert torch.equal(of(alone, entry.name), of(together, entry.name)), entry.name


def test_nobody_is_louder_than_twice_the_median():
    quiet = [Factor(torch.ones(2, 2, dtype=torch.int8), exponent) for exponent in (3, 5, 5)]
    loud = Factor(torch.full((2, 2), -100, dtype=torch.int8), LARGEST_EXPONENT)
    assert (sum_of([*quiet, loud]) == 8 + 32 + 32 - 100 * 64).all()
    assert torch.equal(sum_of([loud, *quiet]), sum_of([*quiet, loud]))
    assert (sum_of([loud]) == -100 << LARGEST_EXPONENT).all()


@pytest.mark.parametrize("values", [0.0, 1e-30, 1e-3, 1e3])
def test_a_factor_is_near_to_what_it_is_of(values):
    matrix = values * torch.randn(5, 3, generator=torch.Generator().manual_seed(4)).clamp(-1, 1)
    found = Factor.nearest(matrix, 1e3)
    fine = max(float(matrix.abs().max()) / 127, 1e3 * 2.0**-38)
    assert (found.values(1e3) - matrix).abs().max() <= fine


@pytest.mark.parametrize("method_name", BOTH)
def test_factors_that_nothing_honest_says_are_refused_with_their_reason(method_name):
    method = method_of(run(method_name), LAYOUT)
    payload = method.contribute(gradient_of(LAYOUT, 1), 8, 0, PEERS[0])
    method.check(payload)
    for wrong, reason in [
        (bytes([LARGEST_EXPONENT + 1]) + payload[1:], "exponent of 32"),
        (payload[:1] + b"\x80" + payload[2:], "-128"),
        (payload[:-1], "bytes where"),
        (payload + b"\0", "bytes where"),
    ]:
        with pytest.raises(ContributionError, match=reason):
            method.check(wrong)


@pytest.mark.parametrize("method_name", BOTH)
@settings(max_examples=25)
@given(st.data())
def test_bent_factors_are_refused_alike_or_make_a_bounded_step(method_name, data):
    method = method_of(run(method_name, learning_rate=2.0**-8), LAYOUT)
    honest = {peer: method_of(run(method_name), LAYOUT) for peer in PEERS[:2]}
    payloads = {peer: each.contribute(gradient_of(LAYOUT, 1), 8, 0, peer) for peer, each in honest.items()}
    payloads[PEERS[1]] = bent(payloads[PEERS[1]], data)
    tally = method.tally(0)
    tally.add(PEERS[0], payloads[PEERS[0]])
    try:
        method.check(payloads[PEERS[1]])
    except ContributionError:
        with pytest.raises(ContributionError):
            tally.add(PEERS[1], payloads[PEERS[1]])
        assert torch.equal(dense(tally.step(), LAYOUT), step_of(method, {PEERS[0]: payloads[PEERS[0]]}))
        return
    tally.add(PEERS[1], payloads[PEERS[1]])
    # Orthogonal, whoever said what: no entry beyond the rate times the root of the matrix's numbers.
    assert dense(tally.step(), LAYOUT).abs().max() <= 2**22 * 2.0**-8 * 88


@pytest.mark.parametrize("method_name", BOTH)
def test_matrices_come_down_a_quadratic(method_name):
    settings_ = run(method_name, learning_rate=0.05, decay_rounds=120, momentum=0.9)
    target, weights = gradient_of(LAYOUT, 5) * 0.3, torch.zeros(LAYOUT.size, dtype=torch.int32)
    method = method_of(settings_, LAYOUT)
    for round in range(120):
        gradient = 4 * (weights * 2.0**-22 - target)
        weights += step_of(method, {PEERS[0]: method.contribute(gradient * 4, 4, round, PEERS[0])}, round)
    for name in (QUERY, UP):
        wanted = of(target, name)
        assert (of(weights, name) * 2.0**-22 - wanted).norm() < 0.35 * wanted.norm(), name


def test_runs_that_say_nothing_of_rank_and_cut_keep_their_ids():
    plain = Manifest("test", PEERS[0])
    assert b'"rank"' not in plain.canonical()
    assert b'"cut"' not in plain.canonical()
    assert Manifest("test", PEERS[0], sync=Sync(rank=8)).run_id() != plain.run_id()
