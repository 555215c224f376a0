"""Benchmark of stage skipping with real workers on a virtual clock: path reservation against the router.

The workers' state machines, messages and timeouts are the product's. Compute, latencies and the transfer of
bodies are simulated with the times of a topology. With `alone` links a body takes its hop's time regardless
of other bodies. With `shared` links the bodies between two peers follow one another, as on one connection.

The result is the number of microbatches that come back to their origins in a steady swarm, after a warm-up.
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
from peers.telemetry.log_events import Committed
from peers.worker.pipeline.reservation_client import NoReservations
from peers.worker.settings import Settings
from peers.worker.worker import Worker
from peers.worker.worker_context import WorkerContext
from protocols.memory.conditions import Conditions
from protocols.memory.transport import MemoryNetwork, MemoryTransport
from protocols.messages.table import Lane, Message
from protocols.messages.terms import ANYTHING, Terms
from protocols.ports import Receiver
from protocols.signed.identity import Identity
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.run.canonical_form import owner_statement
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Data, ModelShape, Paths, Rounds

Lines = Literal["alone", "shared"]
Rule = Literal["ahead", "router"]
"""`ahead`: paths are reserved in advance. `router`: the next peer is chosen when the output is ready."""
BACKWARD_TIMES = 1.5
"""Backward time divided by forward time, from SkipPipe's released schedule (topologies.py)."""
LOSS = 0.25
"""Time of the loss divided by forward time, from the same schedule."""
BODY_BYTES = 66_000
"""Bytes of a body here; links are slower than the topology's by the same factor."""
WARM_SECONDS = 120.0
"""Warm-up, in which workers measure hops and adapt their timeouts."""
WATCHED_SECONDS = 300.0
"""Length of the measurement."""
SHARE = 30
"""Results are seconds for this number of microbatches, as in docs/benchmarks/skipping.md."""
THIRD = Paths(skip_ratio=1 / 3)
"""Every microbatch skips a third of the stages, as in SkipPipe."""
SLOTS = 32
"""Slots of a peer: the peer file's default; memory is the tighter limit."""


@dataclass(slots=True)
class Finding:
    """Result of one rule on one topology."""

    seconds: float
    """Seconds for `SHARE` microbatches."""
    visits: tuple[int, ...]
    """Microbatches that each stage committed."""
    microbatches: int
    """Number of microbatches that came back to their origins."""
    counts: dict[str, int]
    """Re-routed and dropped microbatches by code, refused reservations, and messages by name."""
    most_held: int
    """Maximum number of graphs that a peer had open at a time."""


class OpenGraphCounter(StubCompute):
    """Stub compute that records the maximum number of open graphs."""

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
    """Compute that takes the topology's time; dropping a microbatch takes none."""

    def submit(
        self, priority: int, work: Callable[[], Result], done: Callable[[Result, float], None]
    ) -> None:
        if priority == BACKWARD and isinstance(work, partial) and work.func.__name__ == "drop":
            done(work(), 0.0)
            return
        super().submit(priority, work, done)


class Delayed:
    """`Receiver` that delays each body by the time of its hop, and counts all messages."""

    def __init__(self, receiver: Receiver, seconds: Callable[[PeerId], float], counts: Counter[str]) -> None:
        self._receiver = receiver
        self._seconds = seconds
        self._counts = counts

    def received(self, peer: PeerId, lane: Lane, message: Message, body: bytes, wire_bytes: int) -> None:
        self._counts[type(message).__name__] += 1
        self._counts[f"bytes of {type(message).__name__}"] += wire_bytes
        if type(message).body and lane == "data" and (seconds := self._seconds(peer)):
            loop = asyncio.get_running_loop()
            loop.call_later(seconds, self._receiver.received, peer, lane, message, body, wire_bytes)
        else:
            self._receiver.received(peer, lane, message, body, wire_bytes)

    def lost(self, peer: PeerId, lane: Lane, reason: str) -> None:
        self._receiver.lost(peer, lane, reason)

    def refused(self, peer: PeerId, code: str, reason: str) -> None:
        self._receiver.refused(peer, code, reason)


class ZeroText:
    """`MicrobatchSource` of zeros."""

    def __init__(self, manifest: Manifest) -> None:
        shape = (manifest.data.micro_batch_size, manifest.data.seq_len)
        self._tokens = torch.zeros(shape, dtype=torch.int64)

    def microbatch(self, key: MicrobatchId, _mixture: object = None) -> tuple[Tensor, Tensor]:
        return self._tokens, self._tokens


def manifest_of(topology: Topology, paths: Paths) -> Manifest:
    """Return a manifest with bodies of 32 Ki two-byte numbers, whose first round outlasts the benchmark."""
    return Manifest(
        name="skipping",
        owner=Identity.from_seed(b"the owner of the run").peer_id,
        stages=(1,) * topology.stages,
        model=ModelShape(hidden_size=128, num_hidden_layers=topology.stages),
        data=Data(seq_len=64, micro_batch_size=4),
        rounds=Rounds(global_batch_tokens=10**9, max_seconds=1e6),
        paths=paths,
    )


class TopologyRun:
    """A swarm of one topology, from its start to its end."""

    def __init__(self, *, topology: Topology, paths: Paths, lines: Lines, seed: int) -> None:
        owner = Identity.from_seed(b"the owner of the run")
        manifest = manifest_of(topology, paths)
        self.manifest = manifest
        run_id = manifest.run_id()
        self.signed = SignedManifest(manifest, owner.sign(owner_statement(run_id)), run_id)
        self.topology = topology
        self.lines = lines
        self.seed = seed
        self.loop = asyncio.get_running_loop()
        self.network = MemoryNetwork(Random(seed))
        self.identities = [Identity.from_seed(f"peer {n}".encode()) for n in range(len(topology.stage))]
        self.number = {identity.peer_id: n for n, identity in enumerate(self.identities)}
        self.workers: dict[int, Worker] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.held: dict[int, OpenGraphCounter] = {}
        self.committed: list[tuple[float, int, MicrobatchId]] = []
        """Committed microbatches: time, number of the peer, and id."""
        self.sent: Counter[str] = Counter()
        self._since = 0.0
        self._counted = Counter[str]()
        self.escaped: list[BaseException] = []
        self.loop.set_exception_handler(
            lambda _, context: self.escaped.append(
                context.get("exception") or RuntimeError(str(context["message"]))
            )
        )

    def start(self) -> None:
        """Start all workers at once."""
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
        """Start the worker with this number. Its computation takes as long as the topology says."""
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
            held = OpenGraphCounter(manifest)
            self.held[number] = held
            return replace(made, compute=held, most_graphs=topology.memory)

        async def text(_withdrawn: frozenset[bytes]) -> ZeroText:
            return ZeroText(self.manifest)

        transport = self.network.transport(identity.peer_id)
        self._overhear(transport, number)
        context = WorkerContext(
            signed=self.signed,
            identity=identity,
            transport=transport,
            directory=self.network.directory(identity.peer_id),
            compute=TimedCompute(cost),
            settings=Settings(stage=stage, in_flight=SLOTS, slots=SLOTS, checkpoint_seconds=0.0),
            chance=Random(f"{self.seed}/{number}"),
            log_event=note,
            notify=lambda _event, _line: None,
        )
        worker = Worker(context, text, part)
        self.workers[number] = worker
        self.tasks[number] = self.loop.create_task(worker.run(), name=str(number))

    def _overhear(self, transport: MemoryTransport, number: int) -> None:
        """Count the messages of a transport, and delay its bodies by their hop."""
        topology, listen = self.topology, transport.listen

        def seconds(peer: PeerId) -> float:
            other = self.number[peer]
            alone = self.lines == "alone"
            return topology.hop[other][number] - topology.latency[other][number] if alone else 0.0

        def delayed(receiver: Receiver, terms: Terms = ANYTHING) -> None:
            listen(Delayed(receiver, seconds, self.sent), terms)

        transport.listen = delayed  # type: ignore[method-assign]

    async def during(self, seconds: float) -> None:
        """Let the swarm run for `seconds`; raise the first exception of a worker."""
        await asyncio.sleep(seconds)
        for task in self.tasks.values():
            if task.done() and not task.cancelled():
                task.result()
        for error in self.escaped:
            raise error

    async def kill(self, number: int) -> None:
        """Kill a worker as by SIGKILL."""
        self.network.crash(self.identities[number].peer_id)
        task = self.tasks.pop(number)
        task.cancel()
        await asyncio.wait([task])

    async def end(self) -> None:
        for number in list(self.tasks):
            await self.kill(number)

    async def assembled(self) -> None:
        while any(worker.services is None for worker in self.workers.values()):
            await self.during(0.001)

    def by_router(self) -> None:
        """Disable path reservation: a worker chooses the next peer, among all legal ones, when it sends."""
        for worker in self.workers.values():
            assert worker.services is not None
            data = worker.services.pipeline_service
            data.reservations.close()
            data.reservations = NoReservations(data.neighbourhood)
            data.pipeline.guide = None

    def watch(self) -> None:
        """Start the measurement."""
        self._since = self.loop.time()
        self._counted = self._counts()

    def _counts(self) -> Counter[str]:
        """Return the numbers of re-routed and dropped microbatches, refusals and messages, by name."""
        counts: Counter[str] = Counter(self.sent)
        for worker in self.workers.values():
            assert worker.services is not None
            pipeline = worker.services.pipeline_service
            counts.update({f"re-routed: {code}": n for code, n in pipeline.ledger.rerouted.items()})
            counts.update({f"dropped: {code}": n for code, n in pipeline.ledger.dropped.items()})
            counts["refused"] += pipeline.reservations.refused
        return counts

    def finding(self) -> Finding:
        """Return the result since `watch`."""
        seconds = self.loop.time() - self._since
        seen = [(number, key) for at, number, key in self.committed if at >= self._since]
        stages = [self.topology.stage[number] for number, _ in seen]
        own = max(1, stages.count(0))
        counts = self._counts()
        counts.subtract(self._counted)
        return Finding(
            SHARE * seconds / own,
            tuple(stages.count(stage) for stage in range(self.topology.stages)),
            own,
            dict(+counts),
            max(held.most for held in self.held.values()),
        )


def play(main: Callable[[], Coroutine[Any, Any, Finding]]) -> Finding:
    """Run a scenario on a new virtual clock."""
    with asyncio.Runner(loop_factory=GatedLoop) as runner:
        return runner.run(main())


def measure(
    topology: Topology,
    rule: Rule,
    lines: Lines = "alone",
    seed: int = 0,
    paths: Paths = THIRD,
    warm: float = WARM_SECONDS,
    watched: float = WATCHED_SECONDS,
) -> Finding:
    async def scenario() -> Finding:
        torch.set_num_threads(1)
        swarm = TopologyRun(topology=topology, paths=paths, lines=lines, seed=seed)
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

    return play(scenario)


@dataclass(frozen=True, slots=True)
class TopologyRow:
    """Results of both rules on one topology."""

    seed: int
    memory: int
    router: Finding
    ahead: Finding

    @property
    def kilobytes(self) -> float:
        """Return the kilobytes of reservation messages (requests, replies, state) for one microbatch."""
        names = ("Prospect", "ReservationRequest", "ReservationReply", "HoldTime")
        sent = sum(self.ahead.counts.get(f"bytes of {name}", 0) for name in names)
        return sent / 1000 / max(1, self.ahead.microbatches)


def bench(
    seeds: Sequence[int], memory: int, lines: Lines, full_path_fraction: float = 0.0
) -> Iterator[TopologyRow]:
    """Measure both rules; yield one row for each seed. `full_path_fraction` of the paths skip nothing."""
    paths = replace(THIRD, full_path_fraction=full_path_fraction)
    for seed in seeds:
        topology = draw(seed, memory)
        router, ahead = (measure(topology, rule, lines, seed, paths) for rule in ("router", "ahead"))
        yield TopologyRow(seed, memory, router, ahead)


def render(rows: Sequence[TopologyRow], lines: Lines) -> Table:
    """Return a table with the means in the last row."""
    title = f"Seconds for {SHARE} microbatches in a steady swarm of real workers, links {lines}"
    table = Table(title=title)
    names = [
        "seed",
        "memory",
        "router",
        "ahead",
        "ahead to router",
        "full for router",
        "requests",
        "refusals",
        "kB reported",
        "per stage",
        "router's",
    ]
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        ahead, router = row.ahead, row.router
        table.add_row(
            str(row.seed),
            str(row.memory),
            *_figures(router.seconds, ahead.seconds),
            str(router.counts.get("re-routed: busy", 0)),
            str(ahead.counts.get("ReservationRequest", 0)),
            str(ahead.counts.get("refused", 0)),
            f"{row.kilobytes:.0f}",
            " ".join(map(str, ahead.visits)),
            " ".join(map(str, router.visits)),
        )
    if len(rows) > 1:
        means = (mean(row.router.seconds for row in rows), mean(row.ahead.seconds for row in rows))
        table.add_row("mean", str(rows[0].memory), *_figures(*means), end_section=True)
    return table


def _figures(router: float, ahead: float) -> list[str]:
    return [f"{router:.1f}", f"{ahead:.1f}", f"{ahead / router - 1:+.1%}"]
