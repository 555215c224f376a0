"""State that the peers of one process share, if it holds several adjacent stages.

Each stage is held by a worker of its own, with an identity, a p2pd, links and a folder. To the swarm they are
separate peers. The first of them leads: it finds the run, chooses the stages, and applies the limits. The
others, its siblings, join through it. They share one compute thread, one socket and one endpoint, and links
between them stay in the process.
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
    """The multiaddrs of the first peer."""


class Siblings:
    """The shared state; created once per process, before its peers."""

    def __init__(self, stages: int, work_share: float = 1.0) -> None:
        self.stages = stages
        self.near = Near()
        self.computing = SharedCompute(lambda: ThreadCompute(work_share))
        self.roles: list[Pauses] = []
        """All roles, the first one first."""
        self.daemons: dict[int, int] = {}
        """Maps the number of a peer to the process id of its p2pd."""
        self.gpu: GpuWatch | None = None
        """Watch of the common device, read by the first peer."""
        self._upload: Upload | None = None
        self._found: Found | None = None
        self._held: range | None = None
        self._changed = asyncio.Event()

    def upload(self, bytes_per_second: float) -> Upload:
        """Return the upload limit that all peers share."""
        if self._upload is None:
            self._upload = Upload(bytes_per_second)
        return self._upload

    # -- set by the first peer, awaited by the others -----------------------------------------------------

    def lead(self, found: Found) -> None:
        """Publish the run. Called when the first peer has joined the swarm."""
        self._found = found
        self._notify()

    async def found(self) -> Found:
        """Wait until the first peer has found the run."""
        while self._found is None:
            await self._changed.wait()
        return self._found

    def hold(self, stages: range) -> None:
        """Publish the stages. They stay the same as long as the process lives."""
        self._held = stages
        self._notify()

    async def held(self) -> range:
        """Wait until the first peer has chosen the stages."""
        while self._held is None:
            await self._changed.wait()
        return self._held

    @property
    def stages_held(self) -> range | None:
        """The stages of this process; None before they are known."""
        return self._held

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # -- pausing, for the limits watch (`Pauses`) -----------------------------------------------------------

    def pause(self, reason: Why, text: str = "") -> None:
        for role in self.roles:
            role.pause(reason, text)

    def resume(self, reason: Why) -> None:
        for role in self.roles:
            role.resume(reason)

    def own_processes(self) -> Collection[int]:
        """Return the process ids of all p2pds, whose work belongs to this peer."""
        return self.daemons.values()
