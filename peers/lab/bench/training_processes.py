"""What training costs in real processes: a peer with the whole model, and one peer for each stage, beside the
plain loop of training.py, which runs in this process at the same time.

Everything that a peer does counts: its text, its links, its p2pd, its event log, its records. Seconds are the
processors', of all these processes, between two words of the last stage about how many tokens it has
committed.
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

from peers.config.run_file import publish
from peers.errors import UserError
from peers.lab.bench.training import Plain, step_tokens_of, texts_of
from peers.lab.processes.processes import DemoPeer, start
from protocols.signed.identity import load_or_create
from swarmnet.model.state_layout import first_state
from swarmnet.run.manifest import Manifest

LOOPBACK = {
    "listen": ["/ip4/127.0.0.1/tcp/0"], "relay": False, "nat": False, "lan": False, "log": "json",
    "metrics": {"listen": "off"}, "drain_seconds": 5, "auto_rebalance": False, "threads": 1, "device": "cpu",
}  # fmt: skip
TRAINING = "training"
"""What a worker's status says once it takes part."""
BEGIN_SECONDS = 180.0
"""For all to train, on a machine that has much else to do."""
SETTLED_ROUNDS = 3
"""Before anything is measured: imports, the first dials and weights are over."""
LOOK_SECONDS = 0.02
STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class SwarmCost:
    """Of one swarm, and of the plain loop at the same time."""

    peers: int
    tokens: int
    seconds: float
    """Of processors, for these."""
    of_daemons: float
    """Of them, of the peers' p2pd."""
    of_loops: float
    """Of them, of the threads that do not compute but talk: event loops."""
    plain_tokens: int
    plain_seconds: float

    @property
    def ratio(self) -> float:
        """Tokens for a second of a processor, beside the plain loop."""
        return (self.tokens / self.seconds) / (self.plain_tokens / self.plain_seconds)


async def bench(run_file: Path, manifest: Manifest, seconds: float) -> list[SwarmCost]:
    """A swarm of one peer, and of one for each stage, for so many seconds each. UserError if one does not
    come to train."""
    cuts: list[tuple[int, ...]] = [(manifest.model.num_hidden_layers,)]
    if len(manifest.stages) > 1:
        cuts.append(manifest.stages)
    found = []
    for stages in cuts:
        with tempfile.TemporaryDirectory(prefix="swarmnet-training-") as folder:
            found.append(await _of_a_swarm(Path(folder), run_file, replace(manifest, stages=stages), seconds))
    return found


def render(costs: Sequence[SwarmCost]) -> str:
    """A row a swarm."""
    lines = ["processor time of whole processes, each beside the plain loop at the same time", ""]
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
        plain = _Beside(manifest)
        beside = asyncio.create_task(asyncio.to_thread(plain.run))
        try:
            before, tokens = await _next_word(peers)
            await asyncio.sleep(seconds)
            after, tokens_then = await _next_word(peers)
        finally:
            plain.ended = True
            await beside
    spent, of_daemons, of_loops = (then - now for now, then in zip(before, after, strict=True))
    return SwarmCost(
        len(peers), tokens_then - tokens, spent + of_daemons, of_daemons, of_loops, plain.tokens,
        plain.seconds,
    )  # fmt: skip


async def _started(stack: AsyncExitStack, folder: Path, name: str, keys: dict[str, object]) -> DemoPeer:
    peer = await start(folder, name, keys)
    stack.push_async_callback(peer.stop, STOP_SECONDS)
    return peer


async def _next_word(peers: Sequence[DemoPeer]) -> tuple[tuple[float, float, float], int]:
    """Once the last stage says that it has committed more: seconds of the peers, of their p2pd and of their
    event loops by then, and its tokens."""
    last = peers[-1]
    said = last.status["tokens"]
    await _until(last, lambda status: status["tokens"] != said)
    own = sum(_seconds(peer.process.pid) for peer in peers)
    daemons = sum(_seconds(peer.p2pd) for peer in peers)
    loops = sum(_loop_seconds(peer.process.pid) for peer in peers)
    return (own, daemons, loops), last.status["tokens"]


def _trains(status: Mapping[str, Any]) -> bool:
    return status.get("state") == TRAINING and (status.get("round") or 0) >= SETTLED_ROUNDS


async def _until(peer: DemoPeer, holds: Callable[[Mapping[str, Any]], bool]) -> None:
    """UserError if a peer ends before its status says so, or takes too long."""
    until = time.monotonic() + BEGIN_SECONDS
    while not holds(peer.status):
        if not peer.alive or time.monotonic() > until:
            why = f"does not train within {BEGIN_SECONDS:g} s" if peer.alive else "has ended"
            raise UserError(f"{peer.name} {why}: {peer.last_words}")
        await asyncio.sleep(LOOK_SECONDS)


def _seconds(pid: int) -> float:
    """That a process has had of the processors."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _loop_seconds(pid: int) -> float:
    """Of its first thread."""
    threads = psutil.Process(pid).threads()
    return float(sum(thread.user_time + thread.system_time for thread in threads if thread.id == pid))


class _Beside:
    """The plain loop, in a thread."""

    def __init__(self, manifest: Manifest) -> None:
        first = first_state(replace(manifest, stages=(manifest.model.num_hidden_layers,)), 0)
        self._loop = Plain(manifest, first, step_tokens_of(manifest))
        self._texts = texts_of(manifest)
        self.tokens, self.seconds, self.ended = 0, 0.0, False

    def run(self) -> None:
        while not self.ended:
            began = time.thread_time()
            tokens_BT, labels_BT = self._texts[0]
            self._loop.microbatch(tokens_BT, labels_BT)
            self.seconds += time.thread_time() - began
            self.tokens += labels_BT.numel()
