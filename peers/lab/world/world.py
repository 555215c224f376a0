"""A simulated world from one seed: real workers with cheap stages, their network, and their event logs.

The worker, its state machines and the wire format are the product's. The network, the directory, the clock,
the disk's thread and (unless `real`) the tensor work are simulated. Times in seconds on the virtual clock.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Hashable
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from peers.compute.executor import InlineCompute
from peers.compute.stage_part import StagePart, build_stage_part
from peers.config.run_file import SignedManifest
from peers.lab.world.bootstraps import BOOTSTRAP, SimulatedBootstrap
from peers.lab.world.gated_clock import GATE, Gate, GatedLoop
from peers.lab.world.journal import Journal
from peers.lab.world.link_conditions import LinkConditions
from peers.lab.world.stub_stage import stub_part
from peers.lab.world.world_events import Begun, Crashed, Frozen, Noticed, Thawed
from peers.telemetry.event import Event
from peers.telemetry.log_events import Settled
from peers.worker.pipeline.origin import MicrobatchSource
from peers.worker.settings import Settings
from peers.worker.worker import Worker
from peers.worker.worker_context import WorkerContext
from protocols.errors import Unreachable
from protocols.memory.directory import MemoryDirectory
from protocols.memory.transport import MemoryNetwork, MemoryTransport
from protocols.signed.identity import Identity
from swarmnet.identifiers import MicrobatchId, PeerId, RunId
from swarmnet.membership.bootstrap_contacts import BootstrapContacts
from swarmnet.run.canonical_form import owner_statement
from swarmnet.run.manifest import Manifest

CHECKPOINT_SECONDS = 7.0
SHARES = (0.01, 1.0, 1.0, 0.01)
"""Time of update, backward, forward and background work, as parts of a peer's seconds per microbatch."""


@dataclass(slots=True, eq=False)
class Member:
    """One process of one peer."""

    name: str
    life: int
    stage: int
    identity: Identity
    gate: Gate
    worker: Worker
    task: asyncio.Task[None]
    seconds: float
    """Compute seconds per microbatch and direction."""
    slow: float = 1.0
    skew: float = 0.0
    ended: bool = False
    moved: int = 0
    """Number of moves to another stage, each with a new worker."""
    told_to_leave: bool = False

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    @property
    def who(self) -> str:
        """Return the contributor's name, which differs in every stage (lab/faults/trees.py)."""
        return f"{self.name}.{self.life}" + (f"+{self.moved}" if self.moved else "")

    @property
    def trains(self) -> bool:
        return not self.ended and not self.gate.shut and self.worker.state == "training"


class _Text:
    """`MicrobatchSource` of zeros, in the manifest's shape."""

    def __init__(self, manifest: Manifest) -> None:
        data = manifest.data
        self._tokens = torch.zeros(data.micro_batch_size, data.seq_len, dtype=torch.int64)

    def microbatch(self, key: MicrobatchId, _mixture: object = None) -> tuple[Tensor, Tensor]:
        return self._tokens, self._tokens


class _Directory(MemoryDirectory):
    """Directory of one peer; its clock may be wrong, and it may not answer."""

    def __init__(self, world: World, peer: PeerId, name: str) -> None:
        super().__init__(world.network, peer)
        self._world = world
        self._name = name
        self._ways = BootstrapContacts([BOOTSTRAP], Random(f"ways in {peer}"))

    def now(self) -> float:
        # An offset keeps a wrong clock after 1970.
        member = self._world.members.get(self._name)
        return 1e6 + super().now() + (member.skew if member else 0.0)

    async def announce(self, run: RunId, stage: int, record: bytes, deadline_seconds: float) -> bool:
        await self._answer(deadline_seconds)
        return await super().announce(run, stage, record, deadline_seconds)

    async def look_up(self, run: RunId, stage: int, deadline_seconds: float) -> dict[PeerId, bytes]:
        await self._answer(deadline_seconds)
        return await super().look_up(run, stage, deadline_seconds)

    async def _answer(self, deadline_seconds: float) -> None:
        if self._world.outages.is_silent:
            await asyncio.sleep(deadline_seconds)
            raise Unreachable("no node of the directory answers")
        bootstrap, now = self._world.bootstrap, self._world.loop.time()
        if not (bootstrap.has_met(self._peer) or bootstrap.answer(self._peer)):
            await asyncio.sleep(deadline_seconds)
            raise Unreachable("no bootstrap answers")
        for asked in self._ways.look([] if bootstrap.away else [BOOTSTRAP], (), now):
            self._ways.record_answer(asked, bootstrap.answer(self._peer), now)

    def _reaches(self, peer: PeerId) -> bool:
        is_shown = peer == self._peer or self._world.bootstrap.connects(self._peer, peer)
        return is_shown and super()._reaches(peer)


class DirectoryOutages:
    """The times at which the directory answers no request."""

    def __init__(self) -> None:
        self.is_silent = False
        self._ended_at = float("-inf")

    def begin(self) -> None:
        self.is_silent = True

    def end(self, now: float) -> None:
        self.is_silent = False
        self._ended_at = now

    def lasted_until(self, time: float) -> bool:
        """Return whether there was an outage after `time`."""
        return self.is_silent or self._ended_at > time


class World:
    """All peers of a simulation, with their network, directory, disks and event log."""

    def __init__(
        self, *, manifest: Manifest, seed: int, disk: Path, real: bool = False, moves: bool = False
    ) -> None:
        """`disk`: a folder for the peers' checkpoints. `moves`: peers may move to a stage that needs them."""
        owner = Identity.from_seed(b"the owner of the run")
        run_id = manifest.run_id()
        self.signed = SignedManifest(manifest, owner.sign(owner_statement(run_id)), run_id)
        self.seed = seed
        self.chance = Random(f"world {seed}")
        self.disk = disk
        self.real = real
        self.moves = moves
        self.loop = asyncio.get_running_loop()
        assert isinstance(self.loop, GatedLoop)
        self.network = MemoryNetwork(Random(f"network {seed}"))
        self.links = LinkConditions(self.network, self.chance)
        self.journal = Journal(self.loop)
        self.members: dict[str, Member] = {}
        self.all_lives: list[Member] = []
        self.text: MicrobatchSource = _Text(manifest)
        """Training text of all peers."""
        self.outages = DirectoryOutages()
        self.bootstrap = SimulatedBootstrap()
        self.movers: set[str] = set()
        """Names of peers that may move to another stage although `moves` is off."""
        self.helpers: set[str] = set()
        """Names of peers that only reduce."""
        self.given_up: set[int] = set()
        """Stages without weights: peers that join may start from the seed until one settles a round."""
        self.killed: dict[Hashable, list[str]] = {}
        """Names of the peers that each fault has killed."""

    # -- peers ----------------------------------------------------------------------------------------

    def start(self, name: str, stage: int | None, life: int = 0, keep_disk: bool = True) -> Member:
        """Start a process of peer `name`, with an identity from the name. `stage` None: it picks one."""
        identity = Identity.from_seed(f"{self.seed} {name}".encode()[:32])
        folder = self.disk / name
        if not keep_disk and folder.exists():
            shutil.rmtree(folder)
        gate, context = Gate(), copy_context()
        context.run(GATE.set, gate)
        seconds = self.chance.uniform(0.15, 0.45)

        transport = context.run(self.network.transport, identity.peer_id)

        async def live() -> None:
            """Run a worker, and a new one after each move, as the worker's role does."""
            await member.worker.run()
            while (stage := member.worker.lifecycle.goes_to) is not None and not member.told_to_leave:
                member.moved += 1
                member.worker = self._worker(name, life, stage, identity, transport, folder, member.moved)
                await member.worker.run()

        def build() -> Member:
            worker = self._worker(name, life, stage, identity, transport, folder)
            task = self.loop.create_task(live(), name=name, context=context)
            return Member(name, life, -1, identity, gate, worker, task, seconds)

        member = context.run(build)
        self.members[name] = member
        self.all_lives.append(member)
        self.note(name, life, Begun(stage, keep_disk))
        member.task.add_done_callback(lambda task: self._ended(member, task))
        self.apply_link_conditions()
        return member

    def _worker(
        self,
        name: str,
        life: int,
        stage: int | None,
        identity: Identity,
        transport: MemoryTransport,
        folder: Path,
        moved: int = 0,
    ) -> Worker:
        """Create a worker of the simulated world. `life` counts the starts of this peer, and `moved` its
        changes of stage."""
        note = partial(self.note, name, life)

        def cost(priority: int) -> float:
            member = self.members[name]
            return member.seconds * member.slow * SHARES[priority]

        def part(manifest: Manifest, stage: int) -> StagePart:
            serial = (life << 24) + (moved << 16)
            if not self.real:
                return stub_part(manifest, note, serial)
            return build_stage_part(manifest, stage)

        async def text(_withdrawn: frozenset[bytes]) -> MicrobatchSource:
            return self.text

        context = WorkerContext(
            signed=self.signed,
            identity=identity,
            transport=transport,
            directory=_Directory(self, identity.peer_id, name),
            compute=InlineCompute(cost),
            settings=Settings(
                stage=stage,
                reduces_only=name in self.helpers,
                in_flight=2,
                checkpoint_seconds=CHECKPOINT_SECONDS,
                drain_seconds=10.0,
                checkpoints=folder,
                moves=self.moves or name in self.movers,
                moved=moved,
                allow_reinit=stage in self.given_up,
            ),
            chance=Random(f"{self.seed}/{name}/{life}"),
            log_event=note,
            notify=lambda topic, line: note(Noticed(topic, line.replace(str(folder), name))),
        )
        return Worker(context, text, part)

    def has_checkpoint(self, name: str) -> bool:
        """Return whether the peer's disk has a checkpoint."""
        return any((self.disk / name).rglob("stage-*-round-*.safetensors"))

    def start_again(self, name: str, keep_disk: bool) -> None:
        """Start a peer again whose process ended, in the same stage."""
        old = self.members[name]
        stage = old.worker.stage if old.worker.stage >= 0 else None
        self.start(name, stage, old.life + 1, keep_disk)

    async def crash(self, member: Member) -> None:
        """Kill a peer as by SIGKILL: it logs and sends nothing more."""
        self.note(member.name, member.life, Crashed())
        member.ended = True
        self.network.crash(member.peer)
        member.gate.open()
        member.task.cancel()
        await asyncio.wait([member.task])

    def freeze(self, member: Member) -> None:
        member.gate.shut = True
        self.note(member.name, member.life, Frozen())
        self.network.freeze(member.peer)

    def thaw(self, member: Member) -> None:
        self.note(member.name, member.life, Thawed())
        member.gate.open()
        self.network.thaw(member.peer)

    def living(self, stage: int | None = None) -> list[Member]:
        return [
            member
            for member in self.members.values()
            if not member.ended and (stage is None or member.worker.stage == stage)
        ]

    def alive(self, name: str) -> Member | None:
        member = self.members.get(name)
        return None if member is None or member.ended else member

    def spare(self, member: Member) -> bool:
        """Return whether another peer of its stage trains now and stays, so that the stage survives."""
        return any(
            other.trains and other.worker.served.moving_to < 0
            for other in self.living(member.worker.stage)
            if other is not member and not other.worker.context.settings.reduces_only
        )

    def apply_link_conditions(self) -> None:
        """Apply the conditions of the links to all living peers."""
        self.links.apply({member.name: member.peer for member in self.living()})

    # -- the log --------------------------------------------------------------------------------------

    def note(self, name: str, life: int, event: Event) -> None:
        self.journal.record(name, life, event)
        member = self.members.get(name) if self.given_up else None
        if member is not None and isinstance(event, Settled):
            self.given_up.discard(member.worker.stage)
        elif member is not None and isinstance(event, Noticed) and event.what == "elsewhere":
            member.worker.elsewhere.allow_reinit = member.worker.stage in self.given_up

    def settled(self, stage: int) -> dict[str, int]:
        """Return the newest settled round of each living peer of a stage that has a replica, by name."""
        return {
            member.name: member.worker.services.round_service.rounds.settled
            for member in self.living(stage)
            if member.worker.services is not None and member.worker.has_weights()
        }

    def _ended(self, member: Member, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not member.ended:
            self.journal.escaped.append((member.name, error))
        member.ended = True

    async def close(self) -> None:
        """Kill all peers."""
        for member in self.living():
            await self.crash(member)
