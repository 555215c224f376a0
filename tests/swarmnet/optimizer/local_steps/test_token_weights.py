"""FedAvg: deltas weigh by the tokens that they are of, whatever a peer claims."""

import pytest
import torch
from method_cases import PEERS, gradient_of, manifest, shapes_of

from swarmnet.model.fixed_point import UNIT, to_floats
from swarmnet.model.flat_layout import layout_of
from swarmnet.optimizer.local_steps.local_steps import FULL_WEIGHT, TOKEN_BYTES
from swarmnet.optimizer.method import ContributionError, method_of
from swarmnet.optimizer.step import dense

LAYOUT = layout_of(shapes_of(1))
FEDERATED = manifest(
    method="diloco", outer_lr=1.0, outer_momentum=0.0, weights="tokens",
    learning_rate=2.0**-7, decay_rounds=10**9,
)  # fmt: skip


def contribution(peer, tokens, steps=2):
    """A payload of so many tokens, and its delta as others decode it."""
    method = method_of(FEDERATED, LAYOUT)
    for number in range(steps):
        method.own.step(gradient_of(LAYOUT, peer + 10 * number), tokens // steps, 0)
    payload = method.own.encode_delta(0, PEERS[peer])
    alone = method.tally(0)
    alone.add(PEERS[peer], payload)
    return payload, to_floats(dense(alone.step(), LAYOUT))


def step_of(payloads):
    tally = method_of(FEDERATED, LAYOUT).tally(0)
    for peer, payload in payloads.items():
        tally.add(PEERS[peer], payload)
    return to_floats(dense(tally.step(), LAYOUT))


def test_the_mean_is_weighed_by_tokens():
    (few, of_few), (many, of_many) = contribution(0, 100), contribution(1, 200)
    expected = (of_few + 2 * of_many) / 3
    assert torch.allclose(step_of({0: few, 1: many}), expected, atol=2 * UNIT)
    assert torch.equal(step_of({0: few, 1: many}), step_of({1: many, 0: few})), "in any order"


def test_nobody_weighs_more_than_twice_the_median():
    made = {peer: contribution(peer, tokens) for peer, tokens in enumerate((100, 100, 10**9))}
    deltas = [delta for _, delta in made.values()]
    expected = (deltas[0] + deltas[1] + 2 * deltas[2]) / 4
    assert torch.allclose(
        step_of({peer: payload for peer, (payload, _) in made.items()}), expected, atol=2 * UNIT
    )


def test_tokens_of_the_warm_up_and_of_earlier_rounds_do_not_count():
    method = method_of(FEDERATED, LAYOUT)
    method.own.step(gradient_of(LAYOUT, 1), 1000, 0, factor=0)
    method.own.step(gradient_of(LAYOUT, 2), 64, 0)
    heads = []
    for round in range(2):
        heads.append(int.from_bytes(method.own.encode_delta(round, PEERS[0])[:TOKEN_BYTES], "little"))
        method.own.step(gradient_of(LAYOUT, 3), 32, round)
    assert heads == [64, 32]


def test_a_contribution_of_no_tokens_is_refused():
    payload, _ = contribution(0, 100)
    method = method_of(FEDERATED, LAYOUT)
    method.check(payload)
    with pytest.raises(ContributionError, match="no tokens"):
        method.check(bytes(TOKEN_BYTES) + payload[TOKEN_BYTES:])
    with pytest.raises(ContributionError, match="bytes where"):
        method.check(payload[:-1])
    assert len(payload) == method.payload_bytes


def test_a_thousand_deltas_of_full_weight_have_an_exact_mean():
    payload, delta = contribution(0, 100)
    tally = method_of(FEDERATED, LAYOUT).tally(0)
    for number in range(1000):
        tally.add(f"peer {number}", payload)
    assert torch.equal(to_floats(dense(tally.step(), LAYOUT)), delta)
    assert method_of(FEDERATED, LAYOUT).weights_of([payload] * 3) == [FULL_WEIGHT] * 3
