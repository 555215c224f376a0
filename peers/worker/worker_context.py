"""What the services of a worker share from the moment it joins a run."""

from __future__ import annotations

import asyncio
from dataclasses import InitVar, dataclass, field
from random import Random

from peers.compute.executor import Compute
from peers.config.run_file import SignedManifest
from peers.network.discovery.announcer import RecordAnnouncer
from peers.telemetry.log_events import LogEvent, Notify
from peers.worker.settings import Settings
from protocols.ports import Directory, Transport
from protocols.signed.identity import Identity
from swarmnet.identifiers import PeerId
from swarmnet.run.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """The run, this peer's identity, and the ports through which a worker acts. Nothing in it changes."""

    signed: SignedManifest
    identity: Identity
    transport: Transport
    directory: InitVar[Directory]
    compute: Compute
    settings: Settings
    chance: Random
    log_event: LogEvent
    """Appends an event to the event log."""
    notify: Notify
    """Prints one line for people."""

    presence: RecordAnnouncer = field(init=False)
    """Announces this peer in `directory`."""

    def __post_init__(self, directory: Directory) -> None:
        presence = RecordAnnouncer(
            signed=self.signed,
            identity=self.identity,
            transport=self.transport,
            directory=directory,
            version=self.settings.version,
            log_event=self.log_event,
            own_start=self.settings.own_start,
        )
        object.__setattr__(self, "presence", presence)  # The dataclass is frozen.

    @property
    def manifest(self) -> Manifest:
        return self.signed.manifest

    @property
    def me(self) -> PeerId:
        return self.transport.peer

    def end_with(self, error: BaseException) -> None:
        """End the worker with `error`, unless something else ended it before."""
        if not self.compute.failed.done():
            self.compute.failed.set_result(error)

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """End the worker if a background task failed; a cancelled one is ignored."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.end_with(error)
