"""Keep the weakest stage on the page steady, although measured speeds jitter.

The weakest stage is the one that a newcomer would choose, because it needs peers most."""

from __future__ import annotations

from dataclasses import replace

from peers.telemetry.snapshot import SwarmSnapshot

STEADY_SECONDS = 20.0
"""Another stage must be the weakest for this long; a walk in a small swarm brings new speeds every 5 s."""


class SteadyStage:
    """Chooses the weakest stage to show. Without it, two similar stages would alternate at each update."""

    def __init__(self) -> None:
        self._shown: int | None = None
        self._other_since: float | None = None
        """When a stage other than the shown one first was the weakest, without a break; None if it is not."""

    def steady(self, snapshot: SwarmSnapshot) -> SwarmSnapshot:
        """Return the snapshot with the stage to show as `weakest`."""
        if snapshot.weakest == self._shown:
            self._other_since = None
        elif self._should_switch(snapshot):
            self._shown = snapshot.weakest
            self._other_since = None
        return replace(snapshot, weakest=self._shown)

    def _should_switch(self, snapshot: SwarmSnapshot) -> bool:
        """Return whether to show the new weakest stage now: at once if it has fewer peers than the shown one,
        otherwise after it was another than the shown one for STEADY_SECONDS."""
        new, shown = snapshot.weakest, self._shown
        if new is None or shown is None or snapshot.stages[new].peers < snapshot.stages[shown].peers:
            return True
        if self._other_since is None:
            self._other_since = snapshot.at
        return snapshot.at >= self._other_since + STEADY_SECONDS
