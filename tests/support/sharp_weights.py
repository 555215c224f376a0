"""Weights of a small model for tests of what is written with it."""

from dataclasses import replace
from pathlib import Path

import torch
from model_sizes import model_shape
from torch import Tensor
from typed import typing

from peers.state.checkpoint_file import Model
from swarmnet.identifiers import PeerId
from swarmnet.model.decoder import initial_units
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.parameters import parameter_shapes, whole
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import ModelShape


def sharp_weights(shape: ModelShape) -> dict[str, Tensor]:
    """Large ones, so that what comes next depends sharply on what came before."""
    layout = layout_of(parameter_shapes(shape, whole(shape)))
    flat = to_floats(initial_units(replace(shape, initializer_range=0.4), whole(shape), layout, seed=1))
    return {
        entry.name: flat[entry.offset : entry.offset + entry.size].view(entry.shape)
        for entry in layout.entries
    }


LLAMA = model_shape(
    width=32, layers=3, heads=4, kv_heads=2, inner=48, head_dim=16, max_position_embeddings=64, rope_theta=5e5
)


def stage_weights(shape: ModelShape, stages: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """Every stage's tensors as views of its flat vector, moved off their start so that norms matter."""
    manifest = Manifest("test", PeerId("owner"), stages=stages, model=shape)
    found = []
    for stage in range(len(manifest.stages)):
        span = manifest.span(stage)
        layout = layout_of(parameter_shapes(shape, span))
        flat = to_floats(initial_units(shape, span, layout, seed=1))
        flat *= 1 + torch.rand(flat.shape, generator=torch.Generator().manual_seed(stage))
        found.append(
            {
                entry.name: flat[entry.offset : entry.offset + entry.size].view(entry.shape)
                for entry in layout.entries
            }
        )
    return found


def page_of_what_commands_take_home(manifest, folder, monkeypatch, capsys):
    """The exported model's page. What is exported generates and evaluates as the checkpoint does."""
    model = Model(manifest, tuple(stage_weights(manifest.model, manifest.stages)), 5)
    monkeypatch.setattr("peers.state.checkpoint_file.newest", lambda source: model)
    monkeypatch.setattr("peers.data.documents.held_out_text", lambda: b"for each in range(10):\n" * 9)
    monkeypatch.chdir(folder)
    swarmnet = typing(capsys, monkeypatch)
    code, out, _ = swarmnet("export", "--hf", "model", "--from", "state")
    assert code == 0
    assert "computes the same for 64 tokens" in out
    for command in (["generate", "--prompt", "def ", "--tokens", 20, "--seed", 1], ["evaluate"]):
        told = [swarmnet(*command, "--from", source)[:2] for source in ("state", "model")]
        assert told[0] == told[1]
        assert told[0][0] == 0
    return Path("model/README.md").read_text()
