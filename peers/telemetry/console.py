"""Print a peer's status: one line on a terminal, or JSON lines for machines.

Both reporters take the same two calls: `status` (the current state, often) and `notify` (something happened).
Nothing here starts a thread."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

Level = Literal["info", "warning", "error"]

STATUS_SECONDS = 60.0
"""Interval between statuses in a log that is not requested as JSON: one a second would be 28 MB a day."""
END_OF_P2PD = "use of closed network connection"
"""p2pd, the network daemon, logs this as an error whenever it is stopped."""


@dataclass(frozen=True, slots=True)
class StatusLine:
    """The current state of one peer."""

    state: str
    """One word, such as connecting, joining, training or leaving."""
    stage: int | None = None
    stages: int | None = None
    round: int | None = None
    loss: float | None = None
    """Nats per token."""
    tokens_per_second: float | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    group_peers: int = 0
    """Live peers of the same stage, this one included."""
    swarm_peers: int = 0
    tokens: int = 0
    """Tokens committed here since the start."""
    confirmed_tokens: int | None = None
    """Tokens of own contributions that others confirmed, as `swarmnet credit` shows them."""
    total_tokens: int | None = None
    """Tokens of all peers in all settled rounds of the stage."""
    waits_for: int | None = None
    """A neighbouring stage without a peer, so that no microbatch can pass; None if there is none."""

    def line(self) -> str:
        """Return one line for people; values that are None are left out. A narrow terminal cuts the end, so
        what matters most comes first. Without a stage, only the state and the number of known peers."""
        if self.stage is None:
            return self.state + (f"  {counted(self.swarm_peers, 'peer')} known" if self.swarm_peers else "")
        parts = [self.state if self.waits_for is None else f"waits for stage {self.waits_for}"]
        if self.round is not None:
            parts.append(f"round {self.round}")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3f}")
        if self.confirmed_tokens is not None:
            parts.append(f"{count_text(self.confirmed_tokens)} tokens confirmed")
        if self.tokens_per_second is not None:
            parts.append(pace(self.tokens_per_second))
        stages = self.stages or 1
        parts.append(f"stage {self.stage}" + (f" of 0-{stages - 1}" if stages > 1 else ""))
        parts.append(f"up {amount(self.sent_bytes)} down {amount(self.received_bytes)}")
        parts.append(f"peers {self.group_peers} here, {self.swarm_peers} in all")
        return "  ".join(parts)


class Reporter(Protocol):
    """The output for a peer's messages."""

    def status(self, status: StatusLine) -> None:
        """Show the current status."""

    def notify(self, event: str, text: str, level: Level = "info", **fields: object) -> None:
        """Report an event: `event` is its name for machines, `text` one line for people."""

    def close(self) -> None: ...


def open_report(
    log: Literal["auto", "line", "json"], stream: TextIO, clock: Callable[[], float], name: str = ""
) -> Reporter:
    """Return the report for a peer file's `log` setting: a status line for `line`, JSON lines for `json`.
    With `auto`, it is a status line if `stream` is a terminal, else JSON. `clock` returns Unix time in
    seconds."""
    if log == "line" or (log == "auto" and stream.isatty()):
        return LineReporter(stream, clock)
    return JsonReporter(
        stream=stream, clock=clock, name=name, status_seconds=0.0 if log == "json" else STATUS_SECONDS
    )


class LineReporter:
    """Print a status line that is rewritten in place, and events above it. Without a terminal, print the
    status when its state or stage changes, else once in STATUS_SECONDS."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.time) -> None:
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._live: Live | None = None
        self._throttle = _StatusThrottle(clock, STATUS_SECONDS)

    def status(self, status: StatusLine) -> None:
        """Rewrite the status line on a terminal. Elsewhere print it if it changed or the last one is old."""
        line = Text(printable(status.line()), overflow="ellipsis", no_wrap=True)
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(line, refresh=True)
            return
        if self._throttle.is_due(status):
            self._console.print(line)

    def notify(self, event: str, text: str, level: Level = "info", **fields: object) -> None:
        style = {"info": "", "warning": "yellow", "error": "bold red"}[level]
        prefix = "" if level == "info" else f"{level}: "
        self._console.print(Text(prefix + printable(text), style=style))

    def close(self) -> None:
        """Restore the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None


class _StatusThrottle:
    """Decides whether to write a status to a log: it has changed, or the last one is old."""

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._written: object = None
        """What the last written status showed."""
        self._written_at = 0.0

    def is_due(self, status: StatusLine) -> bool:
        """Return whether to write this status now. True also records it as the last written one."""
        shown, now = (status.state, status.stage, status.waits_for), self._clock()
        if shown == self._written and 0 <= now - self._written_at < self._seconds:
            return False
        self._written = shown
        self._written_at = now
        return True


class JsonReporter:
    """Print one JSON object per line: time, level, event, text, and the event's own fields."""

    def __init__(
        self, *, stream: TextIO, clock: Callable[[], float], name: str = "", status_seconds: float = 0.0
    ) -> None:
        """A status with unchanged state and stage is written every `status_seconds`; 0 writes each one."""
        self._stream = stream
        self._clock = clock
        self._name = {"name": name} if name else {}
        self._throttle = _StatusThrottle(clock, status_seconds)

    def status(self, status: StatusLine) -> None:
        if not self._throttle.is_due(status):
            return
        known = {key: value for key, value in asdict(status).items() if value is not None}
        self._write({"level": "info", "event": "status", **known})

    def notify(self, event: str, text: str, level: Level = "info", **fields: object) -> None:
        self._write({"level": level, "event": event, "text": text, **fields})

    def close(self) -> None:
        self._stream.flush()

    def _write(self, fields: dict[str, object]) -> None:
        line = {"time": round(self._clock(), 3), **self._name, **fields}
        print(json.dumps(line, separators=(",", ":"), default=str), file=self._stream, flush=True)


class LogToReporter(logging.Handler):
    """Pass log records of libraries to a report, so that a terminal or JSON stream stays intact."""

    def __init__(self, report: Reporter, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        """Report a library's log record as an event `log`, in one line. The message of the network daemon
        p2pd that it was stopped is left out."""
        text = " ".join(record.getMessage().split())
        if END_OF_P2PD in text:
            return
        level: Level = "warning" if record.levelno >= logging.WARNING else "info"
        if record.levelno >= logging.ERROR:
            level = "error"
        self._report.notify("log", f"{record.name}: {text}", level)


def report_library_logs(report: Reporter) -> None:
    """Send warnings of hivemind, p2pd and this program's loggers to the report only."""
    for logger in (logging.getLogger(), logging.getLogger("hivemind")):  # hivemind's does not propagate
        logger.handlers = [LogToReporter(report)]


def printable(text: str) -> str:
    """Return text from other peers with unprintable characters replaced, which could control a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def shown(text: str, stream: TextIO) -> str:
    """Return text that contains other peers' words, for `stream`. On a terminal, control characters are
    escaped as in JSON; a program gets the text unchanged."""
    return "".join(map(_escape_control_character, text)) if stream.isatty() else text


def _escape_control_character(character: str) -> str:
    """Return the character, or its JSON escape (a surrogate pair as two) if it is unprintable."""
    if character.isprintable() or character == "\n":
        return character
    code = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{code[at : at + 4]}" for at in range(0, len(code), 4))


def amount(count: float) -> str:
    """Return bytes for people: `999 B`, `1.5 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def count_text(count: int) -> str:
    """Return a number for people: `9,500`, `2.4 million`."""
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.1f} {word}"
    return f"{count:,}"


def pace(tokens_per_second: float) -> str:
    """Return a pace for people: `12,345 tok/s`."""
    return f"{tokens_per_second:,.0f} tok/s"


def counted(count: int, one: str) -> str:
    """Return a count with its noun: `1 peer`, `2 peers`, `1,200 peers`. The plural must end in s."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"
