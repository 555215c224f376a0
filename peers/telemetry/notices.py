"""Print those events of the log that matter to people, one line each.

An event's code gives its reason; its cure is what helps. Repetitions are suppressed."""

from __future__ import annotations

from peers.telemetry.console import Reporter
from peers.telemetry.event import event_text
from peers.telemetry.event_log import LogLine
from peers.telemetry.log_events import Applied

QUIET_SECONDS = 30.0
"""The same event with the same peer is printed once in this time; untrusted peers decide how often."""
MAX_REMEMBERED = 256
ALONE = "alone"
"""Printed once, until another peer of the stage has been there: some runs want one peer per stage."""


class NoticePrinter:
    """Follows a peer's event log and prints the events for people to its report."""

    def __init__(self, report: Reporter) -> None:
        self._report = report
        self._shown_at: dict[tuple[str, str, str], float] = {}
        self._suppressed: dict[tuple[str, str, str], int] = {}
        self._alone = False

    def on_line(self, line: LogLine) -> None:
        """Print the line's event if it matters to people, with its cure. An event with the same code and peer
        as one printed in the last QUIET_SECONDS is only counted; the next print adds the count. Consecutive
        rounds to which only this peer contributed (code ALONE) are printed once."""
        event = line.event
        if isinstance(event, Applied):
            was_alone = self._alone
            self._alone = event.code == ALONE
            if was_alone and self._alone:
                return
        notice = event_text(event) if event.is_printed else None
        if notice is None:
            return
        notice_key = (event.name, notice.code, str(getattr(event, "peer", "")))
        if line.monotonic < self._shown_at.get(notice_key, float("-inf")) + QUIET_SECONDS:
            self._suppressed[notice_key] = self._suppressed.get(notice_key, 0) + 1
            return
        if len(self._shown_at) >= MAX_REMEMBERED:  # Forget the notice that was printed longest ago.
            oldest = next(iter(self._shown_at))
            del self._shown_at[oldest]
            self._suppressed.pop(oldest, None)
        self._shown_at.pop(notice_key, None)  # A key set anew is the last in order, so not the oldest.
        self._shown_at[notice_key] = line.monotonic
        suppressed = self._suppressed.pop(notice_key, 0)
        cure = f" ({notice.cure})" if notice.cure else ""
        repetitions = f" ({suppressed} more since it was last shown)" if suppressed else ""
        self._report.notify(event.name, f"{notice.text}{cure}{repetitions}", notice.level, code=notice.code)
