"""What audits of work cost a group that is honest: the same swarm of real workers without and with, in turns,
since other programs use the machine as well.

Processor seconds are this process's: of the peers' computing, of their machines and of their wire, and of
the world around them. On the world's clock a microbatch takes a peer 0.15 to 0.45 s, and a piece of a replay
as long.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from statistics import mean

import torch

from peers.compute.executor import InlineCompute, Result
from peers.config.run_file import load_manifest
from peers.errors import UserError
from peers.lab.bench.learning.ground import Texts, read_texts
from peers.lab.bench.work.swarm import Corpus, until_settled
from peers.lab.world.gated_clock import GatedLoop
from peers.lab.world.world import World
from peers.telemetry import events as noted
from peers.worker.rounds.replays import advance
from protocols.messages.table import Contribution, Evidence
from swarmnet.identifiers import PeerId
from swarmnet.run.manifest import Manifest

FIRST_COUNTED = 4
"""The round: until then peers come and warm up."""


@dataclass(slots=True)
class Spent:
    """By one play, so far."""

    rounds: int = 0
    microbatches: int = 0
    audits: int = 0
    seconds: float = 0.0
    """On the world's clock."""
    processor_seconds: float = 0.0
    computing_seconds: float = 0.0
    """Of these: what peers computed."""
    replay_seconds: float = 0.0
    """Of these: others' work again."""
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes, by kind of message."""

    def since(self, before: Spent) -> Spent:
        """The difference."""
        names = [each.name for each in fields(self)]
        return Spent(**{name: getattr(self, name) - getattr(before, name) for name in names})


@dataclass(frozen=True, slots=True)
class Price:
    """Of one play."""

    audits: float
    """The share of windows."""
    spent: Spent
    head_bytes: float
    """Of a contribution."""
    contribution_bytes: float
    """All of it."""

    @property
    def per_processor_second(self) -> float:
        """Microbatches."""
        return self.spent.microbatches / self.spent.processor_seconds


class TimedCompute(InlineCompute):
    """Counts the processor's time."""

    def __init__(self, cost: Callable[[int], float], spent: Spent) -> None:
        super().__init__(cost)
        self._spent = spent

    def submit(
        self, priority: int, work: Callable[[], Result], done: Callable[[Result, float], None]
    ) -> None:
        is_replay = isinstance(work, partial) and work.func is advance

        def timed() -> Result:
            began = time.process_time()
            result = work()
            took = time.process_time() - began
            self._spent.computing_seconds += took
            self._spent.replay_seconds += took if is_replay else 0.0
            return result

        super().submit(priority, timed, done)


class TimedWorld(World):
    def __init__(self, manifest: Manifest, seed: int, disk: Path) -> None:
        super().__init__(manifest, seed, disk, real=True)
        self._spent = Spent()
        self._began = time.process_time()

    def _compute(self, name: str, life: int, cost: Callable[[int], float]) -> TimedCompute:
        return TimedCompute(cost, self._spent)

    def spent(self) -> Spent:
        """By now."""
        found = replace(self._spent, sent=Counter(), rounds=min(self.settled(0).values(), default=0))
        found.processor_seconds = time.process_time() - self._began
        found.seconds = self.loop.time()
        found.microbatches = sum(note.event == "committed" for note in self.notes)
        found.audits = sum(isinstance(note.what, noted.Audited) for note in self.notes)
        for each in [member.worker.neighbourhood for member in self.living()]:
            found.sent += each.traffic.sent if each is not None else Counter()
        return found


@dataclass(frozen=True, slots=True)
class Question:
    run_file: Path
    peers: int
    rounds: int
    repeats: int


def bench(question: Question) -> Iterator[Price]:
    """In turns without audits and with those of the run. Raises UserError, TextError."""
    manifest = load_manifest(question.run_file, PeerId(""), {})
    if not manifest.sync.audits:
        raise UserError(f"{question.run_file}: nothing is audited there; set sync.audits")
    texts = read_texts(question.run_file, manifest, None, None)
    torch.set_num_threads(1)
    without = replace(manifest, sync=replace(manifest.sync, audits=0.0, fee=0))
    for seed in range(question.repeats):
        for each in (without, manifest):
            with (
                tempfile.TemporaryDirectory(prefix="swarmnet-price-") as folder,
                asyncio.Runner(loop_factory=GatedLoop) as runner,
            ):
                yield runner.run(_play(question, each, texts, seed, Path(folder)))


async def _play(question: Question, manifest: Manifest, texts: Texts, seed: int, folder: Path) -> Price:
    world = TimedWorld(manifest, seed, folder)
    world.text = Corpus(texts.corpus, world.signed.run_id, manifest.data, manifest.seed)
    members = [world.start(f"p{number}", 0) for number in range(question.peers)]
    await until_settled(world, members, FIRST_COUNTED)
    before = world.spent()
    await until_settled(world, members, FIRST_COUNTED + question.rounds)
    after = world.spent()
    update = members[0].worker.update
    assert update is not None
    heads, all_bytes = zip(
        *((each.head_bytes, each.reference.size) for each in update.stored.values()), strict=True
    )
    await world.close()
    return Price(manifest.sync.audits, after.since(before), mean(heads), mean(all_bytes))


def rows(plays: Iterator[Price]) -> Iterator[str]:
    """Lines of a table, each when it is there, and what they come to."""
    yield (
        "| audits | rounds | microbatches | audits done | processor, s | of it computing | replays "
        "| microbatches a processor second | a second of the world | contributions, kB | of it heads "
        "| audits, kB |"
    )
    yield "|" + "---|" * 12
    found: list[Price] = []
    for each in plays:
        found.append(each)
        spent, head = each.spent, each.head_bytes / each.contribution_bytes
        yield (
            f"| {each.audits:.0%} | {spent.rounds} | {spent.microbatches} | {spent.audits} "
            f"| {spent.processor_seconds:.0f} | {spent.computing_seconds:.0f} | {spent.replay_seconds:.1f} "
            f"| {each.per_processor_second:.3f} | {spent.microbatches / spent.seconds:.2f} "
            f"| {spent.sent[Contribution.kind] / 1e3:.0f} | {head:.2%} "
            f"| {spent.sent[Evidence.kind] / 1e3:.0f} |"
        )
    yield ""
    yield _sum(found)


def _sum(found: Sequence[Price]) -> str:
    """Of all plays without audits, and all with."""
    none, some = ([each for each in found if bool(each.audits) is is_audited] for is_audited in (False, True))
    processor, clock = (
        _rate(some, measure) / _rate(none, measure) for measure in ("processor_seconds", "seconds")
    )
    pairs = [b.per_processor_second / a.per_processor_second for a, b in zip(none, some, strict=True)]
    replays = sum(each.spent.replay_seconds for each in some)
    computing = sum(each.spent.computing_seconds for each in some)
    all_processor = sum(each.spent.processor_seconds for each in some)
    exchange = sum(each.spent.sent[Contribution.kind] for each in some)
    audits = sum(each.spent.sent[Evidence.kind] for each in some)
    return (
        f"with audits, of none: microbatches a processor second {processor:.1%} ({min(pairs):.1%} to "
        f"{max(pairs):.1%}), a second of the world {clock:.1%}; replays {replays / computing:.1%} of the "
        f"computing, {replays / all_processor:.1%} of the processor; what audits ask and are given "
        f"{audits / exchange:.2%} of the exchange, heads "
        f"{sum(each.head_bytes for each in some) / sum(each.contribution_bytes for each in some):.3%}"
    )


def _rate(plays: Sequence[Price], measure: str) -> float:
    measured: float = sum(getattr(each.spent, measure) for each in plays)
    return sum(each.spent.microbatches for each in plays) / measured
