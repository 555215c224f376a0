"""Measure how long the compute thread works and how long it idles, and why. Sampled once a second.

The thread only adds up its working time. Idle time is booked on the reason that holds at the moment of the
sample. The seconds per reason are therefore right over minutes, but not for each single second.
"""

from __future__ import annotations

from collections import deque
from weakref import ref

from peers.compute.executor import Compute
from peers.telemetry.machine_metrics import ComputeSeconds
from peers.worker.worker import Worker

SHARE_SECONDS = 10.0
"""`idle_share` is the mean over this window, the same as for tokens per second."""
PLAIN = {
    "connecting": "joining",
    "joining": "joining",
    "paused_by_owner": "paused_by_owner",
    "ended": "paused_by_owner",
    "leaving": "leaving",
}
"""States of a worker that are an idle reason themselves."""
ELSEWHERE = ("waiting", "unrouted")
"""Phases of a microbatch (`pipeline.Phase`) that is on another stage or needs a peer of one."""


def idle_reason(worker: Worker) -> str:
    """Return what the compute thread waits for when it has nothing to do."""
    services = worker.services
    if worker.state in PLAIN or services is None or not services.pipeline_service.serving:
        return PLAIN.get(worker.state, "joining")
    if services.pipeline_service.missing.now:
        return "stage_missing"
    # What is being computed here at this moment does not explain the pauses in between.
    elsewhere = any(job.phase in ELSEWHERE for job in services.pipeline_service.pipeline.jobs.values())
    return "answers" if elsewhere else "microbatches"


class ComputeTime:
    """The compute time of one process, over all stages that it serves one after another."""

    def __init__(self, metrics: ComputeSeconds) -> None:
        self._metrics = metrics
        self._at: float | None = None
        self._compute: ref[Compute] | None = None
        """A weak reference: work waiting in it holds a stage's memory, which a paused peer has to release."""
        self._busy = 0.0
        self._rested = 0.0
        self._idle = 0.0
        self._samples: deque[tuple[float, float]] = deque()
        """Samples of (time, idle seconds until then)."""

    def look(self, now: float, compute: Compute | None, reason: str) -> None:
        """Add a sample at `now` (seconds). `compute` may be None; `reason` explains idle time."""
        if compute is not (self._compute() if self._compute is not None else None):
            self._compute = ref(compute) if compute is not None else None
            self._busy = 0.0
            self._rested = 0.0
        busy = compute.busy_seconds if compute is not None else 0.0
        rested = compute.rested_seconds if compute is not None else 0.0
        if self._at is not None:
            self._add(now - self._at, max(0.0, busy - self._busy), max(0.0, rested - self._rested), reason)
        self._at = now
        self._busy = busy
        self._rested = rested
        self._samples.append((now, self._idle))
        while self._samples[0][0] < now - SHARE_SECONDS:
            self._samples.popleft()

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
        """Return the idle fraction of the last seconds; None with fewer than two samples."""
        if not self._samples:
            return None
        (first_at, first), (last_at, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else None
