"""Store the momentum of matrices separately from that of the votes, or in one with it.

Shapes: R rows and C columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import hypot
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.model.flat_layout import Entry, Layout, layout_of
from swarmnet.optimizer.device_groups.device_group import DeviceGroup
from swarmnet.optimizer.sign_votes import VoteMethod
from swarmnet.optimizer.step import SignStep
from swarmnet.run.manifest import Manifest


class Momenta(Protocol):
    """The momentum of one peer and stage."""

    @property
    def votes(self) -> VoteMethod: ...

    @property
    def voted(self) -> Layout:
        """Layout of what the votes cover, on all devices together."""

    @property
    def group(self) -> DeviceGroup:
        """The device group for a vector with this layout."""

    def norm(self) -> float:
        """Return the 2-norm of all that was not sent."""

    def accumulate(self, gradient: Tensor, tokens: int, gains: Mapping[str, float], weight: float) -> None:
        """Add a gradient, `weight` times. It is float32 [layout.size], summed over `tokens` tokens. `gains`
        has the factor of each block that makes its clipped mean."""

    def matrices(self) -> Iterable[Tensor]:
        """Return what this device has of the matrices, in the shapes of their entries, for reading."""

    def placed(self, step: SignStep) -> SignStep:
        """Return the step of the votes with places in the whole stage."""


class Apart:
    """Matrices have their own momentum; all other parameters use that of the votes."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        layout: Layout,
        matrices: list[Entry],
        device: torch.device,
        group: DeviceGroup,
    ) -> None:
        self._decay = manifest.sync.momentum
        self._entries = matrices
        self._matrices = [torch.zeros(entry.shape, device=device) for entry in matrices]
        names = {entry.name for entry in matrices}
        others = {entry.name: entry for entry in layout.entries if entry.name not in names}
        self.voted = layout_of({name: group.shape(entry) for name, entry in others.items()})
        self.group = group.divide(self.voted)
        self._layout = self.group.share(self.voted)
        self._places = [(others[entry.name], entry) for entry in self._layout.entries]
        self.votes = VoteMethod(manifest, self._layout, device)
        self.votes.use_device_group(self.group)

    def norm(self) -> float:
        return hypot(self.votes.momentum_norm or 0.0, *(float(matrix.norm()) for matrix in self._matrices))

    def accumulate(self, gradient: Tensor, tokens: int, gains: Mapping[str, float], weight: float) -> None:
        rest = gradient.new_zeros(self._layout.size)
        for there, here in self._places:
            rest[here.place] = gradient[there.place]
        self.votes.accumulate(rest, tokens, weight)
        for matrix_RC, entry in zip(self._matrices, self._entries, strict=True):
            gain = gains[entry.block] * weight * (1 - self._decay)
            matrix_RC.mul_(self._decay).add_(gradient[entry.place].view(entry.shape), alpha=gain)

    def matrices(self) -> list[Tensor]:
        return self._matrices

    def placed(self, step: SignStep) -> SignStep:
        stretches = (
            replace(stretch, start=there.offset, stop=there.offset + there.size)
            for stretch, (there, _) in zip(step.stretches, self._places, strict=True)
        )
        return SignStep(step.signs, tuple(stretches))


class Chained:
    """One momentum, that of the votes. What is sent in the directions is removed and not voted on."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        layout: Layout,
        matrices: list[Entry],
        device: torch.device,
        group: DeviceGroup,
    ) -> None:
        self._layout = layout
        self.group = group
        self.voted = layout_of({entry.name: group.shape(entry) for entry in layout.entries})
        self._entries = matrices
        self._device = device
        self.votes = VoteMethod(manifest, layout, device)
        self.votes.use_device_group(group)

    def norm(self) -> float:
        return self.votes.momentum_norm or 0.0

    def accumulate(self, gradient: Tensor, tokens: int, gains: Mapping[str, float], weight: float) -> None:
        self.votes.accumulate(gradient, tokens, weight)

    def matrices(self) -> list[Tensor]:
        flat = self.votes.left()
        return [flat[entry.place].view(entry.shape) for entry in self._entries]

    def add(self, changes: Iterable[Tensor]) -> None:
        """Add values to all matrices, each to what this device has of it."""
        flat = torch.zeros(self._layout.size, device=self._device)
        for entry, change_RC in zip(self._entries, changes, strict=True):
            flat[entry.place].view(entry.shape).copy_(change_RC)
        self.votes.add(flat)

    def placed(self, step: SignStep) -> SignStep:
        return step
