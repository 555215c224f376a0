"""What a worker is made of, for those of its parts that look at the others.

They know this and not the worker, which owns the life of them all.
"""

from __future__ import annotations

from peers.compute.executor import Compute
from peers.compute.stage_part import StagePart
from peers.network.discovery.announcer import Presence
from peers.network.neighbourhood import Neighbourhood
from peers.network.ports import Load
from peers.state.checkpoint_writer import Disk
from peers.state.state_path import StatePath
from peers.telemetry import events as noted
from peers.telemetry.events import Say
from peers.worker.inference.server import Inference
from peers.worker.pipeline.data_path import DataPath
from peers.worker.rounds.digest_gossip import SignedDigests
from peers.worker.rounds.receipts import Receipts
from peers.worker.rounds.update_path import UpdatePath
from peers.worker.settings import Settings
from peers.worker.stage_moves import Moving
from peers.worker.starting_state import Recovery
from protocols.ports import Transport
from swarmnet.rounds.audits import Audits
from swarmnet.rounds.makers import Makers
from swarmnet.run.manifest import Manifest


class Parts:
    """Those that can be None are not there before the stage is known (`update`: before the weights are here);
    then the ones without None are not there either, below `neighbourhood`."""

    manifest: Manifest
    settings: Settings
    transport: Transport
    presence: Presence
    compute: Compute
    note: noted.Note
    say: Say
    state: str
    stage: int
    part: StagePart
    neighbourhood: Neighbourhood | None
    data: DataPath | None
    update: UpdatePath | None
    states: StatePath | None
    makers: Makers
    audits: Audits
    moving: Moving
    digests: SignedDigests
    receipts: Receipts
    disk: Disk
    recovery: Recovery
    inference: Inference

    def load(self) -> Load:
        """What beats say."""
        data, update = self.data, self.update
        if data is None or update is None:
            return Load(self.stage, False, 0, 0.0, 0)
        ready = data.serving and update.rounds.in_step
        free = max(0, data.pipeline.slots - data.pipeline.under_way)
        round, moving_to = update.rounds.current, self.moving.moving_to
        return Load(self.stage, ready, free, data.service_seconds, round, moving_to)
