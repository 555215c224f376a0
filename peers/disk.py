"""A worker's checkpoints in time: read at the start, written now and then, a full disk survived."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from peers import checkpoint
from peers.compute import BACKGROUND, Compute
from peers.run_file import SignedManifest
from swarmnet.layout import Layout
from swarmnet.model import initial_units
from swarmnet.replica import Replica


class Disk:
    """`folder` None keeps nothing."""

    def __init__(
        self,
        folder: Path | None,
        signed: SignedManifest,
        stage: int,
        layout: Layout,
        compute: Compute,
        note: Callable[..., None],
        say: Callable[[str, str], None],
    ) -> None:
        self.folder = folder
        self.signed = signed
        self.stage = stage
        self.layout = layout
        self.compute = compute
        self.note = note
        self.say = say
        self.saved: tuple[Path, int] | None = None
        """The newest checkpoint's file and round."""

    def own_weights(self) -> tuple[Tensor, int]:
        """int32 units and round of the newest usable checkpoint, else the seed's weights and -1."""
        manifest = self.signed.manifest
        for path in checkpoint.files(self.folder, self.stage) if self.folder is not None else ():
            try:
                round, units = checkpoint.restore(path, self.signed.run_id, self.stage, self.layout)
            except checkpoint.CheckpointError as error:
                self.say("checkpoint_unusable", f"{error}; an older one or the swarm's state is used")
                continue
            self.say("restored", f"goes on from its checkpoint of round {round}")
            return units, round
        return initial_units(manifest.model, manifest.span(self.stage), self.layout, manifest.seed), -1

    async def save_forever(self, seconds: float, replica: Callable[[], Replica]) -> None:
        """Save every `seconds`; never if that is 0."""
        if not seconds:
            await asyncio.get_running_loop().create_future()
        while True:
            await asyncio.sleep(seconds)
            await self.save(replica())

    async def save(self, replica: Replica) -> None:
        """Write the settled weights, unless the newest file has them already."""
        if self.folder is None:
            return
        taken: asyncio.Future[tuple[int, Tensor]] = asyncio.get_running_loop().create_future()

        def deliver(result: tuple[int, Tensor], _seconds: float) -> None:
            if not taken.done():
                taken.set_result(result)

        def take() -> tuple[int, Tensor]:
            return replica.settled_round, replica.settled_units()

        self.compute.submit(BACKGROUND, take, deliver)
        round, units = await taken
        if round < 0 or (self.saved is not None and self.saved[1] == round):
            return
        manifest = self.signed.manifest
        try:
            path = await asyncio.to_thread(
                checkpoint.write, self.folder, manifest, self.stage, round, units, self.layout
            )
        except checkpoint.DiskError as error:
            self.say("checkpoint_failed", f"{error}; training goes on, the older checkpoint is intact")
            return
        self.saved = (path, round)
        self.note("saved", round=round, bytes=path.stat().st_size)
