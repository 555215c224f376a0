"""One event of every kind, each field with some value of its type."""

from __future__ import annotations

from msgspec.structs import fields

from peers.telemetry.event import Event
from peers.telemetry.log_events import EVENT_CLASSES, NOTICE_CLASSES

VALUES = {"int": 3, "str": "x", "float": 0.5, "bool": True, "dict[str, int]": {"a": 1}}
VALUES |= {f"collections.abc.Sequence[{of}]": [VALUES[of]] for of in ("int", "str", "float")}


def one_of_each() -> list[Event]:
    return [kind(**{field.name: _value(field.type) for field in fields(kind)})
            for kind in (*EVENT_CLASSES.values(), *NOTICE_CLASSES.values())]  # fmt: skip


def _value(of: object) -> object:
    return VALUES[of.__name__ if type(of) is type else str(of).partition(" | ")[0]]
