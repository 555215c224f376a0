"""Turn a summed gradient into a mean one, clipped per block: the first step of every method."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from swarmnet.model.flat_layout import Layout
from swarmnet.optimizer.device_groups.device_group import ALONE, DeviceGroup
from swarmnet.optimizer.tiling import blocks_of, plane_of, tiles_of


class GradientError(ValueError):
    """The gradient cannot be used. Nothing was changed. The message names the block."""


class BlockClip:
    """Computes the gain that averages and clips each block of a gradient. Clipping is per block, because a
    stage does not see the whole model's gradient."""

    def __init__(self, layout: Layout, clip: float, device: torch.device) -> None:
        self._layout = layout
        self._clip = clip
        self._blocks, self._block_of_chunk = blocks_of(layout, device)
        self.device_group: DeviceGroup = ALONE
        """Collectives of the devices of this stage. The norm of a block covers its shards on all of them."""
        self.norm: float | None = None
        """2-norm of the newest mean gradient over all blocks, before clipping; None before the first."""

    def chunk_gains(self, gradient: Tensor, tokens: int, share: float) -> list[Tensor]:
        """Return the gain of each chunk, one float32 [C, 1] per plane.

        A gradient summed over `tokens` tokens, times its gain, is `share` of the mean, clipped to a 2-norm of
        `clip` per block. Raises GradientError if it is not finite or `tokens` is not positive.
        """
        return self.by_chunk(self.gains(gradient, tokens, share))

    def block_gains(self, gradient: Tensor, tokens: int) -> dict[str, float]:
        """Return the gain of each block for the whole mean (a share of 1). Raises GradientError."""
        return self.by_block(self.gains(gradient, tokens, 1.0))

    def by_chunk(self, gains: Tensor) -> list[Tensor]:
        """Return the gains of blocks for each chunk, one float32 [C, 1] per plane."""
        return [gains[block_of_chunk][:, None] for block_of_chunk in self._block_of_chunk]

    def by_block(self, gains: Tensor) -> dict[str, float]:
        """Return the gains by the name of their block."""
        return dict(zip(self._blocks, gains.tolist(), strict=True))

    def gains(self, gradient: Tensor, tokens: int, share: float) -> Tensor:
        """Return the gain of each block, float32 [blocks], as `chunk_gains`. Raises GradientError."""
        if tokens < 1:
            raise GradientError(f"a gradient over {tokens} tokens: only a peer with tokens can contribute")
        if gradient.shape != (self._layout.size,):
            raise GradientError(f"gradient of shape {tuple(gradient.shape)}, not ({self._layout.size},)")
        squares = torch.zeros(len(self._blocks), dtype=torch.float64, device=gradient.device)
        for plane, block_of_chunk in zip(self._layout.planes, self._block_of_chunk, strict=True):
            tiles = tiles_of(plane_of(gradient, plane))
            norms_C = torch.cat([torch.linalg.vector_norm(tile_CN.float(), dim=1) for tile_CN in tiles])
            squares.index_add_(0, block_of_chunk, norms_C.to(torch.float64).square())
        norms = self.device_group.total(squares).sqrt() / tokens
        if not bool(norms.isfinite().all()):
            pairs = zip(self._blocks, norms.tolist(), strict=True)
            bad = ", ".join(name for name, norm in pairs if not isfinite(norm))
            raise GradientError(f"the gradient of {bad} is not finite; drop it and continue")
        self.norm = float(norms.square().sum().sqrt())
        shrink = (self._clip / norms.clamp(min=1e-30)).clamp(max=1)
        return (shrink * (share / tokens)).to(torch.float32)
