"""The worker that a peer runs now, as its role sees it, and what stands for it while there is none."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from peers.compute.executor import Compute
from peers.telemetry.snapshot import SwarmSnapshot
from peers.worker.stage_services import StageServices
from peers.worker.watch.sampler import WorkerSampler
from peers.worker.watch.snapshot_of_worker import stuck_of_worker
from peers.worker.worker import Worker


class NotRunning:
    """Stands for the worker while this peer serves no stage."""

    is_there = False
    is_ready = False
    state = ""
    stage = -1
    services: StageServices | None = None
    compute: Compute | None = None
    snapshot: SwarmSnapshot | None = None
    stuck: tuple[str, ...] = ()

    def leave(self) -> None:
        """Do nothing, since there is nothing to leave."""

    def work_at_most(self, share: float) -> None:
        """Do nothing: the next worker begins with the share that holds then."""

    def working_seconds(self) -> float:
        return 0.0

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """Do nothing: the worker of this task has ended."""


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """The worker of one stage, with what belongs to it alone."""

    worker: Worker
    sampler: WorkerSampler
    compute: Compute

    is_there = True

    @property
    def is_ready(self) -> bool:
        """Whether the worker takes part in the rounds of its stage."""
        return self.sampler.ready

    @property
    def state(self) -> str:
        return self.worker.state

    @property
    def stage(self) -> int:
        """The stage that it serves; -1 until it is chosen."""
        return self.worker.stage

    @property
    def services(self) -> StageServices | None:
        """The services of its stage; None until that is chosen."""
        return self.worker.services

    @property
    def snapshot(self) -> SwarmSnapshot | None:
        """What it knows of the swarm; None before the first look."""
        return self.sampler.snapshot

    @property
    def stuck(self) -> tuple[str, ...]:
        """Why the run is stuck, as far as this peer knows."""
        return stuck_of_worker(self.worker)

    def leave(self) -> None:
        self.worker.leave()

    def work_at_most(self, share: float) -> None:
        """Compute at most this fraction of the time from now on."""
        self.compute.work_at_most(share)

    def working_seconds(self) -> float:
        return self.compute.working_seconds()

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """End the worker if this task of it failed."""
        self.worker.context.task_ended(task)
