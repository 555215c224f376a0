"""From a summed gradient to a mean one, block by block clipped: what every method begins with."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from swarmnet.model.flat_layout import Layout
from swarmnet.optimizer.device_groups.device_group import ALONE, DeviceGroup
from swarmnet.optimizer.tiling import blocks_of, plane_of, tiles_of


class GradientError(ValueError):
    """The gradient cannot be used; nothing was changed. The message names the block."""


class BlockClip:
    """What to multiply a summed gradient by. Blocks are clipped and not the whole, because a stage does not
    see the whole."""

    def __init__(self, layout: Layout, clip: float, device: torch.device) -> None:
        self._layout, self._clip = layout, clip
        self._blocks, self._block_of_chunk = blocks_of(layout, device)
        self.company: DeviceGroup = ALONE
        """Where several devices hold the stage together, a block's norm is that of all its shares."""
        self.norm: float | None = None
        """2-norm of the newest mean gradient, all blocks together, before it is clipped."""

    def chunk_gains(self, gradient: Tensor, tokens: int, share: float) -> list[Tensor]:
        """Of each plane float32 [C, 1]: the gain of each chunk that makes `share` of the mean over `tokens`
        tokens, each block's mean of a 2-norm of `clip` at most. GradientError if it is not finite or `tokens`
        is not positive."""
        gains = self._gains(gradient, tokens, share)
        return [gains[block_of_chunk][:, None] for block_of_chunk in self._block_of_chunk]

    def block_gains(self, gradient: Tensor, tokens: int) -> dict[str, float]:
        """The same of the whole mean, by block."""
        return dict(zip(self._blocks, self._gains(gradient, tokens, 1.0).tolist(), strict=True))

    def _gains(self, gradient: Tensor, tokens: int, share: float) -> Tensor:
        """float32 [blocks]."""
        if tokens < 1:
            raise GradientError(f"a gradient over {tokens} tokens: only a peer with tokens can contribute")
        if gradient.shape != (self._layout.size,):
            raise GradientError(f"gradient of shape {tuple(gradient.shape)}, not ({self._layout.size},)")
        squares = torch.zeros(len(self._blocks), dtype=torch.float64, device=gradient.device)
        for plane, block_of_chunk in zip(self._layout.planes, self._block_of_chunk, strict=True):
            tiles = tiles_of(plane_of(gradient, plane))
            norms_C = torch.cat([torch.linalg.vector_norm(tile_CN.float(), dim=1) for tile_CN in tiles])
            squares.index_add_(0, block_of_chunk, norms_C.to(torch.float64).square())
        norms = self.company.total(squares).sqrt() / tokens
        if not bool(norms.isfinite().all()):
            pairs = zip(self._blocks, norms.tolist(), strict=True)
            bad = ", ".join(name for name, norm in pairs if not isfinite(norm))
            raise GradientError(f"the gradient of {bad} is not finite; drop it and go on")
        self.norm = float(norms.square().sum().sqrt())
        shrink = (self._clip / norms.clamp(min=1e-30)).clamp(max=1)
        return (shrink * (share / tokens)).to(torch.float32)
