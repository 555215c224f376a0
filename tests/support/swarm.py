"""A whole swarm in one process: real workers in a MemoryNetwork, on a virtual clock, from one seed.

    swarm = Swarm(tiny_manifest())
    async def story():
        swarm.open()
        first = swarm.start("a", stage=0)
        ...
        await swarm.until(lambda: swarm.committed(0) > 50, 60.0)
        await swarm.close()
    run(story())

Everything a worker writes to its event log is in `swarm.notes`. An exception that escapes from a callback or
a worker ends the story with it. Seconds are the virtual clock's.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from peers.compute.executor import InlineCompute
from peers.compute.stage_part import StagePart, build_stage_part
from peers.config.peer_file import PeerFile
from peers.config.run_file import SignedManifest
from peers.data.documents import text_at
from peers.data.tokenizer import open_tokenizer
from peers.data.tokens import encoded
from peers.lab.world.stub_stage import stub_part
from peers.network.discovery.announcer import RecordAnnouncer
from peers.state.chunks.text_exchange import TextExchange
from peers.telemetry import log_events
from peers.telemetry.event import Event
from peers.telemetry.event_fold import SettledRounds
from peers.tools.model.swarm_client import Conversation, SwarmClient
from peers.tools.model.swarm_session import stream
from peers.worker.settings import Settings
from peers.worker.worker import Worker
from peers.worker.worker_context import WorkerContext
from protocols.memory.transport import Conditions, MemoryNetwork
from protocols.ports import Directory, Transport
from protocols.signed.identity import Identity
from swarmnet.identifiers import MicrobatchId, PeerId, RunId
from swarmnet.membership.membership import SILENT_SECONDS
from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.model.sampling import drawn
from swarmnet.run.canonical_form import owner_statement
from swarmnet.run.local_step_config import TopologyName
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Data, Experts, ModelShape, Rounds, Sync

OWNER = Identity.from_seed(b"the owner of the run")
COST_SECONDS = (0.005, 0.02, 0.02, 0.001)
"""What update, backward, forward and background work takes of the virtual clock."""
TINY_MODEL = ModelShape(
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=64,
    max_position_embeddings=64,
)


def tiny_manifest(stages: tuple[int, ...] = (1, 1, 1), **changes: Any) -> Manifest:
    """Three layers of width 32, microbatches of 2 x 16 tokens, rounds of 8 microbatches."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "owner": OWNER.peer_id,
        "stages": stages,
        "model": TINY_MODEL,
        "data": Data(seq_len=16, micro_batch_size=2),
        "rounds": Rounds(
            global_batch_tokens=256,
            max_seconds=5.0,
            contribution_timeout_seconds=1.0,
            finality_timeout_seconds=3.0,
            snapshot_interval=4,
        ),
        "sync": Sync(warmup_rounds=1, decay_rounds=1000, learning_rate=8e-3),
    }
    return Manifest(**{**fields, **changes})


def local_steps(topology: TopologyName, shards: int) -> Sync:
    """Local steps that a tiny model learns with."""
    return Sync(
        method="local-steps",
        learning_rate=1e-2,
        warmup_rounds=1,
        decay_rounds=1000,
        inner_batch_tokens=64,
        topology=topology,
        shards=shards,
    )


def sharded_manifest(stages: tuple[int, ...], *, shards: int, global_batch_tokens: int) -> Manifest:
    """A tiny one whose peers take local steps and exchange them through reducers."""
    plain = tiny_manifest(stages, sync=local_steps("sharded-reduce", shards))
    return replace(plain, rounds=replace(plain.rounds, global_batch_tokens=global_batch_tokens))


def expert_manifest(exchange: TopologyName = "all-gather", **experts: Any) -> Manifest:
    """Likewise, with experts instead of a feed-forward, by peers that step by themselves."""
    manifest = tiny_manifest()
    model = replace(TINY_MODEL, qk_norm=True, intermediate_size=32, experts=Experts(**experts))
    sync = local_steps(exchange, 3)
    return replace(manifest, model=model, sync=sync, rounds=replace(manifest.rounds, global_batch_tokens=512))


def sign(manifest: Manifest) -> SignedManifest:
    run_id = manifest.run_id()
    return SignedManifest(manifest, OWNER.sign(owner_statement(run_id)), run_id)


def announcer(
    signed: SignedManifest, identity: Identity, transport: Transport, directory: Directory
) -> RecordAnnouncer:
    """It announces a peer that logs nothing."""
    return RecordAnnouncer(
        signed=signed,
        identity=identity,
        transport=transport,
        directory=directory,
        version="1",
        log_event=lambda _: None,
    )


def canonical_and_signature(identity: Identity, canonical: bytes) -> bytes:
    """A manifest as the directory keeps it, whatever is in it."""
    return canonical + identity.sign(owner_statement(RunId(hashlib.sha256(canonical).hexdigest())))


def tokens_of(places: Sequence[str], vocabulary: int, tokenizer: Path | None = None) -> Tensor:
    """Of the text at `places`, in memory."""
    read_by = open_tokenizer(tokenizer, vocabulary)
    return torch.cat(list(encoded(text_at(places), read_by, lambda _done, _all: None)))


@cache
def corpus(tokens: int = 20_000, seed: int = 0) -> Tensor:
    """uint8 text that can be learnt: half of it 16 frequent bytes, the rest follows from the byte before. All
    swarms share it, and only read it."""
    chance, text = Random(seed), [0]
    for _ in range(tokens - 1):
        frequent = chance.random() < 0.5
        text.append(chance.randrange(16) if frequent else (5 * text[-1] + chance.randrange(4)) % 256)
    return torch.tensor(text, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Sampled:
    """`Text` of a corpus in memory."""

    tokens: Tensor
    run_id: RunId
    data: Data

    def microbatch(self, key: MicrobatchId, _mixture: object = None) -> tuple[Tensor, Tensor]:
        return drawn(self.run_id, 0, key, self.tokens, self.data)


class TextProcess(SimpleNamespace):
    """What a `TextReader` uses of a process, and what it was told."""

    def __init__(self, config: PeerFile, identity: Identity | None = None) -> None:
        self.events: list[object] = []
        self.lines: list[str] = []
        super().__init__(
            config=config,
            identity=identity or Identity.from_seed(b"origin"),
            notify_event=self.events.append,
            log=SimpleNamespace(record=self.events.append),
            notify=lambda _topic, line: self.lines.append(line),
            report=SimpleNamespace(notify=lambda _topic, line, level: self.lines.append(f"{level}: {line}")),
        )


def exchange_alone(process, signed) -> TextExchange:
    """A peer's exchange of text without any other peer."""

    async def nobody(_run, _stage, _deadline):
        return {}

    return TextExchange(
        config=process.config,
        signed=signed,
        transport=SimpleNamespace(peer=process.identity.peer_id, serve_text=lambda find: None),
        directory=SimpleNamespace(look_up=nobody),
        log_event=process.log.record,
        notify=process.notify,
    )


@dataclass(frozen=True, slots=True)
class Note:
    """One line of a worker's event log."""

    time: float
    name: str
    what: Event

    @property
    def event(self) -> str:
        return self.what.name

    @property
    def fields(self) -> dict[str, Any]:
        return self.what.fields


@dataclass(slots=True)
class Member:
    """A worker, under the name that the test gave it."""

    name: str
    identity: Identity
    worker: Worker
    task: asyncio.Task[None]
    dead: bool = False
    said: list[tuple[str, str]] = field(default_factory=list)

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id


class Swarm:
    def __init__(
        self,
        manifest: Manifest,
        seed: int = 0,
        conditions: Conditions | None = None,
        text_run: RunId | None = None,
        stub: bool = False,
    ) -> None:
        """`text_run`: sample the text as this run would, so that other runs read the same. `stub`: nothing is
        learnt, for stories of who works with whom; settled weights tell which contributions they hold."""
        self.stub = stub
        self._lives = itertools.count()
        """Tells the payloads of a stub from those that the same peer made in an earlier life."""
        self.signed = sign(manifest)
        self.seed = seed
        self.network = MemoryNetwork(Random(seed), conditions)
        self.text = Sampled(corpus(), text_run or self.signed.run_id, manifest.data)
        self.text_without: Callable[[frozenset[bytes]], Sampled] = lambda withdrawn: self.text
        self.members: dict[str, Member] = {}
        self.notes: list[Note] = []
        self._found_in: list[Note] | None = None
        self._found = 0
        self._by_event: dict[str, list[Note]] = {}
        """The first `_found` of `notes`: conditions ask for some of them all the time."""
        self.escaped: list[BaseException] = []
        self.on_note: Callable[[Note], None] = lambda note: None

    # -- peers come and go ----------------------------------------------------------------------------

    def open(self) -> None:
        """First thing on the event loop: exceptions of callbacks must not be lost in a log."""
        torch.set_num_threads(1)
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(self._escaped)

    def start(
        self,
        name: str,
        stage: int | None = None,
        *,
        signed: SignedManifest | None = None,
        compute: Callable[[int], float] | None = None,
        computing: Computing = PLAIN,
        **settings: Any,
    ) -> Member:
        """A peer whose identity follows from its name; `settings` as in `Settings`."""
        identity = Identity.from_seed(name.encode())
        said: list[tuple[str, str]] = []

        def note(event: Event) -> None:
            line = Note(round(self.loop.time(), 6), name, event)
            self.notes.append(line)
            self.on_note(line)

        async def text(withdrawn: frozenset[bytes]) -> Sampled:
            return self.text if not withdrawn else self.text_without(withdrawn)

        transport = self.network.transport(identity.peer_id)
        directory = self.network.directory(identity.peer_id)

        def part(manifest: Manifest, stage: int) -> StagePart:
            if self.stub:
                return stub_part(manifest, note, next(self._lives) << 24)
            return build_stage_part(manifest, stage, computing=computing)

        def worker(settings: Settings) -> Worker:
            context = WorkerContext(
                signed=signed or self.signed,
                identity=identity,
                transport=transport,
                directory=directory,
                compute=InlineCompute(compute or COST_SECONDS.__getitem__),
                settings=settings,
                chance=Random(f"{self.seed}/{name}"),
                log_event=note,
                notify=lambda event, line: said.append((event, line)),
            )
            return Worker(context, text, part)

        async def life() -> None:
            """One worker, and another wherever it moves to."""
            await member.worker.run()
            while member.worker.lifecycle.goes_to is not None:
                held, target = member.worker.context.settings, member.worker.lifecycle.goes_to
                heard = tuple(member.worker.orders.book.documents)
                moved = held.moved + (target != member.worker.stage)
                member.worker = worker(replace(held, stage=target, moved=moved, heard_orders=heard))
                await member.worker.run()

        first = worker(Settings(**{"stage": stage, "checkpoint_seconds": 0.0, **settings}))
        task = self.loop.create_task(life(), name=name)
        member = self.members[name] = Member(name, identity, first, task, said=said)
        return member

    async def crash(self, name: str) -> None:
        """SIGKILL: it says nothing more, and neither do its timers."""
        member = self.members[name]
        member.dead = True
        self.network.crash(member.peer)
        member.task.cancel()
        await asyncio.wait([member.task])

    async def leave(self, *names: str) -> None:
        """SIGTERM, and wait for the end."""
        for name in names:
            self.members[name].worker.leave()
        for name in names:
            await asyncio.wait_for(self.members[name].task, 120.0)
            self.members[name].dead = True

    async def close(self) -> None:
        """Everybody leaves; what escaped is raised."""
        await self.leave(*self.living())
        self.check()

    def living(self) -> list[str]:
        return [name for name, member in self.members.items() if not member.dead]

    def check(self) -> None:
        """Raise the first exception that escaped from a callback or a worker."""
        for member in self.members.values():
            if not member.dead and member.task.done():
                member.task.result()
        for error in self.escaped:
            raise error

    async def until(self, condition: Callable[[], object], seconds: float) -> None:
        """Wait until it holds; AssertionError after so many seconds."""
        end = self.loop.time() + seconds
        while not condition():
            self.check()
            assert self.loop.time() < end, f"not within {seconds:g} s: {self.rounds()}"
            await asyncio.sleep(0.05)
        self.check()

    async def during(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.check()

    # -- what is seen ---------------------------------------------------------------------------------

    def of(self, event: str, *names: str) -> list[Note]:
        if self._found_in is not self.notes:  # A test may put others in their place.
            self._found_in, self._found, self._by_event = self.notes, 0, {}
        for note in self.notes[self._found :]:
            self._by_event.setdefault(note.event, []).append(note)
        self._found = len(self.notes)
        found = self._by_event.get(event, [])
        return [note for note in found if not names or note.name in names]

    def losses(self, stage: int = 0) -> list[float]:
        """Nats per token of the microbatches that a stage committed, in order."""
        names = {name for name, member in self.members.items() if member.worker.stage == stage}
        committed = (note.what for note in self.of("committed", *names))
        return [what.loss for what in committed if isinstance(what, log_events.Committed)]

    def committed(self, stage: int = 0) -> int:
        return len(self.losses(stage))

    def rounds(self) -> dict[str, tuple[int, int]]:
        """Name -> (current, settled) round of the living."""
        joined = {
            name: services.round_service.rounds
            for name in self.living()
            if (services := self.members[name].worker.services) and services.round_service.has_weights
        }
        return {name: (rounds.current, rounds.settled) for name, rounds in joined.items()}

    def digests(self, stage: int) -> dict[str, dict[int, bytes]]:
        """Name -> round -> digest of the settled weights, of all that ever held the stage. Not of a history
        that was given up: what a peer settled while nobody reached it is not its word any more once it has
        fetched the state of the others, or has parted with it from a round on. It notices `SILENT_SECONDS`
        later that nobody does."""
        names = {name for name, member in self.members.items() if member.worker.stage == stage}
        found = {name: SettledRounds() for name in sorted(names)}
        alone: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
        for note in self.notes:
            if note.name not in names:
                continue
            found[note.name].take(note.what)
            match note.what:
                case log_events.Settled(round):
                    alone[note.name].append((note.time, round))
                case log_events.Unlinked(code=code):
                    since = note.time - SILENT_SECONDS * (code == "silent")
                    alone[note.name] = [each for each in alone[note.name] if each[0] > since]
                case log_events.Fetched():
                    for _, round in alone[note.name]:
                        found[note.name].pop(round, None)
        return {
            name: {round: bytes.fromhex(settled.digest) for round, settled in rounds.items()}
            for name, rounds in found.items()
        }

    def _escaped(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.escaped.append(context.get("exception") or RuntimeError(str(context["message"])))


def shared_rounds(swarm: Swarm) -> int:
    """How many rounds two peers of a stage or more have settled; AssertionError where digests differ."""
    shared = 0
    for stage in range(len(swarm.signed.manifest.stages)):
        named: dict[int, set[bytes]] = {}
        count: dict[int, int] = {}
        for digests in swarm.digests(stage).values():
            for number, digest in digests.items():
                named.setdefault(number, set()).add(digest)
                count[number] = count.get(number, 0) + 1
        unequal = sorted(number for number, found in named.items() if len(found) > 1)
        assert not unequal, f"stage {stage}: rounds {unequal} settled with different digests"
        shared += sum(number > 1 for number in count.values())
    return shared


def nothing_is_committed_twice(swarm: Swarm) -> None:
    """No peer has committed a microbatch twice (its ledger would have raised; the log must say the same)."""
    seen: set[tuple[str, str, int]] = set()
    for note in swarm.of("committed"):
        key = (note.name, note.fields["origin"], note.fields["counter"])
        assert key not in seen, f"{key} was committed twice"
        seen.add(key)


FOUR = {"a": 0, "c": 1, "d": 1, "e": 2}
TEXT = b"It was a dark and stormy night; the rain fell in torrents. " * 12


async def text_of(client: SwarmClient, prompt: bytes, tokens: int, talk: Conversation) -> bytes:
    return b"".join(
        [piece async for piece in stream(client, prompt, tokens, temperature=0.0, conversation=talk)]
    )
