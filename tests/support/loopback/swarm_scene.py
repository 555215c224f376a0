"""Four real peers that train on 127.0.0.1, and what their event logs say so far."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from model_sizes import model_keys
from processes import publish_run

from peers.lab.processes import demo_report
from peers.lab.processes.demo import LOOPBACK
from peers.lab.processes.demo_report import DemoPeerReport
from peers.lab.processes.local_processes import DemoPeer, start

RUN = {
    "name": "loopback",
    "stages": [1, 1],
    "model": model_keys(width=64, layers=2, heads=4, kv_heads=4, inner=128),
    "data": {"seq_len": 64, "micro_batch_size": 4},
    "rounds": {"global_batch_tokens": 2048, "snapshot_interval": 8},
}
PATIENCE_SECONDS = 120.0


class RunningPeers:
    """Processes, of which none may end by itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.boot: DemoPeer | None = None
        self.peers: list[DemoPeer] = []

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            words = {peer.name: list(peer.said)[-3:] for peer in self.peers}
            assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_SECONDS:g} s; {words}"
            ended = [peer.name for peer in self.peers if not peer.alive and peer.killed_at is None]
            assert not ended, f"{ended} ended by themselves; {words}"
            await asyncio.sleep(0.5)


class Scene(RunningPeers):
    """The processes, and what their event logs say so far."""

    async def begin(self) -> None:
        publish_run(self.folder, RUN)
        self.boot = await start(self.folder, "boot", {"role": "bootstrap", "run": "run.json", **LOOPBACK})
        await self.boot.until_listening()
        for number in range(4):
            await self.worker(number // 2)

    async def worker(self, stage: int | str) -> DemoPeer:
        assert self.boot is not None
        keys = {
            "run": "run.json", "bootstrap": self.boot.addresses, "stage": stage, "in_flight": 2, "slots": 8,
            **LOOPBACK,
        }  # fmt: skip
        self.peers.append(await start(self.folder, f"peer-{len(self.peers)}", keys))
        return self.peers[-1]

    async def end(self) -> None:
        await asyncio.gather(*(peer.stop(60.0) for peer in self.peers))
        if self.boot is not None:
            await self.boot.stop(60.0)

    def story(self, peer: DemoPeer) -> DemoPeerReport:
        if not (peer.state / "events.jsonl").exists():
            return DemoPeerReport("")
        return demo_report.read_story(peer.state)
