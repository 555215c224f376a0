"""What the routers of a stage chose is counted once for each microbatch that is trained on."""

from dataclasses import replace

import pytest
import torch
from model_sizes import model_shape
from torch.nn import functional

from swarmnet.model.computing.choices import Computing
from swarmnet.model.experts.load import busiest_ratio
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.parameters import parameter_shapes, whole
from swarmnet.model.stage_compute import StageCompute, copied
from swarmnet.run.manifest import Span
from swarmnet.run.schema import Experts

SHAPE = model_shape(
    width=16, layers=2, heads=2, kv_heads=2, inner=12, qk_norm=True, experts=Experts(num_experts=4, top_k=2)
)
TOKENS = torch.randint(256, (2, 6), generator=torch.Generator().manual_seed(0))


def computing(span, recompute="none", shape=SHAPE):
    layout = layout_of(parameter_shapes(shape, span))
    made = StageCompute(
        shape=shape, span=span, layout=layout, computing=Computing(activation_checkpointing=recompute)
    )
    weights = torch.randn(layout.size, generator=torch.Generator().manual_seed(1)) / 4
    made.publish(copied(weights))
    return made, weights, layout


@pytest.mark.parametrize("recompute", ["none", "layer", "stage"])
def test_a_microbatch_counts_once_whether_its_layers_are_computed_once_or_twice(recompute):
    made, _, _ = computing(Span(0, 2, has_embedding=True, has_head=False), recompute)
    hidden = made.forward("m", TOKENS)
    made.backward("m", torch.ones_like(hidden))
    assert [sum(tokens) for tokens in made.routed.values()] == [2 * TOKENS.numel()] * 2


def test_each_layer_counts_what_its_own_router_chose():
    made, weights, layout = computing(whole(SHAPE))
    gates = {entry.name: entry for entry in layout.entries if entry.name.endswith("mlp.gate.weight")}
    for layer in (0, 1):
        gate = gates[f"model.layers.{layer}.mlp.gate.weight"]
        weights[gate.place] = 0.0
    made.publish(copied(weights))  # A router of zeros has equal shares, of which the first ones are taken.
    expected = torch.zeros(1, 4).topk(2).indices[0].tolist()
    made.finish("m", TOKENS, TOKENS)
    for tokens in made.routed.values():
        assert [expert for expert, count in enumerate(tokens) if count] == sorted(expected)


def test_what_is_only_computed_with_counts_nothing_and_a_model_without_experts_has_none():
    made, _, _ = computing(whole(SHAPE))
    with torch.no_grad():
        made._weights.run(made._weights.version, TOKENS, None, 1.0, made._weights.rows(2))
    assert all(not any(tokens) for tokens in made.routed.values())
    plain = replace(SHAPE, experts=Experts(), intermediate_size=16)
    made, _, _ = computing(whole(plain), shape=plain)
    made.finish("m", TOKENS, TOKENS)
    assert made.routed == {}


def test_counting_changes_no_bit_of_what_is_computed():
    from swarmnet.model.decoder import forward
    from swarmnet.model.flat_layout import views_of

    made, weights, layout = computing(whole(SHAPE))
    loss = made.finish("m", TOKENS, TOKENS).loss_sum
    logits = forward(views_of(weights, layout), SHAPE, whole(SHAPE), TOKENS)
    assert loss == functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten(), reduction="sum").item()


def test_the_load_is_even_at_one_and_told_of_what_came_since():
    before = {0: [10, 0], 1: [0, 0]}
    assert busiest_ratio({0: [14, 4], 1: [3, 3]}, before) == 1.0
    assert busiest_ratio({0: [14, 0], 1: [0, 0]}, before) == 2.0, "a layer to which nothing came says nothing"
    assert busiest_ratio({0: [13, 1], 1: [5, 5]}, before) == pytest.approx((1.5 + 1.0) / 2)
    assert busiest_ratio(before, before) is None
