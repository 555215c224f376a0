"""Generate docs/events.md and the code tables of docs/watching.md from the event classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from msgspec.structs import FieldInfo, fields

from peers.telemetry.event import Event
from peers.telemetry.events import NOTED, SAID, Topic
from peers.telemetry.reasons import TABLES, Codes

HEAD = """# Events

A peer's event log, `events.jsonl` in its state folder, has one JSON object a line: `time` (Unix time in
seconds), `monotonic` (seconds of the process's clock), `event` (the name), and the fields below, text unless
noted. Durations are seconds, losses nats per token, ids and digests hexadecimal; a field with `?` is
optional. See also [codes](watching.md#codes). A file after another one starts with `continued`, whose
`standing` lists the lines that still hold. Generated from peers/telemetry/events.py by `scripts/docs`.
"""
TYPES = {
    "collections.abc.Sequence[str]": "text list", "collections.abc.Sequence[int]": "int list",
    "collections.abc.Sequence[float]": "float list", "dict[str, int]": "int object",
}  # fmt: skip


def document() -> str:
    """Return docs/events.md."""
    topics = ", ".join(f"`{topic}`" for topic in get_args(Topic))
    return "\n".join([
        HEAD,
        *_table(NOTED),
        "",
        "## Lines for people",
        "",
        "`text` is the line as it was shown.",
        "",
        *_table(SAID),
        "",
        f"Without other fields: {topics}.",
        "",
    ])  # fmt: skip


def _table(kinds: Mapping[str, type[Event]]) -> list[str]:
    rows = ["| event | fields | meaning |", "|---|---|---|"]
    for name, kind in sorted(kinds.items()):
        shown = ", ".join(_shown(field) for field in fields(kind) if field.name != "text")
        rows.append(f"| `{name}` | {shown} | {_meaning(kind)} |")
    return rows


def _shown(field: FieldInfo) -> str:
    of = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    known = of.partition(" | msgspec")[0].replace(" | None", " or null")
    optional = "?" if "UnsetType" in of else ""
    kind = TYPES.get(known, known).replace("str", "text")
    return f"`{field.name}{optional}`" + (f" {kind}" if kind != "text" else "")


def _meaning(kind: type[Event]) -> str:
    words, codes = " ".join(str(kind.__doc__).split()), kind.codes
    return words if codes is None else f"{words} Codes: {codes.title}."


def codes() -> str:
    """Return the part of docs/watching.md that lists all codes."""
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
