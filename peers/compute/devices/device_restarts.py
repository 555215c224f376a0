"""When devices whose processes were lost are started again."""

from __future__ import annotations

from swarmnet.backoff import doubled

RESTART_SECONDS = 1.0
"""Delay before lost devices are started again; it doubles with each loss in a row."""
LONGEST_RESTART_SECONDS = 30.0


class DeviceRestarts:
    """Delays before lost devices start again, longer unless the devices had worked for a while."""

    def __init__(self) -> None:
        self.held_since = 0.0
        """When the devices last began to work, in seconds of the monotonic clock."""
        self._losses = 0
        """Losses in a row."""

    def next_delay(self, now: float) -> float:
        """Return how long to wait, in seconds, before devices that were lost at `now` are started again."""
        if now > self.held_since + LONGEST_RESTART_SECONDS:
            self._losses = 0
        delay = doubled(RESTART_SECONDS, self._losses, LONGEST_RESTART_SECONDS)
        self._losses += 1
        return delay
