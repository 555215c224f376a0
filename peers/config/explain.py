"""Describe all configuration keys for `swarmnet config explain` and docs/configuration.md. A peer file starts
one peer. A run file defines a run for all peers; its keys are those of `Manifest`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Literal

from peers.config.peer_file import PeerFile, load
from peers.config.schema import element, keys, section, type_text, yaml_text
from peers.config.yaml_lines import read
from swarmnet.run.manifest import Manifest
from swarmnet.run.sync_methods import PRESETS

FILLED_IN = ("owner", "wire_version")
"""Keys of the manifest that publishing fills in."""


@dataclass(frozen=True, slots=True)
class ExplainedKey:
    """One key with its full name (`metrics.listen`, `data.sources[].name`)."""

    name: str
    kind: str
    default: str
    meaning: str


def lines(cls: type, prefix: str = "") -> Iterator[ExplainedKey]:
    """Yield every key of a configuration class and of the sections in it, each name with `prefix` in front.
    Keys of the manifest that publishing fills in are left out."""
    for key in keys(cls):
        name = prefix + key.name
        is_top_level = not prefix
        if is_top_level and cls is Manifest and key.name in FILLED_IN:
            continue
        section_class = section(key.kind)
        item_class = section(element(key.kind))
        if section_class is not None:
            yield from lines(section_class, f"{name}.")
            continue
        default = "required" if key.default is None else key.default
        # Three defaults are computed, so the class cannot name them.
        if cls is Manifest and key.name == "name":
            default = "the file's name"
        if name == "data.sources":
            default = "modules of each peer's Python"
        if name == "sync.weights":
            default = "agreement with sign-muon unless data.private, else equal"
        yield ExplainedKey(name, type_text(key.kind), default, key.meaning)
        if item_class is not None:
            yield from lines(item_class, f"{name}[].")


def explain(which: Literal["peer", "run"]) -> str:
    """Return every key of a peer file or a run file with its type, default and meaning, for a terminal."""
    text = []
    for line in lines(PeerFile if which == "peer" else Manifest):
        text.append(f"{line.name}: {line.kind} (default: {line.default})")
        if line.meaning:
            text.append(fill(line.meaning, 100, initial_indent="    ", subsequent_indent="    "))
    return "\n".join(text) + "\n"


def explain_file(path: Path, environment: Mapping[str, str], overrides: Mapping[str, str]) -> str:
    """Return every key of a peer file with its current value and its meaning. Raises ConfigError."""
    config = load(path, environment, overrides)
    text = []
    for line in lines(PeerFile):
        value: object = config
        for step in line.name.split("."):
            value = getattr(value, step)
        text.append(f"{line.name}: {yaml_text(value)}")
        text.append(fill(line.meaning, 100, initial_indent="    # ", subsequent_indent="    # "))
    return "\n".join(text) + "\n"


def is_run_file(path: Path) -> bool:
    """Return whether more of the file's keys exist only in run files than only in peer files. Raises
    ConfigError if the file cannot be read as YAML."""
    file_keys = set(read(path).data)
    run_keys = {key.name for key in keys(Manifest)}
    peer_keys = {key.name for key in keys(PeerFile)}
    return len(file_keys & (run_keys - peer_keys)) > len(file_keys & (peer_keys - run_keys))


def document() -> str:
    """Return the text of docs/configuration.md."""
    return "\n".join(
        [
            "# Configuration",
            "",
            "`scripts/docs` generates this page from the classes that validate the files; do not edit it.",
            "",
            "Files are YAML 1.2. Unknown keys, wrong types and keys given twice are refused with file and",
            "line. `swarmnet config check FILE` validates a file; examples are in `configs/`.",
            "",
            "## Peer file",
            "",
            "A peer file starts one peer (`swarmnet run PEER.yaml`). Its paths are relative to the file.",
            "Environment variables (`SWARMNET__METRICS__LISTEN=off`) override it; `--set metrics.listen=off`",
            "overrides both.",
            "Durations are seconds or `30s`, `5min`, `2h`; sizes are bytes or `64MiB`, `1.5GB`.",
            "",
            *_table(PeerFile),
            "",
            "## Run file",
            "",
            "A run file defines a run (`swarmnet publish RUN.yaml`). Publishing adds the owner and the wire",
            "version, and signs the run. Afterwards nothing in it can change, because the run id is its",
            f"SHA-256. The local-step methods are {', '.join(PRESETS)}.",
            "",
            *_table(Manifest),
            "",
        ]
    )


def _table(cls: type) -> Iterator[str]:
    """Yield the lines of a Markdown table of all keys of a class."""
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for line in lines(cls):
        cells = (f"`{line.name}`", line.kind, _default_as_markdown(line.default), line.meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default_as_markdown(default: str) -> str:
    """Return a default in backticks; a phrase such as `no limit` is returned without them."""
    is_phrase = " " in default and not default.startswith(("[", "{"))
    return default if is_phrase or default == "required" else f"`{default}`"
