"""The demo's processes: each a real `swarmnet run` with its own folder, identity and p2pd."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.config.errors import UserError
from peers.runtime.child_process import start_swarmnet

START_SECONDS = 60.0
"""Time limit for a peer to start: one alone takes about 2 s, seven on two busy cores several times that."""
KEPT_LINES = 50


@dataclass(slots=True)
class DemoPeer:
    """One child process, with its latest status and messages."""

    name: str
    state: Path
    process: asyncio.subprocess.Process
    started_at: float
    """Unix time of the start."""
    status: dict[str, Any] = field(default_factory=dict)
    said: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    addresses: list[str] = field(default_factory=list)
    peer_id: str = ""
    p2pd: int = 0
    """Process id of its newest p2pd."""
    killed_at: float | None = None
    reader: asyncio.Task[None] | None = None
    listening: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    @property
    def last_words(self) -> str:
        """Return the peer's last messages, for an error text."""
        return " | ".join(list(self.said)[-3:]) or "it said nothing"

    async def read(self) -> None:
        """Read the JSON lines on the peer's standard error until it ends."""
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            try:
                line = json.loads(raw)
            except ValueError:
                self.said.append(raw.decode(errors="replace").rstrip())
                continue
            if not isinstance(line, dict):
                continue
            if line.get("event") == "status":
                self.status = line
                continue
            self.said.append(str(line.get("text", "")))
            if line.get("event") == "listening":
                address = str(line["text"]).removeprefix("listening on ")
                self.addresses.append(address)
                self.peer_id = address.rpartition("/p2p/")[2]
                self.p2pd = int(line.get("p2pd", 0))
                self.listening.set()

    async def until_listening(self) -> None:
        """Wait until the peer's p2pd listens. Raises UserError with its last messages if it ends first."""
        wait = asyncio.create_task(self.listening.wait())
        end = asyncio.create_task(self.process.wait())
        done, _ = await asyncio.wait({wait, end}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for task in (wait, end):
            task.cancel()
        if wait not in done:
            raise UserError(f"{self.name} did not start within {START_SECONDS:g} s: {self.last_words}")

    def kill(self) -> None:
        """Kill the peer by SIGKILL, like a power cut."""
        self.killed_at = time.time()
        self.process.kill()

    def freeze(self, signal_number: int = signal.SIGSTOP) -> None:
        """Stop the peer and its p2pd by SIGSTOP; SIGCONT continues them."""
        for pid in (self.process.pid, self.p2pd):
            os.kill(pid, signal_number)

    async def stop(self, drain_seconds: float) -> None:
        """Stop the peer by SIGTERM; kill it after `drain_seconds`."""
        if self.alive:
            self.process.terminate()
            try:
                async with asyncio.timeout(drain_seconds):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        if self.reader is not None:
            await self.reader


async def start(folder: Path, name: str, keys: Mapping[str, object], prefix: Sequence[str] = ()) -> DemoPeer:
    """Write `name.yaml` and start the peer. `prefix`: command that runs the peer elsewhere."""
    file = folder / f"{name}.yaml"
    lines = [f"{key}: {json.dumps(value)}" for key, value in {"log": "json", **keys, "state": name}.items()]
    await asyncio.to_thread(file.write_text, "\n".join(lines) + "\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    process = await start_swarmnet(["run", str(file)], prefix=prefix, environment=environment)
    peer = DemoPeer(name, folder / name, process, time.time())
    peer.reader = asyncio.create_task(peer.read(), name=f"reader of {name}")
    return peer
