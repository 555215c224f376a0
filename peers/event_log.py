"""What happened, one JSON object per line in the peer's state folder; invariants are checked from it later.

Buffered: the file is written when enough lines or enough time have gathered. After a crash it may end in
the middle of a line: the reader leaves that one out, the next start cuts it off.
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
        self._lines: list[str] = []
        self._oldest = 0.0
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file = path.open("ab", buffering=0)

    def record(self, event: str, /, **fields: object) -> None:
        """Note that something happened. Fields are JSON values; bytes become hexadecimal."""
        if not _RESERVED.isdisjoint(fields):
            raise TypeError(f"{sorted(_RESERVED & fields.keys())} are the log's own fields")
        now = self._monotonic()
        line = {"time": round(self._clock(), 6), "monotonic": round(now, 6), "event": event, **fields}
        if not self._lines:
            self._oldest = now
        self._lines.append(json.dumps(line, separators=(",", ":"), default=_plain))
        if len(self._lines) >= self._flush_count or now - self._oldest >= self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system."""
        if not self._lines:
            return
        self._file.write(("\n".join(self._lines) + "\n").encode())
        self._lines.clear()
        if self._file.tell() >= self._limit_bytes:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".old"))
            self._file = self._path.open("ab", buffering=0)

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
