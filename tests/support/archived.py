"""A swarm in memory with an archivist, and an archivist's answers without a swarm."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from swarm import Swarm, announcer, sign, tiny_manifest

from peers.network.discovery.claims import Claims
from peers.network.orders.order_book import OrderBook
from peers.network.ports import OpenToAll
from peers.stageless.archivist.archivist import Archivist, Policy
from peers.stageless.archivist.archivist_links import ArchivistLinks
from peers.stageless.archivist.serve import NewcomerService
from peers.state import checkpoint_file
from peers.state.archive import Archive, ArchivedCheckpoint, entry_name
from peers.state.archive_store import open_store, sha256
from peers.state.archivists import NO_STAGE
from peers.state.snapshot_store import Snapshots
from protocols.memory.transport import MemoryNetwork
from protocols.messages.table import Hello
from protocols.signed.envelope import run_bytes
from protocols.signed.identity import Identity
from swarmnet.model.flat_layout import layout_of
from swarmnet.model.parameters import parameter_shapes
from swarmnet.rounds.history import START
from swarmnet.run.schema import WIRE_VERSION

MANIFEST = tiny_manifest((2, 1))
SIGNED = sign(MANIFEST)
SLOW = {0: 0.005, 1: 0.2, 2: 0.2, 3: 0.001}.__getitem__
"""Seconds of virtual time for update, backward, forward and the rest: few microbatches, little real work."""


def entry(stage: int, number: int, data: bytes, **changes) -> ArchivedCheckpoint:
    made = ArchivedCheckpoint(
        entry_name(stage, number), stage, number, len(data), sha256(data), ("peer",), 1.0
    )
    return replace(made, **changes)


async def trained(swarm: Swarm, stages: dict[str, int], rounds: int, **how: Any) -> None:
    """Open a swarm of these peers, and wait until each has settled more than so many rounds."""
    swarm.open()
    for name, stage in stages.items():
        swarm.start(name, stage, **how)
    await swarm.until(lambda: min(s for _, s in swarm.rounds().values() or [(0, 0)]) > rounds, 60.0)


async def archived(
    swarm: Swarm, place: str, policy: Policy, model: Path | None = None
) -> tuple[Archivist, Archive, list[str]]:
    """An archivist in the swarm, opened. `model`: that the run starts from."""
    said: list[str] = []
    identity = Identity.from_seed(b"archivist")
    book = OrderBook(signed=swarm.signed, kept=None, log_event=lambda *_, **__: None, notify=lambda *_: None)
    me = identity.peer_id
    transport, directory = swarm.network.transport(me), swarm.network.directory(me)
    archive = Archive(open_store(place))
    quiet = lambda *_, **__: None  # noqa: E731 - what is noted is not looked at
    presence = announcer(swarm.signed, identity, transport, directory)
    record = partial(presence.record, NO_STAGE, Claims("serving", "", "archivist"))
    serving = NewcomerService(
        archive=archive,
        signed=swarm.signed,
        transport=transport,
        admission=OpenToAll(),
        record=record,
        log_event=quiet,
        model=model,
    )
    circle = ArchivistLinks(
        book=book,
        transport=transport,
        directory=directory,
        invite=b"",
        chance=Random(1),
        log_event=quiet,
        serving=serving,
    )
    await directory.announce(swarm.signed.run_id, NO_STAGE, record(), 10.0)
    archivist = Archivist(
        archive=archive,
        policy=policy,
        identity=identity,
        book=book,
        circle=circle,
        log_event=lambda *_, **__: None,
        notify=lambda _, text: said.append(text),
    )
    circle.listen()
    await archivist.open()
    return archivist, archive, said


def open_archive(place: str) -> Archive:
    archive = Archive(open_store(place))
    archive.open()
    return archive


STAGE = 1
LAYOUT = layout_of(parameter_shapes(MANIFEST.model, MANIFEST.span(STAGE)))


class Unreachable(Exception):
    """As botocore's and gcsfs's errors: neither an OSError nor a ValueError."""


def unreachable(*_, **__):
    raise Unreachable("no route to the store")


class QuietLink:
    """To a newcomer of which nothing is heard."""

    def __init__(self, peer):
        self.peer = peer
        self.closed = False

    def post(self, message, body=b""):
        return 0

    async def drained(self, most, seconds):
        """All has been sent."""

    def close(self):
        self.closed = True


class Desk:
    """An archivist's answers, with an archive of its own and no swarm."""

    def __init__(self, place: str) -> None:
        self.notes: list[tuple[str, dict]] = []
        self.network = MemoryNetwork()
        self.archive = Archive(open_store(place))
        self.archive.open(SIGNED)
        me = Identity.from_seed(b"archivist")
        note = lambda event: self.notes.append((event.name, event.fields))  # noqa: E731 - a name for a line
        transport = self.network.transport(me.peer_id)
        self.serving = NewcomerService(
            archive=self.archive,
            signed=SIGNED,
            transport=transport,
            admission=OpenToAll(),
            record=bytes,
            log_event=note,
        )
        self.snapshots = Snapshots(identity=me, run_id=SIGNED.run_id, stage=STAGE, rules=MANIFEST.rounds)
        self.serving.snapshots[STAGE] = (self.snapshots, LAYOUT)

    def put(self, at: int, damaged: bool = False) -> None:
        units = torch.zeros(LAYOUT.size, dtype=torch.int32)
        units[0] = at
        data = checkpoint_file.content(MANIFEST, STAGE, at, START, units, LAYOUT)
        self.archive.put(entry(STAGE, at, data, **({"sha256": "damaged"} if damaged else {})), data)

    async def greeted(self, name: str) -> str:
        """A newcomer comes; its peer id."""
        identity = Identity.from_seed(name.encode())
        peer = identity.peer_id
        transport, directory = self.network.transport(peer), self.network.directory(peer)
        presence = announcer(SIGNED, identity, transport, directory)
        record = presence.record(STAGE, Claims("starting", "", "worker"))
        self.serving.greeted(peer, Hello(WIRE_VERSION, run_bytes(SIGNED.run_id), record), QuietLink(peer))
        await self.done()
        assert self.serving.stage_of(peer) == STAGE
        return peer

    async def done(self) -> None:
        """What was begun is at its end; an exception that nobody took is raised."""
        await asyncio.gather(*self.serving._tasks)

    def held(self) -> list[int]:
        return [snapshot.root.round for snapshot in self.snapshots.held]
