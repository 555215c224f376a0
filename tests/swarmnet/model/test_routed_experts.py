"""Experts that are others': a stage that asks for them computes what one that has them computes."""

from dataclasses import replace

import pytest
import torch

from swarmnet.identifiers import PeerId
from swarmnet.model.decoder import initial_units
from swarmnet.model.experts.expert_compute import ExpertCompute
from swarmnet.model.experts.mixture import choose
from swarmnet.model.experts.routed_trunk import RoutedTrunk
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import layout_of, trained_layout, views_of
from swarmnet.model.parameters import parameter_shapes, whole
from swarmnet.model.stage_compute import StageCompute, StageError, copied
from swarmnet.run.manifest import Data, Experts, Manifest, ManifestError, ModelShape, Paths, Sync
from swarmnet.run.manifest_check import check

EXPERTS = Experts(count=4, active=2, balance=0.01, groups=2, form="routed")
SHAPE = ModelShape(
    width=16, layers=3, heads=2, key_value_heads=2, head_width=8, feed_forward=12, qk_norm=True,
    experts=EXPERTS,
)  # fmt: skip
RUN = Manifest(
    "routed", PeerId("owner"), stages=(2, 1), model=SHAPE,
    data=Data(sequence_tokens=12, microbatch_sequences=3),
)  # fmt: skip
FOUR = replace(SHAPE, layers=4)
MERGED = replace(EXPERTS, merge_rounds=2, merge_nearest=2)
RESIDENT = replace(RUN, model=replace(SHAPE, experts=replace(EXPERTS, form="resident", groups=1)))


def computes(manifest, stage):
    """With the run's first weights."""
    span, layout = manifest.span(stage), trained_layout(manifest, stage)
    routed, held = manifest.model.experts.is_routed, manifest.experts_at(stage)
    kind = StageCompute if not routed else RoutedTrunk if held is None else ExpertCompute
    compute = kind(manifest.model, span, layout)
    units = initial_units(manifest.model, span, layout, seed=7)
    compute.publish(copied(to_floats(units) * 3))  # Larger, so that experts weigh something.
    return compute


def gradients(manifest, stage, compute):
    layout = trained_layout(manifest, stage)
    found = compute.use_gradient(torch.Tensor.clone)
    return views_of(found, layout)


class Holders:
    """All groups' experts, asked directly."""

    def __init__(self, manifest, trunk, away=()):
        self.stages = manifest.expert_stages(trunk)
        self.computes = [computes(manifest, stage) for stage in self.stages]
        self.away = set(away)
        self.asked = []

    def answer(self, call):
        self.asked.append(call)
        if call.group in self.away:
            return None
        held = self.computes[call.group]
        if call.gradient is None:
            return held.answer(call.layer, call.counts, call.rows)
        return held.answer_backward(call.layer, call.counts, call.rows, call.gradient, adds=True)

    def carry(self, steps):
        try:
            calls = next(steps)
            while True:
                calls = steps.send({call.group: self.answer(call) for call in calls})
        except StopIteration as end:
            return end.value


def text():
    torch.manual_seed(1)
    return torch.randint(256, (3, 12)), torch.randint(256, (3, 12))


def test_what_is_asked_of_others_gives_the_loss_and_the_gradients_of_what_is_held():
    tokens, labels = text()
    whole_stages = [computes(RESIDENT, stage) for stage in range(2)]
    hidden = whole_stages[0].forward("m", tokens)
    finished = whole_stages[1].finish("m", hidden, labels)
    whole_stages[0].backward("m", finished.hidden_gradient)
    expected = {}
    for stage, compute in enumerate(whole_stages):
        expected |= gradients(RESIDENT, stage, compute)

    trunks = [computes(RUN, stage) for stage in range(2)]
    holders = [Holders(RUN, stage) for stage in range(2)]
    sent = holders[0].carry(trunks[0].forward_steps("m", tokens))
    torch.testing.assert_close(sent, hidden)
    done = holders[1].carry(trunks[1].finish_steps("m", sent, labels))
    assert done.tokens == finished.tokens
    assert done.loss_sum == pytest.approx(finished.loss_sum, rel=1e-6)
    torch.testing.assert_close(done.hidden_gradient, finished.hidden_gradient, rtol=1e-4, atol=1e-6)
    assert holders[0].carry(trunks[0].backward_steps("m", done.hidden_gradient)) is None
    found = {}
    for stage in range(2):
        found |= gradients(RUN, stage, trunks[stage])
        for of_group, held in zip(RUN.expert_stages(stage), holders[stage].computes, strict=True):
            found |= gradients(RUN, of_group, held)
    assert found.keys() == expected.keys() == parameter_shapes(SHAPE, whole(SHAPE)).keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5, msg=name)
    assert any(gradient.any() for name, gradient in found.items() if ".experts.3." in name)
    assert [trunk.open for trunk in trunks] == [0, 0]
    counted = [trunk.routed[layer] for trunk, layer in ((trunks[0], 0), (trunks[0], 1), (trunks[1], 2))]
    assert [sum(of_layer) for of_layer in counted] == [72, 72, 72], "each token takes two experts"


def test_no_weight_is_in_two_stages_and_none_is_left_out():
    names = [
        name for stage in range(RUN.all_stages) for name in parameter_shapes(SHAPE, RUN.span(stage))
    ]
    assert RUN.all_stages == 2 + 2 * 2
    assert sorted(names) == sorted(parameter_shapes(SHAPE, whole(SHAPE)))
    assert (RUN.experts_at(1), RUN.experts_at(4).trunk, RUN.experts_at(4).group) == (None, 1, 0)
    assert list(RUN.expert_stages(1)) == [4, 5]
    assert (RUN.beside(0), RUN.beside(1), RUN.beside(5)) == ((1, 2, 3), (0, 4, 5), (1,))


def test_tokens_of_experts_that_nobody_holds_go_to_the_next_best():
    tokens, labels = text()
    one_stage = replace(RUN, stages=(3,))
    trunk, holders = computes(one_stage, 0), Holders(one_stage, 0)
    trunk.missing = frozenset({1})
    finished = holders.carry(trunk.finish_steps("m", tokens, labels))
    assert {call.group for call in holders.asked} == {0}
    assert sum(holders.asked[0].counts) == 72, "all tokens, for two of the experts that are there"
    assert finished.loss_sum > 0
    trunk.missing = frozenset({0, 1})
    with pytest.raises(StageError, match="no peer holds experts of layer 0"):
        holders.carry(trunk.finish_steps("n", tokens, labels))
    assert trunk.open == 0


def test_whoever_does_not_answer_is_gone_around_and_backward_costs_its_tokens_their_gradient_alone():
    tokens, labels = text()
    one_stage = replace(RUN, stages=(3,))
    trunk, holders = computes(one_stage, 0), Holders(one_stage, 0, away={1})
    holders.carry(trunk.finish_steps("m", tokens, labels))
    forward = [call for call in holders.asked if call.gradient is None]
    assert [call.group for call in forward if call.layer == 0] == [0, 1, 0]
    assert [call.group for call in forward if call.layer > 0] == [0, 0], "it is not asked again for this one"
    holders.away.clear()
    steps = trunk.finish_steps("n", tokens, labels)
    calls = next(steps)
    while calls[0].gradient is None:
        calls = steps.send({call.group: holders.answer(call) for call in calls})
    holders.away.add(0)
    finished = None
    try:
        while True:
            calls = steps.send({call.group: holders.answer(call) for call in calls})
    except StopIteration as end:
        finished = end.value
    assert finished is not None
    assert trunk.without_gradient == 3


def test_a_step_between_the_passes_of_a_microbatch_disturbs_neither_it_nor_the_new_weights():
    tokens, _ = text()
    trunk, holders = computes(RUN, 0), Holders(RUN, 0)
    before = holders.carry(trunk.forward_steps("m", tokens))
    steps = trunk.forward_steps("n", tokens)
    calls = next(steps)
    layout = trained_layout(RUN, 0)
    trunk.publish(copied(torch.zeros(layout.size)))
    said = {call.group: holders.answer(call) for call in calls}
    calls = steps.send(said)
    with pytest.raises(StopIteration) as end:
        steps.send({call.group: holders.answer(call) for call in calls})
    assert torch.equal(end.value.value, before)
    holders.carry(trunk.backward_steps("m", torch.ones_like(before)))


def test_a_gradient_that_is_asked_for_again_is_the_same_and_is_not_added_again():
    held = computes(RUN, 2)
    rows, gradient = torch.randn(5, 16), torch.randn(5, 16)
    first = held.answer_backward(0, (2, 3), rows, gradient, adds=True)
    once = held.use_gradient(torch.Tensor.clone)
    again = held.answer_backward(0, (2, 3), rows, gradient, adds=False)
    assert torch.equal(first, again)
    assert once.any()
    assert not held.use_gradient(torch.Tensor.clone).any()


def test_a_router_without_some_experts_is_the_router_of_the_others():
    torch.manual_seed(2)
    gate_ED, x_ND = torch.randn(4, 16), torch.randn(7, 16)
    without = choose(gate_ED, SHAPE, x_ND, (1, 3))
    shares = (x_ND @ gate_ED[[0, 2]].T).softmax(-1)
    torch.testing.assert_close(without.weights.sum(-1), torch.ones(7))
    assert set(without.chosen.flatten().tolist()) == {0, 2}
    torch.testing.assert_close(without.weights.amax(-1), shares.amax(-1))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"paths": Paths(skip_ratio=0.3), "stages": (1, 1, 1, 1), "model": FOUR}, "does not go with paths"),
        ({"sync": Sync(method="local-steps", expert_rate=0.5)}, "or their form is routed"),
        ({"model": replace(SHAPE, experts=MERGED)}, "merge_rounds"),
        ({"data": Data(sequence_tokens=1024, microbatch_sequences=800)}, "tokens for a group of experts"),
    ],
)
def test_what_does_not_go_with_experts_of_others_is_refused(changes, told):
    check(RUN)
    with pytest.raises(ManifestError, match=told):
        check(replace(RUN, **changes))


def test_a_run_that_says_nothing_of_the_form_is_what_it_was():
    assert b'"form":"resident"' not in RESIDENT.canonical()
    assert b'"form":"routed"' in RUN.canonical()
    assert layout_of(parameter_shapes(SHAPE, RESIDENT.span(0))) == trained_layout(RESIDENT, 0)
