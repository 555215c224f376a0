"""docs/events.md: every event that a peer's log can hold, from the classes that write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from msgspec.structs import FieldInfo, fields

from peers.telemetry.event import Event
from peers.telemetry.events import NOTED, SAID, Topic
from peers.telemetry.reasons import TABLES, Codes

HEAD = """# Events

A peer's event log, `events.jsonl` in its state folder, has one JSON object a line: `time` (Unix time in
seconds), `monotonic` (seconds of the process' own clock), `event` (the name), and the fields below. Durations
are seconds, losses nats per token, ids and digests hexadecimal; a field with `?` is left out where it says
nothing. What a `code` means: [codes](watching.md#codes). `continued` begins a file after another one: its
`standing` are the lines that still hold. From peers/telemetry/events.py, by `scripts/docs`.
"""
TYPES = {
    "collections.abc.Sequence[str]": "list of text", "collections.abc.Sequence[int]": "list of int",
    "collections.abc.Sequence[float]": "list of float", "dict[str, int]": "object of int",
}  # fmt: skip


def document() -> str:
    topics = ", ".join(f"`{topic}`" for topic in get_args(Topic))
    return "\n".join([
        HEAD,
        *_table(NOTED),
        "",
        "## What people were told",
        "",
        "In `text` as it was said.",
        "",
        *_table(SAID),
        "",
        f"With nothing but their text: {topics}.",
        "",
    ])  # fmt: skip


def _table(kinds: Mapping[str, type[Event]]) -> list[str]:
    rows = ["| event | fields | what it says |", "|---|---|---|"]
    for name, kind in sorted(kinds.items()):
        shown = ", ".join(_shown(field) for field in fields(kind) if field.name != "text")
        rows.append(f"| `{name}` | {shown} | {_meaning(kind)} |")
    return rows


def _shown(field: FieldInfo) -> str:
    of = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    known = of.partition(" | msgspec")[0].replace(" | None", " or null")
    optional = "?" if "UnsetType" in of else ""
    return f"`{field.name}{optional}` {TYPES.get(known, known).replace('str', 'text')}"


def _meaning(kind: type[Event]) -> str:
    words, codes = " ".join(str(kind.__doc__).split()), kind.codes
    return words if codes is None else f"{words} Codes: {codes.title[0].lower()}{codes.title[1:]}."


def codes() -> str:
    """The part of docs/watching.md that lists all codes."""
    lines: list[str] = []
    for table in TABLES:
        lines += [f"### {table.title}", "", f"In {_where(table)}.", ""]
        lines += ["| code | level | meaning | what helps |", "|---|---|---|---|"]
        lines += [f"| `{code}` | {reason.level} | {reason.meaning} | {reason.cure} |"
                  for code, reason in table.items()]  # fmt: skip
        lines.append("")
    return "\n".join(lines)


def _where(table: Codes) -> str:
    events = ", ".join(f"`{name}`" for name, kind in NOTED.items() if kind.codes is table)
    metric = f"`swarmnet_{table.metric}`" if table.metric else ""
    return "; ".join(words for words in (f"events {events}" if events else "", metric) if words)
