import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from model_sizes import model_shape
from torch import Tensor
from torch.nn import functional

from swarmnet.identifiers import PeerId
from swarmnet.model.activation_codec import decode, encode
from swarmnet.model.computing.choices import PLAIN, ActivationCheckpointing, Computing, DtypeName
from swarmnet.model.decoder import Rotation, RunLayer, forward, initial_units
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import Layout, layout_of
from swarmnet.model.parameters import EMBEDDING, HEAD, parameter_shapes, whole
from swarmnet.model.stage_compute import LastStageResult, StageCompute, StageError, Uncounted, copied
from swarmnet.run.boundary_settings import Boundary
from swarmnet.run.manifest import Manifest, Span
from swarmnet.run.schema import Experts, ModelShape, RopeScaling

LLAMA = model_shape(width=32, layers=4, heads=4, inner=48, vocab_size=64, max_position_embeddings=64)
GROUPED = replace(LLAMA, num_key_value_heads=2)
QWEN = replace(LLAMA, num_key_value_heads=1, qk_norm=True, rope_theta=1e6)
BIASED = replace(GROUPED, attention_bias=True, rope_scaling=RopeScaling("linear", 2.0))
EXPERTS = replace(QWEN, experts=Experts(num_experts=4, top_k=2, aux_loss_coef=0.01))
SHARED = replace(LLAMA, boundary=Boundary("shared-subspace", 8, after=(2,)))
KINDS, NAMES = (
    [LLAMA, GROUPED, QWEN, EXPERTS, SHARED],
    ["llama", "grouped", "qwen", "experts", "shared-subspace"],
)
CUTS = [(4,), (2, 2), (1, 3), (2, 1, 1), (1, 1, 1, 1)]
BATCH, LENGTH = 3, 20


def spans(shape: ModelShape, stages: tuple[int, ...]) -> list[Span]:
    manifest = Manifest("test", PeerId("owner"), stages=stages, model=shape)
    return [manifest.span(stage) for stage in range(len(stages))]


def stage_of(shape: ModelShape, span: Span, recompute: bool = False, seed: int = 3) -> StageCompute:
    layout = layout_of(parameter_shapes(shape, span))
    stage = StageCompute(
        shape=shape,
        span=span,
        layout=layout,
        computing=Computing(activation_checkpointing="stage" if recompute else "none"),
    )
    stage.publish(copied(to_floats(initial_units(shape, span, layout, seed))))
    return stage


def microbatch(shape: ModelShape, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(shape.vocab_size, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def over_the_wire(tensor: Tensor) -> Tensor:
    return decode(encode(tensor, "fp32"), tuple(tensor.shape), "fp32")


def train(stages: list[StageCompute], shape: ModelShape, number: int) -> LastStageResult:
    inputs, labels = microbatch(shape, number)
    hidden = inputs
    for stage in stages[:-1]:
        hidden = over_the_wire(stage.forward(number, hidden, tokens_BT=inputs))
    finished = stages[-1].finish(number, hidden, labels, inputs)
    gradient = finished.hidden_gradient
    for stage in reversed(stages[:-1]):
        assert gradient is not None
        gradient = stage.backward(number, over_the_wire(gradient))
    assert gradient is None
    return finished


def named(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    return {entry.name: flat[entry.offset : entry.offset + entry.size] for entry in layout.entries}


def gradients(stages: list[StageCompute], shape: ModelShape, cut: list[Span]) -> dict[str, Tensor]:
    return {
        name: gradient
        for stage, span in zip(stages, cut, strict=True)
        for name, gradient in named(
            stage.use_gradient(torch.clone), layout_of(parameter_shapes(shape, span))
        ).items()
    }


def assert_equal_to_the_bit(some: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert sorted(some) == sorted(others)
    for name in some:
        assert torch.equal(some[name].view(torch.int32), others[name].view(torch.int32)), name


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stages", CUTS)
@pytest.mark.parametrize("shape", [LLAMA, GROUPED, QWEN, BIASED], ids=["llama", "grouped", "qwen", "biased"])
def test_a_cut_model_has_the_loss_and_gradients_of_the_uncut_one_to_the_bit(
    shape: ModelShape, stages: tuple[int, ...], recompute: bool
) -> None:
    whole_stage = [stage_of(shape, whole(shape))]
    cut_stages = [stage_of(shape, span, recompute) for span in spans(shape, stages)]
    for number in range(3):
        expected, found = train(whole_stage, shape, number), train(cut_stages, shape, number)
        assert found.loss_sum == expected.loss_sum
        assert found.tokens == BATCH * LENGTH
    assert_equal_to_the_bit(
        gradients(cut_stages, shape, spans(shape, stages)), gradients(whole_stage, shape, [whole(shape)])
    )


def test_gradients_are_those_of_the_summed_loss_of_all_microbatches() -> None:
    layout = layout_of(parameter_shapes(GROUPED, whole(GROUPED)))
    flat = to_floats(initial_units(GROUPED, whole(GROUPED), layout, 3))
    weights = {
        entry.name: flat[entry.offset : entry.offset + entry.size].view(entry.shape).clone().requires_grad_()
        for entry in layout.entries
    }
    stage = stage_of(GROUPED, whole(GROUPED))
    total = torch.zeros(())
    for number in range(2):
        train([stage], GROUPED, number)
        inputs, labels = microbatch(GROUPED, number)
        logits = forward(weights, GROUPED, whole(GROUPED), inputs)
        total = total + functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    total.backward()
    taken = stage.use_gradient(torch.clone)
    for name, gradient in named(taken, layout).items():
        expected = weights[name].grad
        assert expected is not None
        torch.testing.assert_close(gradient, expected.flatten(), rtol=1e-4, atol=1e-5)
    assert all(not taken[start:stop].any() for start, stop in layout.padding)


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_that_count_for_half_are_those_whose_last_matrices_are_halved(recompute: bool) -> None:
    span = spans(LLAMA, (1, 2, 1))[1]
    layout = layout_of(parameter_shapes(LLAMA, span))
    stage = stage_of(LLAMA, span, recompute)
    flat = to_floats(initial_units(LLAMA, span, layout, 3)).requires_grad_()
    halves = torch.ones(layout.size)
    for entry in layout.entries:
        if "o_proj" in entry.name or "down_proj" in entry.name:
            halves[entry.offset : entry.offset + entry.size] = 0.5
    halved = {name: part.view(parameter_shapes(LLAMA, span)[name]) for name, part in
              named(flat * halves, layout).items()}  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    hidden, gradient = torch.randn((2, BATCH, LENGTH, LLAMA.hidden_size), generator=generator)
    expected = forward(halved, LLAMA, span, hidden)
    (expected * gradient).sum().backward()
    assert torch.equal(stage.forward("half", hidden, 0.5), expected.detach())
    stage.backward("half", gradient)
    torch.testing.assert_close(stage.use_gradient(torch.clone), flat.grad)
    assert not torch.equal(stage.forward("whole", hidden), expected.detach())


def test_the_gradient_is_empty_after_it_was_used() -> None:
    stage = stage_of(LLAMA, whole(LLAMA))
    train([stage], LLAMA, 0)
    first = stage.use_gradient(torch.clone)
    kept = first.clone()
    assert first.any()
    assert not stage.use_gradient(torch.clone).any()
    train([stage], LLAMA, 1)
    assert torch.equal(first, kept)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_does_not_disturb_a_microbatch_under_way(recompute: bool) -> None:
    cut = spans(QWEN, (2, 2))
    quiet = [stage_of(QWEN, span, recompute) for span in cut]
    disturbed = [stage_of(QWEN, span, recompute) for span in cut]
    inputs, labels = microbatch(QWEN, 0)
    gradient = None
    for stages, disturb in ((quiet, False), (disturbed, True)):
        hidden = stages[0].forward("a", inputs)
        finished = stages[1].finish("a", hidden, labels)
        if disturb:
            layout = layout_of(parameter_shapes(QWEN, cut[0]))
            stages[0].publish(copied(to_floats(initial_units(QWEN, cut[0], layout, seed=99))))
            assert not torch.equal(stages[0].forward("b", inputs), hidden)
            stages[0].drop("b")
        assert finished.hidden_gradient is not None
        gradient = stages[0].backward("a", finished.hidden_gradient)
    assert gradient is None
    assert torch.equal(quiet[0].use_gradient(torch.clone), disturbed[0].use_gradient(torch.clone))


def test_later_forwards_use_the_published_weights() -> None:
    span = spans(LLAMA, (2, 2))[0]
    stage, other = stage_of(LLAMA, span), stage_of(LLAMA, span, seed=99)
    inputs, _ = microbatch(LLAMA, 0)
    stage.publish(copied(to_floats(initial_units(LLAMA, span, layout_of(parameter_shapes(LLAMA, span)), 99))))
    assert torch.equal(stage.forward(0, inputs), other.forward(0, inputs))


def test_graphs_wait_in_any_order_and_can_be_dropped() -> None:
    span = spans(LLAMA, (2, 2))[0]
    stage = stage_of(LLAMA, span)
    outputs = {number: stage.forward(number, microbatch(LLAMA, number)[0]) for number in range(3)}
    assert stage.open == 3
    stage.drop(1)
    stage.drop("never opened")
    stage.backward(2, outputs[2])
    stage.backward(0, outputs[0])
    assert stage.open == 0
    alone = stage_of(LLAMA, span)
    for number in (2, 0):
        alone.backward(number, alone.forward(number, microbatch(LLAMA, number)[0]))
    assert torch.equal(stage.use_gradient(torch.clone), alone.use_gradient(torch.clone))


def test_the_output_is_not_part_of_the_graph() -> None:
    output = stage_of(LLAMA, spans(LLAMA, (2, 2))[0]).forward(0, microbatch(LLAMA, 0)[0])
    assert not output.requires_grad


def test_the_callers_inputs_stay_as_they_were() -> None:
    stage = stage_of(LLAMA, spans(LLAMA, (1, 3))[1])
    hidden = torch.ones(BATCH, LENGTH, LLAMA.hidden_size)
    stage.finish(0, hidden, microbatch(LLAMA, 0)[1])
    assert not hidden.requires_grad
    assert (hidden == 1).all()


HIDDEN = torch.ones(BATCH, LENGTH, LLAMA.hidden_size)
TOKENS = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
NAN_INSIDE = HIDDEN.clone().index_put(
    (torch.tensor(1), torch.tensor(2), torch.tensor(3)), torch.tensor(torch.nan)
)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (
            lambda first, last: first.forward(0, TOKENS + 64),
            "inputs hold token 64, the vocabulary is 0 to 63",
        ),
        (lambda first, last: first.forward(0, TOKENS - 1), "inputs hold token -1"),
        (lambda first, last: first.forward(0, TOKENS.float()), "inputs are float32"),
        (lambda first, last: first.forward(0, HIDDEN), "this stage takes int64 tokens"),
        (lambda first, last: first.forward(0, TOKENS[:, :0]), "of 0 tokens"),
        (lambda first, last: first.forward(0, TOKENS[:0]), "0 sequences"),
        (lambda first, last: first.forward(0, TOKENS.repeat(1, 4)), "1 to 64 tokens"),
        (lambda first, last: first.backward(0, HIDDEN), "0 is not open"),
        (
            lambda first, last: last.finish(0, HIDDEN[:, :, :8], TOKENS),
            r"takes float32 hidden states \[B, T, 32\]",
        ),
        (lambda first, last: last.finish(0, HIDDEN.double(), TOKENS), "inputs are float64"),
        (lambda first, last: last.finish(0, HIDDEN, TOKENS[:, 1:]), r"labels are int64 \[3, 19\]"),
        (lambda first, last: last.finish(0, HIDDEN, TOKENS.int()), "labels are int32"),
        (lambda first, last: last.finish(0, HIDDEN, TOKENS + 64), "labels hold token 64"),
        (lambda first, last: last.finish(0, NAN_INSIDE, TOKENS), "loss not finite"),
        (lambda first, last: last.finish(0, HIDDEN * torch.inf, TOKENS), "loss not finite"),
    ],
)
def test_what_cannot_be_computed_is_refused_and_leaves_nothing_behind(
    attempt: Callable[[StageCompute, StageCompute], object], message: str
) -> None:
    first, last = (stage_of(LLAMA, span) for span in spans(LLAMA, (2, 2)))
    with pytest.raises(StageError, match=message):
        attempt(first, last)
    assert first.open == last.open == 0
    assert not first.use_gradient(torch.clone).any()
    assert not last.use_gradient(torch.clone).any()


def test_hidden_states_that_are_not_finite_open_no_graph() -> None:
    middle = stage_of(LLAMA, Span(1, 2, has_embedding=False, has_head=False))
    with pytest.raises(StageError, match="microbatch 0: hidden states not finite"):
        middle.forward(0, NAN_INSIDE)
    assert middle.open == 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "poison", [NAN_INSIDE, HIDDEN * torch.inf, HIDDEN * 3e38], ids=["nan", "inf", "overflow"]
)
def test_a_gradient_that_is_not_finite_adds_nothing_and_closes_the_graph(
    poison: Tensor, recompute: bool
) -> None:
    stage = stage_of(LLAMA, spans(LLAMA, (2, 2))[0], recompute)
    inputs, _ = microbatch(LLAMA, 0)
    for key in ("good", "bad"):
        output = stage.forward(key, inputs)
    stage.backward("good", output)
    with pytest.raises(StageError, match="microbatch bad: gradient not finite"):
        stage.backward("bad", poison)
    assert stage.open == 0
    alone = stage_of(LLAMA, spans(LLAMA, (2, 2))[0])
    alone.backward("good", alone.forward("good", inputs))
    assert torch.equal(stage.use_gradient(torch.clone), alone.use_gradient(torch.clone))


def test_a_gradient_that_no_round_could_sum_is_left_out_and_the_others_stay() -> None:
    stage = stage_of(LLAMA, spans(LLAMA, (2, 2))[0])
    stage.backward("good", torch.ones_like(stage.forward("good", TOKENS)))
    before = stage.use_gradient(torch.clone)
    stage.backward("good", torch.ones_like(stage.forward("good", TOKENS)))
    with pytest.raises(StageError, match="not finite, or too large to be summed"):
        stage.backward("loud", 1e30 * torch.ones_like(stage.forward("loud", TOKENS)))
    assert torch.equal(stage.use_gradient(torch.clone), before)


def test_an_open_key_and_a_misshapen_gradient_are_refused() -> None:
    stage = stage_of(LLAMA, spans(LLAMA, (2, 2))[0])
    for gradient in (HIDDEN[:1], HIDDEN.double()):
        stage.forward("a", TOKENS)
        with pytest.raises(StageError, match="already open"):
            stage.forward("a", TOKENS)
        assert stage.open == 1
        with pytest.raises(StageError, match="gradient is"):
            stage.backward("a", gradient)
        assert stage.open == 0


def test_nothing_is_computed_before_weights_are_published() -> None:
    layout = layout_of(parameter_shapes(LLAMA, whole(LLAMA)))
    stage = StageCompute(shape=LLAMA, span=whole(LLAMA), layout=layout)
    with pytest.raises(ValueError, match="publish weights first"):
        stage.forward(0, TOKENS)


def test_a_peer_pays_for_no_part_of_torch_that_it_does_not_use() -> None:
    program = """
import sys, torch
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import layout_of
from swarmnet.run.manifest import Span
from swarmnet.run.schema import ModelShape
from swarmnet.model.decoder import initial_units
from swarmnet.model.parameters import EMBEDDING, HEAD, parameter_shapes
from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.model.stage_compute import StageCompute, copied
shape = ModelShape(num_hidden_layers=2)
tokens = torch.zeros(1, 4, dtype=torch.int64)
first, last = Span(0, 1, True, False), Span(1, 2, False, True)
stages = []
for span, computing in ((first, Computing()), (last, Computing("bf16", "layer"))):
    layout = layout_of(parameter_shapes(shape, span))
    stages.append(StageCompute(shape=shape, span=span, layout=layout, computing=computing))
    stages[-1].publish(copied(to_floats(initial_units(shape, span, layout, 0))))
finished = stages[1].finish(0, stages[0].forward(0, tokens), tokens)
stages[0].backward(0, finished.hidden_gradient)
print(sorted({"sympy", "torch._dynamo"} & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ran.stdout.strip() == "[]", ran.stderr


def taken(stage: StageCompute) -> Tensor:
    return stage.use_gradient(torch.clone)


def computed_as(
    shape: ModelShape, span: Span, computing: Computing = PLAIN, tile: int = 1 << 20
) -> StageCompute:
    layout = layout_of(parameter_shapes(shape, span))
    stage = StageCompute(shape=shape, span=span, layout=layout, computing=computing)
    weights = to_floats(initial_units(shape, span, layout, 3))
    stage.publish((start, weights[start : start + tile]) for start in range(0, layout.size, tile))
    return stage


@pytest.mark.parametrize("shape", KINDS, ids=NAMES)
@pytest.mark.parametrize("recompute", ["stage", "layer"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_what_is_computed_again_comes_to_the_same_bits(
    shape: ModelShape, recompute: ActivationCheckpointing, dtype: DtypeName
) -> None:
    cut = spans(shape, (2, 2))
    kept = [computed_as(shape, span, Computing(dtype)) for span in cut]
    again = [computed_as(shape, span, Computing(dtype, recompute)) for span in cut]
    assert train(kept, shape, 0).loss_sum == train(again, shape, 0).loss_sum
    for one, other in zip(kept, again, strict=True):
        assert torch.equal(taken(one), taken(other))


def test_of_a_layer_that_is_computed_again_only_the_input_is_kept() -> None:
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    middle = spans(LLAMA, (1, 2, 1))[1]
    hidden = torch.randn(3, 20, LLAMA.hidden_size)
    held = []
    for computing in (Computing(), Computing(activation_checkpointing="layer")):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            computed_as(LLAMA, middle, computing).forward(0, hidden)
        held.append(sum(kept.values()))
    parameters = 4 * layout_of(parameter_shapes(LLAMA, middle)).size
    assert held[1] - parameters < 4 * hidden.nbytes < (held[0] - parameters) / 4


@pytest.mark.parametrize("shape", KINDS, ids=NAMES)
@pytest.mark.parametrize(("dtype", "error"), [("bf16", 0.03), ("fp16", 0.004)])
def test_in_16_bits_loss_and_gradients_are_near_and_sums_stay_float32(
    shape: ModelShape, dtype: DtypeName, error: float
) -> None:
    exact = computed_as(shape, whole(shape))
    near = computed_as(shape, whole(shape), Computing(dtype), tile=1000)
    losses = [train([stage], shape, 0).loss_sum for stage in (exact, near)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    expected, found = taken(exact), taken(near)
    assert found.dtype == torch.float32
    assert float((found - expected).norm() / expected.norm()) < error
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e6])
def test_in_fp16_gradients_of_any_size_are_as_exact(size: float) -> None:
    """float16 itself holds 6e-8 to 65,504."""
    first = spans(LLAMA, (2, 2))[0]
    inputs, _ = microbatch(LLAMA, 0)
    found = []
    for dtype in ("fp32", "fp16"):
        stage = computed_as(LLAMA, first, Computing(dtype))
        output = stage.forward(0, inputs)
        stage.backward(0, size * torch.randn(output.shape, generator=torch.Generator().manual_seed(1)))
        found.append(taken(stage))
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 0.004


def test_weights_that_come_in_any_parts_are_the_same_weights() -> None:
    inputs, _ = microbatch(QWEN, 0)
    first = spans(QWEN, (2, 2))[0]
    numbers: tuple[DtypeName, ...] = ("fp32", "bf16", "fp16")
    for dtype in numbers:
        stages = [computed_as(QWEN, first, Computing(dtype), tile) for tile in (999, 1 << 20)]
        outputs = [stage.forward(0, inputs) for stage in stages]
        assert torch.equal(*outputs)
        assert outputs[0].dtype == torch.float32


def test_a_gradient_that_grows_too_large_on_its_way_leaves_the_sum_finite() -> None:
    """The last matrix's gradient is small enough to be summed, those behind it are not."""
    first = spans(LLAMA, (2, 2))[0]
    stage = computed_as(LLAMA, first)
    layout = layout_of(parameter_shapes(LLAMA, first))
    weights = to_floats(initial_units(LLAMA, first, layout, 3))
    for entry in layout.entries:
        if entry.name.startswith("model.layers.1.mlp"):
            weights[entry.offset : entry.offset + entry.size] *= 1e9
    stage.publish(copied(weights))
    stage.backward("good", torch.ones_like(stage.forward("good", microbatch(LLAMA, 0)[0])) * 1e-30)
    with pytest.raises(StageError, match="too large to be summed"):
        stage.backward("bad", torch.ones_like(stage.forward("bad", microbatch(LLAMA, 1)[0])))
    assert taken(stage).isfinite().all()
    stage.backward("good", torch.ones_like(stage.forward("good", microbatch(LLAMA, 0)[0])) * 1e-30)


def test_only_microbatches_of_the_runs_own_shape_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compiler does is not played here, only what is given to it; on a GPU test_gpu.py does both."""
    seen: list[torch.Size] = []

    def compiled(run: RunLayer, dynamic: bool) -> RunLayer:
        assert not dynamic, "or other shapes would be compiled as well"

        def as_compiled(
            members: Mapping[str, Tensor], shape: ModelShape, hidden_BTD: Tensor, rotation: Rotation
        ) -> Tensor:
            seen.append(hidden_BTD.shape[:2])
            return run(members, shape, hidden_BTD, rotation)

        return as_compiled

    monkeypatch.setattr(torch, "compile", compiled)
    layout = layout_of(parameter_shapes(LLAMA, whole(LLAMA)))
    stage = StageCompute(shape=LLAMA, span=whole(LLAMA), layout=layout, computing=Computing(compile=True))
    stage.warm_up(BATCH, LENGTH)
    assert not taken(stage).any(), "warming up leaves nothing behind"
    stage.publish(copied(to_floats(initial_units(LLAMA, whole(LLAMA), layout, 3))))
    before = len(seen)
    inputs, labels = microbatch(LLAMA, 0)
    stage.finish("short", inputs[:, 1:], labels[:, 1:])
    assert len(seen) == before
    assert stage.finish("own", inputs, labels) == train([stage_of(LLAMA, whole(LLAMA))], LLAMA, 0)
    assert set(seen) == {torch.Size((BATCH, LENGTH))}


def test_layers_of_experts_are_not_compiled_for_each_number_of_tokens_would_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compiled(run: RunLayer, dynamic: bool) -> RunLayer:
        pytest.fail("compiled")

    monkeypatch.setattr(torch, "compile", compiled)
    stage = StageCompute(
        shape=EXPERTS,
        span=whole(EXPERTS),
        layout=layout_of(parameter_shapes(EXPERTS, whole(EXPERTS))),
        computing=Computing(compile=True),
    )
    stage.warm_up(BATCH, LENGTH)


def test_a_tied_matrix_has_the_gradients_of_embedding_and_head_together():
    gradients_by_kind, losses = [], []
    for is_tied in (False, True):
        shape = replace(GROUPED, tie_word_embeddings=is_tied)
        (span,) = spans(shape, (4,))
        layout = layout_of(parameter_shapes(shape, span))
        units = initial_units(shape, span, layout, 3)
        places = {entry.name: entry.place for entry in layout.entries}
        if not is_tied:
            units[places[HEAD]] = units[places[EMBEDDING]]
        stage = StageCompute(shape=shape, span=span, layout=layout)
        stage.publish(copied(to_floats(units)))
        losses.append(train([stage], shape, 1).loss_sum)
        gradients_by_kind.append(named(stage.use_gradient(torch.clone), layout))
    untied, tied = gradients_by_kind
    assert losses[0] == losses[1]
    untied[EMBEDDING] += untied.pop(HEAD)
    assert tied.keys() == untied.keys()
    for name, gradient in untied.items():
        torch.testing.assert_close(tied[name], gradient)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_computed_for_a_comparison_has_the_same_gradient_and_is_not_counted(recompute: bool) -> None:
    shape, cut = EXPERTS, spans(EXPERTS, (1, 2, 1))
    stages = [stage_of(shape, span, recompute) for span in cut]
    inputs, labels = microbatch(shape, 0)
    hidden = stages[1].forward("once", stages[0].forward("once", inputs))
    found = []
    for key in (Uncounted("again"), "again"):
        last = stages[2].finish(key, hidden, labels)
        assert last.hidden_gradient is not None
        stages[1].forward(key, stages[0].forward(key, inputs))
        found.append(stages[1].backward(key, last.hidden_gradient))
        if isinstance(key, Uncounted):
            assert not any(stage.use_gradient(torch.clone).any() for stage in stages)
    assert torch.equal(*found)
    assert all(stage.use_gradient(torch.clone).any() for stage in stages[1:])
