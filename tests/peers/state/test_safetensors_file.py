"""A file whose head is large for nothing is refused before the library parses it, wherever one is opened."""

import json
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from swarm import sign, tiny_manifest

from peers.state import checkpoint_file
from peers.state.archive import ArchivedCheckpoint
from peers.state.archive_restore import Restoring
from peers.state.checkpoint_file import CheckpointError
from peers.state.safetensors_file import MAX_HEAD_BYTES, MAX_TENSORS, open_tensors
from peers.state.start_folder import StartError, _read_headers
from peers.tools.model.export import ExportError, load_weights
from swarmnet.model.state_layout import state_layout

MANIFEST = tiny_manifest()


def write(file: Path, head: bytes) -> Path:
    file.write_bytes(struct.pack("<Q", len(head)) + head)
    return file


def empty_tensors(count: int) -> bytes:
    one = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return json.dumps({f"t{number}": one for number in range(count)}).encode()


LONG = b"{" + b" " * MAX_HEAD_BYTES + b"}"


@pytest.mark.parametrize(
    ("head", "reason"), [(LONG, "its head has"), (empty_tensors(MAX_TENSORS + 1), "it names 65537 tensors")]
)
def test_a_head_that_no_model_needs_is_refused_everywhere(tmp_path, monkeypatch, head, reason):
    file = write(tmp_path / "stage-0-round-00000001.safetensors", head)
    monkeypatch.setattr(
        "peers.state.safetensors_file.safe_open", lambda *_, **__: pytest.fail("it is parsed")
    )
    with pytest.raises(SafetensorError, match=reason):
        open_tensors(file)
    with pytest.raises(StartError, match=reason):
        _read_headers(file)
    with pytest.raises(CheckpointError, match=reason):
        checkpoint_file.read(file)


def test_a_file_of_an_archive_has_no_more_tensors_than_the_manifest_needs(tmp_path):
    data = write(tmp_path / "file", empty_tensors(1000)).read_bytes()
    archive = SimpleNamespace(checkpoint=lambda _: data)
    entry = ArchivedCheckpoint("stage-0-round-00000001.safetensors", 0, 1, len(data), "", (), 0.0)
    restoring = Restoring("archive", sign(MANIFEST), lambda *_: None)
    with pytest.raises(CheckpointError, match="it names 1000 tensors, of at most"):
        restoring._copy_checked(archive, entry, tmp_path, state_layout(MANIFEST, 0))


def test_an_exported_folder_is_held_to_the_same(tmp_path):
    config = {
        "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "intermediate_size": 64, "architectures": ["LlamaForCausalLM"],
        "rope_theta": 1e4, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "initializer_range": 0.02,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    write(tmp_path / "a.safetensors", LONG)
    with pytest.raises(ExportError, match="its head has"):
        load_weights(tmp_path)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_opened(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    file.write_bytes(data)
    with pytest.raises((SafetensorError, OSError)):
        open_tensors(file)
