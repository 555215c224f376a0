"""Generate docs/events.md and the code tables of docs/watching.md from the event classes.

A code is a fixed word in an event that gives its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import get_args

from msgspec.structs import FieldInfo, fields

from peers.telemetry.event import Event, Topic
from peers.telemetry.log_events import EVENT_CLASSES, NOTICE_CLASSES
from peers.telemetry.reasons import BAN, NOTHING, TABLES, Codes, Reason

HEAD = """# Events

A peer writes events to its event log, `events.jsonl` in its state folder. Each line is a JSON object with
`time` (Unix time in seconds), `monotonic` (seconds of the process's clock), `event` (its name) and the
fields below. Fields are text unless the table says otherwise; a field with `?` is optional. Durations are in
seconds, losses in nats per token, ids and digests in hexadecimal. [Watching](watching.md#codes) explains the
codes. When a log file is full, the next one starts with the event `continued`, whose `standing` lists the
lines that still hold. `scripts/docs` generates this page from peers/telemetry/log_events.py.
"""
TYPES = {
    "collections.abc.Sequence[str]": "text list",
    "collections.abc.Sequence[int]": "int list",
    "collections.abc.Sequence[float]": "float list",
    "dict[str, int]": "int object",
}


def document() -> str:
    """Return the text of docs/events.md: a table of all events, and one of the lines for people."""
    topics = ", ".join(f"`{topic}`" for topic in get_args(Topic))
    return "\n".join(
        [
            HEAD,
            *_event_table(EVENT_CLASSES),
            "",
            "## Lines for people",
            "",
            "These events are lines that the peer printed; `text` is the line.",
            "",
            *_event_table(NOTICE_CLASSES),
            "",
            f"These events have no field but `text`: {topics}.",
            "",
        ]
    )


def _event_table(kinds: Mapping[str, type[Event]]) -> list[str]:
    """Return the lines of a Markdown table of these event classes, sorted by name."""
    rows = ["| event | fields | meaning |", "|---|---|---|"]
    for name, kind in sorted(kinds.items()):
        described = ", ".join(_describe_field(field) for field in fields(kind) if field.name != "text")
        rows.append(f"| `{name}` | {described} | {_describe_event(kind)} |")
    return rows


def _describe_field(field: FieldInfo) -> str:
    """Return a field's name, `?` if it is optional, and its type unless that is text."""
    type_name = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    required_type = type_name.partition(" | msgspec")[0].replace(" | None", " or null")
    optional = "?" if "UnsetType" in type_name else ""
    kind = TYPES.get(required_type, required_type).replace("str", "text")
    return f"`{field.name}{optional}`" + (f" {kind}" if kind != "text" else "")


def _describe_event(kind: type[Event]) -> str:
    return " ".join(str(kind.__doc__).split())


CODES_HEAD = """\
A *code* in the log, a metric or a message gives the reason for an event. A code without a level in
brackets is logged as `info`; routine codes are not shown to people. Each table names the events and
the metric that have its codes. If the column "fix" is empty, do nothing. *Tell the owner*: the
run's owner can ban the peer (`swarmnet order ban RUN PEER`).
"""
SHARED_TITLE = "Codes of several tables"
SHARED_LINK = "[shared codes](#codes-of-several-tables)"


def codes() -> str:
    """Return the part of docs/watching.md that lists all codes. A code with the same meaning in several of
    TABLES is explained once, in a table of shared codes at the top of the page."""
    shared = _shared_codes()
    lines = [CODES_HEAD, f"### {SHARED_TITLE}", "", *_code_table(shared), ""]
    for table in TABLES:
        unshared = {code: reason for code, reason in table.items() if shared.get(code) != reason}
        explained_before = [f"`{code}`" for code in table if code not in unshared]
        lines += [f"### {table.title}", "", f"{_users_of_table(table)}.", ""]
        if unshared:
            lines += [*_code_table(unshared), ""]
        if explained_before:
            lines += [f"Also {SHARED_LINK}: {', '.join(explained_before)}.", ""]
    return "\n".join(lines)


def _shared_codes() -> dict[str, Reason]:
    """Return the codes that have the same reason in two tables or more."""
    counts = Counter((code, reason) for table in TABLES for code, reason in table.items())
    return {code: reason for (code, reason), count in sorted(counts.items(), key=_code_of) if count > 1}


def _code_of(counted: tuple[tuple[str, Reason], int]) -> str:
    return counted[0][0]


def _code_table(reasons: Mapping[str, Reason]) -> list[str]:
    """Return the lines of a Markdown table of codes with their levels, meanings and fixes."""
    rows = ["| code | meaning | fix |", "|---|---|---|"]
    for code, reason in reasons.items():
        level = {"info": "", "none": " (routine)"}.get(reason.level, f" ({reason.level})")
        cure = "" if reason.cure == NOTHING else f" {reason.cure}".replace(BAN, "tell the owner")
        rows.append(f"| `{code}`{level} | {reason.meaning} |{cure} |")
    return rows


def _users_of_table(table: Codes) -> str:
    """Return the events and the metric that use the codes of this table."""
    events = ", ".join(f"`{name}`" for name, kind in EVENT_CLASSES.items() if kind.codes is table)
    metric = f"metric: `swarmnet_{table.metric}`" if table.metric else ""
    words = "; ".join(words for words in (f"events: {events}" if events else "", metric) if words)
    return words[:1].upper() + words[1:]
