"""Votes: what differs from other methods, and what their sizes are."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_cases import PEERS, SELECTIONS, bent, gradient_of, manifest, shapes_of

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import layout_of
from swarmnet.optimizer.method import ContributionError, method_of
from swarmnet.optimizer.step import dense

SIZES = [("top-k", 32, 10), ("top-k", 128, 8), ("group", 128, 6)]


@pytest.mark.parametrize(("selection", "kept", "bits_per_vote"), SIZES)
def test_the_sizes_at_a_million_parameters_are_what_the_codes_promise(selection, kept, bits_per_vote):
    layout = layout_of({"model.embed_tokens.weight": (8192, 128)})
    method = method_of(manifest(selection=selection, topk_per_chunk=kept), layout)
    assert method.payload_bytes * 8 == bits_per_vote * 256 * kept


def test_exact_zeros_get_pseudo_random_signs():
    layout = layout_of({"lm_head.weight": (64, 64)})
    method = method_of(manifest(selection="group", topk_per_chunk=1024), layout)
    votes = set()
    for round in range(4):
        payload = method.contribute(torch.zeros(layout.size), 1, round, PEERS[0])
        votes.add(payload)
        assert 400 < int(np.unpackbits(np.frombuffer(payload, np.uint8)).sum()) < 624
    assert len(votes) == 4


@given(st.sampled_from(SELECTIONS), st.data())
def test_bent_payloads_are_refused_or_count_as_one_vote_each(selection, data):
    layout = layout_of({"lm_head.weight": (64, 64), "model.norm.weight": (60,)})
    method = method_of(manifest(selection=selection, topk_per_chunk=64), layout)
    payload = bent(method.contribute(gradient_of(layout, 0), 1, 0, PEERS[0]), data)
    try:
        method.check(payload)
    except ContributionError:
        return
    for votes, plane in zip(method.votes_of(payload), layout.planes, strict=True):
        assert votes.indices.shape == (plane.chunks, max(1, 64 * plane.chunk // 4096))
        assert all(len(set(row)) == len(row) for row in votes.indices.tolist())
        assert set(votes.signs.flatten().tolist()) <= {-1, 1}
        assert votes.indices.max() < plane.chunk


@given(st.sampled_from(SELECTIONS), st.binary(max_size=200))
def test_random_bytes_are_refused_for_their_length(selection, payload):
    layout = layout_of(shapes_of(1))
    with pytest.raises(ContributionError, match="bytes where"):
        method_of(manifest(selection=selection), layout).check(payload)


def test_the_majority_decides_and_ties_and_silence_leave_a_weight():
    layout = layout_of({"lm_head.weight": (64, 64)})
    settings_ = manifest(selection="group", topk_per_chunk=4096, learning_rate=2.0**-10)
    method = method_of(settings_, layout)
    tally = method.tally(0)
    assert not dense(tally.step(), layout).any()
    up = torch.zeros(layout.size)
    up[0] = 1.0  # Its coefficients are all alike.
    down = -up
    for peer, gradient in zip(PEERS, [up, up, down], strict=False):
        tally.add(peer, method_of(settings_, layout).contribute(gradient, 1, 0, peer))
    step = dense(tally.step(), layout)
    assert step[0] == -(2**12)
    assert not step[1:].any()
    tally.add(PEERS[3], method_of(settings_, layout).contribute(down, 1, 0, PEERS[3]))
    assert not dense(tally.step(), layout).any()


def test_another_run_gives_exact_zeros_other_signs():
    layout = layout_of({"lm_head.weight": (64, 64)})
    one = manifest()
    payloads = {
        name: method_of(replace(one, name=name), layout).contribute(torch.zeros(layout.size), 1, 0, PEERS[0])
        for name in ("one", "two")
    }
    assert payloads["one"] != payloads["two"]


def test_many_equal_votes_do_not_overflow():
    """Nine voters on all coefficients of a single spike add up to 36864 in its place: beyond 16 bits."""
    layout = layout_of({"lm_head.weight": (64, 64)})
    settings_ = manifest(selection="group", transform="hadamard", topk_per_chunk=4096)
    spike = torch.zeros(layout.size)
    spike[0] = 1.0
    tally = method_of(settings_, layout).tally(0)
    for number in range(9):
        peer = PeerId(f"peer {number}")
        tally.add(peer, method_of(settings_, layout).contribute(spike, 1, 0, peer))
    step = dense(tally.step(), layout)
    assert step[0] < 0
    assert not step[1:].any()
