"""What this peer adds up over its whole life: training time, energy of its GPU, and traffic of the month."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

FILE_NAME = "totals.json"
"""File in the state folder: `{"seconds": 3600.0, "joules": 0.0, "month": "2026-11", "month_bytes": 0}`."""
SAVE_SECONDS = 30.0
"""A crash loses the counts of this time."""
MAX_GAP_SECONDS = 10.0
"""A longer time between two samples is no training: the machine slept."""


class PeerTotals:
    """Adds the samples of one process to the counts of earlier processes in the same state folder."""

    def __init__(self, state: Path) -> None:
        """Read the saved counts; they are 0 without a usable file."""
        self._state = state
        self.seconds = 0.0
        """Time in which this peer trained."""
        self.joules = 0.0
        """Energy of its GPU in that time; 0 if the GPU does not report it."""
        self._month = ""
        self._month_bytes = 0
        self._last: tuple[float, float] | None = None
        """Time and joules of the last sample in which the peer trained."""
        self._last_bytes = 0
        self._saved_at: float | None = None
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, OverflowError):
            self._read(json.loads((state / FILE_NAME).read_text(encoding="utf-8")))

    def _read(self, saved: dict[str, object]) -> None:
        """Take over saved counts. Raises ValueError, TypeError, KeyError or OverflowError."""
        seconds, joules = float(str(saved["seconds"])), float(str(saved["joules"]))
        month, month_bytes = str(saved["month"]), int(str(saved["month_bytes"]))
        if not (0 <= seconds < 1e12 and 0 <= joules < 1e18 and month_bytes >= 0):
            raise ValueError("a count is out of range")
        self.seconds, self.joules, self._month, self._month_bytes = seconds, joules, month, month_bytes

    def look(self, now: float, month: str, *, trains: bool, joules: float, traffic_bytes: int) -> None:
        """Take a sample at `now` (monotonic seconds) in a calendar month such as `2026-11`. `joules` is the
        energy of the GPU since this process started, and `traffic_bytes` what the current stage has sent and
        received since it started; it begins at 0 again with each stage."""
        if self._last is not None:
            at, joules_before = self._last
            if now - at <= MAX_GAP_SECONDS:
                self.seconds += now - at
                self.joules += max(0.0, joules - joules_before)
        self._last = (now, joules) if trains else None
        self._month_bytes = self.month_bytes(month)
        self._month = month
        restarted = traffic_bytes < self._last_bytes
        self._month_bytes += traffic_bytes - (0 if restarted else self._last_bytes)
        self._last_bytes = traffic_bytes
        if self._saved_at is None:
            self._saved_at = now
        elif now >= self._saved_at + SAVE_SECONDS:
            self._saved_at = now
            self.save()

    def month_bytes(self, month: str) -> int:
        """Return the bytes sent and received in this month."""
        return self._month_bytes if month == self._month else 0

    def save(self) -> None:
        """Write the file. A disk that refuses is reported where weights are saved."""
        content = {
            "seconds": round(self.seconds, 1),
            "joules": round(self.joules, 1),
            "month": self._month,
            "month_bytes": self._month_bytes,
        }
        temporary = self._state / f".{FILE_NAME}.part"
        with contextlib.suppress(OSError):
            # Without a sync to the disk, which would hold up the event loop: these are only counts.
            temporary.write_text(json.dumps(content), encoding="utf-8")
            temporary.replace(self._state / FILE_NAME)
