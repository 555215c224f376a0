"""What a worker is made of, for those of its parts that look at the others.

They know this and not the worker, which owns the life of them all.
"""

from __future__ import annotations

from collections.abc import Callable

from peers.compute import Compute
from peers.data_path import DataPath
from peers.disk import Disk
from peers.inference.server import Inference
from peers.listener import Load
from peers.moving import Moving
from peers.neighbourhood import Neighbourhood
from peers.presence import Presence
from peers.receipts import Receipts
from peers.recovery import Recovery
from peers.settings import Settings
from peers.signed_digests import SignedDigests
from peers.stage_part import StagePart
from peers.state_path import StatePath
from peers.update_path import UpdatePath
from protocols.transport import Transport
from swarmnet.makers import Makers
from swarmnet.manifest import Manifest


class Parts:
    """Those that can be None are not there before the stage is known (`update`: before the weights are here);
    then the ones without None are not there either, below `neighbourhood`."""

    manifest: Manifest
    settings: Settings
    transport: Transport
    presence: Presence
    compute: Compute
    note: Callable[..., None]
    say: Callable[[str, str], None]
    state: str
    stage: int
    part: StagePart
    neighbourhood: Neighbourhood | None
    data: DataPath | None
    update: UpdatePath | None
    states: StatePath | None
    makers: Makers
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
