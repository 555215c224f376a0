"""What a microbatch costs this machine, everything counted in: two small real swarms, their processor time.

Timing a stage's matrix products is not enough where peers are small: messages, p2pd, hashing, rounds and
Python itself take more. So real peers train for a while, one per stage and then MANY, and the kernel says how
much processor time the peers of a stage and their p2pd took per microbatch. What each of the others adds is
what another peer of the same stage costs: its contributions.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from peers.config.run_file import publish
from peers.errors import UserError
from peers.lab.planner.question import Measured
from peers.lab.processes.demo import LOOPBACK
from peers.lab.processes.processes import DemoPeer, start
from protocols.daemon.temporary import prefix
from protocols.signed.identity import load_or_create
from swarmnet.run.manifest import Manifest

MANY = 3
"""Peers per stage of the second swarm: the more, the less it matters that no machine is as fast twice."""
START_SECONDS = 12.0
"""For each of the peers, which start together: on two cores seven take 8 to 12 s in all, on a busy machine
several times that."""
LOOK_SECONDS = 0.25
WARM_SECONDS, MEASURED_SECONDS = 4.0, 20.0
"""From when all train: what is under way must fill the pipeline."""
DRAIN_SECONDS = 3.0


def measured(manifest: Manifest) -> Measured:
    """Takes a minute and a half, mostly for the peers to start. UserError for a run that starts from a
    model."""
    if manifest.start.path:
        raise UserError("--measure trains from a seed, this run starts from a model: give speeds instead")
    tokens = manifest.microbatch_tokens
    found = []
    for each in (1, MANY):
        with tempfile.TemporaryDirectory(prefix=prefix("plan")) as folder:
            _publish(manifest, Path(folder))
            found.append(asyncio.run(_swarm(manifest, Path(folder), each, tokens)))
    one, many = found
    return Measured(one, tuple(max(0.0, (b - a) / (MANY - 1)) for a, b in zip(one, many, strict=True)))


def _publish(manifest: Manifest, folder: Path) -> None:
    typed = {key: value for key, value in asdict(manifest).items() if key not in ("owner", "wire_version")}
    (folder / "run.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in typed.items()))
    publish(folder / "run.yaml", load_or_create(folder / "owner.key"), folder / "run.json")


async def _swarm(manifest: Manifest, folder: Path, each: int, tokens: int) -> tuple[float, ...]:
    """Processor seconds per microbatch of a stage's peers, from a swarm with `each` peers per stage."""
    boot = await start(folder, "bootstrap", {"role": "bootstrap", "run": "run.json", **LOOPBACK})
    peers: list[DemoPeer] = []
    try:
        await boot.until_listening()
        for stage in range(len(manifest.stages)):
            keys = {"run": "run.json", "bootstrap": boot.addresses, "stage": stage, **LOOPBACK}
            peers += [await start(folder, f"peer-{stage}-{number}", keys) for number in range(each)]
        await _all_train(peers)
        await asyncio.sleep(WARM_SECONDS)
        before = [(_processor_seconds(peer), _tokens(peer)) for peer in peers]
        await asyncio.sleep(MEASURED_SECONDS)
        after = [(_processor_seconds(peer), _tokens(peer)) for peer in peers]
    finally:
        await asyncio.gather(*(peer.stop(DRAIN_SECONDS) for peer in [*peers, boot]))
    costs = []
    for stage in range(len(manifest.stages)):
        mine = range(stage * each, (stage + 1) * each)
        spent = sum(after[peer][0] - before[peer][0] for peer in mine)
        done = sum(after[peer][1] - before[peer][1] for peer in mine) / tokens
        if done < 1:
            raise UserError(f"measuring: stage {stage} trained nothing in {MEASURED_SECONDS:g} s")
        costs.append(spent / done)
    return tuple(costs)


async def _all_train(peers: Sequence[DemoPeer]) -> None:
    """UserError with the last words of one that does not."""
    seconds = START_SECONDS * len(peers)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while late := next((peer for peer in peers if not _tokens(peer)), None):
        if not late.alive:
            raise UserError(f"measuring: {late.name} ended: {late.last_words}")
        if loop.time() >= deadline:
            why = f"did not begin to train within {seconds:g} s"
            raise UserError(f"measuring: {late.name} {why}: {late.last_words}")
        await asyncio.sleep(LOOK_SECONDS)


def _tokens(peer: DemoPeer) -> int:
    return int(peer.status.get("tokens", 0))


def _processor_seconds(peer: DemoPeer) -> float:
    """Of the peer's process and its p2pd, from Linux' /proc."""
    ticks = 0
    for process in (peer.process.pid, peer.p2pd):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError as error:
            raise UserError(f"measuring needs Linux' /proc: {error}") from None
        ticks += int(fields[11]) + int(fields[12])  # utime and stime, fields 14 and 15 of proc(5)
    return ticks / os.sysconf("SC_CLK_TCK")
