"""Narrow boundaries: fewer numbers per token (R) travel to the next stage than a hidden state has (D).

The receiver adds the rest from the token, which it knows. There are two kinds, `token-anchored` and
`shared-subspace`.

*Anchored*: at the boundary after layer p the sender has hidden states x and sends c = (x - before[token])
P^T. The receiver continues with c P + after[token]. `before` and `after` are tables of learned vectors,
*anchors*, the first in the sender's stage and the second in the receiver's. P has orthonormal rows, is drawn
from a seed in the run file and never changes. The vector of the token itself need not cross. What the layers
added to it crosses in R random directions (docs/benchmarks/boundaries.md).

*Shared* (arXiv:2506.01260, but weights are narrow by construction): one P serves all boundaries. In all
layers before the last boundary, x = F[token] + z P. F is fixed and computed from a hash, so that no stage
stores a table. The embedding and the last matrices of attention and feed-forward add to z only, R numbers per
token. z crosses without loss. The rows of P are called the *shared directions*. Layers after the last
boundary, and the head, are as in any model. Multiplied out, the model is a plain decoder
(`to_plain_weights`).

Shape suffixes: B sequences, T tokens, D width, R numbers that cross, V vocabulary, A rows of a table of
anchors, W words of 32 bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from swarmnet.model.draws import normal
from swarmnet.model.linear import linear
from swarmnet.model.parameters import BRANCH_ENDS, EMBEDDING, anchors_after, anchors_before
from swarmnet.run.boundary_settings import Boundary
from swarmnet.run.schema import ModelShape

DIRECTIONS = "shared_directions"
"""Key of the shared directions among the members of a layer (`decoder.py`)."""
PROJECTORS_KEPT = 64
"""Number of cached projectors per process and device: more than a model has boundaries."""


def leave(
    weights: Mapping[str, Tensor], shape: ModelShape, layer: int, hidden_BTD: Tensor, tokens_BT: Tensor
) -> Tensor:
    """Return [B, T, R]: the numbers that a stage sends across the boundary after `layer` layers. They are (x
    - before[token]) P^T, or (x - F[token]) P^T with shared directions."""
    token_BTD = _token_part(weights, shape, anchors_before(layer), tokens_BT)
    return linear(hidden_BTD - token_BTD, _projector_rows(shape, layer, hidden_BTD.device))


def enter(
    weights: Mapping[str, Tensor], shape: ModelShape, layer: int, crossed_BTR: Tensor, tokens_BT: Tensor
) -> Tensor:
    """Return [B, T, D]: the hidden states with which the stage after the boundary continues. They are c P +
    after[token], or F[token] + z P with shared directions."""
    rows_RD = _projector_rows(shape, layer, crossed_BTR.device)
    return linear(crossed_BTR, rows_RD.t()) + _token_part(weights, shape, anchors_after(layer), tokens_BT)


def embedded(table: Tensor, shape: ModelShape, tokens_BT: Tensor) -> Tensor:
    """Return [B, T, D], the input of the first layer. `table` is [V, D], or [V, R] with shared directions."""
    rows = functional.embedding(tokens_BT, table).float()
    if shape.boundary.kind != "shared-subspace":
        return rows
    return fixed(shape, tokens_BT) + linear(rows, _projector_rows(shape, 0, rows.device).t())


def directions(shape: ModelShape, layer: int, device: torch.device) -> dict[str, Tensor]:
    """Return the shared directions [R, D] by name, for a layer that adds to z only; empty for any other."""
    return {DIRECTIONS: _projector_rows(shape, layer, device)} if shape.boundary.is_shared_at(layer) else {}


def written(members: Mapping[str, Tensor], branch: Tensor) -> Tensor:
    """Return [B, T, D]: what attention or feed-forward of a layer adds to the hidden states. `branch` is its
    output, [B, T, D], or [B, T, R] if `members` of the layer has the shared directions."""
    return linear(branch, members[DIRECTIONS].t()) if DIRECTIONS in members else branch


def fixed(shape: ModelShape, tokens_BT: Tensor) -> Tensor:
    """Return F[token], [B, T, D], equal on every machine for the same seed. Each number is plus or minus
    `initializer_range`, as a bit of a hash decides. One hash of (seed, token, word) gives 32 such signs.
    Intermediate products stay below 2**63, because devices may differ beyond that."""
    digest = hashlib.sha256(f"{shape.boundary.seed}/model.boundaries.fixed".encode()).digest()
    words, device = -(-shape.hidden_size // 32), tokens_BT.device
    indices_BTW = tokens_BT[..., None] * words + torch.arange(words, device=device)
    hashes_BTW = _mix_bits(_mix_bits(indices_BTW) ^ int.from_bytes(digest[:4], "little"))
    # Read the 32 bits as a signed int32, which takes half the time.
    signed_BTW = ((hashes_BTW ^ 1 << 31) - (1 << 31)).int()
    bits = signed_BTW[..., None] >> torch.arange(32, dtype=torch.int32, device=device) & 1
    signs_BTD = bits.float().mul_(2.0).sub_(1.0).flatten(-2)[..., : shape.hidden_size]
    return signs_BTD * shape.initializer_range


def to_plain_weights(weights: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Return the weights of the plain decoder that computes the same, up to rounding. `weights` are those of
    a model with shared directions, or of one stage of it. The embedding becomes F + table P. The last matrix
    of each attention and feed-forward, which writes to z, is multiplied by P^T."""
    plain = dict(weights)
    for name, tensor in weights.items():
        if name == EMBEDDING:
            plain[name] = embedded(tensor, shape, torch.arange(shape.vocab_size, device=tensor.device))
        elif name.endswith(BRANCH_ENDS):
            layer = int(name.split(".")[2])
            if shape.boundary.is_shared_at(layer):
                rows_RD = _projector_rows(shape, 0, tensor.device)  # One P for all boundaries.
                plain[name] = rows_RD.t() @ tensor
    return plain


def _token_part(weights: Mapping[str, Tensor], shape: ModelShape, anchors: str, tokens_BT: Tensor) -> Tensor:
    """Return [B, T, D]: F[token] with shared directions, else the vectors in the table named `anchors`."""
    if shape.boundary.kind == "shared-subspace":
        return fixed(shape, tokens_BT)
    return _anchors_of(weights[anchors], shape.boundary, tokens_BT)


def _mix_bits(x: Tensor) -> Tensor:
    """Permute 32-bit numbers: each output bit depends on all input bits (hash-prospector, two rounds)."""
    x = (x ^ x >> 16) * 0x21F0AAAD & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x735A2D97 & 0xFFFFFFFF
    return x ^ x >> 15


def _projector_rows(shape: ModelShape, layer: int, device: torch.device) -> Tensor:
    """Return P [R, D] of the boundary after `layer`; with shared directions, the one for all boundaries."""
    drawn_for = layer if shape.boundary.kind == "token-anchored" else 0
    return projector(shape.boundary, shape.hidden_size, drawn_for, device)


def _anchors_of(table_AD: Tensor, boundary: Boundary, tokens_BT: Tensor) -> Tensor:
    """Return the anchors [B, T, D] of tokens. A full table has one row per token. In a smaller one an anchor
    is the sum of two rows: row token % half of the first half, and row token // half of the second half
    (arXiv:1909.02107). No two tokens have the same pair."""
    if not boundary.anchor_rows:
        return functional.embedding(tokens_BT, table_AD)
    half = boundary.anchor_rows // 2
    remainder_BTD = functional.embedding(tokens_BT % half, table_AD)
    return remainder_BTD + functional.embedding(half + tokens_BT // half, table_AD)


@lru_cache(PROJECTORS_KEPT)
def projector(boundary: Boundary, width: int, layer: int, device: torch.device) -> Tensor:
    """Return P for the boundary after `layer`: float32 [R, D] with orthonormal rows. They are drawn from the
    boundary's seed and equal on every machine. `width` is D."""
    drawn = normal(boundary.width * width, boundary.seed, f"model.boundaries.{layer}.projector")
    rows_RD = orthonormal(drawn.view(boundary.width, width).numpy())
    return torch.from_numpy(rows_RD.astype(np.float32)).to(device)


def projectors(shape: ModelShape) -> dict[str, Tensor]:
    """Return the projectors of all boundaries on the CPU, as (global name -> [R, D]) that never change."""
    boundary, cpu = shape.boundary, torch.device("cpu")
    return {
        f"model.boundaries.{layer}.projector.weight": projector(boundary, shape.hidden_size, layer, cpu)
        for layer in boundary.after
    }


def orthonormal(rows_RD: np.ndarray) -> np.ndarray:
    """Orthonormalize rows in float64 by modified Gram-Schmidt. Returns rows with the same span. Each
    operation is elementwise and correctly rounded by IEEE 754, and sums are taken pairwise. A library's QR or
    dot product adds in an order that depends on the processor and gives other bits."""
    rows_RD = rows_RD.copy()
    for row in range(len(rows_RD)):
        rows_RD[row] /= np.sqrt(_sums(np.square(rows_RD[row : row + 1])))
        rest_RD = rows_RD[row + 1 :]
        rest_RD -= _sums(rest_RD * rows_RD[row])[:, None] * rows_RD[row]
    return rows_RD


def _sums(terms_RD: np.ndarray) -> np.ndarray:
    """Return the sum of each row, [R]. The second half of a row is added to the first until one number is
    left; the last number of an odd row waits for the next turn. The order is the same on every machine."""
    while terms_RD.shape[1] > 1:
        half = terms_RD.shape[1] // 2
        summed = terms_RD[:, :half] + terms_RD[:, half : 2 * half]
        terms_RD = np.concatenate((summed, terms_RD[:, 2 * half :]), axis=1)
    return terms_RD[:, 0]
