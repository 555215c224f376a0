"""Draw the directions of a round: some columns of a random orthogonal matrix, the same for all peers.

The orthogonal matrix consists of Hadamard matrices along its diagonal. Their size is the largest power of two
that divides the matrix size. Rows have a drawn order and drawn signs. Columns are used in a drawn order, all
once per cycle; each cycle has another matrix. All entries are -1, 0 or 1 times one number, so products with
integers are integers.

Shapes: L length of a column, K columns.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarmnet.identifiers import RunId

SUBSPACES_KEPT = 64
"""Number of cached subspaces: those of open rounds, for each length. Every step uses them."""


@dataclass(frozen=True, slots=True)
class Subspace:
    """Orthonormal columns: `signs` times `scale`."""

    signs: Tensor
    """float32 [L, K] of -1, 0 and 1."""
    scale: float


@lru_cache(SUBSPACES_KEPT)
def subspace(run_id: RunId, round: int, length: int, columns: int, device: torch.device) -> Subspace:
    """Return the `columns` directions of a round, out of `length` in all. Requires `columns` <= `length`."""
    cycle, turn = divmod(round, -(-length // columns))
    block = length & -length
    drawn_L = _drawn(run_id, cycle, length, "columns").argsort(kind="stable")
    chosen_K = np.resize(drawn_L, length + columns)[turn * columns : (turn + 1) * columns]
    places_L = np.arange(length)
    rows_L = _drawn(run_id, cycle, length, "rows").argsort(kind="stable")
    flips_L = 1 - 2 * (_drawn(run_id, cycle, length, "signs") & 1).astype(np.int8)
    odd_LK = np.bitwise_count(places_L[:, None] % block & chosen_K % block) & 1
    here_LK = places_L[:, None] // block == chosen_K // block
    signs_LK = np.zeros((length, columns), np.float32)
    signs_LK[rows_L] = np.where(here_LK, flips_L[:, None] * (1 - 2 * odd_LK.astype(np.int8)), 0)
    return Subspace(torch.from_numpy(signs_LK).to(device), block**-0.5)


def _drawn(run_id: RunId, cycle: int, length: int, what: str) -> NDArray[np.uint64]:
    """Return random numbers [L] by SHAKE-256, because a library's generator may change."""
    stream = hashlib.shake_256(f"swarmnet subspace\n{run_id}\n{cycle}\n{length}\n{what}".encode())
    return np.frombuffer(stream.digest(8 * length), "<u8").astype(np.uint64)
