import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from model_sizes import model_shape
from torch import Tensor

from swarmnet.identifiers import PeerId
from swarmnet.model.activation_codec import decode, encode
from swarmnet.model.boundary import fixed, orthonormal, projector, to_plain_weights
from swarmnet.model.computing.choices import Computing
from swarmnet.model.decoder import Cache, forward, initial_units
from swarmnet.model.draws import normal
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.flops import operations_per_token
from swarmnet.model.parameters import EMBEDDING, parameter_shapes, whole
from swarmnet.model.stage_compute import StageCompute, StageError, copied
from swarmnet.run.boundary_settings import Boundary
from swarmnet.run.manifest import Manifest, ManifestError, Span
from swarmnet.run.manifest_check import check
from swarmnet.run.schema import ModelShape, Paths

CPU = torch.device("cpu")
USUAL = model_shape(width=32, layers=4, heads=4, inner=48, vocab_size=64, max_position_embeddings=128)
NARROW = replace(USUAL, boundary=Boundary("token-anchored", width=8, after=(1, 2, 3)))
HASHED = replace(NARROW, boundary=replace(NARROW.boundary, anchor_rows=16))
SHARED = replace(USUAL, boundary=Boundary("shared-subspace", width=8, after=(1, 2, 3)))
QWEN = replace(NARROW, num_key_value_heads=1, qk_norm=True)
BEGINS, ENDS = Span(0, 2, True, False), Span(2, 4, False, True)
TOKENS = torch.randint(64, (3, 21), generator=torch.Generator().manual_seed(0))
INPUTS, LABELS = TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous()
CROSSED = torch.randn(3, 20, 8, generator=torch.Generator().manual_seed(1))


def manifest_of(stages: tuple[int, ...], shape: ModelShape, **changes: object) -> Manifest:
    return Manifest("test", PeerId("owner"), stages=stages, model=replace(shape, vocab_size=256), **changes)


def weights_of(shape: ModelShape, span: Span) -> dict[str, Tensor]:
    layout = layout_of(parameter_shapes(shape, span))
    flat = to_floats(initial_units(shape, span, layout, 3))
    return {
        each.name: flat[each.offset : each.offset + each.size].view(each.shape) for each in layout.entries
    }


def stage_of(shape: ModelShape, span: Span, recompute: bool = False) -> StageCompute:
    layout = layout_of(parameter_shapes(shape, span))
    stage = StageCompute(
        shape=shape,
        span=span,
        layout=layout,
        computing=Computing(activation_checkpointing="stage" if recompute else "none"),
    )
    stage.publish(copied(to_floats(initial_units(shape, span, layout, 3))))
    return stage


def carried(tensor: Tensor) -> Tensor:
    return decode(encode(tensor, "fp32"), tuple(tensor.shape), "fp32")


def learnt(
    shape: ModelShape, stages: tuple[int, ...], recompute: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """The summed loss of a microbatch and its gradients by name, of the model cut so."""
    manifest = manifest_of(stages, shape)
    spans = [manifest.span(stage) for stage in range(len(stages))]
    parts = [stage_of(shape, span, recompute) for span in spans]
    hidden = INPUTS
    for part in parts[:-1]:
        hidden = carried(part.forward(0, hidden, tokens_BT=INPUTS))
        assert hidden.shape == (3, 20, shape.crossing)
    finished = parts[-1].finish(0, hidden, LABELS, INPUTS)
    back = finished.hidden_gradient
    for part in reversed(parts[:-1]):
        assert back is not None
        back = part.backward(0, carried(back))
    gradients = {}
    for part, span in zip(parts, spans, strict=True):
        flat = part.use_gradient(torch.clone)
        for each in layout_of(parameter_shapes(shape, span)).entries:
            gradients[each.name] = flat[each.offset : each.offset + each.size]
    return finished.loss_sum, gradients


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stages", [(1, 1, 1, 1), (2, 2), (1, 3), (1, 2, 1)], ids=str)
@pytest.mark.parametrize(
    "shape", [NARROW, HASHED, QWEN, SHARED], ids=["token-anchored", "hashed", "qwen", "shared-subspace"]
)
def test_a_cut_model_has_the_loss_and_gradients_of_the_uncut_one_to_the_bit(shape, stages, recompute):
    loss, gradients = learnt(shape, (4,))
    cut_loss, cut_gradients = learnt(shape, stages, recompute)
    assert cut_loss == loss
    assert cut_gradients.keys() == gradients.keys()
    assert [name for name, each in gradients.items() if not torch.equal(each, cut_gradients[name])] == []
    assert all(bool(each.any()) for each in gradients.values()), "every parameter learns, anchors too"


def test_a_boundary_is_what_its_page_says():
    weights = weights_of(NARROW, whole(NARROW))
    first = {name: each for name, each in weights.items() if name in parameter_shapes(NARROW, BEGINS)}
    crossed = forward(first, NARROW, BEGINS, INPUTS)
    usual = replace(USUAL, num_hidden_layers=1)
    hidden = forward(weights, usual, Span(0, 1, True, False), INPUTS)
    rows = projector(NARROW.boundary, 32, 1, CPU)
    before, after = weights["model.boundaries.1.before.weight"], weights["model.boundaries.1.after.weight"]
    entered = (hidden - before[INPUTS]) @ rows.T @ rows + after[INPUTS]
    hidden = forward(weights, USUAL, Span(1, 2, False, False), entered)
    rows = projector(NARROW.boundary, 32, 2, CPU)
    sent = (hidden - weights["model.boundaries.2.before.weight"][INPUTS]) @ rows.T
    assert torch.allclose(crossed, sent, atol=1e-6)


def test_with_shared_directions_all_that_is_added_before_the_last_boundary_lies_in_them():
    weights = weights_of(SHARED, whole(SHARED))
    sent = forward(weights, SHARED, Span(0, 3, True, False), INPUTS)
    rows = projector(SHARED.boundary, 32, 0, CPU)
    hidden = fixed(SHARED, INPUTS) + weights[EMBEDDING][INPUTS] @ rows
    plain = to_plain_weights(weights, SHARED)
    for layer in range(3):
        hidden = forward(plain, USUAL, Span(layer, layer + 1, False, False), hidden)
    assert torch.allclose(hidden, fixed(SHARED, INPUTS) + sent @ rows, atol=1e-5), "nothing is lost"
    shapes = parameter_shapes(SHARED, whole(SHARED))
    assert shapes[EMBEDDING] == (64, 8)
    ends = [shapes[f"model.layers.{layer}.self_attn.o_proj.weight"] for layer in range(4)]
    ends += [shapes[f"model.layers.{layer}.mlp.down_proj.weight"] for layer in range(4)]
    assert ends == [(8, 32)] * 3 + [(32, 32)] + [(8, 48)] * 3 + [(32, 48)], "behind it nothing crosses"
    assert not any("boundaries" in name for name in shapes), "no stage holds a table"


@pytest.mark.parametrize(
    "shape", [SHARED, replace(SHARED, qk_norm=True, hidden_size=40)], ids=["llama", "qwen"]
)
def test_shared_directions_multiplied_out_are_a_plain_model_with_the_same_logits(shape):
    weights, plain = weights_of(shape, whole(shape)), replace(shape, boundary=Boundary())
    wide = to_plain_weights(weights, shape)
    assert {name: tuple(each.shape) for name, each in wide.items()} == parameter_shapes(plain, whole(plain))
    logits = forward(weights, shape, whole(shape), INPUTS)
    assert (forward(wide, plain, whole(plain), INPUTS) - logits).abs().max() < 1e-5 * logits.abs().max()


def test_what_is_fixed_of_a_token_is_a_row_of_signs_that_follows_from_the_seed_alone():
    shape = replace(SHARED, vocab_size=4096, hidden_size=200)
    everyone = torch.arange(4096)
    rows = fixed(shape, everyone)
    assert set(rows.unique().tolist()) == {-rows.max().item(), rows.max().item()}
    assert rows.max().item() == pytest.approx(shape.initializer_range)
    assert torch.equal(fixed(shape, everyone.view(64, 64).t()), rows.view(64, 64, 200).transpose(0, 1))
    signs = rows.sign()
    products = (signs @ signs.T).fill_diagonal_(0.0) / 200
    assert float(products.std()) == pytest.approx(200**-0.5, rel=0.02), "as independent as chance makes them"
    assert float(products.abs().max()) < 0.5
    assert float(signs.mean(0).abs().max()) < 5 * 4096**-0.5
    other = replace(shape, boundary=replace(shape.boundary, seed=1))
    assert abs(float((fixed(other, everyone).sign() * signs).mean())) < 0.01


def test_the_bits_that_are_fixed_of_a_token_are_those_of_plain_integers():
    def mixed(x: int) -> int:
        x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
        x = (x ^ x >> 15) * 0x735A2D97 % 2**32
        return x ^ x >> 15

    shape, token = replace(SHARED, vocab_size=300_000, hidden_size=200), 299_999
    seed = int.from_bytes(hashlib.sha256(b"0/model.boundaries.fixed").digest()[:4], "little")
    words = [mixed(mixed(7 * token + word) ^ seed) for word in range(7)]
    bits = [words[place // 32] >> place % 32 & 1 for place in range(200)]
    assert (fixed(shape, torch.tensor([token]))[0] > 0).tolist() == [bit == 1 for bit in bits]


def test_anchors_begin_as_the_embedding_in_stages_that_do_not_hold_it():
    embedding = weights_of(NARROW, BEGINS)[EMBEDDING]
    for span in (BEGINS, ENDS):
        tables = [each for name, each in weights_of(NARROW, span).items() if "boundaries" in name]
        assert len(tables) == 3
        assert all(torch.equal(table, embedding) for table in tables)


def test_hashed_anchors_are_few_rows_and_differ_for_all_tokens():
    table = weights_of(HASHED, ENDS)["model.boundaries.2.after.weight"]
    assert table.shape == (16, 32)
    anchors = {tuple((table[token % 8] + table[8 + token // 8]).tolist()) for token in range(64)}
    assert len(anchors) == 64
    deviation = HASHED.initializer_range
    assert float(table.std()) == pytest.approx(deviation * 0.5**0.5, rel=0.1)


@pytest.mark.parametrize(
    "shape", [NARROW, HASHED, SHARED], ids=["token-anchored", "hashed", "shared-subspace"]
)
def test_with_a_cache_a_text_goes_on_as_without(shape):
    weights, cache = weights_of(shape, whole(shape)), Cache()
    at_once = forward(weights, shape, whole(shape), INPUTS)
    forward(weights, shape, whole(shape), INPUTS[:, :7], cache)
    for place in range(7, 20):
        one = forward(weights, shape, whole(shape), INPUTS[:, place : place + 1], cache)
        assert torch.allclose(one[:, 0], at_once[:, place], atol=1e-4)


@pytest.mark.parametrize(("numbers", "width"), [(8, 32), (24, 192), (5, 37), (32, 32)])
def test_projectors_have_orthonormal_rows(numbers, width):
    rows = projector(Boundary("token-anchored", numbers, (1, 2)), width, 1, CPU).double()
    assert torch.allclose(rows @ rows.T, torch.eye(numbers, dtype=torch.float64), atol=1e-6)
    other = projector(Boundary("token-anchored", numbers, (1, 2)), width, 2, CPU).double()
    assert not torch.allclose(rows, other, atol=0.01), "each boundary has its own"


def test_the_bits_of_a_projector_are_written_down():
    """They are the same whatever the processor and the library: whoever finds others here computes another
    model than the rest of a swarm."""
    rows = projector(Boundary("token-anchored", 8, (1,), seed=7), 48, 1, CPU)
    assert hashlib.sha256(rows.numpy().tobytes()).hexdigest()[:16] == "047150e56e8b1ee5"


def test_rows_are_orthonormal_by_the_same_order_of_sums_in_plain_floats():
    drawn = normal(6 * 11, 1, "x").view(6, 11)
    found = orthonormal(drawn.numpy())
    rows = drawn.tolist()

    def summed(terms: list[float]) -> float:
        while len(terms) > 1:
            half = len(terms) // 2
            terms = [terms[i] + terms[half + i] for i in range(half)] + terms[2 * half :]
        return terms[0]

    for row in range(6):
        length = summed([value * value for value in rows[row]]) ** 0.5
        rows[row] = [value / length for value in rows[row]]
        for other in range(row + 1, 6):
            dot = summed([one * two for one, two in zip(rows[other], rows[row], strict=True)])
            rows[other] = [one - dot * two for one, two in zip(rows[other], rows[row], strict=True)]
    assert np.array_equal(found, np.array(rows))


@pytest.mark.parametrize(
    ("inputs", "tokens", "said"),
    [
        (CROSSED, None, "are none, need int64"),
        (CROSSED, INPUTS[:, :-1], r"are int64 \[3, 19\]"),
        (CROSSED, INPUTS.int(), "are int32"),
        (CROSSED, INPUTS + 64, "tokens beside hidden states hold token"),
        (CROSSED, -1 - INPUTS, "hold token -"),
        (CROSSED[..., :7], INPUTS, r"takes float32 hidden states \[B, T, 8\]"),
        (torch.randn(3, 20, 32), INPUTS, r"takes float32 hidden states \[B, T, 8\]"),
    ],
)
def test_what_does_not_fit_a_stage_behind_a_boundary_is_refused(inputs, tokens, said):
    stage = stage_of(NARROW, ENDS)
    with pytest.raises(StageError, match=said):
        stage.finish(0, inputs, LABELS, tokens)
    assert not stage.use_gradient(torch.clone).any()


def boundary(**changes: object) -> Boundary:
    return replace(Boundary("token-anchored", width=8, after=(1, 2)), **changes)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Boundary(width=8), "say nothing without kind: token-anchored or shared-subspace"),
        (boundary(width=0), "between 1 and model.hidden_size, 32"),
        (boundary(width=33), "model.boundary.width is 33"),
        (boundary(after=()), "name at least one place"),
        (boundary(after=(2, 1)), "in ascending order"),
        (boundary(after=(1, 1, 2)), "in ascending order"),
        (boundary(after=(0, 1, 2)), "between two of 4 layers"),
        (boundary(after=(1, 2, 4)), "between two of 4 layers"),
        (boundary(after=(1, 3)), r"add \[2\]"),
        (boundary(anchor_rows=30), "square of its half at least the vocabulary, 256"),
        (boundary(anchor_rows=33), "it must be even"),
        (boundary(anchor_rows=256), "0 gives each of 256 tokens a row"),
        (
            boundary(kind="shared-subspace", anchor_rows=64),
            "with kind shared-subspace no table holds the fixed part of a token",
        ),
    ],
)
def test_a_boundary_that_contradicts_the_rest_is_refused(wrong, said):
    with pytest.raises(ManifestError, match=said):
        check(manifest_of((1, 1, 2), replace(USUAL, boundary=wrong)))


def test_stages_between_boundaries_are_not_left_out():
    five = replace(NARROW, num_hidden_layers=5, boundary=replace(NARROW.boundary, after=(1, 2, 3, 4)))
    with pytest.raises(ManifestError, match="none can be left out"):
        check(manifest_of((1, 1, 1, 1, 1), five, paths=Paths(skip_ratio=0.4)))


def test_a_run_without_boundaries_keeps_its_id_and_one_with_them_has_another():
    usual = manifest_of((1, 1, 2), USUAL)
    assert b"boundary" not in usual.canonical()
    check(narrow := manifest_of((1, 1, 2), NARROW))
    assert (
        b'"boundary":{"after":[1,2,3],"anchor_rows":0,"kind":"token-anchored","seed":0,"width":8}'
        in narrow.canonical()
    )
    assert len({each.run_id() for each in (usual, narrow, manifest_of((1, 1, 2), HASHED))}) == 3


def test_fewer_bytes_go_from_stage_to_stage():
    usual, narrow = manifest_of((2, 2), USUAL), manifest_of((2, 2), NARROW)
    sequences, tokens = narrow.data.micro_batch_size, narrow.data.seq_len
    assert narrow.hidden_shape == (sequences, tokens, 8)
    assert usual.body_bytes == sequences * tokens * (2 * 32 + 4)
    assert narrow.body_bytes == sequences * (tokens * 2 * 8 + tokens + 1), "a byte for a token of 256"


def test_projections_are_counted_and_looking_anchors_up_is_free():
    usual, narrow = manifest_of((1, 3), USUAL), manifest_of((1, 3), NARROW)
    each = 4 * 8 * 32
    assert operations_per_token(narrow, 0) == operations_per_token(usual, 0) + each
    assert operations_per_token(narrow, 1) == operations_per_token(usual, 1) + 5 * each
    shared = manifest_of((1, 3), SHARED)
    saved = 6 * (32 - 8) * (32 + 48)  # Of each layer that writes eight numbers.
    assert operations_per_token(shared, 0) == operations_per_token(usual, 0) - saved + (1 + 1 + 2) * each
    assert operations_per_token(shared, 1) == operations_per_token(usual, 1) - 2 * saved + (5 + 4) * each
