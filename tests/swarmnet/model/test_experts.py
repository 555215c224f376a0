"""A feed-forward of several experts: what a token gets of them, and what keeps their load even."""

from dataclasses import replace

import pytest
import torch
from model_sizes import model_shape
from torch.nn import functional

import swarmnet.model.linear
from swarmnet.identifiers import PeerId
from swarmnet.model.decoder import forward, initial_units
from swarmnet.model.experts.mixture import feed_forward, mixture
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.parameters import parameter_shapes, trains_with_muon, whole
from swarmnet.run.manifest import Manifest, ManifestError
from swarmnet.run.manifest_check import check
from swarmnet.run.schema import Experts

SHAPE = model_shape(
    width=16,
    layers=1,
    heads=2,
    kv_heads=2,
    inner=12,
    vocab_size=256,
    qk_norm=True,
    experts=Experts(num_experts=4, top_k=2, aux_loss_coef=0.0),
)


def weights_of(shape, seed=0):
    span = whole(shape)
    layout = layout_of(parameter_shapes(shape, span))
    flat = to_floats(initial_units(shape, span, layout, seed))
    return {
        entry.name: flat[entry.offset : entry.offset + entry.size].view(entry.shape).clone().requires_grad_()
        for entry in layout.entries
    }


def of_layer(weights):
    before = "model.layers.0."
    return {
        name.removeprefix(before).removesuffix(".weight"): weight
        for name, weight in weights.items()
        if name.startswith(before)
    }


def test_a_token_gets_the_shares_of_its_two_best_experts_made_to_sum_to_one():
    weights = weights_of(SHAPE)
    x_ND = torch.randn(9, SHAPE.hidden_size)
    shares_NE = functional.linear(x_ND, weights["model.layers.0.mlp.gate.weight"]).softmax(-1)
    made_ND = mixture(of_layer(weights), SHAPE, x_ND)
    for token, (shares, found) in enumerate(zip(shares_NE, made_ND, strict=True)):
        first, second = shares.argsort(descending=True)[:2].tolist()
        expected = sum(
            shares[one]
            / (shares[first] + shares[second])
            * feed_forward(of_layer(weights), SHAPE, f"mlp.experts.{one}.", x_ND[token : token + 1])[0]
            for one in (first, second)
        )
        torch.testing.assert_close(found, expected)


def test_a_kernel_is_made_for_no_number_of_tokens_that_chance_gave_an_expert(monkeypatch):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    product, asked = swarmnet.model.linear._product, []
    monkeypatch.setattr(swarmnet.model.linear, "_onednn_is_faster", lambda: True)
    monkeypatch.setattr(swarmnet.model.linear, "SMALL", 1)
    monkeypatch.setattr(
        swarmnet.model.linear, "_product", lambda x, weight: asked.append(x.shape) or product(x, weight)
    )
    mixture(of_layer(weights_of(SHAPE)), SHAPE, torch.randn(9, SHAPE.hidden_size)).sum().backward()
    of_router = [
        (9, SHAPE.hidden_size),
        (SHAPE.experts.num_experts, 9),
    ]  # Its product, and the gradient of its weights.
    assert asked == of_router


def test_an_expert_that_no_token_wants_gets_a_gradient_of_zero_and_nothing_breaks():
    weights = weights_of(SHAPE)
    with torch.no_grad():
        weights["model.layers.0.mlp.gate.weight"].zero_()
        weights["model.layers.0.mlp.gate.weight"][:2, 0] = torch.tensor([40.0, 30.0])
    x_ND = torch.randn(5, SHAPE.hidden_size).abs()
    leaves = list(weights.values())
    made = mixture(of_layer(weights), SHAPE, x_ND).square().sum()
    gradients = torch.autograd.grad(made, leaves, allow_unused=True)
    by_name = dict(zip(weights, gradients, strict=True))
    for member in ("gate_proj", "up_proj", "down_proj"):
        assert by_name[f"model.layers.0.mlp.experts.0.{member}.weight"].any()
        unwanted = by_name[f"model.layers.0.mlp.experts.3.{member}.weight"]
        assert unwanted is not None
        assert not unwanted.any()


def test_the_balance_is_the_loss_that_transformers_adds_and_changes_nothing_else():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    balanced, plain = replace(SHAPE, experts=Experts(4, 2, 0.01)), SHAPE
    weights, x_ND = weights_of(SHAPE), torch.randn(40, SHAPE.hidden_size)
    gate = weights["model.layers.0.mlp.gate.weight"]
    with_loss, without = (mixture(of_layer(weights), shape, x_ND) for shape in (balanced, plain))
    assert torch.equal(with_loss, without)
    gradients = [torch.autograd.grad(made.square().sum(), gate)[0] for made in (with_loss, without)]
    theirs = load_balancing_loss_func((functional.linear(x_ND, gate),), num_experts=4, top_k=2)
    of_two_choices = torch.autograd.grad(theirs, gate)[0]
    expected = of_two_choices * 0.01 * len(x_ND) / 2
    torch.testing.assert_close(gradients[0] - gradients[1], expected, atol=1e-7, rtol=1e-4)


def test_by_it_experts_come_to_have_as_much_to_do_where_all_tokens_wanted_the_same():
    def load_after(balance):
        torch.manual_seed(0)
        shape = replace(SHAPE, experts=Experts(4, 1, balance))
        weights = weights_of(shape)
        gate = weights["model.layers.0.mlp.gate.weight"]
        x_ND = torch.randn(256, SHAPE.hidden_size)
        x_ND[:, 0] = 1.0
        with torch.no_grad():
            gate.copy_(torch.randn(4, 16) / 4)
            gate[0, 0] = 2.0
        for _ in range(60):
            made = mixture(of_layer(weights), shape, x_ND)
            (step,) = torch.autograd.grad(0 * made.sum(), gate)
            with torch.no_grad():
                gate -= 0.05 * step
        chosen = functional.linear(x_ND, gate).argmax(-1)
        return torch.bincount(chosen, minlength=4).max() / len(x_ND)

    assert load_after(0.0) > 0.7
    assert load_after(1.0) < 0.4


def test_each_expert_has_chunks_of_its_own_so_that_it_can_be_somebody_elses():
    layout = layout_of(parameter_shapes(SHAPE, whole(SHAPE)))
    ranges = layout.block_ranges()
    found = {block: of_block for block, of_block in ranges.items() if "experts" in block}
    chunks = {block: {start // 4096 for start, _ in of_block} for block, of_block in found.items()}
    assert len(chunks) == 4
    assert len(set.union(*chunks.values())) == sum(map(len, chunks.values()))


def test_muon_steps_the_matrices_of_experts_and_not_the_router():
    named = {
        name: trains_with_muon(name, size) for name, size in parameter_shapes(SHAPE, whole(SHAPE)).items()
    }
    assert named["model.layers.0.mlp.experts.2.up_proj.weight"]
    assert not named["model.layers.0.mlp.gate.weight"]


def test_a_cached_continuation_is_what_the_whole_text_gives():
    from swarmnet.model.decoder import Cache

    shape = replace(SHAPE, num_hidden_layers=2)
    weights, tokens = weights_of(shape), torch.randint(256, (1, 12))
    with torch.no_grad():
        whole_text, cache = forward(weights, shape, whole(shape), tokens), Cache()
        forward(weights, shape, whole(shape), tokens[:, :11], cache)
        last = forward(weights, shape, whole(shape), tokens[:, 11:], cache)
    torch.testing.assert_close(last[:, 0], whole_text[:, 11], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("experts", "qk_norm", "told"),
    [
        (Experts(top_k=2), True, "have no effect without num_experts"),
        (Experts(num_experts=4), True, "top_k is 0; it must lie between 1 and num_experts, 4"),
        (Experts(num_experts=4, top_k=5), True, "top_k is 5"),
        (Experts(num_experts=-1, top_k=1), True, "num_experts is -1"),
        (Experts(num_experts=4, top_k=2), False, "needs qk_norm"),
        (Experts(num_experts=4, top_k=2, aux_loss_coef=2.0), True, "aux_loss_coef is 2"),
    ],
)
def test_experts_that_cannot_be_are_refused_with_what_would_fit(experts, qk_norm, told):
    model = replace(SHAPE, experts=experts, qk_norm=qk_norm)
    with pytest.raises(ManifestError, match=told):
        check(Manifest("m", PeerId("owner"), stages=(1,), model=model))
