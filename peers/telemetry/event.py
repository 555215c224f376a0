"""The base class of all events of the event log, and an event as a sentence for people."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from msgspec import UNSET, Struct

from peers.telemetry.console import Level
from peers.telemetry.reasons import NOTHING, Codes

Topic = Literal[
    "archive",
    "archived",
    "behind",
    "bootstraps_found",
    "bootstraps_lost",
    "busy",
    "checkpoint",
    "checkpoint_failed",
    "checkpoint_unusable",
    "chunks_not_kept",
    "clock",
    "compiled",
    "compiles",
    "devices",
    "devices_lost",
    "directory_split",
    "directory_whole",
    "elsewhere",
    "ended",
    "experts",
    "found",
    "height_not_kept",
    "holder",
    "identity_shared",
    "joined",
    "kept",
    "lan",
    "line",
    "look_up_failed",
    "machine",
    "missing",
    "moves",
    "no_manifest",
    "no_text",
    "no_weights",
    "not_evaluated",
    "not_ready",
    "notsaved",
    "order",
    "order_not_kept",
    "order_unusable",
    "p2pd_ended",
    "p2pd_not_started",
    "pause_cut",
    "restored",
    "run",
    "set_aside",
    "slow_upload",
    "stage",
    "state",
    "swarm",
    "text",
    "text_left_out",
    "tokenizing",
    "trains",
    "turned_away",
    "unreachable",
    "weights",
]
"""Topics of lines for people that have no fields of their own."""


def _snake_case(kind: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind).lower()


class Event(Struct, frozen=True, tag_field="event", tag=_snake_case):
    """Something that happened."""

    sentence: ClassVar[str] = ""
    """Sentence for people, with fields in braces; empty if the event is not shown."""
    codes: ClassVar[Codes | None] = None
    """Table of the values of the field `code`; the code's meaning is appended to the sentence."""
    is_printed: ClassVar[bool] = False
    """Whether a peer prints the event when it happens. Otherwise other code has informed the user."""

    @classmethod
    def tag(cls) -> str:
        return str(cls.__struct_config__.tag)

    @property
    def name(self) -> str:
        return self.tag()

    @property
    def fields(self) -> dict[str, Any]:
        """Return all fields except the name, in the order of the log line."""
        values = ((field, getattr(self, field)) for field in self.__struct_fields__)
        return {field: value for field, value in values if value is not UNSET}


class Unknown(Event, frozen=True):
    """A line of another version, or with other fields than this version writes."""

    kind: str
    given: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kind

    @property
    def fields(self) -> dict[str, Any]:
        return self.given


@dataclass(frozen=True, slots=True)
class EventText:
    """An event as text for people."""

    code: str
    """The event's code, or its name if it has none."""
    text: str
    level: Level
    cure: str = ""
    """What helps; empty if nothing needs to be done."""


def short(peer: object) -> str:
    """Return the end of a peer id, which identifies it; all ids begin alike."""
    text = str(peer)
    return f"...{text[-6:]}" if len(text) > 12 else text


def event_text(event: Event) -> EventText | None:
    """Return the text of an event with its level (such as `info`) and its cure (what helps). None if people
    need not see the event, or if this version does not know its code."""
    if not event.sentence:
        return None
    text = event.sentence.format_map({key: _format_value(value) for key, value in event.fields.items()})
    if event.codes is None:
        return EventText(event.name, text, "info")
    code = str(event.fields["code"])
    reason = event.codes.get(code)
    if reason is None or reason.level == "none":
        return None
    cure = "" if reason.cure == NOTHING else reason.cure
    return EventText(code, f"{text}: {reason.meaning}", reason.level, cure)


def _format_value(value: object) -> str:
    """Return a field's value for a sentence: at most eight items of a list, and shortened ids."""
    if isinstance(value, (int, float)):
        return str(value)
    return ", ".join(map(str, value[:8])) if isinstance(value, (list, tuple)) else short(value)
