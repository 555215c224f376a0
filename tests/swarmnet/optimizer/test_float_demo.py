"""Float DeMo: what differs from votes."""

import numpy as np
import pytest
import torch

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import layout_of
from swarmnet.optimizer.method import ContributionError, method_of
from swarmnet.optimizer.step import dense
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Sync

PEERS = [PeerId(f"peer {index}") for index in range(3)]


def manifest(**sync):
    return Manifest("test", PeerId("owner"), sync=Sync(method="demo", warmup_rounds=1, **sync))


def test_float_values_beyond_the_clip_or_not_numbers_are_refused():
    layout = layout_of({"lm_head.weight": (64, 64)})
    method = method_of(manifest(max_grad_norm=0.5), layout)
    payload = method.contribute(torch.ones(layout.size), 1, 0, PEERS[0])
    method.check(payload)
    for value in (0.51, -0.51, float("nan"), float("inf")):
        with pytest.raises(ContributionError, match="clip"):
            method.check(payload[:-4] + np.float32(value).tobytes())


def spike(layout, value):
    """A gradient whose coefficients are all alike."""
    gradient = torch.zeros(layout.size)
    gradient[0] = value
    return gradient


def test_the_float_mean_is_over_the_senders_of_a_coefficient():
    """One large value against two small opposite ones: the mean follows the large one, votes would not."""
    layout = layout_of({"lm_head.weight": (64, 64)})
    settings_ = manifest(selection="group", topk_per_chunk=4096, max_grad_norm=1.0)
    tally = method_of(settings_, layout).tally(0)
    for peer, value in zip(PEERS, (0.01, -0.002, -0.003), strict=False):
        gradient = spike(layout, value)
        tally.add(peer, method_of(settings_, layout).contribute(gradient, 1, 0, peer))
    assert dense(tally.step(), layout)[0] < 0


@pytest.mark.parametrize("tokens", [(600, 200, 200), (100, 100, 100)])
def test_values_weigh_by_the_tokens_that_they_are_of(tokens):
    """A mean gradient of 1 over the first peer's tokens, of -1 over the others': the tokens decide."""
    layout = layout_of({"lm_head.weight": (64, 64)})
    settings_ = manifest(selection="group", topk_per_chunk=4096, max_grad_norm=1e4)
    tally = method_of(settings_, layout).tally(0)
    for peer, sign, count in zip(PEERS, (1.0, -1.0, -1.0), tokens, strict=True):
        gradient = spike(layout, sign * count)
        tally.add(peer, method_of(settings_, layout).contribute(gradient, count, 0, peer))
    assert torch.sign(dense(tally.step(), layout)[0]) == (-1 if tokens[0] > sum(tokens[1:]) else 1)


def test_a_round_that_was_thin_weighs_little_in_what_is_sent_later():
    """One token of a gradient of 3, then a thousand of -1: what is kept of both follows the tokens, too."""
    layout = layout_of({"lm_head.weight": (64, 64)})
    method = method_of(manifest(selection="group", topk_per_chunk=128, max_grad_norm=1e4), layout)
    method.contribute(spike(layout, 3.0), 1, 0, PEERS[0])
    method.contribute(spike(layout, -1000.0), 1000, 1, PEERS[0])
    (left_CN,) = method._momentum.planes()
    assert (left_CN < 0).sum() == 4096 - 128, "all but what was just sent"


def test_more_tokens_than_a_round_has_are_no_more_than_a_round():
    layout = layout_of({"lm_head.weight": (64, 64)})
    settings_ = manifest(selection="group", topk_per_chunk=4096, max_grad_norm=0.5, momentum=0.0)
    method = method_of(settings_, layout)
    count = 5 * settings_.rounds.global_batch_tokens
    one_coefficient = torch.full((layout.size,), 10.0 * count)
    method.check(method.contribute(one_coefficient, count, 0, PEERS[0]))


def test_a_coefficient_weighs_by_its_mean_and_not_by_its_number_of_senders():
    layout = layout_of({"model.norm.weight": (64,)})
    method = method_of(manifest(transform="hadamard"), layout)
    sums, senders = torch.zeros(2, 1, 64, dtype=torch.float64)
    sums[0, 0], senders[0, 0] = 0.3, 3
    sums[0, 1], senders[0, 1] = -0.2, 1
    # Value 0 is coefficient 0 plus coefficient 1: a mean of 0.1 - 0.2, but sums of 0.3 - 0.2.
    assert method.signs_of(0, sums, senders)[0, 0] == -1


def test_values_are_added_in_the_order_of_peer_ids():
    """0.5 + 2**-70 - 0.5 is 0 in float64, and 0.5 - 0.5 + 2**-70 is not: only a fixed order gives one bit."""
    layout = layout_of({"model.norm.weight": (64,)})
    settings = manifest(selection="group", topk_per_chunk=4096)
    method = method_of(settings, layout)
    payloads = {
        peer: np.full(64, value, "<f4").tobytes()
        for peer, value in zip(PEERS, (0.5, 2.0**-70, -0.5), strict=True)
    }
    for order in (PEERS, PEERS[::-1], [PEERS[0], PEERS[2], PEERS[1]]):
        tally = method.tally(0)
        for peer in order:
            tally.add(peer, payloads[peer])
        assert not dense(tally.step(), layout).any()
