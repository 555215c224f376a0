"""A model of which a part is trained: what learns, what stays, and what it costs."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from model_sizes import model_shape
from torch.nn import functional

from peers.compute.stage_part import StagePart, build_stage_part
from peers.state.checkpoint_file import state_digest
from swarmnet.identifiers import PeerId
from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.model.decoder import forward, scaled
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import frozen_layout, trained_layout, views_of
from swarmnet.model.flops import operations_per_token
from swarmnet.model.linear import merged
from swarmnet.model.parameters import factor_names, is_trained, parameter_shapes, whole
from swarmnet.model.state_layout import MOMENTUM, first_state, state_layout
from swarmnet.resources.bandwidth_estimate import contribution_bytes
from swarmnet.resources.memory_estimate import needs_of
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import InitCheckpoint, Lora, ModelShape, Sync

PLAIN_SHAPE = model_shape(
    width=32, layers=2, heads=4, kv_heads=2, inner=48, vocab_size=64, max_position_embeddings=64
)
ADAPTED = replace(PLAIN_SHAPE, lora=Lora(rank=3, alpha=6.0), qk_norm=True)
TOKENS = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(0))


def manifest_of(shape: ModelShape = ADAPTED, **changes: object) -> Manifest:
    fields = {"stages": (2,), "init_checkpoint": InitCheckpoint("model"), **changes}
    return Manifest("m", PeerId("owner"), model=shape, **fields)


def begun(manifest: Manifest, computing: Computing = PLAIN) -> tuple[StagePart, torch.Tensor]:
    """A part of the whole model with weights of which none is zero, published; and these, as units."""
    part = build_stage_part(manifest, 0, computing=computing)
    units, state = first_state(manifest, 0), state_layout(manifest, 0)
    for entry in state.entries:
        if entry.name.endswith("lora_B.weight"):
            drawn = torch.randn(entry.size, generator=torch.Generator().manual_seed(entry.offset))
            units[entry.place] = (drawn * 2**19).int()
    part.compute.publish(part.replica(units, -1).live_tiles(ahead=False))
    return part, units


def floats(manifest: Manifest, units: torch.Tensor) -> dict[str, torch.Tensor]:
    views = views_of(to_floats(units), state_layout(manifest, 0))
    return {name: view for name, view in views.items() if not name.startswith(MOMENTUM)}


def gradient_of(part: StagePart) -> dict[str, torch.Tensor]:
    part.compute.finish("m", TOKENS[:, :-1], TOKENS[:, 1:])
    return part.compute.use_gradient(lambda flat: views_of(flat.float().clone(), part.layout))


@pytest.mark.parametrize("recompute", ["none", "layer", "stage"])
def test_factors_get_the_gradient_that_the_merged_model_gives_them_and_nothing_else_gets_one(recompute):
    manifest = manifest_of()
    part, units = begun(manifest, Computing(activation_checkpointing=recompute))
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in floats(manifest, units).items()}
    plain = {name: tensor for name, tensor in leaves.items() if ".lora_" not in name}
    for name in plain:
        down, up = factor_names(name)
        if down in leaves:
            plain[name] = plain[name] + 2.0 * leaves[up] @ leaves[down]
    logits = forward(plain, replace(ADAPTED, lora=Lora()), whole(ADAPTED), TOKENS[:, :-1])
    functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="sum").backward()
    found = gradient_of(part)
    assert found.keys() == {name for name in leaves if ".lora_" in name}
    assert len(found) == 2 * 2 * 7
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, leaves[name].grad, atol=1e-4, rtol=1e-4)


def test_in_bfloat16_factors_learn_too():
    manifest = manifest_of()
    exact = gradient_of(begun(manifest)[0])
    rough = gradient_of(begun(manifest, Computing(dtype="bf16"))[0])
    for name, gradient in exact.items():
        likeness = functional.cosine_similarity(gradient.flatten(), rough[name].flatten(), dim=0)
        assert likeness > 0.98, name


def test_merged_factors_compute_the_same_also_where_layers_count_more():
    manifest = manifest_of()
    weights = floats(manifest, begun(manifest)[1])
    plain = replace(ADAPTED, lora=Lora())
    assert merged(weights, ADAPTED).keys() == parameter_shapes(plain, whole(plain)).keys()
    for scale in (1.0, 1.5):
        ours = forward(scaled(weights, scale), ADAPTED, whole(ADAPTED), TOKENS)
        theirs = forward(scaled(merged(weights, ADAPTED), scale), plain, whole(plain), TOKENS)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("patterns", [("lm_head.weight",), ("model.layers.1.*", "*norm.weight")])
def test_only_what_the_patterns_name_is_trained(patterns):
    manifest = manifest_of(PLAIN_SHAPE, sync=Sync(trainable=patterns))
    named = {name for name in parameter_shapes(PLAIN_SHAPE, whole(PLAIN_SHAPE)) if is_trained(manifest, name)}
    assert gradient_of(begun(manifest)[0]).keys() == named
    assert named


def test_with_factors_patterns_add_to_them():
    manifest = manifest_of(sync=Sync(trainable=("*_norm.weight",)))
    names = {entry.name for entry in trained_layout(manifest, 0).entries}
    assert {name for name in names if ".lora_" not in name} == {
        f"model.layers.{layer}.self_attn.{which}_norm.weight" for layer in (0, 1) for which in "qk"
    }


@pytest.mark.parametrize("method", ["demo-sign", "low-rank", "local-steps", "diloco", "sparta"])
def test_rounds_leave_what_is_frozen_and_the_digest_covers_it(method):
    manifest = manifest_of(sync=Sync(method=method, warmup_rounds=1))
    part = build_stage_part(manifest, 0)
    units = first_state(manifest, 0)
    replica = part.replica(units, -1)
    assert replica.digest() == state_digest(-1, units)
    part.compute.publish(replica.live_tiles(ahead=False))
    gradient = part.layout.size
    for round in range(2):
        part.compute.finish(round, TOKENS[:, :-1], TOKENS[:, 1:])
        payload = part.compute.use_gradient(
            lambda flat, at=round: part.method.contribute(flat, TOKENS.numel(), at, PeerId("a"))
        )
        assert len(payload) == part.method.payload_bytes
        replica.add(round, PeerId("a"), payload)
        replica.apply(round)
        assert replica.settle(round) == state_digest(round, replica.settled_units())
    settled, frozen = replica.settled_units(), part.method.state.size
    assert torch.equal(settled[frozen:], units[frozen:])
    assert not torch.equal(settled[:gradient], units[:gradient])
    wrong = settled.clone()
    wrong[-1] += 1
    assert state_digest(1, wrong) != replica.digest()


def test_all_that_a_stage_holds_is_trained_or_frozen_and_lies_in_one_vector():
    manifest = manifest_of(sync=Sync(method="diloco"), stages=(1, 1))
    for stage in (0, 1):
        state = state_layout(manifest, stage)
        assert state.size == 2 * trained_layout(manifest, stage).size + frozen_layout(manifest, stage).size
        names = [entry.name for entry in state.entries]
        shapes = parameter_shapes(ADAPTED, manifest.span(stage))
        assert sorted(name for name in names if not name.startswith(MOMENTUM)) == sorted(shapes)
        places = sorted((entry.offset, entry.offset + entry.size) for entry in state.entries)
        assert all(one[1] <= other[0] for one, other in pairwise(places))


def test_a_run_of_factors_sends_less_takes_less_memory_and_computes_less():
    shape = model_shape(width=512, layers=8, heads=8, kv_heads=8, inner=1536, vocab_size=8192)
    whole_run, factors = manifest_of(shape, stages=(4, 4)), manifest_of(
        replace(shape, lora=Lora(rank=8)), stages=(4, 4)
    )  # fmt: skip
    assert contribution_bytes(factors, 0) < contribution_bytes(whole_run, 0) / 20
    assert needs_of(factors, 0, 0).weights < needs_of(whole_run, 0, 0).weights * 0.6
    ratio = operations_per_token(factors, 1) / operations_per_token(whole_run, 1)
    assert 4 / 6 < ratio < 0.75
