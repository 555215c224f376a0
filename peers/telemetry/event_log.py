"""The event log: one JSON object per line in the peer's state folder; tests check invariants from it.

Writes are buffered: lines are written when enough lines or enough time have gathered. After a crash the file
may end in the middle of a line. The reader skips that line, and the next start cuts it off. A full disk does
not stop training: lines wait for space. When too many wait, the oldest are dropped, and the log records how
many.

A long log moves to `.old` and replaces the one before. Facts that were logged once and still hold (the peer's
id, its addresses) would be lost with it. The new file therefore begins with these lines, as one event
`continued`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from peers.errors import UserError
from peers.telemetry.event import Event, Unknown
from peers.telemetry.events import (
    NOTED,
    SAID,
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
OF_P2PD = frozenset({"listening", "relayed"})
"""Lasting facts that end when p2pd ends."""
CONTINUED = "continued"


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


class EventLog:
    """Appends events to a file. Not thread-safe."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        flush_count: int = 256,
        flush_seconds: float = 1.0,
        limit_bytes: int = 256 << 20,
    ) -> None:
        """`clock` and `monotonic` are functions such as `time.time` and `time.monotonic`. At `limit_bytes`
        the file is moved to `<name>.old`, so a long-running peer keeps at most twice that size."""
        self._path = path
        self._clock = clock
        self._monotonic = monotonic
        self._flush_count = flush_count
        self._flush_seconds = flush_seconds
        self._limit_bytes = limit_bytes
        self.trouble: Callable[[str], None] = lambda text: None
        """Called once when the disk refuses writes, and once when it accepts them again."""
        self.listeners: list[Callable[[LogLine], None]] = []
        """Called with every event at once, with its fields as given."""
        self._lines: list[str] = []
        self._oldest = 0.0
        self._waiting = b""
        self._refused = False
        self._lost = 0
        self._standing: dict[tuple[str, str], str] = {}
        """Lines of facts that still hold."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file = path.open("ab", buffering=0)

    def record(self, event: Event) -> None:
        """Append an event."""
        now = self._monotonic()
        at = self._clock()
        line = {"time": round(at, 6), "monotonic": round(now, 6), "event": event.name, **event.fields}
        for listener in self.listeners:
            listener(LogLine(at, now, event))
        if not self._lines:
            self._oldest = now
        self._lines.append(json.dumps(line, separators=(",", ":")))
        self._note_standing(event, self._lines[-1])
        if len(self._lines) >= self._flush_count or now - self._oldest >= self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Write all lines to the operating system, as far as it accepts them."""
        if not self._lines and not self._waiting:
            return
        self._waiting += "".join(f"{line}\n" for line in self._lines).encode()
        self._lines.clear()
        try:
            self._write()
            if self._file.tell() >= self._limit_bytes:
                self._turn_over()
                self._waiting = self._continued()
                self._write()
        except OSError as error:
            self._refuse(error)
        else:
            self._take_again()

    def _write(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def _turn_over(self) -> None:
        """Start a new file; if that fails, the old one remains in use. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):  # Moved before, when opening the new file failed.
            self._path.replace(_older(self._path))
        file = self._path.open("ab", buffering=0)
        self._file.close()
        self._file = file

    def _note_standing(self, event: Event, line: str) -> None:
        match event:
            case Started():
                self._standing = {("started", ""): line}
            case Assembled():
                self._standing["assembled", ""] = line
            case Listening(text):
                self._standing["listening", text] = line
            case Relayed(relay=relay):
                self._standing["relayed", relay] = line
            case NotRelayed(relay=relay):
                self._standing.pop(("relayed", relay), None)
            case TextNotice(topic="p2pd_ended"):
                self._standing = {key: kept for key, kept in self._standing.items() if key[0] not in OF_P2PD}

    def _continued(self) -> bytes:
        """Return the first line of a file that follows another one; empty if no fact holds."""
        if not self._standing:
            return b""
        held = ",".join(self._standing.values())
        at, now = round(self._clock(), 6), round(self._monotonic(), 6)
        return f'{{"time":{at},"monotonic":{now},"event":"{CONTINUED}","standing":[{held}]}}\n'.encode()

    def _refuse(self, error: OSError) -> None:
        """Keep lines for later, up to a limit; the oldest beyond it are dropped. A partly written line is
        kept whole."""
        if len(self._waiting) > LONGEST_WAITING_BYTES:
            begun = self._waiting.find(b"\n") + 1
            until = self._waiting.find(b"\n", len(self._waiting) - LONGEST_WAITING_BYTES // 2) + 1
            self._lost += self._waiting.count(b"\n", begun, until)
            self._waiting = self._waiting[:begun] + self._waiting[until:]
        if not self._refused:
            self._refused = True
            self.trouble(
                f"{self._path}: cannot be written: {error.strerror}; training continues, events wait"
            )

    def _take_again(self) -> None:
        if self._refused:
            lost, self._refused, self._lost = self._lost, False, 0
            self.record(LogRewritten(lost))
            self.trouble(f"{self._path} is written again; events lost meanwhile: {lost}")

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
    return [file for file in (_older(path), path) if file.is_file()]


def read_part(file: Path) -> Iterator[LogLine]:
    """Yield the events of one of the `parts`, preceded by the facts that held when it was started. Raises
    UserError."""
    for line in read(file):
        if line.name == CONTINUED:
            yield from _standing_in(line, file)
        else:
            yield line


def read_lately(path: Path) -> Iterator[LogLine]:
    """Yield the events that describe the peer's current state: the log, preceded by its older part if the log
    has no `started` or `continued`. Raises UserError."""
    files = parts(path)
    first = next(read(path), None) if path in files else None
    if first is not None and first.name in (CONTINUED, "started"):
        files = [path]
    for file in files:
        yield from read_part(file)


def _standing_in(line: LogLine, file: Path) -> Iterator[LogLine]:
    try:
        for fields in line.fields["standing"]:
            kept = {key: value for key, value in fields.items() if key not in _RESERVED}
            yield LogLine(line.time, line.monotonic, parse(fields["event"], kept))
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{file}: invalid line `continued`; the file was changed or damaged") from None


def parse(name: str, fields: Mapping[str, Any]) -> Event:
    """Return the event of a log line.

    A line with a `text` and an unknown name is a `TextNotice`. Any other line is `Unknown` if this version of
    the program has no event of that name with such fields."""
    kind: type[Event] | None = (SAID if "text" in fields else NOTED).get(name)
    with contextlib.suppress(msgspec.ValidationError):
        if kind is not None:
            return msgspec.convert(fields, kind)
        if "text" in fields:
            return msgspec.convert({**fields, "topic": name}, TextNotice)
    return Unknown(name, dict(fields))


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".old")


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, 2)
        tail_start = max(0, end - (1 << 20))
        file.seek(tail_start)
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.truncate(tail_start + tail.rfind(b"\n") + 1)
