"""What tests of real processes wait for and look at."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from peers.telemetry import event_log

QUIET = {
    "listen": ["/ip4/127.0.0.1/tcp/0"], "relay": False, "nat": False, "metrics": {"listen": "off"},
    "log": "json", "drain_seconds": 5, "checkpoint_seconds": 0,
}  # fmt: skip


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
