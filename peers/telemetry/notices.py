"""Print those events of the log that matter to people, one line each."""

from __future__ import annotations

from peers.telemetry.console import Reporter
from peers.telemetry.event import words_of
from peers.telemetry.event_log import LogLine
from peers.telemetry.events import Applied

QUIET_SECONDS = 30.0
"""The same event with the same peer is printed once in this time; untrusted peers decide how often it
happens."""
MAX_REMEMBERED = 256
ALONE = "alone"
"""Printed once, until another peer of the stage has been there: some runs have one peer per stage on
purpose."""


class NoticePrinter:
    """Follows a peer's event log and prints the events for people to its report."""

    def __init__(self, report: Reporter) -> None:
        self._report = report
        self._shown_at: dict[tuple[str, str, str], float] = {}
        self._suppressed: dict[tuple[str, str, str], int] = {}
        self._alone = False

    def on_line(self, line: LogLine) -> None:
        """Handle a log line. `line.monotonic` is the time by which repetitions are suppressed."""
        event = line.event
        if isinstance(event, Applied):
            was_alone, self._alone = self._alone, event.code == ALONE
            if was_alone and self._alone:
                return
        words = words_of(event) if event.is_printed else None
        if words is None:
            return
        which = (event.name, words.code, str(getattr(event, "peer", "")))
        if line.monotonic < self._shown_at.get(which, float("-inf")) + QUIET_SECONDS:
            self._suppressed[which] = self._suppressed.get(which, 0) + 1
            return
        if len(self._shown_at) >= MAX_REMEMBERED:
            oldest = next(iter(self._shown_at))
            del self._shown_at[oldest]
            self._suppressed.pop(oldest, None)
        self._shown_at.pop(which, None)
        self._shown_at[which] = line.monotonic
        more = self._suppressed.pop(which, 0)
        cure = f" ({words.cure})" if words.cure else ""
        again = f" ({more} more since it was last shown)" if more else ""
        self._report.notify(event.name, f"{words.text}{cure}{again}", words.level, code=words.code)
