"""Hours of the day in which a peer may work, in its local time.

A span such as 22:00-08:00 crosses midnight. All times are minutes after midnight; a span's end is exclusive.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DAY_MINUTES = 24 * 60
_SPAN = re.compile(r"\s*(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})\s*")


class HoursError(ValueError):
    """The text contains no valid hours; the message has an example."""


@dataclass(frozen=True, slots=True)
class Hours:
    """The union of these spans."""

    spans: tuple[tuple[int, int], ...]
    """Pairs (first minute, minute after the last); the second is smaller if the span crosses midnight."""

    def allow(self, minute: int) -> bool:
        """Return whether a peer may work in this minute of the day."""
        for first, stop in self.spans:
            crosses_midnight = first >= stop
            if first <= minute < stop or (crosses_midnight and (minute >= first or minute < stop)):
                return True
        return False

    def until(self, minute: int) -> int:
        """Return the minutes from `minute` until `allow` changes; a whole day if it never does."""
        now = self.allow(minute)
        changes = (wait for wait in range(1, DAY_MINUTES) if self.allow((minute + wait) % DAY_MINUTES) != now)
        return next(changes, DAY_MINUTES)


def parse(text: str) -> Hours:
    """Parse `22:00-08:00`, or several spans separated by commas. Raises HoursError."""
    spans = []
    for part in text.split(","):
        match = _SPAN.fullmatch(part)
        if match is None:
            raise HoursError(f"is {text!r}; expected hours such as 22:00-08:00, or several with commas")
        first, stop = _minute(match[1], match[2]), _minute(match[3], match[4])
        if first % DAY_MINUTES == stop % DAY_MINUTES:  # 00:00 equals 24:00.
            raise HoursError(
                f"is {text!r}; {part.strip()} begins when it ends; leave `hours` out for all day"
            )
        spans.append((first % DAY_MINUTES, stop))
    return Hours(tuple(spans))


def _minute(hour: str, minute: str) -> int:
    """Return minutes after midnight; 24:00 is the end of the day. Raises HoursError."""
    total = int(hour) * 60 + int(minute)
    if int(minute) > 59 or total > DAY_MINUTES:
        raise HoursError(f"there is no time {hour}:{minute} in a day")
    return total
