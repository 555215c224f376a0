"""The operations that utilisation is a share of, beside what torch counts while it computes."""

from dataclasses import replace

import pytest
import torch
from clocks import on_virtual_clock
from model_sizes import model_shape
from swarm import tiny_manifest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from watched import Silent, Watched

from peers.telemetry.metrics import PeerMetrics
from peers.worker.watch.sampler import WorkerSampler
from swarmnet.identifiers import PeerId
from swarmnet.model.decoder import initial_units, parameter_shapes
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.flops import operations_per_token
from swarmnet.model.stage_compute import StageCompute, copied
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Data, Experts

SHAPE = model_shape(
    width=32, layers=4, heads=4, kv_heads=2, inner=64, vocab_size=128, max_position_embeddings=64
)
RATIO = "swarmnet_train_flops_utilization_ratio"
MIXED = replace(SHAPE, qk_norm=True, intermediate_size=24, experts=Experts(num_experts=4, top_k=2))
DATA = Data(seq_len=24, micro_batch_size=2)


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, num_key_value_heads=4, qk_norm=True), MIXED])
def test_they_are_those_of_the_matrix_products_that_torch_makes(monkeypatch, shape):
    monkeypatch.setattr(
        "swarmnet.model.linear._onednn_is_faster", lambda: False
    )  # Which torch does not count.
    manifest = Manifest("m", PeerId("owner"), stages=(1, 2, 1), model=shape, data=DATA)
    counted = []
    for stage in range(3):
        span = manifest.span(stage)
        layout = layout_of(parameter_shapes(shape, span))
        compute = StageCompute(shape=shape, span=span, layout=layout)
        compute.publish(copied(to_floats(initial_units(shape, span, layout, 0))))
        tokens_BT = torch.zeros(DATA.micro_batch_size, DATA.seq_len, dtype=torch.int64)
        inputs = tokens_BT if stage == 0 else torch.randn(*tokens_BT.shape, shape.hidden_size)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            if stage == 2:
                compute.finish("one", inputs, tokens_BT)
            else:
                compute.backward("one", torch.ones_like(compute.forward("one", inputs)))
        counted.append(counter.get_total_flops() / tokens_BT.numel())
    assert counted == [operations_per_token(manifest, stage) for stage in range(3)]


@on_virtual_clock
async def test_utilisation_is_the_models_operations_by_the_peak_and_absent_without_one():
    def text(metrics):
        return metrics.text().decode()

    swarm, metrics = Watched(tiny_manifest((3,))), PeerMetrics(process=False)
    swarm.open()
    worker = swarm.start("a", 0).worker
    observer = WorkerSampler(worker=worker, metrics=metrics, report=Silent(), log=Silent(), peak=1e9)
    await swarm.until(lambda: swarm.committed(0) > 1, 30.0)
    first, at = worker.services.pipeline_service.ledger.tokens, swarm.loop.time()
    observer.look()
    await swarm.during(3.0)
    last, seconds = worker.services.pipeline_service.ledger.tokens, swarm.loop.time() - at
    observer.look()
    each = operations_per_token(swarm.signed.manifest, 0)
    (share,) = [line for line in text(metrics).splitlines() if line.startswith(RATIO)]
    assert float(share.split()[1]) == pytest.approx((last - first) / seconds * each / 1e9)
    assert RATIO not in text(swarm.metrics["a"]), "nobody told it a peak"
    await swarm.stop_watching()
    await swarm.close()
