"""What the peers of one process have in common that holds several adjacent stages.

Each stage is held by a worker of its own, with an identity, a p2pd, links and a folder: to the swarm they are
peers like any others. The first of them leads: it finds the run, chooses the stages, keeps the limits' hours.
The rest, its siblings, join through it. One compute thread, one socket, one endpoint serve them all, and
links between them do not leave the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from peers.compute.executor import ThreadCompute
from peers.compute.gpu import GpuWatch
from peers.compute.limits_watch import Pauses, Why
from peers.compute.shared_executor import SharedCompute
from peers.config.run_file import SignedManifest
from protocols.framing.same_process import Near
from protocols.framing.upload_turns import Upload


@dataclass(frozen=True, slots=True)
class Found:
    """What the first peer has found for all."""

    signed: SignedManifest
    ways_in: Sequence[str]
    """Its own multiaddrs."""


class Siblings:
    """Made once per process, before its peers."""

    def __init__(self, stages: int, work_share: float = 1.0) -> None:
        self.stages = stages
        self.near = Near()
        self.computing = SharedCompute(lambda: ThreadCompute(work_share))
        self.roles: list[Pauses] = []
        """All of them, the first one first."""
        self.daemons: dict[int, int] = {}
        """Number -> process id of its p2pd."""
        self.gpu: GpuWatch | None = None
        """Of the device of all, read by the first of them."""
        self._upload: Upload | None = None
        self._found: Found | None = None
        self._held: range | None = None
        self._news = asyncio.Event()

    def upload(self, bytes_per_second: float) -> Upload:
        """What all of them may send together."""
        if self._upload is None:
            self._upload = Upload(bytes_per_second)
        return self._upload

    # -- what the first one says, and the rest wait for ---------------------------------------------------

    def lead(self, found: Found) -> None:
        """The first peer is in the swarm, and knows the run."""
        self._found = found
        self._tell()

    async def found(self) -> Found:
        while self._found is None:
            await self._news.wait()
        return self._found

    def hold(self, stages: range) -> None:
        """These are the stages; they stay the same as long as the process lives."""
        self._held = stages
        self._tell()

    async def held(self) -> range:
        while self._held is None:
            await self._news.wait()
        return self._held

    @property
    def stages_held(self) -> range | None:
        """None: not known yet."""
        return self._held

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # -- pausing, for whoever watches the machine (`Pauses`) ----------------------------------------------

    def pause(self, reason: Why, text: str = "") -> None:
        for role in self.roles:
            role.pause(reason, text)

    def resume(self, reason: Why) -> None:
        for role in self.roles:
            role.resume(reason)

    def own_processes(self) -> Collection[int]:
        """The p2pds of all of them, whose work is this peer's own."""
        return self.daemons.values()
