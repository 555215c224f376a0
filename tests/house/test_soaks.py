"""What the long checks compute from what they saw; the checks themselves are scripts/soak's."""

from dataclasses import replace
from math import exp, log
from statistics import fmean

import pytest
import quality_alone
import torch
import wan_holder
from floods_soak import GROWTH_MIB, longest_gap, problems
from quality_alone import Rule
from quality_soak import MIDDLE, STAGES, quality, scored

from peers.state.checkpoint_file import Model
from peers.state.state_path import StatePath
from peers.tools.model.evaluate import score_weights
from protocols.p2pd.chunk_streams import ChunkService
from swarmnet.identifiers import PeerId
from swarmnet.model.decoder import scaled
from swarmnet.model.parameters import parameter_shapes
from swarmnet.run.manifest import Data, Manifest, ModelShape, Paths

SHAPE = ModelShape(
    width=16, layers=sum(STAGES), heads=2, key_value_heads=2, head_width=8, feed_forward=24, context=64
)
MANIFEST = Manifest("tiny", PeerId("owner"), stages=STAGES, model=SHAPE, data=Data(sequence_tokens=32))
TEXT = bytes(range(32, 127)) * 2


@pytest.fixture
def model():
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    stages = tuple(
        {
            name: torch.randn(shape, generator=generator) * 0.3
            for name, shape in parameter_shapes(SHAPE, MANIFEST.span(stage)).items()
        }
        for stage in range(len(STAGES))
    )
    return Model(MANIFEST, stages, 7)


def test_a_model_with_no_stage_left_out_scores_as_evaluate_says(model):
    weights = {name: tensor for stage in model.stages for name, tensor in stage.items()}
    assert scored(model, TEXT, ()) == score_weights(weights, SHAPE, TEXT, window=32)


def test_a_stage_left_out_scores_as_one_that_adds_nothing(model):
    silent = dict(model.stages[2])
    for name in silent:
        if "o_proj" in name or "down_proj" in name:
            silent[name] = torch.zeros_like(silent[name])
    stages = (*model.stages[:2], silent, *model.stages[3:])
    without = scored(model, TEXT, (2,)).perplexity
    assert without == pytest.approx(scored(Model(MANIFEST, stages, 7), TEXT, ()).perplexity)
    assert without != pytest.approx(scored(model, TEXT, ()).perplexity)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("whole", [1, 1, 1, 1]),
        ("skip", [0, 0, 0, 0]),
        ("skip:first=0.25", [1, 0, 0, 0]),
        ("skip:last=0.25:first=0.25", [1, 0, 0, 1]),
        ("skip:share=0.6", [1, 1, 1, 1]),
        ("skip:first=0.25:share=0.4:plain", [1, 0, 0, 0]),
        ("skip:ramp=0.75", [1, 1, 0, 0]),
    ],
)
def test_a_rule_of_skipping_says_which_microbatches_leave_nothing_out(text, whole):
    rule = Rule.parse(text)
    assert [rule.whole(passed, 0.5) for passed in (0.0, 0.25, 0.5, 0.75)] == [bool(each) for each in whole]


def test_a_run_in_one_process_visits_what_its_rule_says(monkeypatch):
    monkeypatch.setattr(quality_alone, "quality", lambda model, text: {"round": model.round})
    found = quality_alone.train(Rule.parse("skip:first=0.5"), seed=0, tokens=4 * 512)
    assert found["visits"][0] == found["visits"][-1] == 16
    assert sum(found["visits"][stage] for stage in MIDDLE) == 8 * 4 + 8 * 2
    assert found["round"] == min(found["visits"]) // 4 >= 2, "a round is four microbatches"


def test_a_model_that_skipped_is_scored_as_long_as_its_path_is(model):
    skipped = replace(MANIFEST, paths=Paths(skip_ratio=1 / 3))
    halved = tuple(
        scaled(weights, 0.5 if stage in MIDDLE else 1.0) for stage, weights in enumerate(model.stages)
    )
    found = Model(skipped, model.stages, 7)
    assert scored(found, TEXT, ()) == scored(Model(MANIFEST, halved, 7), TEXT, ())
    assert scored(found, TEXT, (1, 3)) == scored(model, TEXT, (1, 3)), "as long as in training"
    assert found.whole().keys() == model.whole().keys()


def test_every_choice_of_half_of_the_middle_stages_is_scored(model):
    found = quality(model, TEXT)
    assert list(found["half_gone"]) == ["1 2", "1 3", "1 4", "2 3", "2 4", "3 4"]
    assert found["half_gone_worst"] == max(found["half_gone"].values())
    assert found["half_gone_mean"] == pytest.approx(exp(fmean(map(log, found["half_gone"].values()))), 1e-3)
    assert set(found["one_gone"]) == set(MIDDLE)


def test_the_holder_that_is_no_use_takes_the_place_of_what_a_holder_serves_with():
    """It is a program of its own, which only a soak starts: a new name would be noticed there."""
    assert wan_holder.honest is StatePath.chunk
    assert callable(StatePath._serve)
    assert callable(ChunkService.accept)


def test_the_longest_gap_counts_from_the_first_moment_and_to_the_last():
    assert longest_gap([], 10.0, 14.0) == 4.0
    assert longest_gap([9.0, 11.0, 12.5, 20.0], 10.0, 14.0) == 1.5
    assert longest_gap([13.0, 11.0], 10.0, 14.0) == 2.0


def test_a_flood_is_held_where_training_goes_on_memory_stays_and_the_floods_links_end():
    held = {
        "during": {"longest_gap_seconds": 1.2}, "growth_mib": {"worker": 20.0, "p2pd": 5.0}, "alive": True,
        "p2pd_replaced": 0, "floods": {"known": {"ended": 3}, "bodies": {"ended": 24}, "beats": {"ended": 0}},
    }  # fmt: skip
    assert problems(held) == []
    for changed, said in (
        ({"during": {"longest_gap_seconds": 2.0}}, "no commit for 2.0 s"),
        ({"growth_mib": {"worker": 20.0, "p2pd": GROWTH_MIB}}, "p2pd grew by 64.0 MiB"),
        ({"floods": {"known": {"ended": 0}}}, "no link of the flood of known was ended"),
        ({"p2pd_replaced": 1}, "replaced"),
        ({"alive": False}, "the victim ended"),
    ):
        (problem,) = problems({**held, **changed})
        assert said in problem
