"""What a device adds to the gradients of a stage that several devices hold, in a group of one device."""

from collections.abc import Iterator

import pytest
import torch
from model_sizes import model_shape
from torch import distributed

from swarmnet.model.computing.choices import PLAIN
from swarmnet.model.computing.spread_weights import SpreadWeights
from swarmnet.model.computing.whole_weights import Rows
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.parameters import parameter_shapes
from swarmnet.run.manifest import Span
from swarmnet.run.schema import Experts

SHAPE = model_shape(
    width=16,
    layers=2,
    heads=2,
    kv_heads=2,
    inner=12,
    qk_norm=True,
    experts=Experts(num_experts=4, top_k=2, aux_loss_coef=0.01),
)


@pytest.fixture
def device_group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("count", [True, False])
def test_a_device_without_sequences_adds_no_balance_loss_of_experts(device_group: None, count: bool):
    span = Span(0, 1, has_embedding=False, has_head=False)
    layout = layout_of(parameter_shapes(SHAPE, span))
    weights = SpreadWeights(
        shape=SHAPE, span=span, layout=layout, computing=PLAIN, device=torch.device("cpu")
    )
    drawn = torch.Generator().manual_seed(0)
    weights.publish([(0, torch.randn(layout.size, generator=drawn) / 4)], lambda version: False)
    hidden = torch.randn(1, 6, SHAPE.hidden_size, generator=drawn).requires_grad_()
    output = weights.run(weights.version, hidden, None, 1.0, Rows(slice(0, 1), count=count))
    weights.add_gradient_of(weights.version, 0.0 * output.sum(), hidden, 1.0)
    assert bool(weights.use_gradient(torch.count_nonzero)) == count, "the balance loss is the only one here"
