"""Real processes: the only bootstrap is away for some time, and a newcomer must find the swarm afterwards.

    scripts/soak bootstrap [--away 5 65 180] [--keep FOLDER]

A bootstrap and two peers that train on 127.0.0.1. The bootstrap is killed, and comes back after `--away`
seconds with the same key and port. The newcomer starts at that moment. It must train in the swarm's group
within 60 s of its start. Prints a line of seconds per absence; exit code 1 if one takes longer.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from model_sizes import model_keys
from processes import publish_run

from peers.lab.processes.demo import LOOPBACK
from peers.lab.processes.local_processes import DemoPeer, start
from peers.telemetry import event_log

RUN: dict[str, Any] = {
    "name": "bootstrap away",
    "stages": [1],
    "model": model_keys(width=32, layers=1, heads=2, kv_heads=2, inner=64),
    "data": {"seq_len": 32, "micro_batch_size": 2},
    "rounds": {"global_batch_tokens": 4096, "snapshot_interval": 8},
}
JOIN_SECONDS = 60.0
"""The issue's bound, from the newcomer's start."""
WATCHED_SECONDS = 150.0
"""How long a join that is too late is waited for, so that its seconds can be reported."""
BEGIN_SECONDS = 120.0
"""Three processes import torch on a busy machine."""


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until(condition: Any, what: str, seconds: float) -> float:
    """Return the seconds that passed until it held. Raises TimeoutError."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() > began + seconds:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.2)
    return time.monotonic() - began


def events(peer: DemoPeer, name: str) -> list[event_log.LogLine]:
    """Return the peer's events of that name so far."""
    log = peer.state / "events.jsonl"
    return [event for event in event_log.read(log) if event.name == name] if log.exists() else []


def make_run(folder: Path) -> Path:
    """Publish the run in a new folder, which is returned."""
    folder.mkdir(parents=True)
    publish_run(folder, RUN)
    return folder


async def play(folder: Path, away: float) -> dict[str, float]:
    """Play one absence. Returns seconds from the return: to the first link, and to training."""
    listen = {"listen": [f"/ip4/127.0.0.1/tcp/{free_port()}"]}
    boot_keys = {"role": "bootstrap", "run": "run.json", **LOOPBACK, **listen}
    boot = await start(folder, "boot", boot_keys)
    peers = []
    try:
        await boot.until_listening()
        keys = {"run": "run.json", "bootstrap": boot.addresses, "stage": 0, **LOOPBACK}
        peers = [await start(folder, f"peer-{number}", keys) for number in (1, 2)]
        first = list(peers)
        await until(lambda: all(events(peer, "in_step") for peer in first), "both train", BEGIN_SECONDS)
        await until(lambda: all(events(peer, "linked") for peer in first), "they are linked", BEGIN_SECONDS)
        boot.kill()
        await asyncio.sleep(away)
        await boot.stop(1.0)
        boot = await start(folder, "boot", boot_keys)
        await boot.until_listening()
        back = time.time()
        newcomer = await start(folder, "newcomer", keys)
        peers.append(newcomer)
        await until(lambda: events(newcomer, "linked"), "the newcomer finds a peer", WATCHED_SECONDS)
        await until(lambda: events(newcomer, "in_step"), "the newcomer trains", WATCHED_SECONDS)
        said = [line for peer in first for line in peer.said if "bootstrap" in line and "answer" in line]
        return {
            "linked": events(newcomer, "linked")[0].time - back,
            "trains": events(newcomer, "in_step")[0].time - back, "lines": len(said),
        }  # fmt: skip
    finally:
        await asyncio.gather(*(peer.stop(10.0) for peer in [*peers, boot]))


async def main(absences: list[float], keep: Path | None) -> int:
    """Play all absences. Returns the exit code."""
    late = 0
    kept = nullcontext(str(keep)) if keep else tempfile.TemporaryDirectory(prefix="swarmnet-soak-")
    with kept as folder:
        for away in absences:
            try:
                seconds = await play(make_run(Path(folder) / f"away-{away:g}"), away)
            except TimeoutError as error:
                late += 1
                print(f"away {away:g} s: {error}", flush=True)
                continue
            late += seconds["linked"] > JOIN_SECONDS
            print(
                f"away {away:g} s: linked after {seconds['linked']:.1f} s, trains after "
                f"{seconds['trains']:.1f} s, {seconds['lines']:g} lines of the two peers",
                flush=True,
            )
    return int(late > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--away", type=float, nargs="+", default=[5.0, 65.0, 180.0])
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    sys.exit(asyncio.run(main(options.away, options.keep)))
