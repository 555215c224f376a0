"""Real peers of a run that an archivist keeps, on 127.0.0.1."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from model_sizes import model_keys
from processes import publish_run
from swarm_scene import PATIENCE_SECONDS, RunningPeers

from peers.lab.processes import demo_report
from peers.lab.processes.demo import LOOPBACK
from peers.lab.processes.local_processes import DemoPeer, start

RUN = {
    "name": "archived",
    "stages": [1, 1],
    "listed": True,
    "contact": "owner@example.org",
    "model": model_keys(width=32, layers=2, heads=2, kv_heads=2, inner=64),
    "data": {
        "seq_len": 32,
        "micro_batch_size": 2,
        "sources": [
            {"name": "first", "path": "first.txt", "licence": "CC0-1.0", "collected": "2024"},
            {"name": "second", "path": "second.txt", "licence": "MIT", "kind": "synthetic"},
        ],
    },
    "rounds": {"global_batch_tokens": 512, "snapshot_interval": 4},
}


class Scene(RunningPeers):
    prefix: tuple[str, ...] = ()
    """Command that runs the peers that start from now on."""

    async def peer(self, name: str, keys: dict[str, object]) -> DemoPeer:
        self.peers.append(await start(self.folder, name, {**keys, **LOOPBACK}, self.prefix))
        return self.peers[-1]

    def settled(self, peer: DemoPeer) -> list[int]:
        log = peer.state / "events.jsonl"
        return sorted(demo_report.read_story(peer.state).settled) if log.exists() else []

    async def swarmnet(self, *arguments: object) -> str:
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-m", "peers.cli.main", *map(str, arguments)],
            capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
            env={"PATH": "/usr/bin:/bin", "XDG_STATE_HOME": str(self.folder / "states")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout


def tokens(scene):
    return [peer.status.get("tokens", 0) for peer in scene.peers[1:]]


@asynccontextmanager
async def owned(folder: Path, name: str, **added: object) -> AsyncIterator[tuple[Scene, dict[str, object]]]:
    """A scene with a published run of one text, its owner's key and a bootstrap, and the keys of its workers;
    whoever is in the scene at the end is stopped. `added`: further keys of the run file."""
    (folder / "first.txt").write_text("the first text. " * 3000)
    run = {**RUN, "name": name, "listed": False, **added}
    run["data"] = {**RUN["data"], "sources": RUN["data"]["sources"][:1]}
    publish_run(folder, run)
    scene = Scene(folder)
    try:
        boot = await scene.peer("boot", {"role": "bootstrap", "run": "run.json"})
        await boot.until_listening()
        keys = {"run": "run.json", "bootstrap": boot.addresses, "data_paths": {"first": "first.txt"}}
        yield scene, {**keys, "in_flight": 2, "slots": 8}
    finally:
        await asyncio.gather(*(peer.stop(60.0) for peer in scene.peers))


async def order(scene: Scene, what: str, *arguments: object) -> str:
    """What the owner of such a scene's run types, and what it says."""
    return await scene.swarmnet(
        "order", what, scene.folder / "run.json", *arguments, "--key", scene.folder / "owner.key",
        "--bootstrap", scene.peers[0].addresses[0],
    )  # fmt: skip
