"""Compute gradients of documents so that none of them can be told from the sum: clipped, with noise.

This is DP-SGD (arXiv:1607.00133, algorithm 1). A sequence is an excerpt of one document. The gradient of its
summed loss is clipped to a norm. Whatever leaves the compute is a sum of such gradients with Gaussian noise,
so all that a peer makes of it (momentum, steps, votes) keeps the privacy of `privacy_loss.py`.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnet.model.computing.choices import Computing
from swarmnet.model.computing.gradient_sum import Used
from swarmnet.model.computing.privacy_loss import noise_multiplier
from swarmnet.model.flat_layout import Layout, views_of
from swarmnet.model.stage_compute import LastStageResult, StageCompute, StageError
from swarmnet.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class DocumentNoise:
    """How the gradients of documents are clipped and noised."""

    max_norm: float
    """Largest 2-norm of the gradient of a document's summed loss."""
    deviation: float
    """Standard deviation of each number of the noise."""
    chance: torch.Generator
    """Draws the noise. No other peer may know its seed."""
    documents_per_sum: Callable[[], int]
    """Returns after how many documents noise is added at the latest, so that none is in a sum twice."""

    @classmethod
    def from_manifest(
        cls, manifest: Manifest, chance: torch.Generator, documents_per_sum: Callable[[], int]
    ) -> DocumentNoise:
        """Return the noise of a run. Its `max_norm` is that of the mean loss over a whole sequence."""
        privacy = manifest.data.privacy
        norm = privacy.max_norm * manifest.data.seq_len
        return cls(norm, noise_multiplier(privacy) * norm, chance, documents_per_sum)


class PrivateStageCompute(StageCompute):
    """A whole model on one device, whose gradients are clipped per document and noised."""

    def __init__(
        self,
        noise: DocumentNoise,
        manifest: Manifest,
        *,
        layout: Layout,
        frozen: Layout,
        computing: Computing,
        device: torch.device,
    ) -> None:
        super().__init__(
            shape=manifest.model,
            span=manifest.span(0),
            layout=layout,
            computing=computing,
            device=device,
            frozen=frozen,
        )
        self._noise = noise
        self._layout = layout
        self._sum = torch.zeros(layout.size, device=device)
        self._documents = 0
        """Documents in the sum since noise was added to it."""

    def finish(
        self, key: Hashable, inputs: Tensor, labels_BT: Tensor, tokens_BT: Tensor | None = None
    ) -> LastStageResult:
        """Compute as `StageCompute`, each sequence on its own. A sequence that cannot be computed adds
        nothing, because its error must not change what the others add. Raises StageError if none could be
        computed."""
        losses, error = list[float](), StageError(f"microbatch {key}: no sequences")
        for row in range(len(inputs)):
            one = slice(row, row + 1)
            try:
                tokens_1T = None if tokens_BT is None else tokens_BT[one]
                result = super().finish(key, inputs[one], labels_BT[one], tokens_1T)
            except StageError as failed:
                error = failed
                super().use_gradient(lambda _gradient: None)
            else:
                losses.append(result.loss_sum)
                super().use_gradient(self._add_document)
            self._documents += 1
            if self._documents >= self._noise.documents_per_sum():
                self._add_noise()
        if not losses:
            raise error
        return LastStageResult(sum(losses), labels_BT.numel(), None)

    def use_gradient(self, use: Callable[[Tensor], Used]) -> Used:
        """Return `use` of the noisy sum since the last call, and zero it."""
        self._add_noise()
        try:
            return use(self._sum)
        finally:
            self._sum.zero_()

    def warm_up(self, sequences: int, tokens: int) -> None:
        """Compile as `StageCompute`, for one sequence at a time."""
        super().warm_up(1, tokens)

    def _add_document(self, gradient: Tensor) -> None:
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        self._sum.add_(gradient * (self._noise.max_norm / norm.clamp(min=self._noise.max_norm)))

    def _add_noise(self) -> None:
        self._documents = 0
        for view in views_of(self._sum, self._layout).values():
            noise = torch.randn(view.shape, generator=self._noise.chance, device=view.device)
            view.add_(noise, alpha=self._noise.deviation)
