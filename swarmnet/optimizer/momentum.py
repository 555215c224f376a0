"""One peer's momentum, kept in the transform domain, where writing zero removes what was sent.

    momentum = beta * momentum + (1 - beta) * transform(clipped mean gradient)

This is DeMo's accumulation (arXiv:2411.19870, algorithm 1). The learning rate is outside, so that its
schedule does not weight votes. It is linear, so the transform can be applied to gradients. No chunk is ever
transformed back to subtract what was sent.

Shapes: C chunks of a plane, N coefficients in a chunk, K kept of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnet.model.flat_layout import Layout
from swarmnet.optimizer.device_groups.device_group import DeviceGroup
from swarmnet.optimizer.mean_gradient import BlockClip
from swarmnet.optimizer.sparsify import Selection, selection_of
from swarmnet.optimizer.step import SignStep, sign_step
from swarmnet.optimizer.tiling import ChunkLayout, cut_of, plane_of, tiles_of
from swarmnet.optimizer.transform import Transform, transform_of
from swarmnet.run.manifest import Manifest
from swarmnet.run.rates import WHOLE
from swarmnet.run.schema import Sync

MIN_STRENGTH = 1e-8
"""Weight of a vote that returns to an empty momentum: negligible compared with any gradient, but not lost."""


def how_of(sync: Sync, cut: ChunkLayout, device: torch.device) -> tuple[list[Transform], list[Selection]]:
    """Return the transform and the selection of each plane."""
    planes = zip(cut.layout.planes, cut.sides, strict=True)
    transforms = [transform_of(sync.transform, plane.chunk, device, sides) for plane, sides in planes]
    return transforms, selections_of(sync, cut)


def selections_of(sync: Sync, cut: ChunkLayout) -> list[Selection]:
    return [
        selection_of(sync.selection, plane.chunk, sync.topk_per_chunk, cut.shrinks)
        for plane in cut.layout.planes
    ]


@dataclass(frozen=True, slots=True)
class Sent:
    """What a contribution took from one plane: int64 [C, K] indices and the float32 [C, K] values there."""

    indices: Tensor
    values: Tensor


class Momentum:
    """The momentum of all planes of one stage, and what the last contribution took of it."""

    def __init__(
        self, *, layout: Layout, transforms: list[Transform], decay: float, clip: float, device: torch.device
    ) -> None:
        self._layout = layout
        self._transforms = transforms
        self._decay = decay
        self.clip = BlockClip(layout, clip, device)
        self._flat = torch.zeros(layout.size, device=device)
        self._last: tuple[int, list[Sent]] | None = None

    @property
    def gradient_norm(self) -> float | None:
        """2-norm of the newest mean gradient over all blocks, before clipping."""
        return self.clip.norm

    def norm(self) -> float:
        """Return the 2-norm of all that was not sent yet."""
        return float(torch.linalg.vector_norm(self._flat))

    def sent(self, round: int) -> list[Sent] | None:
        """Return what `round`'s contribution took from each plane; None if it is not the newest one."""
        return self._last[1] if self._last is not None and self._last[0] == round else None

    def planes(self) -> list[Tensor]:
        """Return views [C, N] of the coefficients, one for each plane."""
        return [plane_of(self._flat, plane) for plane in self._layout.planes]

    def accumulate(self, gradient: Tensor, tokens: int, weight: float = 1.0) -> None:
        """Add a gradient: float32 [layout.size], summed over `tokens` tokens, zero in the padding. The mean
        gradient of each block is clipped to the 2-norm `clip` and multiplied by `weight`, at most 1. Raises
        GradientError if it is not finite or `tokens` is not positive."""
        gains = self.clip.chunk_gains(gradient, tokens, 1 - self._decay)
        for index, (plane, momentum_CN) in enumerate(zip(self._layout.planes, self.planes(), strict=True)):
            gains_C1 = gains[index] * min(1.0, weight)
            tiles = zip(
                tiles_of(momentum_CN), tiles_of(plane_of(gradient, plane)), tiles_of(gains_C1), strict=True
            )
            for tile_CN, gradient_CN, gain_C1 in tiles:
                self._transforms[index].accumulate(tile_CN, gradient_CN * gain_C1, self._decay)

    def take(self, selections: list[Selection], round: int) -> list[Sent]:
        """Select what `round`'s contribution sends, remember it, and set it to zero."""
        taken = []
        for momentum_CN, selection in zip(self.planes(), selections, strict=True):
            indices_CK = torch.cat([selection.choose(tile_CN) for tile_CN in tiles_of(momentum_CN)])
            values_CK = momentum_CN.gather(1, indices_CK)
            taken.append(Sent(indices_CK, values_CK))
            # v - v is exactly zero, and adding is five times as fast as scattering a constant.
            momentum_CN.scatter_add_(1, indices_CK, -values_CK)
        self._last = (round, taken)
        return taken

    def values(self) -> Tensor:
        """Return all that was not sent yet in the domain of the weights, float32 [layout.size]."""
        found = torch.empty_like(self._flat)
        for transform, plane, momentum_CN in zip(
            self._transforms, self._layout.planes, self.planes(), strict=True
        ):
            targets = tiles_of(plane_of(found, plane))
            for target_CN, tile_CN in zip(targets, tiles_of(momentum_CN), strict=True):
                target_CN.copy_(transform.inverse(tile_CN))
        return found

    def add(self, values: Tensor) -> None:
        """Add float32 [layout.size] in the domain of the weights; overwrites `values`."""
        for transform, plane, momentum_CN in zip(
            self._transforms, self._layout.planes, self.planes(), strict=True
        ):
            tiles = zip(tiles_of(momentum_CN), tiles_of(plane_of(values, plane)), strict=True)
            for tile_CN, values_CN in tiles:
                transform.accumulate(tile_CN, values_CN, 1.0)

    def strength(self, plane: int) -> Tensor:
        """Return the largest magnitude in each chunk of a plane, float32 [C, 1]."""
        return self.planes()[plane].abs().amax(dim=1, keepdim=True).clamp(min=MIN_STRENGTH)

    def put(self, plane: int, indices_CK: Tensor, values_CK: Tensor) -> None:
        """Add values to coefficients of a plane."""
        self.planes()[plane].scatter_add_(1, indices_CK, values_CK)

    def signs(self, round: int) -> Tensor:
        """Return the signs of the whole momentum in the domain of the weights, int8 [layout.size]. If
        `round`'s contribution is the last one taken, its values are included, because it is not applied
        yet."""
        signs, taken = torch.empty_like(self._flat, dtype=torch.int8), self.sent(round)
        for index, (plane, momentum_CN) in enumerate(zip(self._layout.planes, self.planes(), strict=True)):
            targets = tiles_of(plane_of(signs, plane))
            sent = self._sent_tiles(momentum_CN, taken[index] if taken is not None else None)
            for target_CN, tile_CN, sent_of in zip(targets, tiles_of(momentum_CN), sent, strict=True):
                if sent_of is not None:
                    tile_CN = tile_CN.scatter(1, *sent_of)
                target_CN.copy_(torch.sign(self._transforms[index].inverse(tile_CN)))
        return signs

    @staticmethod
    def _sent_tiles(momentum_CN: Tensor, sent: Sent | None) -> Iterator[tuple[Tensor, Tensor] | None]:
        """Yield for each tile the indices and values that were taken from it."""
        if sent is None:
            return (None for _ in tiles_of(momentum_CN))
        return zip(tiles_of(sent.indices), tiles_of(sent.values), strict=True)


class CoefficientMethod:
    """Base of `demo-sign` and `demo`: parts of the transformed momentum are sent, and steps are signs."""

    own = held = reduced = None

    def __init__(self, manifest: Manifest, layout: Layout, device: torch.device) -> None:
        sync = manifest.sync
        self._manifest = manifest
        self.state = layout
        self._device = device
        self._whole = layout
        self._cut = cut_of(sync.chunking, layout)
        self._layout = self._cut.layout
        self._transforms, self._selections = how_of(sync, self._cut, device)
        self._momentum = Momentum(
            layout=self._layout,
            transforms=self._transforms,
            decay=sync.momentum,
            clip=sync.max_grad_norm,
            device=device,
        )

    def use_device_group(self, company: DeviceGroup) -> None:
        """Use collectives of several devices for the norms of blocks."""
        self._momentum.clip.device_group = company

    @property
    def gradient_norm(self) -> float | None:
        return self._momentum.gradient_norm

    @property
    def momentum_norm(self) -> float | None:
        return self._momentum.norm()

    def lookahead(self, round: int, factor: int = WHOLE, contributors: int = 1) -> SignStep:
        return self.step_of(self._momentum.signs(round), round, factor)

    def step_of(self, signs: Tensor, round: int, factor: int) -> SignStep:
        """Return the step with these signs at the learning rate of `round`."""
        return sign_step(self._cut.flat(signs), self._whole, self._manifest, round, factor)
