"""Skipping judged with real workers: their machines, messages and patience, on a virtual clock.

What is simulated is what a worker stands on: compute that takes the topology's seconds, a network with its
latencies, and bodies that take its hops. `alone`: a body takes its hop whatever else is on its way;
`shared`: bodies between two peers go one after the other, as on one connection.

Measured is steady: how many microbatches come back to their origins in a while, after a time to warm up.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import mean
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor

from peers.compute.executor import BACKWARD, FORWARD, InlineCompute, Result
from peers.compute.stage_part import StagePart
from peers.config.run_file import SignedManifest
from peers.lab.bench.topologies import Topology, draw
from peers.lab.world.gated_clock import GatedLoop
from peers.lab.world.stub_stage import StubCompute, stub_part
from peers.telemetry.event import Event
from peers.telemetry.events import Committed
from peers.worker.settings import Settings
from peers.worker.worker import Worker
from protocols.memory.conditions import Conditions
from protocols.memory.transport import MemoryNetwork, MemoryTransport
from protocols.messages.table import Lane, Message
from protocols.messages.terms import ANYTHING, Terms
from protocols.ports import Receiver
from protocols.signed.identity import Identity
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.run.manifest import Data, Manifest, ModelShape, Paths, Rounds, owner_statement

Lines = Literal["alone", "shared"]
Rule = Literal["ahead", "router"]
"""Questions run ahead; the router chooses when the output is there."""
BACKWARD_TIMES = 1.5
"""Of the forward's seconds: the time model of SkipPipe's released schedule (topologies.py)."""
LOSS = 0.25
"""The like."""
BODY_BYTES = 66_000
"""Of a microbatch here; lines are as much slower than the topology's."""
WARM_SECONDS = 120.0
"""Until hops are measured and patience is learnt."""
WATCHED_SECONDS = 300.0
SHARE = 30
"""Microbatches of a batch: figures are seconds for so many, as in docs/benchmarks/skipping.md."""
SLOTS = 32
"""The peer file's default; memory bounds it below."""


@dataclass(slots=True)
class Finding:
    """What one rule did with one topology."""

    seconds: float
    """For `SHARE` microbatches."""
    visits: tuple[int, ...]
    """Committed per stage."""
    microbatches: int
    """That came back to their origins."""
    counts: dict[str, int]
    """Re-routed and dropped by code, questions refused, messages by name."""
    most_held: int
    """Graphs that a peer had open at a time."""


class OpenGraphCounter(StubCompute):
    """Counts the graphs that are open at a time."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        self.most = 0

    def forward(
        self, key: Hashable, inputs: Tensor, branch_scale: float = 1.0, tokens_BT: Tensor | None = None
    ) -> Tensor:
        hidden = super().forward(key, inputs, branch_scale, tokens_BT)
        self.most = max(self.most, len(self._open))
        return hidden


class TimedCompute(InlineCompute):
    """Takes the topology's seconds; to forget a microbatch takes none."""

    def submit(
        self, priority: int, work: Callable[[], Result], done: Callable[[Result, float], None]
    ) -> None:
        if priority == BACKWARD and isinstance(work, partial) and work.func.__name__ == "drop":
            done(work(), 0.0)
            return
        super().submit(priority, work, done)


class Delayed:
    """`Receiver` to which bodies come after their hop, each for itself."""

    def __init__(self, receiver: Receiver, seconds: Callable[[PeerId], float], heard: Counter[str]) -> None:
        self._receiver, self._seconds, self._heard = receiver, seconds, heard

    def received(self, peer: PeerId, lane: Lane, message: Message, body: bytes, wire_bytes: int) -> None:
        self._heard[type(message).__name__] += 1
        self._heard[f"bytes of {type(message).__name__}"] += wire_bytes
        if message.body and lane == "data" and (seconds := self._seconds(peer)):
            loop = asyncio.get_running_loop()
            loop.call_later(seconds, self._receiver.received, peer, lane, message, body, wire_bytes)
        else:
            self._receiver.received(peer, lane, message, body, wire_bytes)

    def lost(self, peer: PeerId, lane: Lane, reason: str) -> None:
        self._receiver.lost(peer, lane, reason)

    def refused(self, peer: PeerId, code: str, reason: str) -> None:
        self._receiver.refused(peer, code, reason)


class ZeroText:
    """`Text` of zeros; none after the end of the story."""

    def __init__(self, manifest: Manifest) -> None:
        shape = (manifest.data.micro_batch_size, manifest.data.seq_len)
        self._tokens = torch.zeros(shape, dtype=torch.int64)

    def microbatch(self, key: MicrobatchId) -> tuple[Tensor, Tensor]:
        return self._tokens, self._tokens


def manifest_of(topology: Topology, skip_ratio: float) -> Manifest:
    """32 Ki numbers of two bytes per microbatch, no round within the story."""
    return Manifest(
        name="skipping", owner=Identity.from_seed(b"the owner of the run").peer_id,
        stages=(1,) * topology.stages,
        model=ModelShape(hidden_size=128, num_hidden_layers=topology.stages),
        data=Data(seq_len=64, micro_batch_size=4),
        rounds=Rounds(global_batch_tokens=10**9, max_seconds=1e6),
        paths=Paths(skip_ratio),
    )  # fmt: skip


class TopologyRun:
    """A swarm of one topology, from its start to its end."""

    def __init__(self, topology: Topology, skip_ratio: float, lines: Lines, seed: int) -> None:
        owner = Identity.from_seed(b"the owner of the run")
        manifest = self.manifest = manifest_of(topology, skip_ratio)
        run_id = manifest.run_id()
        self.signed = SignedManifest(manifest, owner.sign(owner_statement(run_id)), run_id)
        self.topology, self.lines, self.seed = topology, lines, seed
        self.loop = asyncio.get_running_loop()
        self.network = MemoryNetwork(Random(seed))
        self.identities = [Identity.from_seed(f"peer {n}".encode()) for n in range(len(topology.stage))]
        self.number = {identity.peer_id: n for n, identity in enumerate(self.identities)}
        self.workers: dict[int, Worker] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.held: dict[int, OpenGraphCounter] = {}
        self.committed: list[tuple[float, int, MicrobatchId]] = []
        """When, by whom, what."""
        self.sent: Counter[str] = Counter()
        self._since, self._counted = 0.0, Counter[str]()
        self.escaped: list[BaseException] = []
        self.loop.set_exception_handler(
            lambda _, context: self.escaped.append(
                context.get("exception") or RuntimeError(str(context["message"]))
            )
        )

    def start(self) -> None:
        """Everybody, at once."""
        for number in range(len(self.identities)):
            self._start(number)
        for a, one in enumerate(self.identities):
            for b, other in enumerate(self.identities):
                if a != b:
                    self.network.set(one.peer_id, other.peer_id, self._conditions(a, b))

    def _conditions(self, a: int, b: int) -> Conditions:
        latency = self.topology.latency[a][b]
        if self.lines == "alone":
            return Conditions(latency)
        return Conditions(latency, BODY_BYTES / (self.topology.hop[a][b] - latency))

    def _start(self, number: int) -> None:
        topology, identity = self.topology, self.identities[number]
        stage = topology.stage[number]
        forward = topology.forward[number]
        last = stage == topology.stages - 1

        def cost(priority: int) -> float:
            if priority == FORWARD:
                return forward * (1 + LOSS + BACKWARD_TIMES) if last else forward
            return BACKWARD_TIMES * forward if priority == BACKWARD else 0.001

        def note(event: Event) -> None:
            if isinstance(event, Committed):
                key = MicrobatchId(PeerId(event.origin), event.counter)
                self.committed.append((self.loop.time(), number, key))

        def part(manifest: Manifest, _stage: int) -> StagePart:
            made = stub_part(manifest, note, number << 32)
            held = self.held[number] = OpenGraphCounter(manifest)
            return replace(made, compute=held, most_graphs=topology.memory)

        async def text(_withdrawn: frozenset[bytes]) -> ZeroText:
            return ZeroText(self.manifest)

        transport = self.network.transport(identity.peer_id)
        self._overhear(transport, number)
        worker = self.workers[number] = Worker(
            self.signed, identity, transport, self.network.directory(identity.peer_id), TimedCompute(cost),
            text, Settings(stage=stage, in_flight=SLOTS, slots=SLOTS, checkpoint_seconds=0.0),
            Random(f"{self.seed}/{number}"), note, lambda _event, _line: None, part,
        )  # fmt: skip
        self.tasks[number] = self.loop.create_task(worker.run(), name=str(number))

    def _overhear(self, transport: MemoryTransport, number: int) -> None:
        """Count its messages, and let bodies come after their hop."""
        topology, listen = self.topology, transport.listen

        def seconds(peer: PeerId) -> float:
            other = self.number[peer]
            alone = self.lines == "alone"
            return topology.hop[other][number] - topology.latency[other][number] if alone else 0.0

        def delayed(receiver: Receiver, terms: Terms = ANYTHING) -> None:
            listen(Delayed(receiver, seconds, self.sent), terms)

        transport.listen = delayed  # type: ignore[method-assign]

    async def during(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        for task in self.tasks.values():
            if task.done() and not task.cancelled():
                task.result()
        for error in self.escaped:
            raise error

    async def kill(self, number: int) -> None:
        """SIGKILL."""
        self.network.crash(self.identities[number].peer_id)
        self.workers[number].log_event = lambda _: None
        task = self.tasks.pop(number)
        task.cancel()
        await asyncio.wait([task])

    async def end(self) -> None:
        for number in list(self.tasks):
            await self.kill(number)

    async def assembled(self) -> None:
        while any(worker.data is None for worker in self.workers.values()):
            await self.during(0.001)

    def by_router(self) -> None:
        """Nobody asks ahead: the next peer is chosen when the output is there, among all legal ones."""
        for worker in self.workers.values():
            data = worker.data
            assert data is not None
            assert data.ahead is not None
            data.ahead.close()
            data.pipeline.guide = data.ahead = None

    def watch(self) -> None:
        """From now on it counts."""
        self._since, self._counted = self.loop.time(), self._counts()

    def _counts(self) -> Counter[str]:
        """What has happened to microbatches besides being done, and what was sent, by name."""
        counts: Counter[str] = Counter(self.sent)
        for worker in self.workers.values():
            assert worker.data is not None
            counts.update({f"re-routed: {code}": n for code, n in worker.data.ledger.rerouted.items()})
            counts.update({f"dropped: {code}": n for code, n in worker.data.ledger.dropped.items()})
            ahead = worker.data.ahead
            counts["refused"] += ahead.scouting.refused if ahead is not None else 0
        return counts

    def finding(self) -> Finding:
        seconds = self.loop.time() - self._since
        seen = [(number, key) for at, number, key in self.committed if at >= self._since]
        stages = [self.topology.stage[number] for number, _ in seen]
        own = max(1, stages.count(0))
        counts = self._counts()
        counts.subtract(self._counted)
        return Finding(
            SHARE * seconds / own, tuple(stages.count(stage) for stage in range(self.topology.stages)), own,
            dict(+counts), max(held.most for held in self.held.values()),
        )  # fmt: skip


def play(main: Callable[[], Coroutine[Any, Any, Finding]]) -> Finding:
    """Run a story on a fresh virtual clock."""
    with asyncio.Runner(loop_factory=GatedLoop) as runner:
        return runner.run(main())


def measure(
    topology: Topology, rule: Rule, lines: Lines = "alone", seed: int = 0, skip_ratio: float = 1 / 3,
    warm: float = WARM_SECONDS, watched: float = WATCHED_SECONDS,
) -> Finding:  # fmt: skip
    """One story."""

    async def story() -> Finding:
        torch.set_num_threads(1)
        swarm = TopologyRun(topology, skip_ratio, lines, seed)
        swarm.start()
        await swarm.assembled()
        if rule == "router":
            swarm.by_router()
        await swarm.during(warm)
        swarm.watch()
        await swarm.during(watched)
        found = swarm.finding()
        await swarm.end()
        return found

    return play(story)


@dataclass(frozen=True, slots=True)
class TopologyRow:
    """One topology, both rules."""

    seed: int
    memory: int
    router: Finding
    ahead: Finding

    @property
    def kilobytes(self) -> float:
        """Questions, answers and what peers tell of themselves, for one microbatch."""
        names = ("Prospect", "Ask", "ReservationReply", "Held")
        told = sum(self.ahead.counts.get(f"bytes of {name}", 0) for name in names)
        return told / 1000 / max(1, self.ahead.microbatches)


def bench(
    seeds: Sequence[int], memory: int, lines: Lines, watched: float = WATCHED_SECONDS
) -> Iterator[TopologyRow]:
    """One row per seed."""
    for seed in seeds:
        topology = draw(seed, memory)
        router, ahead = (
            measure(topology, rule, lines, seed, watched=watched) for rule in ("router", "ahead")
        )
        yield TopologyRow(seed, memory, router, ahead)


def render(rows: Sequence[TopologyRow], lines: Lines) -> Table:
    """A table with the means at the end."""
    title = f"Seconds for {SHARE} microbatches in a steady swarm of real workers, lines {lines}"
    table = Table(title=title)
    for name in ("seed", "memory", "router", "ahead", "ahead to router",
                 "full for router", "questions", "said no", "kB told", "per stage", "router's"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        ahead, router = row.ahead, row.router
        table.add_row(
            str(row.seed), str(row.memory), *_figures(router.seconds, ahead.seconds),
            str(router.counts.get("re-routed: busy", 0)), str(ahead.counts.get("Ask", 0)),
            str(ahead.counts.get("refused", 0)), f"{row.kilobytes:.0f}",
            " ".join(map(str, ahead.visits)), " ".join(map(str, router.visits)),
        )  # fmt: skip
    if len(rows) > 1:
        means = (mean(row.router.seconds for row in rows), mean(row.ahead.seconds for row in rows))
        table.add_row("mean", str(rows[0].memory), *_figures(*means), end_section=True)
    return table


def _figures(router: float, ahead: float) -> list[str]:
    return [f"{router:.1f}", f"{ahead:.1f}", f"{ahead / router - 1:+.1%}"]
