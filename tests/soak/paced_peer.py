"""A peer of a given speed: `paced_peer.py SECONDS NOW LATER PYTHON -m peers.cli.main run FILE`.

It computes everything, and takes SECONDS for a layer and microbatch: NOW times that at first, LATER times
from a SIGUSR2 on, as a computer that something else has begun to use. What the machine below can do matters
only where that is less. Rounds and messages are as quick as they are.
"""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from peers.cli import main as cli
from peers.compute.stage_part import Computes
from peers.worker.pipeline import data_path
from peers.worker.pipeline.microbatch_compute import Bodies, Computed, MicrobatchWork, Trouble
from swarmnet.identifiers import MicrobatchId
from swarmnet.placement.policy import stage_work
from swarmnet.run.manifest import Manifest

FORWARD_PART, BACKWARD_PART = 1 / 3, 2 / 3
"""Of a microbatch: a backward pass multiplies twice as much. The last stage does both in one."""


class PacedWork(MicrobatchWork):
    layer_seconds = 0.0
    times = 1.0

    def __init__(self, manifest: Manifest, stage: int, stage_compute: Computes) -> None:
        super().__init__(manifest, stage, stage_compute)
        self.layers = stage_work(manifest)[stage]

    def forward(self, key: MicrobatchId, kept: Bodies) -> Computed | Trouble:
        with self.paced(1.0 if self.is_last else FORWARD_PART):
            return super().forward(key, kept)

    def backward(self, key: MicrobatchId, kept: Bodies) -> Computed | Trouble:
        with self.paced(BACKWARD_PART):
            return super().backward(key, kept)

    @contextmanager
    def paced(self, part: float) -> Iterator[None]:
        """Sleeps in the compute thread, which to the peer is work: taking so long is what it is for."""
        until = time.perf_counter() + part * self.times * self.layers * self.layer_seconds
        yield
        time.sleep(max(0.0, until - time.perf_counter()))


def slow_down(*_: object) -> None:
    PacedWork.times = later


if __name__ == "__main__":
    PacedWork.layer_seconds, PacedWork.times, later = map(float, sys.argv[1:4])
    data_path.MicrobatchWork = PacedWork  # A volunteer's program has no setting that makes it slow.
    signal.signal(signal.SIGUSR2, slow_down)
    sys.argv = ["swarmnet", *sys.argv[7:]]
    cli.main()
