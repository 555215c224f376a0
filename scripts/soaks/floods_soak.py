"""A peer in a small real swarm under every flood at once: `scripts/soak floods`.

    scripts/soak floods [--seconds 60 --only receipts --keep FOLDER]

A bootstrap and workers of two stages train on 127.0.0.1. Strangers (floods.py) then flood one worker: beats,
forged records, statements of unknown peers, receipts for blocks that have never been, forged records for its
directory node, and long bodies that never end. The attackers run at a lower priority, as a line would hold
them back. Prints JSON: honest commits before, during and after and their longest gap, growth of the victim's
memory, its CPU, what the attackers sent and how often it ended their links, what it refused by code. Ends
with 1 where a gap is 2 s or longer, memory grows by 64 MiB or more, or the links of a flood were not ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import psutil
from floods import FLOODS, Attack, Victim
from processes import QUIET, p2pd_of, times, until

from peers.config.run_file import publish
from peers.lab.processes.local_processes import DemoPeer, start
from peers.telemetry import event_log
from protocols.signed.identity import load_or_create

GAP_SECONDS = 2.0
"""Between two honest commits: a round of the smallest run takes that long."""
GROWTH_MIB = 64.0
STOP_MIB = 1536.0
"""Growth of worker or p2pd at which the attack is given up: the machine has other work."""
CALM_SECONDS = 20.0
"""Before and after the floods."""
ENDED = ("known", "statements", "receipts", "bodies")
"""Floods of what no honest peer sends: their links must be ended. Beats, and what the directory is asked to
store, are what all peers send, only fewer."""
STAGES = (0, 1, 1)
"""Of the workers; the last one is the victim, so that training goes on without it."""
RUN = """
name: flooded
seed: 1
stages: [1, 1]
model: {num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4,
  num_key_value_heads: 4, head_dim: 16, intermediate_size: 128, max_position_embeddings: 256}
data: {seq_len: 64, micro_batch_size: 2}
rounds: {global_batch_tokens: 2048, max_seconds: 5.0}
"""


def longest_gap(moments: Sequence[float], first: float, last: float) -> float:
    """Seconds without a commit between two times, these included."""
    inside = [first, *sorted(at for at in moments if first <= at <= last), last]
    return max(after - before for before, after in pairwise(inside))


def problems(report: dict[str, Any]) -> list[str]:
    """What did not hold."""
    found = []
    if report["during"]["longest_gap_seconds"] >= GAP_SECONDS:
        found.append(f"no commit for {report['during']['longest_gap_seconds']} s; promised: {GAP_SECONDS:g}")
    for who, grown in report["growth_mib"].items():
        if grown >= GROWTH_MIB:
            found.append(f"the victim's {who} grew by {grown} MiB; promised: less than {GROWTH_MIB:g}")
    for name, flooded in report["floods"].items():
        if name in ENDED and not flooded["ended"]:
            found.append(f"no link of the flood of {name} was ended")
    if report["p2pd_replaced"]:  # Then it was that what ended the attackers' links.
        found.append(f"the victim's p2pd was replaced {report['p2pd_replaced']} times")
    if not report["alive"]:
        found.append("the victim ended")
    return found


class Watched:
    """Resident memory and CPU of a peer and its p2pd, and how often that was replaced."""

    def __init__(self, peer: DemoPeer) -> None:
        self._peer = peer
        self._p2pd = p2pd_of(peer.process.pid)
        self.replaced = 0
        self.first = self.now()
        self.most = dict(self.first)

    def now(self) -> dict[str, float]:
        """MiB of what runs."""
        return {who: process.memory_info().rss / 2**20 for who, process in self._processes()}

    def _processes(self) -> list[tuple[str, psutil.Process]]:
        found = []
        with contextlib.suppress(psutil.NoSuchProcess, OSError, StopIteration):
            found.append(("worker", psutil.Process(self._peer.process.pid)))
            p2pd = p2pd_of(self._peer.process.pid)
            self.replaced, self._p2pd = self.replaced + (p2pd != self._p2pd), p2pd
            found.append(("p2pd", psutil.Process(p2pd)))
        return found

    def cpu_seconds(self) -> float:
        """Without that of a p2pd that was replaced."""
        return sum(sum(process.cpu_times()[:2]) for _, process in self._processes())

    async def watch(self, stop: asyncio.Event) -> None:
        """Keeps the most that was seen; gives up the attack where it becomes too much."""
        while True:
            await asyncio.sleep(0.25)
            with contextlib.suppress(psutil.NoSuchProcess):
                for who, mib in self.now().items():
                    self.most[who] = max(self.most[who], mib)
                    if mib - self.first[who] > STOP_MIB:
                        stop.set()

    def growth(self, now: dict[str, float]) -> dict[str, float]:
        """Since the first look, MiB."""
        return {who: round(mib - self.first[who], 1) for who, mib in now.items()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def swarm(folder: Path, peers: list[DemoPeer]) -> None:
    """Starts the bootstrap and the workers, and waits until all of them train."""
    (folder / "run.yaml").write_text(RUN)
    publish(folder / "run.yaml", load_or_create(folder / "owner.key"), folder / "run.json")
    peers.append(await start(folder, "bootstrap", {"role": "bootstrap", "run": "run.json", **QUIET}))
    await peers[0].until_listening()
    keys = {"run": "run.json", "bootstrap": peers[0].addresses[-1:], "device": "cpu", "lan": False, **QUIET}
    for number, stage in enumerate(STAGES):
        listen = [
            f"/ip4/127.0.0.1/tcp/{free_port()}"
        ]  # The same again when p2pd is replaced: attackers redial.
        more = {"stage": stage, "threads": 1, "listen": listen}
        peers.append(await start(folder, f"worker{number}", {**keys, **more}))
    for peer in peers[1:]:
        await until(lambda peer=peer: len(times(peer.state, "committed")) > 20, f"{peer.name} trains", 120.0)


def pace(victim: DemoPeer, first: float, last: float) -> dict[str, float]:
    """Of the victim's commits between two times."""
    moments = [at for at in times(victim.state, "committed") if first <= at <= last]
    return {
        "commits_per_second": round(len(moments) / (last - first), 1),
        "longest_gap_seconds": round(longest_gap(moments, first, last), 2),
    }


def refused(victim: DemoPeer, first: float) -> dict[str, int]:
    """Events with a code, counted."""
    codes = Counter(
        f"{event.name}: {event.fields['code']}"
        for event in event_log.read(victim.state / "events.jsonl")
        if event.time >= first and event.fields.get("code")
    )
    return dict(codes.most_common(20))


async def measure(folder: Path, seconds: float, names: Sequence[str]) -> dict[str, Any]:
    peers: list[DemoPeer] = []
    try:
        async with asyncio.timeout(300.0 + seconds):
            await swarm(folder, peers)
            return await flooded(folder, peers[-1], seconds, names)
    finally:
        for peer in peers:
            await peer.stop(30.0)


async def flooded(folder: Path, victim: DemoPeer, seconds: float, names: Sequence[str]) -> dict[str, Any]:
    run = json.loads((folder / "run.json").read_text())
    address, _, peer = victim.addresses[-1].partition("/p2p/")
    target = Victim(peer, address, run["run_id"], STAGES[-1], run["manifest"]["rounds"]["snapshot_interval"])
    await asyncio.sleep(CALM_SECONDS)
    os.nice(10)  # The attackers, p2pd among them: the swarm was started before.
    keys, stop, watched = folder / "attackers", asyncio.Event(), Watched(victim)
    keys.mkdir()
    began, cpu = time.time(), watched.cpu_seconds()
    watching = asyncio.create_task(watched.watch(stop))
    attacks = [Attack(name, target, keys, began + seconds, stop) for name in names]
    try:
        await asyncio.gather(*(FLOODS[attack.name](attack) for attack in attacks))
        await asyncio.sleep(max(0.0, began + seconds - time.time()))
    finally:
        watching.cancel()
    ended, cpu = time.time(), watched.cpu_seconds() - cpu
    await asyncio.sleep(CALM_SECONDS)
    return {
        "before": pace(victim, began - CALM_SECONDS, began), "during": pace(victim, began, ended),
        "after": pace(victim, ended, ended + CALM_SECONDS), "seconds": round(ended - began, 1),
        "growth_mib": watched.growth(watched.most), "kept_mib": watched.growth(watched.now()),
        "p2pd_replaced": watched.replaced,
        "cpu_seconds": round(cpu, 1), "given_up": stop.is_set(), "alive": victim.alive,
        "floods": {attack.name: msgspec.to_builtins(attack.flooded) for attack in attacks},
        "refused": refused(victim, began), "load": psutil.getloadavg()[0],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of floods")
    parser.add_argument("--only", action="append", choices=list(FLOODS), help="floods; else all of them")
    parser.add_argument("--keep", type=Path, help="folder for the peers' states")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swarmnet-floods-") as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(measure(folder.absolute(), arguments.seconds, arguments.only or list(FLOODS)))
    print(json.dumps(report, indent=1))
    if wrong := problems(report):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
