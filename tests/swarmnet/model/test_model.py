import hashlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_sizes import model_shape
from torch import Tensor

from swarmnet.identifiers import PeerId
from swarmnet.model.decoder import Cache, forward, initial_units, scaled
from swarmnet.model.fixed_point import UNIT, to_floats
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.parameters import parameter_shapes, residual_init_scale, whole
from swarmnet.run.manifest import Manifest, Span
from swarmnet.run.schema import ModelShape

SMALL = model_shape(
    width=16, layers=3, heads=4, kv_heads=2, inner=24, head_dim=8, max_position_embeddings=32, qk_norm=True
)


def named_units(shape: ModelShape, span: Span, seed: int) -> dict[str, Tensor]:
    layout = layout_of(parameter_shapes(shape, span))
    units = initial_units(shape, span, layout, seed)
    return {
        entry.name: units[entry.offset : entry.offset + entry.size].view(entry.shape)
        for entry in layout.entries
    }


def named_weights(shape: ModelShape, seed: int = 0) -> dict[str, Tensor]:
    return {name: to_floats(units) for name, units in named_units(shape, whole(shape), seed).items()}


def spans(shape: ModelShape, stages: tuple[int, ...]) -> list[Span]:
    manifest = Manifest("test", PeerId("owner"), stages=stages, model=shape)
    return [manifest.span(stage) for stage in range(len(stages))]


@pytest.mark.parametrize("stages", [(3,), (1, 2), (2, 1), (1, 1, 1)])
def test_any_cut_starts_as_the_same_model(stages: tuple[int, ...]) -> None:
    uncut = named_units(SMALL, whole(SMALL), seed=7)
    cut = [named_units(SMALL, span, seed=7) for span in spans(SMALL, stages)]
    assert sorted(name for stage in cut for name in stage) == sorted(uncut)
    for stage in cut:
        for name, units in stage.items():
            assert torch.equal(units, uncut[name]), name


@pytest.mark.parametrize(("layers", "wanted", "share"), [(2, 0.0, 0.5), (8, 0.0, 0.25), (8, 1.0, 1.0)])
def test_what_ends_a_branch_counts_for_less_the_more_of_them_there_are(layers, wanted, share) -> None:
    shape = ModelShape(num_hidden_layers=layers, residual_init_scale=wanted)
    shares = {name: residual_init_scale(shape, name) for name in parameter_shapes(shape, whole(shape))}
    ends = {name for name in shares if name.endswith(("o_proj.weight", "down_proj.weight"))}
    assert len(ends) == 2 * layers
    assert {shares[name] for name in ends} == {share}
    assert {shares[name] for name in shares.keys() - ends} == {1.0}


def test_the_first_weights_are_these_on_every_machine_and_in_every_version() -> None:
    shape = ModelShape()
    span = whole(shape)
    units = initial_units(shape, span, layout_of(parameter_shapes(shape, span)), seed=0)
    digest = hashlib.sha256(units.numpy().astype("<i4").tobytes()).hexdigest()
    assert digest == "03d318eae81b02cbdecbed207bc7a3dd424e4054a978beeb523f90901592bfd4"


def test_seed_and_name_both_decide_a_parameter() -> None:
    zero, one = named_units(SMALL, whole(SMALL), 0), named_units(SMALL, whole(SMALL), 1)
    matrices = [name for name, units in zero.items() if units.dim() == 2]
    seen = {named[name].flatten()[:16].numpy().tobytes() for named in (zero, one) for name in matrices}
    assert len(seen) == 2 * len(matrices)


def test_matrices_start_normal_and_norms_at_one() -> None:
    shape = ModelShape()
    for name, weight in named_weights(shape).items():
        if weight.dim() == 1:
            assert (weight == 1).all(), name
            continue
        count = weight.numel()
        deviation = shape.initializer_range * residual_init_scale(shape, name)
        assert abs(weight.mean()) < 5 * deviation / count**0.5, name
        assert weight.std().item() == pytest.approx(deviation, rel=5 / (2 * count) ** 0.5)
        beyond_two = (weight.abs() > 2 * deviation).float().mean().item()
        assert beyond_two == pytest.approx(0.0455, abs=0.006), name
        assert torch.equal(weight, (weight / UNIT).round() * UNIT), "on the grid"


def test_initial_units_leave_the_padding_zero() -> None:
    span = whole(SMALL)
    layout = layout_of(parameter_shapes(SMALL, span))
    units = initial_units(SMALL, span, layout, 0)
    assert layout.padding
    assert all(not units[start:stop].any() for start, stop in layout.padding)


def test_a_layout_of_another_model_is_refused() -> None:
    layout = layout_of(parameter_shapes(replace(SMALL, hidden_size=32), whole(SMALL)))
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight: layout has \(256, 32\)"):
        initial_units(SMALL, whole(SMALL), layout, 0)


@given(st.integers(0, 11), st.integers(0, 255))
def test_a_token_changes_nothing_before_it(position: int, token: int) -> None:
    weights = named_weights(SMALL)
    tokens = torch.arange(12)[None] * 17
    other = tokens.clone()
    other[0, position] = token
    before = forward(weights, SMALL, whole(SMALL), tokens)[0, :position]
    assert torch.equal(before, forward(weights, SMALL, whole(SMALL), other)[0, :position])


@pytest.mark.parametrize("part", ["mlp.down_proj", "self_attn.o_proj"])
@pytest.mark.parametrize("scale", [0.0, 0.25, 1.0])
def test_scaled_layers_add_so_many_times_as_much(scale: float, part: str) -> None:
    layer = Span(1, 2, has_embedding=False, has_head=False)
    weights = named_weights(SMALL)
    only = {name: torch.zeros_like(it) if part in name else it for name, it in weights.items()}
    hidden_BTD = torch.randn(2, 5, SMALL.hidden_size, generator=torch.Generator().manual_seed(3))

    def added(of: dict[str, Tensor]) -> Tensor:
        return forward(of, SMALL, layer, hidden_BTD) - hidden_BTD

    assert added(only).norm() > 0
    torch.testing.assert_close(added(scaled(only, scale)), scale * added(only))


def test_the_order_of_tokens_matters() -> None:
    weights = named_weights(SMALL)
    logits = [
        forward(weights, SMALL, whole(SMALL), torch.tensor([tokens]))[0, -1]
        for tokens in ([1, 2, 3], [2, 1, 3])
    ]
    assert not torch.allclose(*logits)


@pytest.mark.parametrize("prompt", [1, 5, 12])
def test_the_cache_continues_as_the_whole_sequence_would(prompt: int) -> None:
    weights = named_weights(SMALL)
    tokens = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    expected = forward(weights, SMALL, whole(SMALL), tokens)
    cache = Cache()
    parts = [forward(weights, SMALL, whole(SMALL), tokens[:, :prompt], cache)]
    parts += [
        forward(weights, SMALL, whole(SMALL), tokens[:, at : at + 1], cache) for at in range(prompt, 12)
    ]
    assert cache.length == 12
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-5, rtol=1e-5)
