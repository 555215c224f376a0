"""Where the time of the compute thread goes: working, or idle, and why. Looked at once a second.

The thread itself only adds up how long it worked; what it had to wait for is what the peer is at when
somebody looks, so the seconds of each reason are right over minutes, and not one by one.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol
from weakref import ref

from peers.telemetry.machine_metrics import ComputeSeconds
from peers.worker.worker import Worker

SHARE_SECONDS = 10.0
"""`idle_share` is an average over so long (as tokens per second are)."""
PLAIN = {
    "connecting": "joining",
    "joining": "joining",
    "paused_by_owner": "paused_by_owner",
    "ended": "paused_by_owner",
    "leaving": "leaving",
}
"""States of a worker that are the reason themselves."""
ELSEWHERE = ("waiting", "unrouted")
"""Phases of a microbatch (pipeline.Phase) that is on another stage, or wants to go there."""


class Counted(Protocol):
    """What is read of a compute thread (compute.Compute)."""

    @property
    def busy_seconds(self) -> float: ...

    @property
    def rested_seconds(self) -> float: ...


def idle_reason(worker: Worker) -> str:
    """What the compute thread waits for when it has nothing to do."""
    data = worker.data
    if worker.state in PLAIN or data is None or not data.serving:
        return PLAIN.get(worker.state, "joining")
    if data.missing:
        return "stage_missing"
    # What is just being computed here says nothing of the pauses in between.
    elsewhere = any(job.phase in ELSEWHERE for job in data.pipeline.jobs.values())
    return "answers" if elsewhere else "microbatches"


class ComputeTime:
    """Of one process, whatever stages it holds one after the other."""

    def __init__(self, metrics: ComputeSeconds) -> None:
        self._metrics = metrics
        self._at: float | None = None
        self._compute: ref[Counted] | None = None
        """Not kept alive: what waits in it holds a stage's memory, and the peer may be paused."""
        self._busy = self._rested = 0.0
        self._idle = 0.0
        self._looks: deque[tuple[float, float]] = deque()
        """(time, idle seconds until then)."""

    def look(self, now: float, compute: Counted | None, reason: str) -> None:
        """`now` in seconds; `compute`: None: there is none; `reason`: why it would be idle."""
        if compute is not (self._compute() if self._compute is not None else None):
            self._compute = ref(compute) if compute is not None else None
            self._busy = self._rested = 0.0
        busy = compute.busy_seconds if compute is not None else 0.0
        rested = compute.rested_seconds if compute is not None else 0.0
        if self._at is not None:
            self._add(now - self._at, max(0.0, busy - self._busy), max(0.0, rested - self._rested), reason)
        self._at, self._busy, self._rested = now, busy, rested
        self._looks.append((now, self._idle))
        while self._looks[0][0] < now - SHARE_SECONDS:
            self._looks.popleft()

    def _add(self, passed: float, busy: float, rested: float, reason: str) -> None:
        busy = min(passed, busy)
        rested = min(passed - busy, rested)
        idle = passed - busy - rested
        self._idle += idle + rested
        self._metrics.busy.inc(busy)
        self._metrics.idle("compute_duty_cycle").inc(rested)
        self._metrics.idle(reason).inc(idle)

    @property
    def idle_share(self) -> float | None:
        """Of the last seconds; None: not looked at long enough."""
        if not self._looks:
            return None
        (first_at, first), (last_at, last) = self._looks[0], self._looks[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else None
