"""Benchmark of the CPU time of training in real processes, against the plain loop of training.py.

Two swarms are measured: one peer with the whole model, and one peer for each stage. The plain loop runs in
this process at the same time. All work of a peer counts: text, links, p2pd, event log and records. The
measurement takes the CPU time of all peer processes between two status reports of the last stage; the
reports give the tokens that it has committed.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from peers.config.errors import UserError
from peers.config.run_file import publish
from peers.lab.bench.training import Plain, step_tokens_of, texts_of
from peers.lab.processes.local_processes import DemoPeer, start
from protocols.signed.identity import load_or_create
from swarmnet.model.state_layout import first_state
from swarmnet.run.manifest import Manifest

LOOPBACK = {
    "listen": ["/ip4/127.0.0.1/tcp/0"],
    "relay": False,
    "nat": False,
    "lan": False,
    "log": "json",
    "metrics": {"listen": "off"},
    "drain_seconds": 5,
    "auto_rebalance": False,
    "threads": 1,
    "device": "cpu",
}
TRAINING = "training"
"""State of a worker that is training, in its status."""
BEGIN_SECONDS = 180.0
"""Time limit for all peers to start training; enough on a busy machine."""
SETTLED_ROUNDS = 3
"""Rounds before the measurement; imports, first dials and the download of weights are over then."""
LOOK_SECONDS = 0.02
"""Interval at which a peer's status is checked."""
STOP_SECONDS = 20.0
"""Time limit for a peer to stop."""


@dataclass(frozen=True, slots=True)
class SwarmCost:
    """CPU time of one swarm, and of the plain loop at the same time."""

    peers: int
    tokens: int
    seconds: float
    """CPU seconds that the swarm took for `tokens`."""
    of_daemons: float
    """Part of `seconds` in the peers' p2pd processes."""
    of_loops: float
    """Part of `seconds` in the event loop threads, which communicate and do not compute."""
    plain_tokens: int
    plain_seconds: float

    @property
    def ratio(self) -> float:
        """Return the swarm's tokens per CPU second, divided by those of the plain loop."""
        return (self.tokens / self.seconds) / (self.plain_tokens / self.plain_seconds)


async def bench(run_file: Path, manifest: Manifest, seconds: float) -> list[SwarmCost]:
    """Measure a swarm of one peer, and one with a peer for each stage, for `seconds` each.

    Raises UserError if a peer does not start to train.
    """
    cuts: list[tuple[int, ...]] = [(manifest.model.num_hidden_layers,)]
    if len(manifest.stages) > 1:
        cuts.append(manifest.stages)
    found = []
    for stages in cuts:
        with tempfile.TemporaryDirectory(prefix="swarmnet-training-") as folder:
            found.append(await _of_a_swarm(Path(folder), run_file, replace(manifest, stages=stages), seconds))
    return found


def render(costs: Sequence[SwarmCost]) -> str:
    """Return the costs as text, one line for each swarm."""
    lines = ["processor time of whole processes, each with the plain loop at the same time", ""]
    for cost in costs:
        name = "a peer with the whole model" if cost.peers == 1 else f"{cost.peers} peers, one a stage"
        lines.append(
            f"  {name:<32}{cost.tokens / cost.seconds:>9,.0f} tokens per second of a processor, "
            f"{cost.ratio:.3f} of plain ({cost.plain_tokens / cost.plain_seconds:,.0f}); event loops "
            f"{cost.of_loops / cost.seconds:.1%}, p2pd {cost.of_daemons / cost.seconds:.1%}; "
            f"{cost.tokens:,} tokens"
        )
    return "\n".join(lines)


async def _of_a_swarm(folder: Path, run_file: Path, manifest: Manifest, seconds: float) -> SwarmCost:
    cut = {"stages": json.dumps(list(manifest.stages))}
    publish(run_file, load_or_create(folder / "owner.key"), folder / "run.json", cut)
    async with AsyncExitStack() as stack:
        keys: dict[str, object] = {"role": "bootstrap", "run": "run.json", **LOOPBACK}
        boot = await _started(stack, folder, "bootstrap", keys)
        await boot.until_listening()
        keys = {"run": "run.json", "bootstrap": boot.addresses, **LOOPBACK}
        peers = [
            await _started(stack, folder, f"stage-{stage}", {**keys, "stage": stage})
            for stage in range(len(manifest.stages))
        ]
        for peer in peers:
            await _until(peer, _trains)
        plain = _PlainThread(manifest)
        plain_run = asyncio.create_task(asyncio.to_thread(plain.run))
        try:
            before, tokens = await _next_report(peers)
            await asyncio.sleep(seconds)
            after, tokens_then = await _next_report(peers)
        finally:
            plain.ended = True
            await plain_run
    spent, of_daemons, of_loops = (then - now for now, then in zip(before, after, strict=True))
    return SwarmCost(
        len(peers),
        tokens_then - tokens,
        spent + of_daemons,
        of_daemons,
        of_loops,
        plain.tokens,
        plain.seconds,
    )


async def _started(stack: AsyncExitStack, folder: Path, name: str, keys: dict[str, object]) -> DemoPeer:
    peer = await start(folder, name, keys)
    stack.push_async_callback(peer.stop, STOP_SECONDS)
    return peer


async def _next_report(peers: Sequence[DemoPeer]) -> tuple[tuple[float, float, float], int]:
    """Wait until the last stage reports more committed tokens; return CPU seconds and these tokens.

    The CPU seconds are those of the peers, of their p2pd processes and of their event loops.
    """
    last = peers[-1]
    reported = last.status["tokens"]
    await _until(last, lambda status: status["tokens"] != reported)
    own = sum(_seconds(peer.process.pid) for peer in peers)
    daemons = sum(_seconds(peer.p2pd) for peer in peers)
    loops = sum(_loop_seconds(peer.process.pid) for peer in peers)
    return (own, daemons, loops), last.status["tokens"]


def _trains(status: Mapping[str, Any]) -> bool:
    return status.get("state") == TRAINING and (status.get("round") or 0) >= SETTLED_ROUNDS


async def _until(peer: DemoPeer, holds: Callable[[Mapping[str, Any]], bool]) -> None:
    """Wait until `holds` is true of a peer's status. Raises UserError if the peer ends or takes too long."""
    until = time.monotonic() + BEGIN_SECONDS
    while not holds(peer.status):
        if not peer.alive or time.monotonic() > until:
            why = f"does not train within {BEGIN_SECONDS:g} s" if peer.alive else "has ended"
            raise UserError(f"{peer.name} {why}: {peer.last_words}")
        await asyncio.sleep(LOOK_SECONDS)


def _seconds(pid: int) -> float:
    """Return the CPU seconds of a process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _loop_seconds(pid: int) -> float:
    """Return the CPU seconds of a process's first thread, which runs its event loop."""
    threads = psutil.Process(pid).threads()
    return float(sum(thread.user_time + thread.system_time for thread in threads if thread.id == pid))


class _PlainThread:
    """The plain training loop, to run in a thread until `ended` is set."""

    def __init__(self, manifest: Manifest) -> None:
        first = first_state(replace(manifest, stages=(manifest.model.num_hidden_layers,)), 0)
        self._loop = Plain(manifest=manifest, first=first, inner_batch_tokens=step_tokens_of(manifest))
        self._texts = texts_of(manifest)
        self.tokens = 0
        self.seconds = 0.0
        self.ended = False

    def run(self) -> None:
        while not self.ended:
            began = time.thread_time()
            tokens_BT, labels_BT = self._texts[0]
            self._loop.microbatch(tokens_BT, labels_BT)
            self.seconds += time.thread_time() - began
            self.tokens += labels_BT.numel()
