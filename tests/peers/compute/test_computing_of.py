"""What a peer file's `compute` comes to on this machine, and what it is told where it cannot be."""

from __future__ import annotations

import pytest
import torch

from peers.compute.memory_budget import all_needs
from peers.compute.stage_part import computing_of, real_part
from peers.config.compute_file import ComputeFile
from peers.config.peer_file import load
from peers.errors import UserError
from peers.tools.doctor.gpu import as_asked
from swarmnet.identifiers import PeerId
from swarmnet.model.computing.choices import Computing
from swarmnet.run.manifest import Manifest, ModelShape, Sync

CPU = torch.device("cpu")
SHAPE = ModelShape(width=256, heads=8, head_width=32, feed_forward=1024, layers=8, context=256)


def manifest(**sync):
    return Manifest("m", PeerId("owner"), stages=(8,), model=SHAPE, sync=Sync(**sync))


def test_a_processor_computes_in_float32_unless_told_otherwise():
    assert computing_of(ComputeFile(), CPU) == Computing("fp32")
    asked = ComputeFile(dtype="bf16", recompute="layer", moments="host")
    assert computing_of(asked, CPU) == Computing("bf16", "layer", moments="host")


def test_layers_are_compiled_for_gpus_only_and_doctor_says_so(tmp_path):
    with pytest.raises(UserError, match=r"is for GPUs.*set it to false"):
        computing_of(ComputeFile(compile=True), CPU)
    file = tmp_path / "peer.yaml"
    file.write_text("role: bootstrap\ndevice: cpu\ncompute: {compile: true}\n")
    computing, line = as_asked(load(file))
    assert computing == Computing()
    assert (line.check, line.level, line.fix) == ("gpu", "fail", "set it to false")
    file.write_text("role: bootstrap\ndevice: cpu\ncompute: {recompute: layer}\n")
    assert as_asked(load(file)) == (Computing(recompute="layer"), None)


def test_a_peer_says_that_it_needs_less_where_it_computes_in_bf16_and_keeps_less():
    def needs(computing, of):
        return all_needs(of, CPU, 0, computing)[0]

    for of in (manifest(), manifest(method="local-steps")):
        plain, half = needs(Computing(), of), needs(Computing("bf16"), of)
        assert half.weights < plain.weights
        assert half.graph < plain.graph
    layered = needs(Computing(recompute="layer"), manifest())
    assert layered.graph < plain.graph / 5
    assert layered.least < plain.least
    waiting = needs(Computing(recompute="stage"), manifest())
    assert waiting.graph < layered.graph


def test_a_gradient_that_is_used_at_once_is_kept_in_its_own_numbers():
    """One that others are added to is not."""
    for sync, kind in (
        ({"method": "local-steps"}, torch.bfloat16),
        ({"method": "local-steps", "step_tokens": 1 << 20}, torch.float32),
        ({}, torch.float32),
    ):
        part = real_part(manifest(**sync), 0, computing=Computing("bf16"))
        assert part.compute.use_gradient(lambda gradient: gradient.dtype) == kind
