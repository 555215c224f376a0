"""Peers that hold a stage and answer visitors, and do nothing else: inference without a swarm that trains.

Their weights are the run's initial ones, kept as the snapshots of the rounds they are told to have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import torch
from swarm import sign
from torch import Tensor

from peers.compute.executor import InlineCompute
from peers.compute.stage_part import build_stage_part
from peers.network.peer_links import PeerLinks
from peers.network.ports import HeartbeatLoad
from peers.state.snapshot_store import Snapshots, Weights, units_of
from peers.tools.model.swarm_client import SwarmClient
from peers.worker.inference.server import Inference
from protocols.memory.transport import Conditions, MemoryNetwork
from protocols.messages.table import ForwardDeclined, Forwarded, ForwardRequest, Hello, PeerRecord
from protocols.signed.envelope import run_bytes
from protocols.signed.identity import Identity
from protocols.signed.records import seal_record
from swarmnet.identifiers import PeerId
from swarmnet.membership.membership import Membership
from swarmnet.model.decoder import scaled
from swarmnet.model.fixed_point import to_floats
from swarmnet.rounds.history import START
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import WIRE_VERSION

COMPUTE_SECONDS = 0.01


class Holder:
    """`Listener` of its neighbourhood."""

    def __init__(self, holders: Holders, name: str, stage: int, rounds: tuple[int, ...]) -> None:
        manifest, signed = holders.signed.manifest, holders.signed
        self.identity, self.stage = Identity.from_seed(name.encode()), stage
        self.transport = holders.network.transport(self.identity.peer_id)
        self.part = build_stage_part(manifest, stage)
        self.snapshots = Snapshots(
            identity=self.identity, run_id=signed.run_id, stage=stage, rules=manifest.rounds
        )
        self.compute = InlineCompute(lambda _priority: COMPUTE_SECONDS)
        membership = Membership(me=self.identity.peer_id, stage=stage, chance=Random(0))
        self.neighbourhood = PeerLinks(
            transport=self.transport,
            run_id=signed.run_id,
            membership=membership,
            listener=self,
            signed_manifest=signed.wire(),
            log_event=lambda *_, **__: None,
        )
        self.inference = Inference(
            manifest=manifest,
            stage=stage,
            snapshots=self.snapshots,
            part=self.part,
            compute=self.compute,
            neighbourhood=self.neighbourhood,
            log_event=lambda *_, **__: None,
            chance=Random(0),
        )
        for round in rounds:
            self.settle(round)
        self.transport.listen(self.neighbourhood)

    def settle(self, round: int) -> None:
        """A snapshot of this round: the initial weights, changed by the round."""
        self.snapshots.hold(Weights(self.part.first_units() * (round % 3 + 1), round, START))

    def load(self) -> HeartbeatLoad:
        return HeartbeatLoad(self.stage, True, 0, 0.0, 0)

    def message(self, peer: PeerId, message: object, body: bytes) -> None:
        if isinstance(message, ForwardRequest):
            self.inference.message(peer, message, body)

    def linked(self, peer: PeerId, stage: int) -> None: ...

    def unlinked(self, peer: PeerId, reason: str, released: bool) -> None: ...

    def counted(self, peers: int) -> None: ...

    def on_stall(self, seconds: float) -> None: ...

    def met(self) -> tuple[PeerId, ...]:
        return ()

    def own_record(self, signed: object) -> None: ...

    def answer_visitor(self, peer: PeerId, message: object, body: bytes) -> None: ...

    def beat(self, peer: PeerId) -> None: ...


class Holders:
    """Some peers of each stage, by name, and their visitors."""

    def __init__(
        self,
        manifest: Manifest,
        stages: dict[str, int],
        rounds: tuple[int, ...] = (4,),
        conditions: Conditions | None = None,
    ) -> None:
        torch.set_num_threads(1)
        self.loop = asyncio.get_running_loop()
        self.signed = sign(manifest)
        self.network = MemoryNetwork(Random(0), conditions)
        self.peers: dict[str, Holder] = {}
        for name, stage in stages.items():
            self.add(name, stage, rounds)

    def add(self, name: str, stage: int, rounds: tuple[int, ...] = (4,)) -> Holder:
        holder = self.peers[name] = Holder(self, name, stage, rounds)
        record = PeerRecord(holder.identity.peer_id, stage, "worker", ["/memory"], 0, 0.0, "0")
        sealed = seal_record(holder.identity, self.signed.run_id, record, self.loop.time())
        self.network.records.setdefault((self.signed.run_id, stage), {})[record.peer] = sealed
        return holder

    def crash(self, name: str) -> None:
        self.network.crash(self.peers[name].identity.peer_id)

    def visitor(self, name: str = "visitor", exact: bool = True) -> SwarmClient:
        peer = Identity.from_seed(name.encode()).peer_id
        client = SwarmClient(
            signed=self.signed,
            transport=self.network.transport(peer),
            directory=self.network.directory(peer),
            chance=Random(name),
            notify=lambda event, text: said.append((event, text)),
            exact=exact,
        )
        said: list[tuple[str, str]] = []
        client.said = said  # for the tests
        return client

    def weights(self, rounds: dict[int, set[int]]) -> dict[str, Tensor]:
        """The model that answered a conversation: of each stage the weights of the one round it names."""
        found, rules = {}, self.signed.manifest.path_rules()
        for stage, (round,) in rounds.items():
            holder = next(holder for holder in self.peers.values() if holder.stage == stage)
            held = next(held for held in holder.snapshots.held if held.root.round == round)
            scale = rules.branch_scale(stage, len(rounds))
            found |= scaled(named(holder.part.state, units_of(held.data)), scale)
        return found


def named(layout, units: Tensor) -> dict[str, Tensor]:
    """Parameters by name, float32."""
    flat = to_floats(units)
    return {e.name: flat[e.offset : e.offset + e.size].view(e.shape) for e in layout.entries}


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until it holds; AssertionError after so many seconds."""
    end = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.005)


class Pushy:
    """A visitor that asks without measure."""

    def __init__(self, holders: Holders, name: str) -> None:
        self.holders, self.heard = holders, []
        self.transport = holders.network.transport(Identity.from_seed(name.encode()).peer_id)
        self.transport.listen(self)

    def received(self, peer, lane, message, body, wire_bytes):
        self.heard.append(message)

    def lost(self, peer, lane, reason): ...

    def refused(self, peer, code, reason): ...

    async def ask(self, target: str, many: int, body: bytes = bytes(16), **changes: object) -> None:
        link = await self.transport.open(self.holders.peers[target].identity.peer_id, "data", 5.0)
        link.post(Hello(WIRE_VERSION, run_bytes(self.holders.signed.run_id), b""))
        path = len(self.holders.signed.manifest.stages)
        shape = {"sequences": 1, "tokens": 4}
        fields = {"stage": 0, "round": -1, "path": path, **shape, "exact": True, "scores": False}
        for number in range(many):
            link.post(ForwardRequest(number, 1, **{**fields, **changes}, deadline_seconds=10.0), body)

    def codes(self) -> dict[str, int]:
        """What it was answered, and how often."""
        found: dict[str, int] = {}
        for message in self.heard:
            if isinstance(message, ForwardDeclined | Forwarded):
                code = message.code if isinstance(message, ForwardDeclined) else "done"
                found[code] = found.get(code, 0) + 1
        return found
