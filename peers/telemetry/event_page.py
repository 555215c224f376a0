"""docs/events.md: every event that a peer's log can hold, from the classes that write them."""

from __future__ import annotations

from typing import get_args

from msgspec.structs import FieldInfo, fields

from peers.telemetry.events import NOTED, Event
from peers.telemetry.reasons import AREAS
from peers.telemetry.said import SAID, Topic

HEAD = """# Events

A peer's event log, `events.jsonl` in its state folder, has one JSON object a line: `time` (Unix time in
seconds), `monotonic` (seconds of the process' own clock), `event` (the name), and the fields below. Durations
are seconds, losses nats per token, ids and digests hexadecimal; a field with `?` is left out where it says
nothing. What a `code` means: [codes](watching.md#codes). `continued` begins a file after another one: its
`standing` are the lines that still hold. From peers/telemetry/events.py and said.py, by `scripts/docs`.
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


def _table(kinds: dict[str, type[Event]]) -> list[str]:
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
    area = next((area for area in AREAS if kind in area.events), None)
    words = " ".join(str(kind.__doc__).split())
    return words if area is None else f"{words} Codes: {area.title[0].lower()}{area.title[1:]}."
