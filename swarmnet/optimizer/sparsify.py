"""Select which coefficients of a chunk a peer votes on: the strongest, or the strongest of each group.

One interface, `Selection`, chooses from the momentum, encodes the choice in bits, and decodes it. All of it
is a function of single chunks, so the choice does not depend on how layers are cut into stages.

Shapes: C chunks, N coefficients in a chunk, K kept of them, W = N / K size of a group.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarmnet.identifiers import PeerId, RunId
from swarmnet.model.flat_layout import CHUNK
from swarmnet.optimizer.index_code import BitArray, EliasFano, GroupOffsets, log2_exact


class Selection(Protocol):
    """Chooses and encodes indices for one size of chunk."""

    @property
    def kept(self) -> int:
        """K: number of votes per chunk."""

    @property
    def index_bits(self) -> int:
        """Number of bits per chunk that encode the indices of the votes."""

    def choose(self, momentum_CN: Tensor) -> Tensor:
        """Return the indices to vote on, int64 [C, K]; distinct within a chunk."""

    def write(self, indices_CK: Tensor) -> BitArray:
        """Encode indices as bits [C, index_bits]."""

    def read(self, bits_CB: BitArray) -> Tensor:
        """Return int64 [C, K] of what `write` made. Raises ContributionError for anything else."""


@dataclass(frozen=True, slots=True)
class TopK:
    """The K largest magnitudes of each chunk, as DeMo selects them (arXiv:2411.19870, algorithm 1)."""

    chunk: int
    kept: int

    @property
    def code(self) -> EliasFano:
        return EliasFano(self.chunk, self.kept)

    @property
    def index_bits(self) -> int:
        return self.code.bits

    def choose(self, momentum_CN: Tensor) -> Tensor:
        return _largest(momentum_CN.abs(), self.kept)

    def write(self, indices_CK: Tensor) -> BitArray:
        return self.code.write(indices_CK.cpu().numpy())

    def read(self, bits_CB: BitArray) -> Tensor:
        return torch.from_numpy(self.code.read(bits_CB))


@dataclass(frozen=True, slots=True)
class StrongestOfGroups:
    """The largest magnitude of each of K groups of W: a shorter code than TopK's, and a cheaper search."""

    chunk: int
    kept: int

    @property
    def code(self) -> GroupOffsets:
        return GroupOffsets(self.chunk, self.kept)

    @property
    def index_bits(self) -> int:
        return self.code.bits

    def choose(self, momentum_CN: Tensor) -> Tensor:
        offsets_CK = _first_of_largest(momentum_CN.view(momentum_CN.shape[0], -1, self.kept))
        return offsets_CK * self.kept + torch.arange(self.kept, device=momentum_CN.device)

    def write(self, indices_CK: Tensor) -> BitArray:
        return self.code.write(indices_CK.cpu().numpy())

    def read(self, bits_CB: BitArray) -> Tensor:
        return torch.from_numpy(self.code.read(bits_CB))


def selection_of(name: str, chunk: int, kept_of_4096: int, shrinks: bool = True) -> Selection:
    """Return the selection `name` for chunks of `chunk` values. The number kept shrinks with the chunk, down
    to 1, or is the same for all chunks that are large enough, as in DeMo."""
    kept = max(1, kept_of_4096 * chunk // CHUNK) if shrinks else min(kept_of_4096, chunk)
    log2_exact(kept)
    kinds: dict[str, type[TopK] | type[StrongestOfGroups]] = {"top-k": TopK, "group": StrongestOfGroups}
    return kinds[name](chunk, kept)


def seed_of(run_id: RunId, round: int, peer: PeerId) -> bytes:
    """Return 32 bytes that differ in every run, round and peer."""
    return hashlib.sha256(f"swarmnet contribution\n{run_id}\n{round}\n{peer}".encode()).digest()


def coin_flips(seed: bytes, chunk: int, count: int) -> NDArray[np.bool_]:
    """Return signs for coefficients that are exactly zero, bool [count]; a constant sign would be a bias."""
    stream = hashlib.shake_256(b"signs" + seed + chunk.to_bytes(4, "little"))
    return np.unpackbits(np.frombuffer(stream.digest(-(-count // 8)), np.uint8))[:count].astype(np.bool_)


def _largest(magnitude_CN: Tensor, kept: int) -> Tensor:
    """Return the K largest of each chunk, int64 [C, K], ascending; at equal values the first ones. The
    partition of numpy finds the K-th largest with SIMD. All values that reach it are found in ascending
    order. This is several times as fast as torch.topk and a sort."""
    if magnitude_CN.device.type != "cpu":
        return magnitude_CN.topk(kept, dim=1, sorted=False).indices.sort(dim=1).values
    magnitude = magnitude_CN.numpy()
    edge = magnitude.shape[1] - kept
    threshold_C1 = np.partition(magnitude, edge, axis=1)[:, edge, None]
    chosen = magnitude >= threshold_C1
    places = np.flatnonzero(chosen)
    if len(places) > kept * len(magnitude):
        above = magnitude > threshold_C1
        equal = chosen & ~above
        wanted_C1 = kept - np.count_nonzero(above, axis=1)[:, None]
        places = np.flatnonzero(above | (equal & (np.cumsum(equal, axis=1) <= wanted_C1)))
    return torch.from_numpy(places.reshape(-1, kept) % magnitude.shape[1])


def _first_of_largest(values_CWK: Tensor) -> Tensor:
    """Return the position along W, a power of two, of the largest float32 magnitude, int64 [C, K]. The bits
    of a positive float order like an integer. Its lowest log2(W) bits, overwritten with the position, make
    one key for a plain maximum: five times as fast as argmax. Magnitudes that differ by less than W * 2**-23
    of themselves count as equal; the first of them wins."""
    width = values_CWK.shape[1]
    key_CWK = values_CWK.view(torch.int32).bitwise_and(0x7FFFFFFF & ~(width - 1))
    key_CWK |= torch.arange(width - 1, -1, -1, dtype=torch.int32, device=values_CWK.device)[:, None]
    return (width - 1 - (key_CWK.amax(dim=1) & (width - 1))).to(torch.int64)
