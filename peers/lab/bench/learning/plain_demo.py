"""DeMo as its paper describes it (arXiv:2411.19870, algorithm 1), one matrix at a time, in floats.

Each matrix is split into tiles of at most 64 x 64, each vector into pieces of at most 64. A peer transforms a
tile's momentum by an orthonormal DCT-II, subtracts the largest k coefficients from it and sends them. Each
coefficient is averaged over its senders and transformed back. The weights step by the sign of the result.

Shape suffixes: R rows and C columns of tiles, A and B numbers along a tile's sides, K kept coefficients, P
numbers of the flat vector.
"""

from __future__ import annotations

from math import cos, pi, sqrt

import torch
from torch import Tensor

from peers.lab.bench.learning.ground import Ground, Parameter
from peers.lab.bench.learning.learner import CLIP, Rate

TILE = 64
DECAY = 0.999
"""Decay of the momentum; the paper's value (section 4)."""
KEPT = 32
"""Coefficients that are sent of each tile; the paper's value (section 4)."""
VALUE_BYTES = 4
INDEX_BYTES = 2
"""Bytes of an index: a tile has at most 4096 coefficients. The reference implementation sends eight."""


class _Tiles:
    """The tiles of one parameter, and their transform."""

    def __init__(self, parameter: Parameter, kept: int, device: torch.device) -> None:
        self.parameter = parameter
        rows, columns = parameter.shape if len(parameter.shape) == 2 else (1, parameter.shape[0])
        self._rows = rows
        self._columns = columns
        self._height = _side(rows)
        self._width = _side(columns)
        self.kept = min(kept, self._height * self._width)
        self.tiles = rows // self._height * (columns // self._width)
        self._down_AA = _cosines(self._height).to(device)
        self._across_BB = _cosines(self._width).to(device)

    def forward(self, flat: Tensor) -> Tensor:
        """Return the DCT coefficients of a flat parameter: [size] -> [tiles, A B]."""
        shape = (self._rows // self._height, self._height, self._columns // self._width, self._width)
        tiles_RCAB = flat.view(shape).transpose(1, 2)
        return (self._down_AA @ tiles_RCAB @ self._across_BB.T).reshape(self.tiles, -1)

    def backward(self, coefficients: Tensor) -> Tensor:
        """Return the flat parameter with these coefficients: [tiles, A B] -> [size]."""
        shape = (self._rows // self._height, self._columns // self._width, self._height, self._width)
        tiles_RCAB = self._down_AA.T @ coefficients.view(shape) @ self._across_BB
        return tiles_RCAB.transpose(1, 2).reshape(-1)


class PlainDemo:
    """Several peers that train by DeMo, each with its own momentum; all have equal weights."""

    def __init__(self, *, ground: Ground, peers: int, rate: Rate, kept: int = KEPT) -> None:
        self._ground = ground
        self._rate = rate
        self._weights_P = ground.initial_weights()
        self._momenta = [torch.zeros_like(self._weights_P) for _ in range(peers)]
        self._tiles = [_Tiles(each, kept, self._weights_P.device) for each in ground.parameters]
        self.sent_bytes = 0
        self.vote_weights: tuple[float, ...] = ()

    def step(self, number: int) -> float:
        rate, losses, published_P = self._rate(number), [], self.weights()
        sent: list[list[tuple[Tensor, Tensor]]] = []
        for peer, momentum_P in enumerate(self._momenta):
            found = self._ground.gradient(published_P, peer, number)
            losses.append(found.loss)
            gradient_P = found.summed / found.tokens
            norm = float(torch.linalg.vector_norm(gradient_P))
            momentum_P.mul_(DECAY).add_(gradient_P, alpha=rate * min(1.0, CLIP / max(norm, 1e-12)))
            sent.append([self._taken(tiles, momentum_P) for tiles in self._tiles])
        for index, tiles in enumerate(self._tiles):
            indices_RK = torch.cat([each[index][0] for each in sent], dim=1)
            values_RK = torch.cat([each[index][1] for each in sent], dim=1)
            mean = values_RK.new_zeros(tiles.tiles, tiles.parameter.size // tiles.tiles)
            mean.scatter_reduce_(1, indices_RK, values_RK, reduce="mean", include_self=False)
            self._weights_P[tiles.parameter.place] -= rate * torch.sign(tiles.backward(mean))
        self.sent_bytes += sum(each.tiles * each.kept for each in self._tiles) * (VALUE_BYTES + INDEX_BYTES)
        return sum(losses) / len(losses)

    def weights(self) -> Tensor:
        return self._weights_P.clone()

    def _taken(self, tiles: _Tiles, momentum_P: Tensor) -> tuple[Tensor, Tensor]:
        """Subtract the largest coefficients from the momentum; return indices and values, [tiles, K] each."""
        place = tiles.parameter.place
        coefficients = tiles.forward(momentum_P[place])
        indices_RK = coefficients.abs().topk(tiles.kept, dim=1, sorted=False).indices
        values_RK = coefficients.gather(1, indices_RK)
        momentum_P[place] -= tiles.backward(torch.zeros_like(coefficients).scatter_(1, indices_RK, values_RK))
        return indices_RK, values_RK


def _side(length: int) -> int:
    """Return the largest divisor of `length` that is at most `TILE`, like the reference implementation."""
    return max(divisor for divisor in range(1, min(TILE, length) + 1) if length % divisor == 0)


def _cosines(length: int) -> Tensor:
    """Return the matrix of the orthonormal DCT-II, [length, length]."""
    rows = [
        [
            sqrt((2 if row else 1) / length) * cos(pi * (2 * column + 1) * row / (2 * length))
            for column in range(length)
        ]
        for row in range(length)
    ]
    return torch.tensor(rows)
