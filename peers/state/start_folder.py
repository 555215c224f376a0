"""Read the model that a run starts from in a local folder, check it, and convert it to fixed point.

The model is a Llama, Mistral, Qwen2 or Qwen3 in the layout of Hugging Face: config.json and safetensors
files. Nothing in the folder is executed. Its content leaves this machine only if it is bit-identical to the
model in the run's manifest. A run may add LoRA factors. A digest is the hash of a stage's weights in fixed
point.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from peers.config.errors import UserError
from peers.state.checkpoint_file import state_digest
from peers.state.model_config import FAMILIES, ROPE_NUMBERS, join_reasons, read_config
from peers.state.safetensors_file import MAX_TENSORS, open_tensors
from swarmnet.model.fixed_point import GRID_BITS
from swarmnet.model.parameters import EMBEDDING, HEAD, is_factor, parameter_shapes, whole
from swarmnet.model.state_layout import first_state
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import InitCheckpoint, Lora, ModelShape, RopeScaling

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
MAX_JSON_BYTES = 16 << 20
"""Maximum size of config.json (a few KB) and of an index (about 100 bytes a tensor)."""
LARGEST = 2.0 ** (31 - GRID_BITS)
"""Bound of the weights: the int32 of the fixed-point format ends there."""
FLOATS = ("F64", "F32", "F16", "BF16")
BUFFER = ".rotary_emb.inv_freq"
"""Suffix of tensors in older files that are not parameters; they follow from the configuration."""
READ_BYTES = 1 << 20


class StartError(UserError):
    """The run cannot start from this model. The message names the folder and the reason."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A model that fits a run."""

    path: Path
    files: tuple[str, ...]
    """Files with weights, sorted."""
    places: Mapping[str, str]
    """Maps parameter to file."""
    names: Mapping[str, str]
    """Maps parameter to its tensor in the file. A tied embedding and head have the same."""

    def tensor(self, name: str) -> Tensor:
        """Return a parameter in the file's number format. Raises StartError if the file cannot be read, or a
        value is not finite or too large for fixed point."""
        try:
            with open_tensors(self.path / self.places[name]) as file:
                values: Tensor = file.get_tensor(self.names[name])
        except (SafetensorError, OSError) as error:
            raise StartError(f"{self.path / self.places[name]}: cannot be read: {error}") from None
        if not float(values.abs().max()) < LARGEST:  # This is also true for NaN.
            raise StartError(
                f"{self.path}: {name} has a value that is not finite, or {LARGEST:g} and more: weights lie "
                f"on a grid of 2**-{GRID_BITS} within that"
            )
        return values

    def sha256(self) -> str:
        """Return the SHA-256 of the output of `sha256sum config.json *.safetensors`."""
        return hash_of({name: _hash_file(self.path / name) for name in (CONFIG, *self.files)})


def hash_of(hashes: Mapping[str, str]) -> str:
    """Return the hash of a model's folder. `hashes`: of config.json and each safetensors file, by name."""
    names = (CONFIG, *sorted(hashes.keys() - {CONFIG}))
    return hashlib.sha256("".join(f"{hashes[name]}  {name}\n" for name in names).encode()).hexdigest()


def open_model(path: Path, manifest: Manifest) -> Folder:
    """Check that the model in a folder fits the run: configuration, index, and names, shapes and number
    formats of all tensors. Returns its description; no weight is read yet. Raises StartError."""
    is_tied = _require_fit(path, manifest.model)
    expected = parameter_shapes(replace(manifest.model, lora=Lora()), whole(manifest.model))
    names = {tensor: tensor for tensor in expected}
    max_tensors = len(expected) + manifest.model.num_hidden_layers  # A buffer in each layer of older files.
    files = tuple(sorted(found.name for found in path.glob("*.safetensors")))
    file_of: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        for tensor, (shape, dtype) in _read_headers(path / file, max_tensors).items():
            if tensor in file_of:
                raise StartError(f"{path}: {tensor} is in {file_of[tensor]} and in {file}: move one away")
            if dtype not in FLOATS:
                raise StartError(f"{path}: {tensor} is {dtype}; numbers must be one of {', '.join(FLOATS)}")
            file_of[tensor] = file
            shapes[tensor] = shape
    for name, other in ((HEAD, EMBEDDING), (EMBEDDING, HEAD)):
        if is_tied and name in names and name not in shapes:  # Two copies of one tensor.
            names[name] = other
    for tensor, shape in expected.items():
        found = shapes.get(names[tensor])
        if found is None:
            raise StartError(
                f"{path}: {tensor} is missing; there are {len(shapes)} tensors in {_count_files(files)}"
            )
        if found != shape:
            raise StartError(f"{path}: {tensor} is {found}, the run's model has {shape}")
    used = set(names.values())
    for tensor in shapes:
        if tensor not in used and not tensor.endswith(BUFFER):
            cure = "; write model.tie_word_embeddings: false" if tensor == HEAD else ""
            raise StartError(
                f"{path}: {tensor} is no parameter of the {_architecture_name(manifest.model)} of the run"
                f"{cure}"
            )
    _require_index(path, file_of)
    return Folder(path, files, {tensor: file_of[names[tensor]] for tensor in expected}, names)


def start_state(path: Path, manifest: Manifest, stage: int, model: Folder | None = None) -> Tensor:
    """Return the initial weights of a stage as int32 [state_layout.size], from the model in the folder
    `path`. LoRA factors are drawn by the run's seed. `model` is the opened folder; None: it is opened here.
    Raises StartError if the model does not fit, or if the manifest names another digest of these weights."""
    opened = model or open_model(path, manifest)

    def read_parameter(name: str) -> Tensor | None:
        return None if is_factor(name) else opened.tensor(name)

    units = first_state(manifest, stage, read_parameter)
    digests = manifest.init_checkpoint.digests
    if digests and state_digest(-1, units).hex() != digests[stage]:
        raise StartError(
            f"{path} holds other weights than those that the run starts from (stage {stage}); get "
            f"{manifest.init_checkpoint.origin or 'the model'} again, or leave `init_checkpoint` out of "
            "the peer "
            "file: others "
            "that have it give it"
        )
    return units


def pinned(path: Path, manifest: Manifest) -> InitCheckpoint:
    """Return the manifest's entry `init_checkpoint` with the SHA-256 of the files in a folder, and the digest
    of each stage's initial weights. Raises StartError if the model there does not fit the run."""
    model = open_model(path, manifest)
    sha256 = require_hash(model, manifest)
    stages = range(len(manifest.stages))
    # Without digests in the manifest, `start_state` compares with none.
    unpinned = replace(manifest, init_checkpoint=replace(manifest.init_checkpoint, digests=()))
    digests = tuple(state_digest(-1, start_state(path, unpinned, stage, model)).hex() for stage in stages)
    return replace(manifest.init_checkpoint, sha256=sha256, digests=digests)


def require_hash(model: Folder, manifest: Manifest) -> str:
    """Return the SHA-256 of the model's files. Raises StartError if the manifest names another one."""
    sha256, wanted = model.sha256(), manifest.init_checkpoint.sha256
    if wanted not in ("", sha256):
        raise StartError(
            f"{model.path} is not the model that init_checkpoint.sha256 names: that is "
            f"{wanted[:16]}..., the folder's "
            f"is {sha256} (`sha256sum {CONFIG} *.safetensors | sha256sum` in it)"
        )
    return sha256


def _require_fit(path: Path, shape: ModelShape) -> bool:
    """Raise StartError with all reasons if the configuration in the folder `path` is not that of the run's
    model, `shape`. The run may use shorter sequences than the model allows, and untie its head. Returns
    whether the head in the folder is tied to the embedding."""
    config = read_config(read_json(path / CONFIG), length=shape.max_position_embeddings)
    reasons = [*config.reasons]
    wanted_values: dict[str, object] = {}
    if config.qk_norm is not None:  # Else the architecture is unknown.
        wanted_values = {"qk_norm": config.qk_norm, "attention_bias": config.attention_bias}
    if not config.is_tied:
        wanted_values["tie_word_embeddings"] = False
    if not any("rope_" in reason for reason in reasons):
        wanted_values["rope_scaling"] = config.rope_scaling
    for key, wanted in wanted_values.items():
        run_value = getattr(shape, key)
        if run_value != wanted:
            shown = f"the run file has {key}: {_as_yaml(run_value)}"
            reasons.append(f"{shown}; write model.{key}: {_as_yaml(wanted)}")
    for key, value in config.values.items():
        run_size = getattr(shape, key)
        if key == "max_position_embeddings":
            if run_size > value:
                reasons.append(f"{key}: {value}; the run file has {run_size}; write at most {value}")
        elif run_size != value:
            reasons.append(f"{key}: {value}; the run file has {run_size}; write {value}")
    if reasons:
        raise StartError(f"{path / CONFIG} is not of the run's model: {join_reasons(tuple(reasons))}")
    return config.is_tied


def _as_yaml(value: object) -> str:
    """Return a value as a run file has it, on one line. Of a RopeScaling, only what its type uses."""
    if not isinstance(value, RopeScaling):
        return str(value).lower()
    keys = ", ".join(f"{key}: {getattr(value, key)}" for key in ROPE_NUMBERS[value.rope_type])
    return f"{{rope_type: {value.rope_type}{', ' * bool(keys)}{keys}}}"


def _architecture_name(shape: ModelShape) -> str:
    kind = (shape.qk_norm, shape.attention_bias)
    return next(name for name, it in FAMILIES.items() if (it.qk_norm, it.attention_bias) == kind)


def _read_headers(file: Path, max_tensors: int = MAX_TENSORS) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and number format by tensor name from a file's header. Raises StartError."""
    try:
        with open_tensors(file, max_tensors) as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise StartError(f"{file}: is no safetensors file that can be read: {error}") from None


def _require_index(path: Path, places: Mapping[str, str]) -> None:
    """Raise StartError if there is an index and it differs from `places`, the map of parameter to file."""
    if not (path / INDEX).exists():
        return
    weight_map = read_json(path / INDEX).get("weight_map")
    if weight_map != places:
        raise StartError(f"{path / INDEX} does not say what the safetensors files in {path} hold")


def _count_files(files: Sequence[str]) -> str:
    return f"{len(files)} safetensors file{'s' * (len(files) != 1)}"


def _hash_file(file: Path) -> str:
    """Return the SHA-256 of a file. Raises StartError if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with file.open("rb") as opened:
            while block := opened.read(READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise StartError(f"cannot read {file}: {error.strerror}") from None
    return digest.hexdigest()


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises StartError."""
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise StartError(f"{file} is longer than {MAX_JSON_BYTES >> 20} MiB")
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise StartError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise StartError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise StartError(f"{file} is not a JSON object")
    return content
