"""What tests of real processes wait for and look at."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path

from peers.config.run_file import SignedManifest, publish
from peers.telemetry import event_log
from protocols.signed.identity import load_or_create

QUIET = {
    "listen": ["/ip4/127.0.0.1/tcp/0"], "relay": False, "nat": False, "metrics": {"listen": "off"},
    "log": "json", "drain_seconds": 5, "checkpoint_seconds": 0,
}  # fmt: skip


def publish_run(folder: Path, keys: Mapping[str, object]) -> tuple[SignedManifest, Path]:
    """Write a run file and an owner's key in a folder, and publish the run as run.json there."""
    file = folder / "run.yaml"
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    return publish(file, load_or_create(folder / "owner.key"), folder / "run.json")


def times(state: Path, name: str) -> list[float]:
    """When an event happened, Unix time."""
    path = state / "events.jsonl"
    return [event.time for event in event_log.read(path) if event.name == name] if path.exists() else []


HUNG_SECONDS = 120.0
"""After so long nothing more is to be waited for. How fast it is, is no test's matter: machines are busy."""


async def until(condition, what, seconds=HUNG_SECONDS):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(0.05)


def p2pd_of(pid: int) -> int:
    """The p2pd that a peer started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    names = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return next(child for child, name in names.items() if b"p2pd" in name)
