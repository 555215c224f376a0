"""How chunks of a stage lie on several devices."""

from dataclasses import replace

import pytest
import torch
from model_sizes import model_shape

from swarmnet.model.computing.shares import Shares
from swarmnet.model.flat_layout import Layout, layout_of
from swarmnet.model.parameters import parameter_shapes, whole
from swarmnet.run.schema import Experts, ModelShape

LLAMA = model_shape(width=96, layers=3, heads=4, inner=200, vocab_size=256, max_position_embeddings=64)
EXPERTS = replace(LLAMA, qk_norm=True, experts=Experts(num_experts=4, top_k=2))


def layout(shape: ModelShape) -> Layout:
    return layout_of(parameter_shapes(shape, whole(shape)))


@pytest.mark.parametrize("shape", [LLAMA, EXPERTS])
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 7])
def test_every_number_lies_on_one_device_and_each_has_about_as_many(shape, devices):
    shares = Shares(layout(shape), devices)
    at, sizes = 0, [0] * devices
    for run in shares.runs():
        assert run.start == at, "one after the other"
        at = run.stop
        sizes[run.device] += run.stop - run.start
    assert at == shares.whole.size
    layouts = [shares.layout(device) for device in range(devices)]
    assert sizes == [each.size for each in layouts]
    pieces = len(shares.pieces)
    assert max(sizes) - at / devices <= 4096 * pieces, "not more than a chunk of each piece too many"


@pytest.mark.parametrize("devices", [2, 5])
def test_a_share_knows_its_parameters_its_padding_and_all_blocks(devices):
    shares = Shares(layout(EXPERTS), devices)
    numbers = torch.full((shares.whole.size,), -1)
    for number, entry in enumerate(shares.whole.entries):
        numbers[entry.place] = number
    for device in range(devices):
        own = shares.layout(device)
        share = torch.cat([numbers[run.start : run.stop] for run in shares.runs() if run.device == device])
        for number, entry in enumerate(own.entries):
            assert (share[entry.place] == number).all()
            assert entry.size == (share == number).sum()
        padded = torch.zeros(own.size, dtype=torch.bool)
        for start, stop in own.padding:
            padded[start:stop] = True
        assert torch.equal(padded, share == -1)
        assert list(own.block_ranges()) == list(shares.whole.block_ranges()), "told apart by their number"
        assert [plane.stop for plane in own.planes][-1] == own.size
