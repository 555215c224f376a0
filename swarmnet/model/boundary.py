"""Narrow boundaries between stages: r numbers per token cross, and the rest is made anew from the token.

At the boundary after layer p the sender has hidden states x and sends c = (x - before[token]) P^T, the
receiver goes on with c P + after[token]. `before` and `after` are tables of learned vectors, *anchors*, the
first in the sender's stage and the second in the receiver's. P has orthonormal rows, is drawn from a seed in
the run file and never changes. So what a token is need not cross, and what layers have found out about it
does, in r random directions (docs/benchmarks/boundaries.md).

Shape suffixes: B sequences, T tokens, D width, R numbers that cross, V vocabulary, A rows of a table of
anchors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from swarmnet.model.draws import normal
from swarmnet.model.linear import linear
from swarmnet.model.parameters import anchors_after, anchors_before
from swarmnet.run.boundary import Boundary
from swarmnet.run.manifest import ModelShape

PROJECTORS_KEPT = 64
"""Of the process, on each device: more than a model has boundaries."""


def leave(
    weights: Mapping[str, Tensor], shape: ModelShape, layer: int, hidden_BTD: Tensor, tokens_BT: Tensor
) -> Tensor:
    """[B, T, R]: what crosses the boundary after so many layers."""
    anchor_BTD = _anchors(weights[anchors_before(layer)], shape.boundary, tokens_BT)
    return linear(hidden_BTD - anchor_BTD, projector(shape.boundary, shape.width, layer, hidden_BTD.device))


def enter(
    weights: Mapping[str, Tensor], shape: ModelShape, layer: int, crossed_BTR: Tensor, tokens_BT: Tensor
) -> Tensor:
    """[B, T, D]: what the stage behind the boundary goes on with."""
    projector_RD = projector(shape.boundary, shape.width, layer, crossed_BTR.device)
    anchor_BTD = _anchors(weights[anchors_after(layer)], shape.boundary, tokens_BT)
    return linear(crossed_BTR, projector_RD.t()) + anchor_BTD


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
