"""The contribution benchmark: the sizes it promises and the baseline it compares with."""

import pytest
import torch

from peers.lab.bench.contribution import BANDS, CASES, FloatDemo, bench, model_shapes, render
from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import layout_of
from swarmnet.optimizer.method import method_of
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Sync

OVERHEAD = 200
"""Bytes of envelope and headers that the targets leave room for."""


@pytest.mark.parametrize(
    ("selection", "kept", "most_bits_per_vote", "least_times_below_dense"),
    [("top-k", 32, 10.2, 320), ("group", 128, 6.1, 168)],
)
def test_a_million_parameters_fit_the_promised_bytes(
    selection, kept, most_bits_per_vote, least_times_below_dense
):
    layout = layout_of(model_shapes(1_000_000))
    method = method_of(
        Manifest("test", PeerId("x"), sync=Sync(selection=selection, topk_per_chunk=kept)), layout
    )
    total = method.payload_bytes + OVERHEAD
    assert 8 * total / method.votes <= most_bits_per_vote
    assert 4 * layout.parameters / total >= least_times_below_dense


def test_the_baseline_sends_everything_when_it_may_and_keeps_nothing():
    baseline = FloatDemo(chunks=BANDS, kept=4096, decay=0.9)
    gradient = torch.randn(baseline.residual.shape, generator=torch.Generator().manual_seed(0))
    sent = baseline.encode(gradient, 1.0)
    assert baseline.residual.abs().max() < 1e-4
    far_from_zero = gradient.abs() > 1e-4
    assert torch.equal(baseline.decode([sent, sent])[far_from_zero], gradient.sign()[far_from_zero])


def test_the_report_has_a_row_per_case_and_is_readable():
    threads = torch.get_num_threads()
    report = bench(parameters=1000, overhead_bytes=OVERHEAD, repeats=1)
    assert torch.get_num_threads() == threads
    assert len(report.rows) == len(CASES)
    assert all(
        min(row.encode, row.decode, row.baseline_encode, row.baseline_decode) > 0 for row in report.rows
    )
    text = render(report)
    assert all(len(line) <= 100 for line in text.splitlines()[2:])
    assert len(text.splitlines()) == 4 + len(CASES)
    for row in report.rows:
        assert f"{row.payload_bytes:,}" in text
