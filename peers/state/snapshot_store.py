"""Settled weights kept for newcomers: snapshots, in chunks named by their hashes under one signed root."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from peers.state.checkpoint_file import state_digest
from peers.state.unnamed_file import laid_down
from protocols.messages.table import SnapshotRoot
from protocols.signed.envelope import Kind, seal
from protocols.signed.identity import Identity
from protocols.signed.told_tokens import told
from swarmnet.identifiers import RunId
from swarmnet.rounds.own_contributions import Past
from swarmnet.run.manifest import Rounds
from swarmnet.snapshots.fetch import chunk_bytes

SNAPSHOTS_KEPT = 2
"""A newcomer may still fetch the older one while the group makes the next. What was asked for last is kept
besides: four holders on home lines need 25 s for 103 MB, and had forgotten it by then (measured)."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    root: SnapshotRoot
    signed: bytes
    data: bytes | memoryview
    """Little-endian int32 settled weights, in memory or on the disk."""
    tokens: int | None = None
    """In all settled rounds up to it; None: not known."""

    def chunk(self, index: int) -> memoryview:
        size = chunk_bytes(self.root.size)
        return memoryview(self.data)[index * size : (index + 1) * size]

    def weights(self) -> Weights:
        return Weights(units_of(self.data), self.root.round, self.root.chain, tokens=self.tokens)


@dataclass(frozen=True, slots=True)
class Weights:
    """What a newcomer starts from: `units` int32 [method.state.size], what was settled after
    `settled_round`."""

    units: Tensor
    settled_round: int
    chain: bytes
    """The value of the chain of settled sets there."""
    past: Past = field(default_factory=Past)
    """What is known of the rounds up to there, where they are from the own disk."""
    tokens: int | None = None
    """In all settled rounds up to there, of all peers; None: nobody says it."""


def units_of(data: bytes | memoryview) -> Tensor:
    """int32 [size] from little-endian bytes."""
    return torch.from_numpy(np.frombuffer(data, "<i4").astype(np.int32))


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a peer stands."""

    current: int
    settled: int
    digest: bytes
    """Of the settled weights."""
    began: int
    """The round whose settled weights it started from: of later ones alone it has the sets."""


NOT_BEGUN = Standing(-1, -1, b"", -1)


def sealed_round(round: int) -> int:
    """As the envelope of a root has it, which knows no round -1."""
    return max(0, round)


class Snapshots:
    """What this peer keeps for newcomers. `keep` runs in the compute thread, the rest on the event loop."""

    def __init__(
        self, identity: Identity, run_id: RunId, stage: int, rules: Rounds, folder: Path | None = None
    ) -> None:
        """`folder`: where snapshots lie instead of in memory, in files that nobody else sees."""
        self._folder = folder
        self.identity = identity
        self.run_id = run_id
        self.stage = stage
        self.rules = rules
        self.held: tuple[Snapshot, ...] = ()
        """Newest first; replaced as a whole, so that both threads may read it."""
        self.start: Snapshot | None = None
        """What the run starts from, where that is a model and it is here; its root says round -1."""
        self.asked = b""
        """The digest that was last asked for."""

    def keep(
        self, round: int, units: Callable[[], Tensor], digest: bytes, chain: bytes, tokens: int | None = None
    ) -> None:
        """A round settled: make a snapshot if it is its turn."""
        if (round + 1) % self.rules.snapshot_rounds == 0:
            self._hold(round, units(), digest, chain, tokens)

    def hold(self, weights: Weights) -> None:
        """Serve these weights too: from the own disk or fetched, others may need just them."""
        if weights.settled_round < 0:
            self.start = self._made(-1, weights.units, state_digest(-1, weights.units), weights.chain, 0)
        elif all(snapshot.root.round != weights.settled_round for snapshot in self.held):
            digest = state_digest(weights.settled_round, weights.units)
            self._hold(weights.settled_round, weights.units, digest, weights.chain, weights.tokens)

    def _hold(self, round: int, units: Tensor, digest: bytes, chain: bytes, tokens: int | None) -> None:
        held = [self._made(round, units, digest, chain, tokens), *self.held]
        held.sort(key=lambda snapshot: -snapshot.root.round)
        in_use = [snapshot for snapshot in held[SNAPSHOTS_KEPT:] if snapshot.root.digest == self.asked]
        self.held = (*held[:SNAPSHOTS_KEPT], *in_use)

    def _made(
        self, round: int, units: Tensor, digest: bytes, chain: bytes, tokens: int | None
    ) -> Snapshot:
        view = units.cpu().numpy().astype("<i4", copy=False).data.cast("B")
        size = chunk_bytes(len(view))
        hashes = [hashlib.sha256(view[at : at + size]).digest() for at in range(0, len(view), size)]
        root = SnapshotRoot(round, self.stage, len(view), digest, chain, hashes)
        (data,) = laid_down([view], self._folder)
        signed = seal(
            self.identity, self.run_id, Kind.SNAPSHOT, self.stage, sealed_round(round), told(tokens, round),
            msgspec.msgpack.encode(root),
        )  # fmt: skip
        return Snapshot(root, signed, data, tokens)

    def offered(self) -> list[Snapshot]:
        """What a newcomer is told of, as many as fit into a message. Those that are only still being given do
        not count. What the run starts from is of no use where two snapshots are there."""
        return [*self.held, *([self.start] if self.start is not None else [])][:SNAPSHOTS_KEPT]

    def newest_round(self) -> int:
        """-1: none is held."""
        return self.held[0].root.round if self.held else -1

    def forget_after(self, round: int) -> None:
        """The group goes on from this round: what is newer here is another history."""
        self.held = tuple(snapshot for snapshot in self.held if snapshot.root.round <= round)

    def find(self, digest: bytes) -> Snapshot | None:
        if self.start is not None and self.start.root.digest == digest:
            return self.start
        found = next((snapshot for snapshot in self.held if snapshot.root.digest == digest), None)
        if found is not None:
            self.asked = digest
        return found
