"""What happened, one JSON object per line in the peer's state folder; invariants are checked from it later.

Buffered: the file is written when enough lines or enough time have gathered. After a crash it may end in
the middle of a line: the reader leaves that one out, the next start cuts it off. A full disk is no reason to
stop training: lines wait for room, and when too many do the oldest are left out, which the log then says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from peers.errors import UserError

_RESERVED = frozenset({"time", "monotonic", "event"})
LONGEST_WAITING_BYTES = 4 << 20
"""Some minutes of a busy peer's events."""


@dataclass(frozen=True, slots=True)
class Event:
    time: float
    """Unix time in seconds, for people and for comparing machines."""
    monotonic: float
    """Seconds of the process' own clock, for durations."""
    name: str
    fields: dict[str, Any]


class EventLog:
    """Appends events to a file. Not for several threads."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        flush_count: int = 256,
        flush_seconds: float = 1.0,
        limit_bytes: int = 256 << 20,
    ) -> None:
        """`clock` and `monotonic` are e.g. time.time and time.monotonic. At `limit_bytes` the file is moved
        to `<name>.old`, so that a peer that runs for months keeps at most twice that."""
        self._path = path
        self._clock = clock
        self._monotonic = monotonic
        self._flush_count = flush_count
        self._flush_seconds = flush_seconds
        self._limit_bytes = limit_bytes
        self.trouble: Callable[[str], None] = lambda text: None
        """Told once when the disk refuses, and once when it takes again."""
        self.listeners: list[Callable[[Event], None]] = []
        """Told of every event at once, with its fields as they were given."""
        self._lines: list[str] = []
        self._oldest = 0.0
        self._waiting = b""
        self._refused = False
        self._lost = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file = path.open("ab", buffering=0)

    def record(self, event: str, /, **fields: object) -> None:
        """Note that something happened. Fields are JSON values; bytes become hexadecimal."""
        if not _RESERVED.isdisjoint(fields):
            raise TypeError(f"{sorted(_RESERVED & fields.keys())} are the log's own fields")
        now = self._monotonic()
        at = self._clock()
        line = {"time": round(at, 6), "monotonic": round(now, 6), "event": event, **fields}
        for listener in self.listeners:
            listener(Event(at, now, event, fields))
        if not self._lines:
            self._oldest = now
        self._lines.append(json.dumps(line, separators=(",", ":"), default=_plain))
        if len(self._lines) >= self._flush_count or now - self._oldest >= self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system, as far as it takes it."""
        if not self._lines and not self._waiting:
            return
        self._waiting += "".join(f"{line}\n" for line in self._lines).encode()
        self._lines.clear()
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            if self._file.tell() >= self._limit_bytes:
                self._path.replace(self._path.with_name(self._path.name + ".old"))
                self._file.close()
                self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            self._refuse(error)
        else:
            self._take_again()

    def _refuse(self, error: OSError) -> None:
        """What is beyond the longest that waits is lost; a line of which a part is written is not cut."""
        if len(self._waiting) > LONGEST_WAITING_BYTES:
            begun = self._waiting.find(b"\n") + 1
            until = self._waiting.find(b"\n", len(self._waiting) - LONGEST_WAITING_BYTES // 2) + 1
            self._lost += self._waiting.count(b"\n", begun, until)
            self._waiting = self._waiting[:begun] + self._waiting[until:]
        if not self._refused:
            self._refused = True
            self.trouble(f"{self._path}: cannot be written: {error.strerror}; training goes on, events wait")

    def _take_again(self) -> None:
        if self._refused:
            lost, self._refused, self._lost = self._lost, False, 0
            self.record("log_written_again", lost=lost)
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


def read(path: Path) -> Iterator[Event]:
    """The events in a log, oldest first; a last line without its end is left out. Raises UserError."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                fields = json.loads(line)
                yield Event(fields.pop("time"), fields.pop("monotonic"), fields.pop("event"), fields)
            except (ValueError, KeyError, AttributeError):
                raise UserError(f"{path}:{number}: is no event; the file was changed or damaged") from None


def _plain(value: object) -> object:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no event field")


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
