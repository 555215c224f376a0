"""The interface between a worker and its parts, through which the parts reach each other.

The parts depend on this module and not on the worker, which owns the life cycle of all of them.
"""

from __future__ import annotations

from peers.compute.executor import Compute
from peers.compute.stage_part import StagePart
from peers.network.discovery.announcer import RecordAnnouncer
from peers.network.peer_links import PeerLinks
from peers.network.ports import HeartbeatLoad
from peers.state.checkpoint_writer import CheckpointWriter
from peers.state.snapshot_service import SnapshotService
from peers.telemetry import log_events
from peers.telemetry.log_events import Notify
from peers.worker.inference.server import Inference
from peers.worker.pipeline.pipeline_service import PipelineService
from peers.worker.rounds.digest_gossip import SignedDigests
from peers.worker.rounds.receipt_service import Receipts
from peers.worker.rounds.round_service import RoundService
from peers.worker.settings import Settings
from peers.worker.stage_moves import StageMover
from peers.worker.starting_state import StateRecovery
from protocols.ports import Transport
from swarmnet.rounds.audits import Audits
from swarmnet.rounds.contributors import ContributorFilter
from swarmnet.run.manifest import Manifest


class WorkerContext:
    """The parts of a worker. Those that may be None do not exist before the stage is known (`update`: before
    the weights are there). The parts from `contributors` on then do not exist either."""

    manifest: Manifest
    settings: Settings
    transport: Transport
    presence: RecordAnnouncer
    compute: Compute
    log_event: log_events.LogEvent
    notify: Notify
    state: str
    stage: int
    part: StagePart
    neighbourhood: PeerLinks | None
    data: PipelineService | None
    update: RoundService | None
    states: SnapshotService | None
    contributors: ContributorFilter
    audits: Audits
    moving: StageMover
    digests: SignedDigests
    receipts: Receipts
    disk: CheckpointWriter
    recovery: StateRecovery
    inference: Inference

    def load(self) -> HeartbeatLoad:
        """Return this peer's load, as sent in heartbeats."""
        data, update = self.data, self.update
        if data is None or update is None:
            return HeartbeatLoad(self.stage, False, 0, 0.0, 0)
        ready = data.serving and update.rounds.in_step
        free = max(0, data.pipeline.slots - data.pipeline.under_way)
        round, moving_to = update.rounds.current, self.moving.moving_to
        return HeartbeatLoad(self.stage, ready, free, data.service.seconds, round, moving_to)
