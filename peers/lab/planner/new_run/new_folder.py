"""Write the folder of a new run: run file, bootstrap file, tokenizer, links to text and model, and README.md.

Everything is prepared and checked in a temporary folder, which gets its name at the end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from peers.config.atomic_files import is_file, is_folder, is_there
from peers.config.errors import UserError
from peers.config.peer_file import default_state
from peers.config.run_file import initial_model_option, load_manifest, text_settings
from peers.data.documents import text_at
from peers.data.tokenizer import open_reader, open_tokenizer
from peers.lab.planner.new_run.machines import Machines, bootstrap_place, machines_of
from peers.lab.planner.new_run.proposal import (
    propose_size,
    propose_tuning,
    sequence_for,
    vocabulary_for,
)
from peers.lab.planner.new_run.readme import Readme, readme_of
from peers.lab.planner.new_run.text_facts import TextFacts, facts_of, format_of
from peers.lab.planner.plan_request import PlanRequest
from peers.lab.planner.shape.shape_search import search
from peers.lab.planner.shape.writing import WIDTH, text_of
from peers.state.model_config import join_reasons, read_config
from peers.state.start_fetch import TOKENIZER_FILES
from peers.state.start_folder import CONFIG, open_model, read_json
from peers.tools.owner.run_check import check_run
from swarmnet.identifiers import PeerId
from swarmnet.model.flops import operations_per_token
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import BYTES, STANDARD_LIBRARY, Data, FormatName, ModelShape, Sync

TEXT, MODEL, TOKENIZER = "text", "model", "tokenizer.json"
BOOTSTRAP_FILE, README = "bootstrap.yaml", "README.md"
EOS = "<|endoftext|>"
"""End of text of a tokenizer that is made here."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
Notify = Callable[[str, str], None]
"""Receives a word and what it is about, for people."""


@dataclass(frozen=True, slots=True)
class NewRun:
    """What the user typed."""

    folder: Path
    text: str
    model: Path | None
    lora: int
    peers: str
    hours: float
    address: str | None


@dataclass(frozen=True, slots=True)
class Made:
    """A new run in its folder."""

    manifest: Manifest
    reasons: tuple[str, ...]
    commands: tuple[str, ...]


def create(wanted: NewRun, notify: Notify, progress: Callable[[int, int], None]) -> Made:
    """Propose a run and write its folder. Raises UserError or TextError, and then leaves no folder."""
    _require_possible(wanted)
    place, port = bootstrap_place(wanted.address)
    text_format = "text" if wanted.text == STANDARD_LIBRARY else format_of(Path(wanted.text))
    if text_format == "messages" and wanted.model is None:
        raise UserError(
            f"--text {wanted.text}: conversations need a model that was trained on text: add --from MODEL_DIR"
        )
    with tempfile.TemporaryDirectory(prefix=f".{wanted.folder.name}.", dir=wanted.folder.parent) as scratch:
        folder = Path(scratch).absolute() / "new"
        folder.mkdir()
        try:
            made = _fill(folder, wanted, text_format, (place, port), notify, progress)
            folder.rename(wanted.folder)
        except OSError as error:
            raise UserError(f"{wanted.folder}: cannot be written: {error.strerror}") from None
    return made


def _require_possible(wanted: NewRun) -> None:
    """Raise UserError for options that exclude each other, and for what is not there."""
    if _NAME.fullmatch(wanted.folder.name) is None:
        raise UserError(f"{wanted.folder.name!r} is no name of a run: use up to 64 letters, digits, . _ -")
    if is_there(wanted.folder) or wanted.folder.is_symlink():
        raise UserError(f"{wanted.folder} exists, and is never overwritten; give another name")
    if not is_folder(wanted.folder.parent):
        raise UserError(f"{wanted.folder.parent} is no folder: create it, or give a name alone")
    if wanted.lora and wanted.model is None:
        raise UserError("--lora trains adapters of a model: add --from MODEL_DIR")
    if wanted.model is not None and not is_file(wanted.model / CONFIG):
        raise UserError(
            f"--from {wanted.model}: there is no {CONFIG}: name a folder with a Hugging Face model"
        )


def _fill(
    folder: Path,
    wanted: NewRun,
    text_format: FormatName,
    address: tuple[str, int],
    notify: Notify,
    progress: Callable[[int, int], None],
) -> Made:
    """Write all files of the run into `folder`."""
    source = _link_text(folder, wanted.text)
    shape = None if wanted.model is None else _shape_of(wanted.model)
    data = _tokenizer(folder, wanted, shape, text_format, source["path"], progress)
    vocabulary = 1 << 31 if shape is None else shape.vocab_size
    file = folder / TOKENIZER if data.tokenizer != BYTES else None
    reads = open_reader(data, file, vocabulary)
    text = facts_of(_place(folder, source["path"]), reads, progress)
    notify("text", f"{text.documents:,} documents, {text.bytes:,} bytes, {text.tokens:,} tokens")
    machines = machines_of(wanted.peers)
    notify("peers", str(machines))
    keys: dict[str, Any] = {
        "name": wanted.folder.name,
        "data": {"sources": [source], **_data_keys(data)},
    }
    run_file = folder / f"{wanted.folder.name}.yaml"
    if shape is None:
        reasons = _write_from_seed(run_file, keys, text, reads.vocabulary, machines, wanted.hours)
    else:
        reasons = _write_tuning(run_file, keys, text, shape, machines, wanted)
    manifest = load_manifest(run_file, PeerId(""))
    if wanted.model is not None:
        open_model(wanted.model, manifest)
    warnings = (*text.warnings, *check_run(run_file, manifest))
    multiaddr = _write_bootstrap(folder, wanted.folder.name, address)
    options = text_settings(manifest, folder) + initial_model_option(manifest, folder)
    readme = Readme(
        folder=wanted.folder,
        manifest=manifest,
        multiaddr=multiaddr,
        options=options.replace(str(folder), str(wanted.folder.absolute())),
        reasons=reasons,
        warnings=warnings,
    )
    (folder / README).write_text(readme_of(readme), encoding="utf-8")
    for warning in warnings:
        notify("warning", warning)
    return Made(manifest, reasons, readme.commands)


def _link_text(folder: Path, text: str) -> dict[str, str]:
    """Link the text into the run's folder, where publishing looks for it. Returns the source."""
    if text == STANDARD_LIBRARY:
        return {"name": STANDARD_LIBRARY, "path": STANDARD_LIBRARY}
    path = Path(text).expanduser().resolve()
    name = TEXT if is_folder(path) else TEXT + "".join(path.suffixes)
    (folder / name).symlink_to(path)
    return {"name": TEXT, "path": name}


def _place(folder: Path, path: str) -> str:
    return path if path == STANDARD_LIBRARY else str(folder / path)


def _shape_of(model: Path) -> ModelShape:
    """Return the shape of a public model. Raises UserError with the reasons if it cannot be a start."""
    config = read_config(read_json(model / CONFIG))
    if config.reasons:
        raise UserError(f"--from {model}: {join_reasons(config.reasons)}")
    sizes: dict[str, Any] = dict(config.values)
    return ModelShape(
        **sizes,
        qk_norm=bool(config.qk_norm),
        attention_bias=config.attention_bias,
        tie_word_embeddings=config.is_tied,
        rope_scaling=config.rope_scaling,
    )


def _tokenizer(
    folder: Path,
    wanted: NewRun,
    shape: ModelShape | None,
    text_format: FormatName,
    path: str,
    progress: Callable[[int, int], None],
) -> Data:
    """Write the run's tokenizer into its folder: the model's, or one made of the text. Returns the keys that
    name it, with defaults elsewhere. Raises UserError or TextError."""
    if wanted.model is not None and shape is not None:
        if not is_file(wanted.model / TOKENIZER):
            raise UserError(
                f"--from {wanted.model}: there is no {TOKENIZER}, with whose tokens it was trained"
            )
        for name in TOKENIZER_FILES:
            if is_file(wanted.model / name):
                shutil.copyfile(wanted.model / name, folder / name)
        data = Data(tokenizer=TOKENIZER, format=text_format)
        eos_token = _end_of(wanted.model / "tokenizer_config.json")
        if eos_token:
            open_tokenizer(folder / TOKENIZER, shape.vocab_size, eos_token)  # Raises if it is not one token.
        return replace(data, eos_token=eos_token)
    text = text_at([_place(folder, path)])
    vocabulary = vocabulary_for(text_at([_place(folder, path)], sys.maxsize).total_bytes)
    if not vocabulary:
        return Data()
    from peers.data.train_tokenizer import train_tokenizer

    (folder / TOKENIZER).write_bytes(train_tokenizer(text, vocabulary, EOS, progress)[0])
    return Data(tokenizer=TOKENIZER, eos_token=EOS)


def _end_of(config: Path) -> str:
    """Return the end of text in a tokenizer_config.json; empty: none."""
    token = read_json(config).get("eos_token") if is_file(config) else None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


def _data_keys(data: Data) -> dict[str, Any]:
    """Return the keys of a run file that differ from the defaults."""
    default = Data()
    names = ("tokenizer", "eos_token", "format")
    return {name: getattr(data, name) for name in names if getattr(data, name) != getattr(default, name)}


def _write_from_seed(
    run_file: Path,
    keys: dict[str, Any],
    text: TextFacts,
    vocabulary: int,
    machines: Machines,
    hours: float,
) -> tuple[str, ...]:
    """Write the run file of a model that starts from a seed, in the shape that the planner finds best. Return
    the reasons."""
    shape, tokens, why = propose_size(text, vocabulary, machines, hours * 3600)
    seq_len = sequence_for(text, shape.hidden_size)
    # The text is read once per epoch where a peer's memory does not hold it.
    sampling = {"sampling": "epoch"} if text.bytes > text.read_bytes else {}
    keys |= {"stages": [shape.num_hidden_layers], "model": _model_keys(shape)}
    keys["data"] |= {"seq_len": seq_len, **sampling}
    _write(run_file, keys)
    manifest = load_manifest(run_file, PeerId(""))
    classes = machines.classes(operations_per_token(manifest, 0))
    found = search(manifest, PlanRequest(classes, tokens=tokens))
    config = replace(manifest.sync, method=found.found[0].shape.manifest(manifest).sync.method).config
    rate = config.small_model_rate or Sync().learning_rate
    keys["sync"] = {"learning_rate": rate}
    _write(run_file, keys)
    reasons = (
        f"model: {why}",
        f"vocab_size: {vocabulary:,}" + ("" if "tokenizer" in keys["data"] else ", bytes: the text is small"),
        f"seq_len: {seq_len}, for a model of this width",
        f"learning_rate: {rate:g}, the best on small models (docs/learning.md); search with `swarmnet bench "
        "learning`",
    )
    planned = text_of(found, manifest, run_file)
    run_file.write_text(_comments(reasons) + planned, encoding="utf-8")
    return (*reasons, f"stages, rounds and method: for {machines}; see the run file")


def _write_tuning(
    run_file: Path,
    keys: dict[str, Any],
    text: TextFacts,
    shape: ModelShape,
    machines: Machines,
    wanted: NewRun,
) -> tuple[str, ...]:
    """Write the run file of a fine-tuning. Return the reasons."""
    assert wanted.model is not None, "its shape is known"
    (run_file.parent / MODEL).symlink_to(wanted.model.resolve())
    proposal = propose_tuning(text, shape, machines.count, machines.memory, wanted.lora)
    if len(proposal.keys["stages"]) > 1:
        shape = replace(shape, tie_word_embeddings=False)
    keys |= {
        **{name: value for name, value in proposal.keys.items() if name not in ("data", "model")},
        "init_checkpoint": {"path": MODEL, "origin": wanted.model.resolve().name},
        "model": _model_keys(shape) | proposal.keys.get("model", {}),
    }
    keys["data"] |= proposal.keys["data"]
    _write(run_file, keys, proposal.reasons)
    return proposal.reasons


def _model_keys(shape: ModelShape) -> dict[str, Any]:
    """Return the keys of a model in a run file: its sizes, and what differs from the defaults."""
    default, scaling = ModelShape(), shape.rope_scaling
    keys = {
        name: getattr(shape, name)
        for name in ModelShape.__slots__
        if name not in ("rope_scaling", "boundary", "experts", "lora")
        and (name in _SIZES or getattr(shape, name) != getattr(default, name))
    }
    if scaling != default.rope_scaling:
        keys["rope_scaling"] = {name: getattr(scaling, name) for name in type(scaling).__slots__}
    return keys


_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def _write(run_file: Path, keys: Mapping[str, Any], reasons: tuple[str, ...] = ()) -> None:
    body, dumper = StringIO(), YAML()
    dumper.width = WIDTH
    dumper.dump(dict(keys), body)
    run_file.write_text(_comments(reasons) + body.getvalue(), encoding="utf-8")


def _comments(reasons: tuple[str, ...]) -> str:
    """Return the reasons as comments of a run file."""
    head = ("Written by `swarmnet new`. Fill in contact, intended_use, license, and each source's licence.",)
    return "".join(f"# {line}\n" for line in (*head, *reasons)) if reasons else ""


def _write_bootstrap(folder: Path, name: str, address: tuple[str, int]) -> str:
    """Write the bootstrap's file, create its key in the state home, and return its multiaddr."""
    from protocols.signed.identity import load_or_create

    place, port = address
    peer_name = f"{name}-bootstrap"
    state = default_state(os.environ, sys.platform) / peer_name
    lines = [
        "# Others find the run through this peer. Its port must be open to them; it trains nothing.",
        "role: bootstrap",
        f"name: {json.dumps(peer_name)}",
        f"run: {json.dumps(f'{name}.run.json')}",
        f"listen: [/ip4/0.0.0.0/tcp/{port}]",
        "nat: false",
        'metrics: {listen: "off"}',
    ]
    (folder / BOOTSTRAP_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"{place}/tcp/{port}/p2p/{load_or_create(state / 'identity.key').peer_id}"
