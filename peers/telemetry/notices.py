"""Prints the events of the log that people want to hear of, as one line each."""

from __future__ import annotations

from peers.telemetry.console import Report
from peers.telemetry.event import words_of
from peers.telemetry.event_log import LogLine
from peers.telemetry.events import Applied

QUIET_SECONDS = 30.0
"""The same trouble with the same peer is told once in so long: strangers decide how often it comes."""
MAX_REMEMBERED = 256
ALONE = "alone"
"""Said once, until another peer of the stage has been there: some runs have one peer per stage on purpose."""


class Teller:
    """Listens to a peer's event log and says in its report what people want to hear of."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._said: dict[tuple[str, str, str], float] = {}
        self._kept: dict[tuple[str, str, str], int] = {}
        self._alone = False

    def heard(self, line: LogLine) -> None:
        """`line.monotonic` is the time by which repetitions are held back."""
        event = line.event
        if isinstance(event, Applied):
            was_alone, self._alone = self._alone, event.code == ALONE
            if was_alone and self._alone:
                return
        words = words_of(event) if event.is_printed else None
        if words is None:
            return
        which = (event.name, words.code, str(getattr(event, "peer", "")))
        if line.monotonic < self._said.get(which, float("-inf")) + QUIET_SECONDS:
            self._kept[which] = self._kept.get(which, 0) + 1
            return
        if len(self._said) >= MAX_REMEMBERED:
            oldest = next(iter(self._said))
            del self._said[oldest]
            self._kept.pop(oldest, None)
        self._said.pop(which, None)
        self._said[which] = line.monotonic
        more = self._kept.pop(which, 0)
        cure = f" ({words.cure})" if words.cure else ""
        again = f" ({more} more since it was last said)" if more else ""
        self._report.notify(event.name, f"{words.text}{cure}{again}", words.level, code=words.code)
