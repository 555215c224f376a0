"""What a stage takes, said before anything is fetched: which of a run's sizes it goes with."""

from dataclasses import replace

import pytest
from model_sizes import model_shape

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import trained_layout
from swarmnet.pipeline.flow_control import FLOAT_BYTES, graph_at_work, graph_bytes
from swarmnet.resources.memory_estimate import needs_of, waits
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Data, ModelShape, Sync

MODEL = model_shape(width=512, layers=16, heads=8, kv_heads=8, inner=1536)
ONE_STEP = Sync(method="local-steps", inner_batch_tokens=1)
"""For each microbatch, so that its gradient lies in its own numbers."""


def run_of(model: ModelShape) -> Manifest:
    stages = (model.num_hidden_layers // 2, model.num_hidden_layers // 2)
    return Manifest("m", PeerId("owner"), model=model, stages=stages, sync=ONE_STEP)


def weights(model: ModelShape, stage: int) -> int:
    """Bytes in a process that computes in float32, beside few others of its stage, but for a graph."""
    run = run_of(model)
    return needs_of(run, stage, 1, is_small=True).least - graph_bytes(run, stage)


def test_a_matrix_in_the_making_is_counted_once_however_many_layers_a_stage_has():
    deep, shallow = MODEL, replace(MODEL, num_hidden_layers=8)
    sizes = [trained_layout(run_of(model), 0).size for model in (deep, shallow)]
    each = (weights(deep, 0) - weights(shallow, 0)) / (sizes[0] - sizes[1])
    # Settled 4, computed with 4, begun with 4, gradient 4, not sent 4, Muon's moment 2, six rounds of a
    # quarter 1.5, a checkpoint's copy 8, freed 4.
    assert each == pytest.approx(35.5, abs=0.05)


def test_the_gradient_of_a_table_of_tokens_has_room():
    large = replace(MODEL, vocab_size=131072)
    more = 512 * (131072 - 256)
    # Two more bytes than a matrix of a layer, for AdamW's second moment, and once the table's gradient.
    least = weights(MODEL, 0) + (35.5 + 2) * more
    assert least + 0.8 * FLOAT_BYTES * more < weights(large, 0) < least + FLOAT_BYTES * more + 1e6


def test_where_the_head_is_nothing_waits_and_what_it_says_of_tokens_has_room():
    run = run_of(MODEL)
    assert [waits(run, stage) for stage in (0, 1)] == [True, False]
    assert graph_at_work(run, 0) == 0
    assert graph_at_work(run, 1) == 3 * FLOAT_BYTES * MODEL.vocab_size * run.microbatch_tokens


def test_each_microbatch_under_way_keeps_the_weights_that_it_was_begun_with():
    run = replace(run_of(MODEL), data=Data(seq_len=64, micro_batch_size=1))
    copy, graph = FLOAT_BYTES * trained_layout(run, 0).size, graph_bytes(run, 0)

    def copies(sync: Sync, microbatches: int) -> float:
        """One lies in the stage's own bytes, with the first."""
        needs = needs_of(replace(run, sync=sync), 0, 1, is_small=True)
        return 1 + (microbatches - 1) * (needs.graph - graph) / copy

    for every, under_way, kept in [(1, 1, 1), (1, 6, 6), (4, 1, 1), (4, 5, 2), (4, 9, 3)]:
        assert copies(replace(ONE_STEP, inner_batch_tokens=every * 64), under_way) == pytest.approx(kept)
    assert copies(Sync(method="demo-sign"), 6) == pytest.approx(1), "weights change with a round"
