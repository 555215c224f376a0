"""A writer of checkpoints is killed 200 times; each time a newer checkpoint that loads must lie there.

    scripts/soak disks [--kills 200 --seed 7]

Ends with 1 where a kill left no newer checkpoint or one that does not load, or where no kill hit a write.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from peers.state import checkpoint_file
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.parameters import parameter_shapes
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import ModelShape

MANIFEST = Manifest(
    "kills",
    "owner",
    stages=(1,),
    model=ModelShape(num_hidden_layers=1, hidden_size=64, intermediate_size=192),
)
LAYOUT = layout_of(parameter_shapes(MANIFEST.model, MANIFEST.span(0)))
WEIGHTS = torch.arange(LAYOUT.size, dtype=torch.int32)


def killed_after(folder: Path, first: int, seconds: float) -> None:
    """A child writes checkpoints from this round on; it is killed so long after it wrote the first."""
    ready, wrote = os.pipe()
    child = os.fork()
    if child == 0:
        for round in range(first, first + 1000):
            checkpoint_file.write(folder, MANIFEST, 0, round, bytes(8), WEIGHTS + round, LAYOUT)
            os.write(wrote, b".")
        os._exit(0)
    os.read(ready, 1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready)
    os.close(wrote)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chance, newest, torn = random.Random(arguments.seed), -1, 0
    with tempfile.TemporaryDirectory(prefix="swarmnet-disks-") as name:
        folder = Path(name)
        for kill in range(arguments.kills):
            killed_after(folder, newest + 1, chance.uniform(0.0, 0.02))
            torn += len([path for path in folder.iterdir() if path.suffix != ".safetensors"])
            held = checkpoint_file.files(folder, 0)
            round, _, units = checkpoint_file.restore(held[0], MANIFEST.run_id(), 0, LAYOUT)
            if round <= newest or not torch.equal(units, WEIGHTS + round):
                sys.exit(f"kill {kill}: the newest checkpoint is of round {round}, after {newest} before")
            newest = round
    print(f"{arguments.kills} kills, {torn} of them while a file was written; the newest round is {newest}")
    if torn == 0:
        sys.exit("no kill hit a write: this shows nothing")


if __name__ == "__main__":
    main()
