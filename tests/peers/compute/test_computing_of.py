"""What a peer file's `compute` comes to on this machine, and what it is told where it cannot be."""

from __future__ import annotations

import pytest
import torch
from model_sizes import model_shape

from peers.compute.memory_budget import all_needs
from peers.compute.stage_part import build_stage_part, computing_of, devices_of
from peers.config.compute_file import ComputeFile
from peers.config.errors import ConfigError, UserError
from peers.config.peer_file import load
from peers.tools.doctor.gpu_checks import as_asked
from swarmnet.identifiers import PeerId
from swarmnet.model.computing.choices import Computing
from swarmnet.resources.memory_estimate import PROCESS_BYTES
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Sync

CPU = torch.device("cpu")
SHAPE = model_shape(width=256, layers=8, heads=8, inner=1024, max_position_embeddings=256)


def manifest(**sync):
    return Manifest("m", PeerId("owner"), stages=(8,), model=SHAPE, sync=Sync(**sync))


def test_a_processor_computes_in_float32_unless_told_otherwise():
    assert computing_of(ComputeFile(), CPU) == Computing("fp32")
    asked = ComputeFile(dtype="bf16", activation_checkpointing="layer", optimizer_state="cpu")
    assert computing_of(asked, CPU) == Computing("bf16", "layer", optimizer_state="cpu")


def test_layers_are_compiled_for_gpus_only_and_doctor_says_so(tmp_path):
    with pytest.raises(UserError, match=r"is for GPUs.*set it to false"):
        computing_of(ComputeFile(compile=True), CPU)
    file = tmp_path / "peer.yaml"
    file.write_text("role: bootstrap\ndevice: cpu\ncompute: {compile: true}\n")
    computing, line = as_asked(load(file))
    assert computing == Computing()
    assert (line.check, line.level, line.fix) == ("gpu", "fail", "set it to false")
    file.write_text("role: bootstrap\ndevice: cpu\ncompute: {activation_checkpointing: layer}\n")
    assert as_asked(load(file)) == (Computing(activation_checkpointing="layer"), None)


def test_a_peer_says_that_it_needs_less_where_it_computes_in_bf16_and_keeps_less():
    def needs(computing, of):
        return all_needs(of, CPU, 0, computing)[0]

    for of in (manifest(), manifest(method="local-steps")):
        plain, half = needs(Computing(), of), needs(Computing("bf16"), of)
        assert half.weights < plain.weights
        assert half.graph < plain.graph
    layered = needs(Computing(activation_checkpointing="layer"), manifest())
    assert layered.graph < plain.graph / 5
    assert layered.least < plain.least
    waiting = needs(Computing(activation_checkpointing="stage"), manifest())
    assert waiting.graph < layered.graph


def test_a_gradient_that_is_used_at_once_is_kept_in_its_own_numbers():
    """One that others are added to is not."""
    for sync, kind in (
        ({"method": "local-steps"}, torch.bfloat16),
        ({"method": "local-steps", "inner_batch_tokens": 1 << 20}, torch.float32),
        ({}, torch.float32),
    ):
        part = build_stage_part(manifest(**sync), 0, computing=Computing("bf16"))
        assert part.compute.use_gradient(lambda gradient: gradient.dtype) == kind


def test_devices_are_a_number_a_list_or_all_that_there_are(monkeypatch):
    assert devices_of(ComputeFile(), CPU) == devices_of(ComputeFile(devices="all"), CPU) == [CPU]
    assert devices_of(ComputeFile(devices=3), CPU) == [CPU] * 3
    with pytest.raises(UserError, match="here the processor computes"):
        devices_of(ComputeFile(devices=(0, 1)), CPU)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    card = torch.device("cuda")
    for wish, numbers in ((1, [0]), ("all", [0, 1, 2, 3]), (2, [0, 1]), ((3, 1), [3, 1])):
        found = devices_of(ComputeFile(devices=wish), card)
        assert found == [torch.device("cuda", number) for number in numbers]
    with pytest.raises(UserError, match="there is no GPU 4 here, only 0 to 3"):
        devices_of(ComputeFile(devices=5), card)
    with pytest.raises(UserError, match=r"compute\.compile is for one device"):
        devices_of(ComputeFile(devices=2, compile=True), card)


def test_devices_are_typed_in_the_peer_file(tmp_path):
    file = tmp_path / "peer.yaml"
    for text, wish in (("all", "all"), ("2", 2), ("[0, 2]", (0, 2))):
        file.write_text(f"role: bootstrap\ncompute: {{devices: {text}}}\n")
        assert load(file).compute.devices == wish
    for text in ("0", "[]", "some", "[-1]"):
        file.write_text(f"role: bootstrap\ncompute: {{devices: {text}}}\n")
        with pytest.raises(ConfigError, match=r"compute\.devices"):
            load(file)


def test_two_cards_need_about_half_of_the_memory_each_and_two_processes_here_more_in_all():
    (one,) = all_needs(manifest(), torch.device("cuda"), 0)
    (each,) = all_needs(manifest(), torch.device("cuda"), 0, devices=2)
    assert one.least / 2 < each.least < 0.8 * one.least, "beside its half a layer and the tables at times"
    (here,) = all_needs(manifest(), CPU, 0)
    (both,) = all_needs(manifest(), CPU, 0, devices=2)
    (with_another_node,) = all_needs(manifest(), CPU, 0, devices=1, remote_devices=1)
    assert here.weights / 2 < with_another_node.weights < both.weights
    assert with_another_node.process < both.process
    (gpu_of_two_nodes,) = all_needs(manifest(), torch.device("cuda"), 0, devices=1, remote_devices=1)
    assert gpu_of_two_nodes == each
    assert both.process - here.process == 2 * PROCESS_BYTES
    assert both.weights > here.weights
