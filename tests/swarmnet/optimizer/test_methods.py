"""What every sync method must fulfil, those to come too: all names that a manifest can say go through it."""

from dataclasses import replace
from itertools import permutations, product
from typing import get_args

import method_cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_cases import PEERS, SELECTIONS, bent, gradient_of, shapes_of
from model_sizes import model_shape

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.model.fixed_point import to_floats, to_units
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.parameters import parameter_shapes, whole
from swarmnet.optimizer.method import METHODS, ContributionError, GradientError, add_own, method_of
from swarmnet.optimizer.step import dense
from swarmnet.rounds.result_table import Contributor, tag_of
from swarmnet.run.sync_methods import METHOD_CONFIGS, PRESETS, MethodName

TRANSFORMS = ["hadamard", "dct"]
SIGNED = ["demo-sign", "demo"]
"""Methods that step by a learning rate in a direction; they alone select and transform."""
SHARDED = ["local-steps, sharded", "diloco, sharded", "sign-muon, sharded"]
TILED = "demo-sign, tiles"
EVERY = [
    *product(SIGNED, SELECTIONS, TRANSFORMS),
    ("demo", "top-k", "fine-dct"), (TILED, "top-k", "dct"),
    *((method, "group", "hadamard") for method in (*PRESETS, *SHARDED)),
    ("low-rank", "group", "hadamard"), ("hybrid", "group", "hadamard"), ("sign-muon", "group", "hadamard"),
]  # fmt: skip
NAMES = [*METHODS, *SHARDED, TILED]
"""All that a manifest can say: names of methods, and exchange and cut where there is a choice."""


def manifest(method="demo-sign", **sync):
    if method in SHARDED:
        sync |= {"topology": "sharded-reduce", "shards": 3}
    if method == TILED:
        sync = {"transform": "dct"} | sync | {"chunking": "tiled"}
    return method_cases.manifest(method=method.partition(",")[0], **sync)


def taken(method, peer, payload):
    """What a tally takes of a contribution: where there are reducers the result of this one alone."""
    if method.reduced is None:
        return payload
    one = Contributor.of(peer, ContributionId(tag_of(peer)), 1)
    return method.reduced.reduce(
        {shard: {one: data} for shard, data in enumerate(method.reduced.slices(payload))}
    )


def contributions(method_manifest, layout, rounds=1):
    """Payloads of the last round, one per peer, each peer with its own method and gradients."""
    payloads = {}
    for number, peer in enumerate(PEERS):
        method = method_of(method_manifest, layout)
        for round in range(rounds):
            payloads[peer] = method.contribute(gradient_of(layout, 100 * round + number), 7, round, peer)
    return payloads


def tally_of(method, payloads, round=0):
    tally = method.tally(round)
    for peer, payload in payloads.items():
        tally.add(peer, taken(method, peer, payload))
    return tally


def by_name(layout, flat):
    return {entry.name: flat[entry.offset : entry.offset + entry.size] for entry in layout.entries}


def test_every_name_that_a_manifest_can_say_has_a_class():
    assert set(METHODS) == set(METHOD_CONFIGS) == set(get_args(MethodName)), (
        "a sync method has its name in MethodName (swarmnet/run/sync_methods.py) and its class in METHODS "
        "(swarmnet/optimizer/method.py): add the one that is missing"
    )


def test_every_method_goes_through_this():
    assert {name for name, _, _ in EVERY} == set(NAMES), "a new method: add it to SIGNED, or to EVERY"


@pytest.mark.parametrize("method_name", SIGNED)
def test_what_ends_a_branch_is_stepped_by_its_share_of_the_learning_rate(method_name):
    shape = model_shape(width=32, layers=8, heads=2, kv_heads=2, inner=64)
    layout = layout_of(parameter_shapes(shape, whole(shape)))
    small = replace(manifest(method=method_name, topk_per_chunk=4096, learning_rate=2.0**-6), model=shape)
    method = method_of(small, layout)
    tally = method.tally(0)
    tally.add(PEERS[0], method.contribute(gradient_of(layout, 1), 7, 0, PEERS[0]))
    step = to_floats(dense(tally.step(), layout))
    for entry in layout.entries:
        share = 0.25 if entry.name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        sizes = set(step[entry.offset : entry.offset + entry.size].abs().tolist())
        assert sizes <= {0.0, share * 2.0**-6}, entry.name
        assert share * 2.0**-6 in sizes


@pytest.mark.parametrize(("method_name", "selection", "transform"), EVERY)
def test_the_step_is_a_function_of_the_set_alone(method_name, selection, transform):
    """Any order of arrival, any number of threads, and whatever came and went in between."""
    layout = layout_of(shapes_of(2))
    settings_ = manifest(method=method_name, selection=selection, transform=transform)
    method = method_of(settings_, layout)
    payloads = contributions(settings_, layout)
    step = dense(tally_of(method, payloads).step(), layout)
    assert step.dtype == torch.int32
    assert step.shape == (layout.size,)
    for order in list(permutations(PEERS))[7::29]:
        ordered = tally_of(method, {peer: payloads[peer] for peer in order})
        assert torch.equal(dense(ordered.step(), layout), step)
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if threads == 1 else 1)
    try:
        assert torch.equal(dense(tally_of(method, payloads).step(), layout), step)
    finally:
        torch.set_num_threads(threads)
    tally = tally_of(method, payloads)
    tally.remove(PEERS[2])
    fewer = dense(tally.step(), layout)
    assert not torch.equal(fewer, step)
    without = tally_of(method, {peer: payloads[peer] for peer in PEERS if peer != PEERS[2]})
    assert torch.equal(fewer, dense(without.step(), layout))
    tally.add(PEERS[2], taken(method, PEERS[2], payloads[PEERS[2]]))
    assert torch.equal(dense(tally.step(), layout), step)


@pytest.mark.parametrize(("method_name", "selection", "transform"), EVERY)
def test_any_cut_of_the_layers_in_stages_gives_the_same_votes(method_name, selection, transform):
    settings_ = manifest(method=method_name, selection=selection, transform=transform)
    unsplit = layout_of(shapes_of(5))
    payloads = contributions(settings_, unsplit, 3)
    whole = by_name(unsplit, dense(tally_of(method_of(settings_, unsplit), payloads, 2).step(), unsplit))
    for cut in [(1, 1, 3), (4, 1)]:
        start = 0
        for stage, layers in enumerate(cut):
            layout = layout_of(shapes_of(layers, first=stage == 0, last=stage == len(cut) - 1, start=start))
            start += layers
            own = tally_of(method_of(settings_, layout), contributions(settings_, layout, 3), 2)
            step = dense(own.step(), layout)
            for name, part in by_name(layout, step).items():
                assert torch.equal(part, whole[name]), name


@pytest.mark.parametrize(("method_name", "selection"), list(product(NAMES, SELECTIONS)))
def test_payloads_have_the_promised_length_and_the_padding_stays(method_name, selection):
    layout = layout_of(shapes_of(2))
    assert layout.padding
    settings_ = manifest(method=method_name, selection=selection)
    method = method_of(settings_, layout)
    payloads = contributions(settings_, layout)
    for payload in payloads.values():
        assert len(payload) == method.payload_bytes
        method.check(taken(method, PEERS[0], payload))
    step = dense(tally_of(method, payloads).step(), layout)
    for start, stop in layout.padding:
        assert not step[start:stop].any()


@pytest.mark.parametrize("method_name", NAMES)
def test_an_unusable_gradient_is_refused_and_changes_nothing(method_name):
    layout = layout_of(shapes_of(1))
    settings_ = manifest(method=method_name)
    method, untouched = method_of(settings_, layout), method_of(settings_, layout)
    bad = gradient_of(layout, 0)
    bad[3] = float("nan")
    with pytest.raises(GradientError, match=r"embed_tokens.*not finite"):
        method.contribute(bad, 1, 0, PEERS[0])
    with pytest.raises(GradientError, match="0 tokens"):
        method.contribute(gradient_of(layout, 0), 0, 0, PEERS[0])
    with pytest.raises(GradientError, match="shape"):
        method.contribute(torch.zeros(3), 1, 0, PEERS[0])
    good = gradient_of(layout, 1)
    assert method.contribute(good, 1, 0, PEERS[0]) == untouched.contribute(good, 1, 0, PEERS[0])


@pytest.mark.parametrize("method_name", NAMES)
@given(st.sampled_from(SELECTIONS), st.data())
def test_bent_payloads_are_refused_by_the_check_and_by_the_tally_alike(method_name, selection, data):
    layout = layout_of({"lm_head.weight": (64, 64), "model.norm.weight": (60,)})
    method = method_of(manifest(selection=selection, topk_per_chunk=64, method=method_name), layout)
    payload = bent(taken(method, PEERS[0], method.contribute(gradient_of(layout, 0), 1, 0, PEERS[0])), data)
    tally = method.tally(0)
    try:
        method.check(payload)
    except ContributionError:
        with pytest.raises(ContributionError):
            tally.add(PEERS[0], payload)
        assert not dense(tally.step(), layout).any()
        return
    tally.add(PEERS[0], payload)
    dense(tally.step(), layout)


@pytest.mark.parametrize("method_name", NAMES)
def test_a_peer_counts_once(method_name):
    layout = layout_of(shapes_of(1))
    settings_ = manifest(method=method_name)
    method = method_of(settings_, layout)
    payloads = contributions(settings_, layout)
    tally = tally_of(method, payloads)
    step = dense(tally.step(), layout)
    with pytest.raises(ValueError, match="already"):
        tally.add(PEERS[0], taken(method, PEERS[1], payloads[PEERS[1]]))
    assert torch.equal(dense(tally.step(), layout), step)
    with pytest.raises(KeyError):
        tally.remove(PeerId("stranger"))


@pytest.mark.parametrize(("method_name", "transform"), list(product(SIGNED, TRANSFORMS)))
def test_lookahead_is_the_step_of_a_swarm_of_equals_while_the_round_is_open(method_name, transform):
    layout = layout_of({"lm_head.weight": (64, 64)})
    settings_ = manifest(method=method_name, transform=transform, selection="top-k", topk_per_chunk=4096)
    method = method_of(settings_, layout)
    gradient = gradient_of(layout, 0)
    payload = method.contribute(gradient, 1, 0, PEERS[0])
    ahead = dense(method.lookahead(0), layout)
    step = dense(tally_of(method, {PEERS[0]: payload}).step(), layout)
    agreement = float((ahead == step).float().mean())
    assert agreement >= method.lookahead_accuracy > 0.5, (
        f"lookahead tells {agreement:.3f} of the step, and `lookahead_accuracy` of the method "
        f"{method.lookahead_accuracy}: "
        "say there what its payloads round away, or mend lookahead"
    )
    # All was sent, so nothing is left that would point anywhere after the round.
    assert not dense(method.lookahead(1), layout).any()


@pytest.mark.parametrize("method_name", METHODS)
def test_a_method_looks_ahead_by_the_step_of_a_swarm_of_equals_or_has_weights_of_its_own(method_name):
    layout = layout_of({"lm_head.weight": (64, 64)})
    method = method_of(manifest(method=method_name, selection="top-k", topk_per_chunk=4096), layout)
    payload = method.contribute(gradient_of(layout, 0), 1, 0, PEERS[0])
    ahead = method.lookahead(0)
    if ahead is None:
        assert method.own is not None, "a peer that does not look ahead computes with its own deltas"
        return
    step = dense(tally_of(method, {PEERS[0]: payload}).step(), layout)
    moved = step != 0
    agreement = float((dense(ahead, layout) == step)[moved].float().mean())
    assert agreement >= method.lookahead_accuracy > 0.5, (
        f"lookahead tells {agreement:.3f} of the step; lookahead_accuracy is {method.lookahead_accuracy}"
    )


@pytest.mark.parametrize(("method_name", "selection", "transform"), EVERY)
@pytest.mark.slow
def test_every_selection_and_transform_descends(method_name, selection, transform):
    """Three peers with noisy gradients of a quadratic reach a tenth of the first loss and stay there. A step
    of sign-muon is a fifth of its learning rate."""
    layout = layout_of({"lm_head.weight": (70, 64), "model.norm.weight": (40,)})
    settings_ = manifest(
        method=method_name, selection=selection, transform=transform, topk_per_chunk=1024, momentum=0.8,
        learning_rate=0.1 if "sign-muon" in method_name else 0.02, decay_rounds=120, max_grad_norm=100.0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    target = gradient_of(layout, 5) * 0.3
    weights = torch.zeros(layout.size, dtype=torch.int32)
    methods = {peer: method_of(settings_, layout) for peer in PEERS[:3]}

    def where(method, applied):
        """The weights that this peer computes with."""
        floats = to_floats(weights)
        if method.own is not None:
            add_own(method.own, floats, method.own.layout, applied)
        return floats

    first = float(((to_floats(weights) - target) ** 2).sum())
    for round in range(120):
        tally = methods[PEERS[0]].tally(round)
        for peer, method in methods.items():
            noise = 0.1 * torch.randn(layout.size, generator=generator)
            for start, stop in layout.padding:
                noise[start:stop] = 0
            gradient = 4 * (where(method, round - 1) - target + noise)
            tally.add(peer, taken(method, peer, method.contribute(gradient, 4, round, peer)))
        weights += dense(tally.step(), layout)
    assert float(((to_floats(weights) - target) ** 2).sum()) < 0.1 * first
    assert torch.equal(to_units(to_floats(weights)), weights)
