"""The same bits on a GPU. Skipped by name where torch sees none."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import pytest
import torch
from model_sizes import model_shape

from peers.compute.stage_part import build_stage_part, computing_of
from peers.config.compute_file import ComputeFile
from swarmnet.identifiers import PeerId
from swarmnet.model.activation_codec import decode, encode
from swarmnet.model.computing.choices import ActivationCheckpointing, Computing
from swarmnet.optimizer.replica import Replica
from swarmnet.run.activation_sizes import Codec
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Data, Sync

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

SHAPE = model_shape(width=64, layers=2, heads=4, kv_heads=2, inner=192)


@pytest.mark.parametrize("transform", ["hadamard", "dct"])
@pytest.mark.parametrize("selection", ["group", "top-k"])
def test_settled_weights_on_a_gpu_are_those_of_the_processor(selection: str, transform: str) -> None:
    manifest = Manifest(
        "gpu", PeerId("nobody"), stages=(2,), model=SHAPE, sync=Sync(selection=selection, transform=transform)
    )
    payloads: list[bytes] = []
    digests = []
    for device in ("cpu", "cuda"):
        part = build_stage_part(manifest, 0, device)
        replica = Replica(layout=part.layout, method=part.method, units=part.first_units().to(device))
        if not payloads:
            generator = torch.Generator().manual_seed(0)
            for number in range(4):
                gradient = torch.randn(part.layout.size, generator=generator)
                for start, stop in part.layout.padding:
                    gradient[start:stop] = 0
                payloads.append(part.method.contribute(gradient, 1, 0, PeerId(f"peer{number}")))
        for number, payload in enumerate(payloads):
            replica.add(0, PeerId(f"peer{number}"), payload)
        replica.apply(0)
        digests.append(replica.settle(0))
    assert all(one == other for one, other in pairwise(digests))


def test_what_peers_moved_settles_on_a_gpu_as_on_the_processor() -> None:
    """Told on either, read on both."""
    sync = Sync(method="local-steps", inner_batch_tokens=32)
    manifest = Manifest("gpu", PeerId("nobody"), stages=(2,), model=SHAPE, sync=sync)
    parts = [build_stage_part(manifest, 0, device) for device in ("cpu", "cuda")]
    replicas = [
        Replica(layout=part.layout, method=part.method, units=part.first_units().to(part.device))
        for part in parts
    ]
    generator, payloads = torch.Generator().manual_seed(0), []
    for number, part in enumerate([*parts, *parts]):
        gradient = torch.randn(part.layout.size, generator=generator)
        for start, stop in part.layout.padding:
            gradient[start:stop] = 0
        payloads.append(part.method.contribute(gradient.to(part.device), 1, 0, PeerId(f"peer{number}")))
    digests = []
    for replica in replicas:
        for number, payload in enumerate(payloads):
            replica.add(0, PeerId(f"peer{number}"), payload)
        replica.apply(0)
        digests.append(replica.settle(0))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("by_chance", [False, True])
@pytest.mark.parametrize("codec", get_args(Codec))
def test_hidden_states_are_coded_on_a_gpu_as_on_the_processor(codec: Codec, by_chance: bool) -> None:
    """But for the last bit of a division, and what chance decides."""
    shape = (2, 5, 77)
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    chance = torch.Generator().manual_seed(1) if by_chance else None
    data = encode(hidden.to("cuda"), codec, chance)
    there, here = decode(data, shape, codec, torch.device("cuda")), decode(data, shape, codec)
    assert there.device.type == "cuda"
    assert torch.allclose(there.cpu(), here, rtol=1e-6, atol=1e-7)
    steps = {"fp32": 0.0, "bf16": 2.0**-8, "int8": 2 / 127, "int6-tiles": 2 / 63, "int4-tiles": 2 / 15}
    assert float((here - hidden).abs().max()) <= (1 + by_chance) * steps[codec] * float(hidden.abs().max())


def test_a_stage_on_a_gpu_computes_and_contributes() -> None:
    manifest = Manifest("gpu", PeerId("nobody"), stages=(2,), model=SHAPE)
    part = build_stage_part(manifest, 0, "cuda")
    replica = Replica(layout=part.layout, method=part.method, units=part.first_units().to("cuda"))
    part.compute.publish(replica.live_tiles(ahead=False))
    tokens_BT = torch.randint(0, 256, (2, 16))
    finished = part.compute.finish("microbatch", tokens_BT, tokens_BT)
    assert finished.tokens == 32
    payload = part.method.contribute(part.compute.use_gradient(torch.clone), 32, 0, PeerId("me"))
    part.method.check(payload)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
def test_a_stage_on_a_gpu_computes_as_its_peer_file_says(
    recompute: ActivationCheckpointing, compiles: bool
) -> None:
    """In bf16 by itself, near what the processor computes in float32."""
    manifest = Manifest(
        "gpu", PeerId("nobody"), stages=(2,), model=SHAPE, sync=Sync(method="local-steps"),
        data=Data(seq_len=16, micro_batch_size=2),
    )  # fmt: skip
    tokens_BT = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    wish = ComputeFile(activation_checkpointing=recompute, compile=compiles, optimizer_state="cpu")
    losses = []
    for device in ("cpu", "cuda"):
        where = torch.device(device)
        computing = computing_of(wish, where) if device == "cuda" else Computing()
        part = build_stage_part(manifest, 0, device, computing)
        part.compute.warm_up(2, 16)
        replica = Replica(layout=part.layout, method=part.method, units=part.first_units().to(device))
        part.compute.publish(replica.live_tiles(ahead=False))
        losses.append(part.compute.finish("microbatch", tokens_BT, tokens_BT).loss_sum)
        payload = part.compute.use_gradient(
            lambda gradient, method=part.method: method.contribute(gradient, 32, 0, PeerId("me"))
        )
        part.method.check(payload)
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
