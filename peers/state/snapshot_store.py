"""Keep settled weights for peers that join: snapshots, which these download in chunks.

A round is settled when its set of contributions can no longer change; all peers then have the same weights. A
snapshot's root, signed by the peer that offers it, names the round, the digest of the weights, the chain
value (hash over all settled sets so far) and the hash of each chunk. Units are int32 fixed-point weights."""

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
from peers.state.unnamed_file import store_unnamed
from protocols.messages.table import SnapshotRoot
from protocols.signed.envelope import EnvelopeKind, seal
from protocols.signed.identity import Identity
from protocols.signed.token_count import encode_tokens
from swarmnet.identifiers import RunId
from swarmnet.rounds.own_contributions import RestartState
from swarmnet.run.schema import Rounds
from swarmnet.snapshots.fetch import chunk_bytes

SNAPSHOTS_KEPT = 2
"""Number of snapshots kept, so that a newcomer can still fetch the older one while the next is made.

The snapshot requested last is kept as well. Four holders on home links need 25 s for 103 MB, and dropped it
before the fetch was complete (measured)."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One snapshot with its signed root."""

    root: SnapshotRoot
    signed: bytes
    data: bytes | memoryview
    """Settled weights as little-endian int32, in memory or on disk."""
    tokens: int | None = None
    """Number of tokens in all settled rounds up to it; None if not known."""

    def chunk(self, index: int) -> memoryview:
        size = chunk_bytes(self.root.size)
        return memoryview(self.data)[index * size : (index + 1) * size]

    def weights(self) -> Weights:
        return Weights(units_of(self.data), self.root.round, self.root.chain, tokens=self.tokens)


@dataclass(frozen=True, slots=True)
class Weights:
    """The state that a newcomer starts from: `units`, int32 [state size], settled after `settled_round`."""

    units: Tensor
    settled_round: int
    chain: bytes
    """The value of the chain of settled sets at that round."""
    past: RestartState = field(default_factory=RestartState)
    """What is known of the rounds up to there, if the weights are from this peer's own disk."""
    tokens: int | None = None
    """Number of tokens of all peers in all settled rounds up to there; None if no peer reports it."""


def units_of(data: bytes | memoryview) -> Tensor:
    """Return an int32 [size] tensor from little-endian bytes."""
    return torch.from_numpy(np.frombuffer(data, "<i4").astype(np.int32))


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """The progress of a peer."""

    current: int
    settled: int
    digest: bytes
    """Digest of the settled weights."""
    began: int
    """The round whose settled weights the peer started from. It has the sets of later rounds only."""


NOT_BEGUN = RoundProgress(-1, -1, b"", -1)


def sealed_round(round: int) -> int:
    """Return the round in the envelope of a root, which cannot represent round -1."""
    return max(0, round)


class Snapshots:
    """The snapshots that this peer keeps. `keep` runs in the compute thread, the rest on the event loop."""

    def __init__(
        self, *, identity: Identity, run_id: RunId, stage: int, rules: Rounds, folder: Path | None = None
    ) -> None:
        """Create the store. Snapshots are kept in unnamed files in `folder`, or in memory if it is None."""
        self._folder = folder
        self.identity = identity
        self.run_id = run_id
        self.stage = stage
        self.rules = rules
        self.held: tuple[Snapshot, ...] = ()
        """Newest first. It is replaced as a whole, so that both threads may read it."""
        self.start: Snapshot | None = None
        """The weights that the run starts from, if they are a model and available; its root has round -1."""
        self.asked = b""
        """The digest of the snapshot requested last."""

    def keep(
        self, round: int, units: Callable[[], Tensor], digest: bytes, chain: bytes, tokens: int | None = None
    ) -> None:
        """Make a snapshot of a settled round if it is the last of `snapshot_interval` rounds; else do
        nothing. `units` returns the weights; `digest` is their digest, and `tokens` the number of tokens in
        all settled rounds."""
        if (round + 1) % self.rules.snapshot_interval == 0:
            self._add_snapshot(round, units(), digest, chain, tokens)

    def hold(self, weights: Weights) -> None:
        """Make a snapshot of weights that were read from disk or downloaded, because other peers may need
        them. Round -1 means the initial weights. Any other round gets at most one snapshot."""
        if weights.settled_round < 0:
            digest = state_digest(-1, weights.units)
            self.start = self._make_snapshot(-1, weights.units, digest, weights.chain, tokens=0)
        elif all(snapshot.root.round != weights.settled_round for snapshot in self.held):
            digest = state_digest(weights.settled_round, weights.units)
            self._add_snapshot(weights.settled_round, weights.units, digest, weights.chain, weights.tokens)

    def _add_snapshot(
        self, round: int, units: Tensor, digest: bytes, chain: bytes, tokens: int | None
    ) -> None:
        """Make a snapshot and add it. Keep the newest SNAPSHOTS_KEPT ones, and the one that was requested
        last even if it is older."""
        held = [self._make_snapshot(round, units, digest, chain, tokens), *self.held]
        held.sort(key=lambda snapshot: -snapshot.root.round)
        newest, older = held[:SNAPSHOTS_KEPT], held[SNAPSHOTS_KEPT:]
        requested = [snapshot for snapshot in older if snapshot.root.digest == self.asked]
        self.held = (*newest, *requested)

    def _make_snapshot(
        self, round: int, units: Tensor, digest: bytes, chain: bytes, tokens: int | None
    ) -> Snapshot:
        """Return a snapshot of these weights with a signed root; its bytes are on disk if possible."""
        view = units.cpu().numpy().astype("<i4", copy=False).data.cast("B")
        size = chunk_bytes(len(view))
        hashes = [hashlib.sha256(view[at : at + size]).digest() for at in range(0, len(view), size)]
        root = SnapshotRoot(round, self.stage, len(view), digest, chain, hashes)
        data = store_unnamed([view], self._folder)[0]
        signed = seal(
            self.identity,
            self.run_id,
            EnvelopeKind.SNAPSHOT,
            self.stage,
            sealed_round(round),
            encode_tokens(tokens, round),
            msgspec.msgpack.encode(root),
        )
        return Snapshot(root, signed, data, tokens)

    def offered(self) -> list[Snapshot]:
        """Return the snapshots to offer to a newcomer: the newest `SNAPSHOTS_KEPT`, or fewer and the initial
        weights. A snapshot that is kept only because it was requested last is left out."""
        start = [self.start] if self.start is not None else []
        return [*self.held, *start][:SNAPSHOTS_KEPT]

    def newest_round(self) -> int:
        """Return the round of the newest snapshot; -1 if there is none."""
        return self.held[0].root.round if self.held else -1

    def forget_after(self, round: int) -> None:
        """Drop snapshots newer than `round`, from which the group continues: they are of another branch."""
        self.held = tuple(snapshot for snapshot in self.held if snapshot.root.round <= round)

    def find(self, digest: bytes) -> Snapshot | None:
        """Return the snapshot with this digest, or None. It is kept longer than others from now on."""
        if self.start is not None and self.start.root.digest == digest:
            return self.start
        found = next((snapshot for snapshot in self.held if snapshot.root.digest == digest), None)
        if found is not None:
            self.asked = digest
        return found
