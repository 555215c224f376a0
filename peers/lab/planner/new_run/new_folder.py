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
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any, get_args

from ruamel.yaml import YAML

from peers.config.atomic_files import is_file, is_folder, is_there
from peers.config.errors import UserError
from peers.config.peer_file import default_state
from peers.config.run_file import initial_model_option, load_manifest, text_settings
from peers.data.documents import LONGEST_CORPUS_BYTES, text_at
from peers.data.tokenizer import open_reader
from peers.lab.planner.new_run.machines import Machines, bootstrap_place, machines_of
from peers.lab.planner.new_run.proposal import propose_size, propose_tuning, vocabulary_for
from peers.lab.planner.new_run.readme import commands_of, readme_of
from peers.lab.planner.new_run.text_facts import TextFacts, facts_of, format_of
from peers.lab.planner.plan_request import PlanRequest
from peers.lab.planner.shape.shape_report import sentence, warnings
from peers.lab.planner.shape.shape_search import search
from peers.lab.planner.shape.writing import WIDTH, text_of
from peers.state.model_config import join_reasons, read_config
from peers.state.start_fetch import TOKENIZER_FILES
from peers.state.start_folder import CONFIG, open_model, read_json
from peers.tools.owner.run_check import check_run
from swarmnet.identifiers import PeerId
from swarmnet.model.flops import operations_per_token
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import (
    STANDARD_LIBRARY,
    Data,
    InitCheckpoint,
    ModelShape,
    SourceKind,
    Sync,
    TextSource,
)

TEXT, MODEL, TOKENIZER = "text", "model", "tokenizer.json"
EOS = "<|endoftext|>"
"""End of text of a tokenizer that is made here."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
HEAD = (
    "Written by `swarmnet new NAME --text PATH`. Fill in contact, intended_use, license, and each source's "
    "licence and kind."
)
SOURCE_HINTS = (
    ("licence: unknown", "SPDX name, such as CC0-1.0; the run's entry and its report state it"),
    ("kind: other", f"or {', '.join(kind for kind in get_args(SourceKind) if kind != 'other')}"),
)
"""Keys of a source, with their defaults, that only the creator knows, and their values."""


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
    """What was written."""

    notes: tuple[str, ...]
    """Reasons of the settings, and warnings."""
    commands: tuple[str, ...]


def create(wanted: NewRun, notify: Callable[[str, str], None], progress: Callable[[int, int], None]) -> Made:
    """Propose a run and write its folder. `notify` receives a word and what it is about. Raises UserError or
    TextError, and then leaves no folder."""
    _require_possible(wanted)
    address, name = bootstrap_place(wanted.address), wanted.folder.name
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=wanted.folder.parent) as scratch:
        folder = Path(scratch).absolute() / "new"
        try:
            folder.mkdir()
            data = _data(folder, wanted, progress)
            shape = None if wanted.model is None else _shape_of(wanted.model)
            vocabulary = 1 << 31 if shape is None else shape.vocab_size
            reads = open_reader(data, _file(folder, data), vocabulary)
            text = facts_of(_place(folder, data), reads, progress)
            if text.bytes > LONGEST_CORPUS_BYTES:  # Else peers would read only parts of it.
                data = replace(data, sampling="epoch")
            notify("text", f"{text.documents:,} documents, {text.bytes:,} bytes, {text.tokens:,} tokens")
            machines = machines_of(wanted.peers)
            notify("peers", str(machines))
            run, run_file = Manifest(name, PeerId(""), data=data), folder / f"{name}.yaml"
            if shape is None:
                reasons = _write_from_seed(run_file, run, text, reads.vocabulary, machines, wanted.hours)
            else:
                reasons = _write_tuning(run_file, replace(run, model=shape), text, machines, wanted)
            manifest = load_manifest(run_file, PeerId(""))
            if wanted.model is not None:
                open_model(wanted.model, manifest)
            doubts = (*text.warnings, *check_run(run_file, manifest))
            multiaddr = _write_bootstrap(folder, name, address)
            options = text_settings(manifest, folder) + initial_model_option(manifest, folder)
            options = options.replace(str(folder), str(wanted.folder.absolute()))
            commands = commands_of(wanted.folder, multiaddr, options)
            notes = (*reasons, *(f"warning: {doubt}" for doubt in doubts))
            readme = readme_of(wanted.folder, manifest, commands, multiaddr, notes)
            (folder / "README.md").write_text(readme, encoding="utf-8")
            folder.rename(wanted.folder)
        except OSError as error:
            raise UserError(f"{wanted.folder}: cannot be written: {error.strerror}") from None
    return Made(notes, commands)


def _require_possible(wanted: NewRun) -> None:
    """Raise UserError for options that exclude each other, and for what is not there."""
    folder, model = wanted.folder, wanted.model
    if _NAME.fullmatch(folder.name) is None:
        raise UserError(f"{folder.name!r} is no name of a run: use up to 64 letters, digits, . _ -")
    if is_there(folder) or folder.is_symlink():
        raise UserError(f"{folder} exists, and is never overwritten; give another name")
    if not is_folder(folder.parent):
        raise UserError(f"{folder.parent} is no folder: create it, or give a name alone")
    if wanted.lora and model is None:
        raise UserError("--lora trains adapters of a model: add --from MODEL_DIR")
    for name in (CONFIG, TOKENIZER):
        if model is not None and not is_file(model / name):
            raise UserError(f"--from {model}: there is no {name}: name a folder with a Hugging Face model")


def _data(folder: Path, wanted: NewRun, progress: Callable[[int, int], None]) -> Data:
    """Link the text into the run's folder, where publishing looks for it, and write the tokenizer: the
    model's, or one made of the text. Returns the keys that name them. Raises UserError or TextError."""
    source = TextSource(STANDARD_LIBRARY, STANDARD_LIBRARY)
    if wanted.text != STANDARD_LIBRARY:
        path = Path(wanted.text).expanduser().resolve()
        source = TextSource(TEXT, TEXT if is_folder(path) else TEXT + "".join(path.suffixes))
        (folder / source.path).symlink_to(path)
    data, form = Data((source,)), format_of(wanted.text)
    if wanted.model is not None:
        for name in TOKENIZER_FILES:
            if is_file(wanted.model / name):
                shutil.copyfile(wanted.model / name, folder / name)
        return replace(data, tokenizer=TOKENIZER, format=form, eos_token=_end_of(wanted.model))
    if form == "messages":
        raise UserError(
            f"--text {wanted.text}: conversations need a model that was trained on text: add --from MODEL_DIR"
        )
    vocabulary = vocabulary_for(text_at([_place(folder, data)], sys.maxsize).total_bytes)
    if not vocabulary:
        return data
    from peers.data.train_tokenizer import train_tokenizer

    made, _ = train_tokenizer(text_at([_place(folder, data)]), vocabulary, EOS, progress)
    (folder / TOKENIZER).write_bytes(made)
    return replace(data, tokenizer=TOKENIZER, eos_token=EOS)


def _place(folder: Path, data: Data) -> str:
    """Return where the text is."""
    path = data.sources[0].path
    return path if path == STANDARD_LIBRARY else str(folder / path)


def _file(folder: Path, data: Data) -> Path | None:
    """Return the tokenizer.json; None: tokens are bytes."""
    return folder / TOKENIZER if data.tokenizer == TOKENIZER else None


def _end_of(model: Path) -> str:
    """Return the end of text that a model's tokenizer names; empty: none."""
    config = model / "tokenizer_config.json"
    token = read_json(config).get("eos_token") if is_file(config) else None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


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


def _write_from_seed(
    run_file: Path, run: Manifest, text: TextFacts, vocabulary: int, machines: Machines, hours: float
) -> tuple[str, ...]:
    """Write the run file of a model that starts from a seed, in the shape that the planner finds best. Return
    the reasons."""
    run, tokens, reasons = propose_size(run, text, vocabulary, machines, hours * 3600)
    found = search(run, PlanRequest(machines.classes(operations_per_token(run, 0)), tokens=tokens))
    method = found.found[0].shape.manifest(run).sync.method
    rate = replace(run.sync, method=method).config.small_model_rate or Sync().learning_rate
    run = replace(run, sync=replace(run.sync, learning_rate=rate))
    _write(run_file, run, ())
    planned = text_of(found, run, run_file)
    reasons += (
        f"learning_rate: {rate:g}, the best of {method} on small models (docs/learning.md); search with "
        "`swarmnet bench learning RUN.yaml`",
    )
    run_file.write_text(_comments(reasons) + planned, encoding="utf-8")
    plan = (f"plan: {sentence(found)}", *(f"warning: {warning}" for warning in warnings(found) if warning))
    return (*reasons, f"stages, rounds and method: for {machines}", *plan)


def _write_tuning(
    run_file: Path, run: Manifest, text: TextFacts, machines: Machines, wanted: NewRun
) -> tuple[str, ...]:
    """Write the run file of a fine-tuning, and link the model. Return the reasons."""
    assert wanted.model is not None, "its shape is known"
    model = wanted.model.resolve()
    (run_file.parent / MODEL).symlink_to(model)
    run, reasons = propose_tuning(run, text, machines, wanted.lora)
    _write(run_file, replace(run, init_checkpoint=InitCheckpoint(MODEL, origin=model.name)), reasons)
    return reasons


def _write(run_file: Path, run: Manifest, reasons: tuple[str, ...]) -> None:
    body, dumper = StringIO(), YAML()
    dumper.width = WIDTH
    dumper.dump(_changed(run, Manifest("", PeerId(""))), body)
    hints = "".join(f"    # {key:<18}# {values}\n" for key, values in SOURCE_HINTS)
    before, path, after = re.split(r"(^    path: .*\n)", body.getvalue(), maxsplit=1, flags=re.MULTILINE)
    text = (_comments(reasons) if reasons else "") + before + path + hints + after
    run_file.write_text(text, encoding="utf-8")


def _changed(value: object, default: object) -> object:
    """Return a value of a run file as YAML has it. Of keys, only those that differ from the default."""
    if is_dataclass(value):
        pairs = ((key.name, getattr(value, key.name), getattr(default, key.name)) for key in fields(value))
        return {name: _changed(one, other) for name, one, other in pairs if one != other}
    if isinstance(value, tuple):
        return [_changed(each, TextSource("", "")) for each in value]
    return value


def _comments(reasons: tuple[str, ...]) -> str:
    return "".join(f"# {line}\n" for line in (HEAD, *reasons))


def _write_bootstrap(folder: Path, name: str, address: tuple[str, int]) -> str:
    """Write the bootstrap's file, create its key in the state home, and return its multiaddr."""
    from protocols.signed.identity import load_or_create

    place, port = address
    state = default_state(os.environ, sys.platform) / f"{name}-bootstrap"
    text = f"""# Others find the run through this peer. Its port must be open to them; it trains nothing.
role: bootstrap
name: {json.dumps(f"{name}-bootstrap")}
run: {json.dumps(f"{name}.run.json")}
listen: [/ip4/0.0.0.0/tcp/{port}]
nat: false
metrics: {{listen: "off"}}
"""
    (folder / "bootstrap.yaml").write_text(text, encoding="utf-8")
    return f"{place}/tcp/{port}/p2p/{load_or_create(state / 'identity.key').peer_id}"
