"""Write a run file with the shape that was found: the creator's file with other values and reasons."""

from __future__ import annotations

from io import StringIO
from math import ceil
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from peers.config.atomic_files import is_there, write_atomically
from peers.config.errors import UserError
from peers.config.yaml_lines import read
from peers.lab.planner.plan_report import scaled
from peers.lab.planner.shape.candidates import Shape
from peers.lab.planner.shape.shape_report import local_steps, round_seconds, sentence, warnings
from peers.lab.planner.shape.shape_search import PlayedShape, Search
from peers.telemetry.console import counted
from swarmnet.run.manifest import Manifest
from swarmnet.run.sync_methods import METHOD_CONFIGS

WIDTH = 110
WARMUP_SHARE = 0.02
"""Maximum share of the rounds for the warm-up; a run of few rounds would otherwise never end it."""
SHARDED_WAITS = 2
"""Contribution timeout divided by the time of an exchange, with reducers.

Reducers wait for half of the timeout (swarmnet/rounds/reducing.py), and results take four fifths of an
exchange."""


def require_new(out: Path) -> None:
    """Raise UserError if `out` exists; called before the search, which takes minutes."""
    if is_there(out):
        raise UserError(f"--out {out}: it exists, and is never overwritten; give another path")


def write(search: Search, run: Manifest, run_file: Path, out: Path) -> None:
    """Write the run file with the best shape to `out`. Raises UserError if `out` exists."""
    require_new(out)
    write_atomically(out, text_of(search, run, run_file).encode())


def text_of(search: Search, run: Manifest, run_file: Path) -> str:
    """Return the text of the run file with the best shape."""
    read(run_file)  # Plain data without tags and aliases, or an error with its line.
    round_trip = YAML()
    round_trip.width = WIDTH
    typed = round_trip.load(run_file.read_text())
    typed.pop("paths", None)  # Path rules belong to the old stages.
    for section, keys in _values(search, run).items():
        if not isinstance(keys, dict):
            typed[section] = keys
            continue
        typed.setdefault(section, {}).update(keys)
    if not METHOD_CONFIGS[typed["sync"]["method"]].can_weigh:
        typed["sync"].pop("weights", None)  # Other methods have none.
    body = StringIO()
    round_trip.dump(typed, body)
    return "".join(f"# {line}".rstrip() + "\n" for line in _reasons(search)) + body.getvalue()


def _values(search: Search, run: Manifest) -> dict[str, Any]:
    """Return the new values of the run file, by section."""
    best = search.found[0]
    shape, seconds = best.shape, round_seconds(best)
    warmup = min(run.sync.warmup_rounds, ceil(WARMUP_SHARE * search.rounds))
    manifest = shape.manifest(run, seconds)
    waits = best.exchange_seconds * (SHARDED_WAITS if shape.exchange == "sharded-reduce" else 1)
    return {
        **_boundary(shape, run),
        "stages": list(shape.stages),
        "data": {"micro_batch_size": shape.sequences},
        "rounds": {
            "global_batch_tokens": shape.round_tokens,
            "max_seconds": float(ceil(manifest.rounds.max_seconds)),
            "contribution_timeout_seconds": float(ceil(max(run.rounds.contribution_timeout_seconds, waits))),
        },
        "sync": {
            **_method(shape, run),
            "decay_rounds": search.rounds,
            "warmup_rounds": warmup,
        },
    }


def _boundary(shape: Shape, run: Manifest) -> dict[str, Any]:
    narrow = shape.boundary(run)
    if narrow == run.model.boundary:
        return {}
    values = {"kind": narrow.kind, "width": narrow.width, "after": list(narrow.after)}
    return {"model": {"boundary": {**values, "anchor_rows": narrow.anchor_rows, "seed": narrow.seed}}}


def _method(shape: Shape, run: Manifest) -> dict[str, Any]:
    exchange = {"topology": "sharded-reduce"} if shape.exchange == "sharded-reduce" else {}
    parts = {"fragments": shape.parts} if shape.parts else {}
    inner = {"inner_batch_tokens": shape.inner_batch_tokens} if shape.local else {}
    return {
        "method": shape.manifest(run).sync.method,
        **inner,
        **parts,
        **exchange,
    }


def _reasons(search: Search) -> list[str]:
    """Return the comment lines of the run file that say why these values were chosen."""
    best = search.found[0]
    shape, answer = best.shape, best.answer
    lines = [
        "Written by `swarmnet plan RUN.yaml --peers PEERS --shape`.",
        sentence(search),
        f"stages: {len(shape.stages)}. {_stages(search)}",
        f"micro_batch_size: {shape.sequences}. A peer needs {scaled(max(answer.memory))} of memory, with "
        "one microbatch at a time.",
        f"global_batch_tokens: a round takes {round_seconds(best):,.0f} s, and its contributions "
        f"{best.exchange_seconds:,.0f} s on the slowest link; contribution_timeout_seconds waits for these.",
        f"decay_rounds: until {search.tokens:,} tokens; one alone takes {search.target:,} to its loss.",
        *warnings(search),
    ]
    if shape.local:
        lines.append(
            f"sync: peers take {counted(local_steps(best), 'step')} of their own in a round. The learning "
            "rate is not that of votes: search for it with `swarmnet bench learning RUN.yaml` on a small "
            "model."
        )
    if shape.exchange == "sharded-reduce":
        lines.append("exchange: each sends its contribution in slices to a few, who add them up for all.")
    return lines


def _stages(search: Search) -> str:
    best = search.found[0]
    other = [one for one in search.found if len(one.shape.stages) != len(best.shape.stages)]
    if not other:
        return "No other number of them came near."
    return f"With {_count(other[0])} it takes {other[0].days / best.days:.3g} times as long."


def _count(one: PlayedShape) -> str:
    count = len(one.shape.stages)
    return "one" if count == 1 else str(count)
