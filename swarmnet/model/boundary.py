"""Narrow boundaries between stages: r numbers per token cross, and the rest is made anew from the token.

*Anchored*: at the boundary after layer p the sender has hidden states x and sends c = (x - before[token])
P^T, the receiver goes on with c P + after[token]. `before` and `after` are tables of learned vectors,
*anchors*, the first in the sender's stage and the second in the receiver's. P has orthonormal rows, is drawn
from a seed in the run file and never changes. So what a token is need not cross, and what layers have found
out about it does, in r random directions (docs/benchmarks/boundaries.md).

*Shared* (arXiv:2506.01260, with weights that are made narrow and not kept so): one P for all boundaries, and
x = F[token] + z P everywhere before the last of them. F is fixed and made from a hash, so that no stage holds
a table; the embedding and the last matrices of attention and feed-forward write z, r numbers. z crosses, and
nothing is lost. Layers behind the last boundary, and the head, are as in any model. Multiplied out, all of
it is a plain decoder (`multiplied_out`).

Shape suffixes: B sequences, T tokens, D width, R numbers that cross, V vocabulary, A rows of a table of
anchors.
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
from swarmnet.run.boundary import Boundary
from swarmnet.run.manifest import ModelShape

DIRECTIONS = "shared_directions"
"""Among the members of a layer (decoder.py)."""
PROJECTORS_KEPT = 64
"""Of the process, on each device: more than a model has boundaries."""


def leave(
    weights: Mapping[str, Tensor], shape: ModelShape, layer: int, hidden_BTD: Tensor, tokens_BT: Tensor
) -> Tensor:
    """[B, T, R]: what crosses the boundary after so many layers."""
    known_BTD = _known(weights, shape, anchors_before(layer), tokens_BT)
    return linear(hidden_BTD - known_BTD, _rows(shape, layer, hidden_BTD.device))


def enter(
    weights: Mapping[str, Tensor], shape: ModelShape, layer: int, crossed_BTR: Tensor, tokens_BT: Tensor
) -> Tensor:
    """[B, T, D]: what the stage behind the boundary goes on with."""
    rows_RD = _rows(shape, layer, crossed_BTR.device)
    return linear(crossed_BTR, rows_RD.t()) + _known(weights, shape, anchors_after(layer), tokens_BT)


def embedded(table: Tensor, shape: ModelShape, tokens_BT: Tensor) -> Tensor:
    """[B, T, D]: what the first layer begins with. `table`: [V, D], or [V, R] where directions are shared."""
    found = functional.embedding(tokens_BT, table).float()
    if shape.boundary.form != "shared":
        return found
    return fixed(shape, tokens_BT) + linear(found, _rows(shape, 0, found.device).t())


def directions(shape: ModelShape, layer: int, device: torch.device) -> dict[str, Tensor]:
    """What a layer has beside its weights: [R, D] that it writes into, or nothing."""
    return {DIRECTIONS: _rows(shape, layer, device)} if shape.boundary.is_shared_at(layer) else {}


def written(members: Mapping[str, Tensor], branch: Tensor) -> Tensor:
    """[B, T, D]: what attention or feed-forward of a layer adds. `branch`: the same, or [B, T, R]."""
    return linear(branch, members[DIRECTIONS].t()) if DIRECTIONS in members else branch


def fixed(shape: ModelShape, tokens_BT: Tensor) -> Tensor:
    """[B, T, D] of + and - `initial_deviation`: F[token], of the seed, the same everywhere.

    A bit of a hash each: 32 bits from (seed, token, place of the word). Products of 32 bits and 31 stay
    below 2**63, beyond which not every device need compute alike.
    """
    digest = hashlib.sha256(f"{shape.boundary.seed}/model.boundaries.fixed".encode()).digest()
    words, device = -(-shape.width // 32), tokens_BT.device
    places_BTW = tokens_BT[..., None] * words + torch.arange(words, device=device)
    hashes_BTW = _mixed(_mixed(places_BTW) ^ int.from_bytes(digest[:4], "little"))
    signed_BTW = ((hashes_BTW ^ 1 << 31) - (1 << 31)).int()  # The same bits, in half the time.
    bits = signed_BTW[..., None] >> torch.arange(32, dtype=torch.int32, device=device) & 1
    signs_BTD = bits.float().mul_(2.0).sub_(1.0).flatten(-2)[..., : shape.width]
    return signs_BTD * shape.initial_deviation


def multiplied_out(weights: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Of a model of shared directions, whole or one stage's: the weights of the plain model that computes the
    same, up to rounding."""
    wide = dict(weights)
    for name, tensor in weights.items():
        if name == EMBEDDING:
            wide[name] = embedded(tensor, shape, torch.arange(shape.vocabulary, device=tensor.device))
        elif name.endswith(BRANCH_ENDS) and shape.boundary.is_shared_at(int(name.split(".")[2])):
            wide[name] = _rows(shape, 0, tensor.device).t() @ tensor
    return wide


def _known(weights: Mapping[str, Tensor], shape: ModelShape, anchors: str, tokens_BT: Tensor) -> Tensor:
    """[B, T, D]: what both sides know by the token."""
    if shape.boundary.form == "shared":
        return fixed(shape, tokens_BT)
    return _anchors(weights[anchors], shape.boundary, tokens_BT)


def _mixed(x: Tensor) -> Tensor:
    """A permutation of 32-bit numbers of which each bit depends on all (hash-prospector's two rounds)."""
    x = (x ^ x >> 16) * 0x21F0AAAD & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x735A2D97 & 0xFFFFFFFF
    return x ^ x >> 15


def _rows(shape: ModelShape, layer: int, device: torch.device) -> Tensor:
    """[R, D] of the boundary after `layer`; where directions are shared, the one for all."""
    place = layer if shape.boundary.form == "anchored" else 0
    return projector(shape.boundary, shape.width, place, device)


def _anchors(table_AD: Tensor, boundary: Boundary, tokens_BT: Tensor) -> Tensor:
    """[B, T, D]. Where there are fewer rows than tokens, quotient and remainder name two of them
    (arXiv:1909.02107), so that all tokens differ."""
    if not boundary.anchor_rows:
        return functional.embedding(tokens_BT, table_AD)
    half = boundary.anchor_rows // 2
    remainder_BTD = functional.embedding(tokens_BT % half, table_AD)
    return remainder_BTD + functional.embedding(half + tokens_BT // half, table_AD)


@lru_cache(PROJECTORS_KEPT)
def projector(boundary: Boundary, width: int, layer: int, device: torch.device) -> Tensor:
    """float32 [R, D] of orthonormal rows, the same bits on every machine, for the boundary after `layer`."""
    drawn = normal(boundary.width * width, boundary.seed, f"model.boundaries.{layer}.projector")
    rows_RD = orthonormal(drawn.view(boundary.width, width).numpy())
    return torch.from_numpy(rows_RD.astype(np.float32)).to(device)


def projectors(shape: ModelShape) -> dict[str, Tensor]:
    """Global name -> [R, D], of all boundaries of the model, on the CPU: what never learns, as parameters."""
    boundary, cpu = shape.boundary, torch.device("cpu")
    return {
        f"model.boundaries.{layer}.projector.weight": projector(boundary, shape.width, layer, cpu)
        for layer in boundary.after
    }


def orthonormal(rows_RD: np.ndarray) -> np.ndarray:
    """Rows that span the same, by Gram and Schmidt (modified), in float64.

    Every operation is one that IEEE 754 rounds correctly, number by number, and sums are taken by halves: a
    library's QR or dot product adds in an order that depends on the processor, and so gives other bits.
    """
    rows_RD = rows_RD.copy()
    for row in range(len(rows_RD)):
        rows_RD[row] /= np.sqrt(_sums(np.square(rows_RD[row : row + 1])))
        rest_RD = rows_RD[row + 1 :]
        rest_RD -= _sums(rest_RD * rows_RD[row])[:, None] * rows_RD[row]
    return rows_RD


def _sums(terms_RD: np.ndarray) -> np.ndarray:
    """[R]: of each row, in an order that is written down here."""
    while terms_RD.shape[1] > 1:
        half = terms_RD.shape[1] // 2
        summed = terms_RD[:, :half] + terms_RD[:, half : 2 * half]
        terms_RD = np.concatenate((summed, terms_RD[:, 2 * half :]), axis=1)
    return terms_RD[:, 0]
