"""The event log: one JSON object per line in the peer's state folder; tests check invariants from it.

Writes are buffered: lines are written when enough lines or enough time have gathered. After a crash the file
may end in the middle of a line. The reader skips that line, and the next start cuts it off. A full disk does
not stop training: lines wait for space. When too many wait, the oldest are dropped, and the log records how
many.

A long log moves to `.old` and replaces the one before. *Standing facts* were logged once and still hold (the
peer's id, its addresses); they would be lost with it. The new file therefore begins with their lines, as one
event `continued`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from peers.config.errors import UserError
from peers.telemetry.event import Event, Unknown
from peers.telemetry.log_events import (
    EVENT_CLASSES,
    NOTICE_CLASSES,
    Assembled,
    Listening,
    LogRewritten,
    NotRelayed,
    Relayed,
    Started,
    TextNotice,
)

_RESERVED = frozenset({"time", "monotonic", "event"})
LONGEST_WAITING_BYTES = 4 << 20
"""Some minutes of a busy peer's events."""
P2PD_FACTS = frozenset({"listening", "relayed"})
"""Standing facts that end when p2pd, the network daemon, ends."""
CONTINUED = "continued"
LOG_FILE = "events.jsonl"
"""Name of the log in a peer's state folder."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of the log."""

    time: float
    """Unix time in seconds, for people and for comparing machines."""
    monotonic: float
    """Seconds of the process's own clock, for durations."""
    event: Event

    @property
    def name(self) -> str:
        return self.event.name

    @property
    def fields(self) -> dict[str, Any]:
        return self.event.fields


@dataclass(eq=False, kw_only=True)
class EventLog:
    """Appends events to a file. Not thread-safe. `clock` and `monotonic` are functions such as `time.time`
    and `time.monotonic`. At `limit_bytes` the file is moved to `<name>.old`, so a long-running peer keeps at
    most twice that size."""

    path: Path
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    flush_count: int = 256
    flush_seconds: float = 1.0
    limit_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        self.trouble: Callable[[str], None] = lambda text: None
        """Called once when the disk refuses writes, and once when it accepts them again."""
        self.listeners: list[Callable[[LogLine], None]] = []
        """Called with every event at once, with its fields as given."""
        self._lines: list[str] = []
        self._oldest_line_at = 0.0
        self._unwritten = b""
        self._is_failing = False
        self._dropped_lines = 0
        self._standing_facts: dict[tuple[str, str], str] = {}
        """Log lines of the standing facts, by event name and subject."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _truncate_incomplete_line(self.path)
        self._file = self.path.open("ab", buffering=0)

    def record(self, event: Event) -> None:
        """Append an event, and pass it to the listeners. Lines are written once enough have gathered."""
        now = self.monotonic()
        unix_time = self.clock()
        line = {"time": round(unix_time, 6), "monotonic": round(now, 6), "event": event.name, **event.fields}
        for listener in self.listeners:
            listener(LogLine(unix_time, now, event))
        if not self._lines:
            self._oldest_line_at = now
        self._lines.append(json.dumps(line, separators=(",", ":")))
        self._update_standing_facts(event, self._lines[-1])
        if len(self._lines) >= self.flush_count or now - self._oldest_line_at >= self.flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Write all lines to the operating system, as far as it accepts them. A file at its size limit is
        then replaced by a new one."""
        if not self._lines and not self._unwritten:
            return
        self._unwritten += "".join(f"{line}\n" for line in self._lines).encode()
        self._lines.clear()
        try:
            self._write()
            if self._file.tell() >= self.limit_bytes:
                self._start_new_file()
                self._unwritten = self._continued_line()
                self._write()
        except OSError as error:
            self._on_write_error(error)
        else:
            self._on_write_success()

    def _write(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def _start_new_file(self) -> None:
        """Start a new file; if that fails, the old one remains in use. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):  # Moved before, when opening the new file failed.
            self.path.replace(_old_path(self.path))
        file = self.path.open("ab", buffering=0)
        self._file.close()
        self._file = file

    def _update_standing_facts(self, event: Event, line: str) -> None:
        """Add the line of a fact that holds from now on, or remove the facts that this event ends. A key is
        the fact and its subject, such as an address. `started` ends all older facts, and the end of p2pd
        (the network daemon) those about addresses."""
        match event:
            case Started():
                self._standing_facts = {("started", ""): line}
            case Assembled():
                self._standing_facts["assembled", ""] = line
            case Listening(text):
                self._standing_facts["listening", text] = line
            case Relayed(relay=relay):
                self._standing_facts["relayed", relay] = line
            case NotRelayed(relay=relay):
                self._standing_facts.pop(("relayed", relay), None)
            case TextNotice(topic="p2pd_ended"):
                facts = self._standing_facts.items()
                self._standing_facts = {key: fact for key, fact in facts if key[0] not in P2PD_FACTS}

    def _continued_line(self) -> bytes:
        """Return the first line of a file that follows another one; empty without standing facts."""
        if not self._standing_facts:
            return b""
        facts = ",".join(self._standing_facts.values())
        at, now = round(self.clock(), 6), round(self.monotonic(), 6)
        return f'{{"time":{at},"monotonic":{now},"event":"{CONTINUED}","standing":[{facts}]}}\n'.encode()

    def _on_write_error(self, error: OSError) -> None:
        """Keep the unwritten lines for later. Beyond the limit, the oldest are dropped and counted. The first
        line is kept, because it may be partly written. The first error in a row is reported."""
        if len(self._unwritten) > LONGEST_WAITING_BYTES:
            first_line_end = self._unwritten.find(b"\n") + 1
            drop_end = self._unwritten.find(b"\n", len(self._unwritten) - LONGEST_WAITING_BYTES // 2) + 1
            self._dropped_lines += self._unwritten.count(b"\n", first_line_end, drop_end)
            self._unwritten = self._unwritten[:first_line_end] + self._unwritten[drop_end:]
        if not self._is_failing:
            self._is_failing = True
            self.trouble(f"{self.path}: cannot be written: {error.strerror}; training continues, events wait")

    def _on_write_success(self) -> None:
        """After failed writes, log and report how many lines were lost."""
        if self._is_failing:
            lost = self._dropped_lines
            self._is_failing = False
            self._dropped_lines = 0
            self.record(LogRewritten(lost))
            self.trouble(f"{self.path} is written again; events lost meanwhile: {lost}")

    def close(self) -> None:
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read(path: Path) -> Iterator[LogLine]:
    """Yield the events of a log, oldest first, without an incomplete last line. Raises UserError."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                fields = json.loads(line)
                yield LogLine(fields.pop("time"), fields.pop("monotonic"), parse(fields.pop("event"), fields))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise UserError(f"{path}:{number}: not an event; the file was changed or damaged") from None


def parts(path: Path) -> list[Path]:
    """Return the existing files of a log, oldest first."""
    return [file for file in (_old_path(path), path) if file.is_file()]


def read_part(file: Path) -> Iterator[LogLine]:
    """Yield the events of one file of a log: the current one or `.old`. A line `continued` yields the events
    of its standing facts. Raises UserError."""
    for line in read(file):
        if line.name == CONTINUED:
            yield from _standing_facts_in(line, file)
        else:
            yield line


def read_all(path: Path) -> Iterator[LogLine]:
    """Yield the events of all files of a log, oldest first. Raises UserError."""
    for file in parts(path):
        yield from read_part(file)


def read_lately(path: Path) -> Iterator[LogLine]:
    """Yield the events that describe the peer's current state. The log alone suffices if it begins with
    `started` or `continued`; otherwise the file `.old` precedes it. Raises UserError."""
    files = parts(path)
    first = next(read(path), None) if path in files else None
    suffices_alone = first is not None and first.name in (CONTINUED, "started")
    if suffices_alone:
        files = [path]
    for file in files:
        yield from read_part(file)


def _standing_facts_in(line: LogLine, file: Path) -> Iterator[LogLine]:
    """Yield the standing facts in a line `continued` as events. Raises UserError if the line is invalid."""
    try:
        for fields in line.fields["standing"]:
            own_fields = {key: value for key, value in fields.items() if key not in _RESERVED}
            yield LogLine(line.time, line.monotonic, parse(fields["event"], own_fields))
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{file}: invalid line `continued`; the file was changed or damaged") from None


def parse(name: str, fields: Mapping[str, Any]) -> Event:
    """Return the event of a log line.

    A line with a `text` and an unknown name is a `TextNotice`. Any other line is `Unknown` if this version of
    the program has no event of that name with such fields."""
    classes: Mapping[str, type[Event]] = NOTICE_CLASSES if "text" in fields else EVENT_CLASSES
    kind = classes.get(name)
    with contextlib.suppress(msgspec.ValidationError):
        if kind is not None:
            return msgspec.convert(fields, kind)
        if "text" in fields:
            return msgspec.convert({**fields, "topic": name}, TextNotice)
    return Unknown(name, dict(fields))


def _old_path(path: Path) -> Path:
    return path.with_name(path.name + ".old")


def _truncate_incomplete_line(path: Path) -> None:
    """Cut the file after its last line end; after a crash it may end within a line."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, 2)
        tail_start = max(0, end - (1 << 20))  # Only the last MiB is searched.
        file.seek(tail_start)
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.truncate(tail_start + tail.rfind(b"\n") + 1)
