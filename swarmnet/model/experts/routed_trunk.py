"""A stage whose layers' experts are others': tokens travel to them and back (learning@home,
arXiv:2002.04013), forward, and backward with a gradient.

A pass is a generator (`Steps`): it computes as far as it can, yields what it asks of experts, and goes on
once it is sent what they say. So no thread waits for a network. The graph of a microbatch is cut at each
layer's experts: what goes into them ends one segment, what comes of them begins the next one, as leaves, and
going back each segment's leaves tell the one before what its ends are worth. What a token's experts weigh,
and so the router's gradient, stays here.

Shape suffixes: B sequences, T tokens, N tokens of all sequences, D width, A experts of a token, S rows that
go to one group: a token once for each expert of it that it takes, one expert's after the other's.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from swarmnet.model.boundary import embedded
from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.model.computing.whole_weights import WholeWeights
from swarmnet.model.decoder import attended, by_layer, logits, rotation_of
from swarmnet.model.experts.mixture import Choice, choose, unevenness
from swarmnet.model.flat_layout import Layout
from swarmnet.model.parameters import EMBEDDING
from swarmnet.model.stage_compute import Finished, StageCompute, StageError
from swarmnet.run.manifest import ModelShape, Span


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """What a layer asks of one group of its experts."""

    layer: int
    group: int
    counts: tuple[int, ...]
    """Rows of each expert of the group."""
    rows: Tensor
    """float32 [S, D]."""
    gradient: Tensor | None = None
    """[S, D], backward: of the summed loss at what they say of the rows. These are sent again, so that
    whoever is asked need have kept nothing."""


Said: TypeAlias = Mapping[int, Tensor | None]
"""Group -> float32 [S, D]: what its experts say of their rows; backward the gradient at the rows. None:
nobody answered."""
Result = TypeVar("Result")
Steps: TypeAlias = Generator[list[ExpertCall], Said, Result]


@dataclass(frozen=True, slots=True)
class _Part:
    """What goes to one group."""

    group: int
    counts: tuple[int, ...]
    tokens: Tensor
    """[S]: which token a row is of."""
    places: Tensor
    """[S]: which of the token's experts."""
    rows: Tensor
    """[S, D]."""

    def call(self, layer: int, gradient_SD: Tensor | None = None) -> ExpertCall:
        return ExpertCall(layer, self.group, self.counts, self.rows.detach(), gradient_SD)


@dataclass(slots=True)
class _Cut:
    """A layer's experts, between two segments. Of what has a leaf the first is the end of a segment, the leaf
    the beginning of the next."""

    layer: int
    parts: list[_Part]
    loss: Tensor | None
    """That keeps the experts' load even."""
    hidden: Tensor
    """[B, T, D] behind attention."""
    weights: Tensor
    """[N, A] of a token's experts."""
    hidden_leaf: Tensor
    weights_leaf: Tensor
    said_leaves: dict[int, Tensor]
    """By group."""

    @property
    def leaves(self) -> list[Tensor]:
        return [self.hidden_leaf, self.weights_leaf, *self.said_leaves.values()]

    def joined(self) -> Tensor:
        """[B, T, D] behind the layer."""
        return _joined(self.hidden_leaf, self.weights_leaf, self.parts, self.said_leaves)

    def worth(self, said: Said) -> Tensor:
        """A number with the gradient of the summed loss at all ends of the segment. `said`: at the rows."""
        ends = [(self.hidden, self.hidden_leaf.grad), (self.weights, self.weights_leaf.grad)]
        ends += [(part.rows, said[part.group]) for part in self.parts]
        worth = sum((end * gradient).sum() for end, gradient in ends if gradient is not None)
        assert isinstance(worth, Tensor)
        return worth if self.loss is None else worth + self.loss


@dataclass(slots=True)
class _Open:
    version: Mapping[str, Tensor]
    inputs: Tensor
    missing: set[int]
    """Groups that nobody holds, or that did not answer this microbatch."""
    cuts: list[_Cut] = field(default_factory=list)
    output: Tensor | None = None
    """Once it is known."""


class RoutedTrunk(StageCompute):
    """Everything of a stage but its experts. `forward_steps`, `finish_steps` and `backward_steps` are what
    `forward`, `finish` and `backward` are elsewhere, with the same errors."""

    def __init__(
        self, shape: ModelShape, span: Span, layout: Layout, computing: Computing = PLAIN,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        if computing.recompute != "none":
            raise ValueError("a graph that is cut at its experts is kept, not computed again")
        self._whole = WholeWeights(shape, span, layout, computing, device or torch.device("cpu"))
        super().__init__(shape, span, layout, computing, device, weights=self._whole)
        self._open: dict[Hashable, _Open] = {}
        self.missing: frozenset[int] = frozenset()
        """Groups of experts that no peer holds: their tokens go to the next best. Any thread may set it."""
        self.without_gradient = 0
        """Calls whose gradient nobody answered: their tokens learned nothing through these experts."""

    @property
    def open(self) -> int:
        return len(self._open)

    def drop(self, key: Hashable) -> None:
        self._open.pop(key, None)

    def forward_steps(self, key: Hashable, inputs: Tensor) -> Steps[Tensor]:
        """[B, T, D] behind the stage's layers; the graph is kept as `key`."""
        opened = self._begin(key, inputs)
        try:
            output_BTD = yield from self._through(opened)
            self._require_finite(key, "hidden states", output_BTD)
        except StageError:
            self._open.pop(key, None)
            raise
        opened.output = output_BTD
        return output_BTD.detach()

    def finish_steps(self, key: Hashable, inputs: Tensor, labels_BT: Tensor) -> Steps[Finished]:
        """The last stage's whole work."""
        labels_BT = self._checked_labels(key, labels_BT, inputs)
        opened = self._begin(key, inputs)
        try:
            hidden_BTD = yield from self._through(opened)
            with torch.enable_grad():
                logits_BTV = logits(opened.version, self._shape, hidden_BTD)
                loss = functional.cross_entropy(
                    logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum"
                )
            self._require_finite(key, "loss", loss)
            told = loss.item()
            gradient_BTD = yield from self._back(key, opened, loss)
        finally:
            self._open.pop(key, None)
        return Finished(told, labels_BT.numel(), gradient_BTD)

    def backward_steps(self, key: Hashable, hidden_gradient: Tensor) -> Steps[Tensor | None]:
        """The gradient at the stage's input, None in the first stage."""
        opened = self._open.get(key)
        if opened is None or opened.output is None:
            raise StageError(f"microbatch {key} is not open in this stage")
        try:
            if hidden_gradient.shape != opened.output.shape:
                raise StageError(f"microbatch {key}: gradient is {list(hidden_gradient.shape)}")
            with torch.enable_grad():
                worth = (opened.output * hidden_gradient.to(opened.output.device)).sum()
            return (yield from self._back(key, opened, worth))
        finally:
            self._open.pop(key, None)

    # -- one pass -------------------------------------------------------------------------------------

    def _begin(self, key: Hashable, inputs: Tensor) -> _Open:
        if key in self._open:
            raise StageError(f"microbatch {key} is already open in this stage")
        version, inputs = self._checked(key, inputs)
        assert isinstance(version, dict)
        leaf = inputs if self._span.has_embedding else inputs.detach().requires_grad_()
        self._open[key] = opened = _Open(version, leaf, set(self.missing))
        return opened

    def _through(self, opened: _Open) -> Steps[Tensor]:
        """[B, T, D] with its graph."""
        shape, hidden_BTD = self._shape, opened.inputs
        of_layers = by_layer(opened.version)
        with torch.enable_grad():
            if self._span.has_embedding:
                hidden_BTD = embedded(opened.version[EMBEDDING], shape, hidden_BTD)
        rotation = rotation_of(shape, 0, hidden_BTD.shape[1], hidden_BTD.device)
        for layer in range(self._span.first, self._span.stop):
            with torch.enable_grad():
                hidden_BTD, normed_BTD = attended(of_layers[layer], shape, hidden_BTD, rotation)
            gate_ED, x_ND = of_layers[layer]["mlp.gate"], normed_BTD.flatten(0, 1)
            choice, parts, said = yield from _asked(shape, layer, gate_ED, x_ND, opened.missing)
            self._count(layer, parts)
            with torch.enable_grad():
                opened.cuts.append(cut := _Cut(
                    layer, parts, unevenness(shape, choice) if shape.experts.balance else None,
                    hidden_BTD, choice.weights, _leaf_of(hidden_BTD), _leaf_of(choice.weights), said,
                ))  # fmt: skip
                hidden_BTD = cut.joined()
        return hidden_BTD

    def _count(self, layer: int, parts: Sequence[_Part]) -> None:
        for part in parts:
            for expert, count in zip(self._shape.experts.members(part.group), part.counts, strict=True):
                self._whole.routed[layer][expert] += count

    def _back(self, key: Hashable, opened: _Open, worth: Tensor) -> Steps[Tensor | None]:
        """Add all gradients; the one at the stage's input."""
        while opened.cuts:
            cut = opened.cuts.pop()
            self._add(key, opened.version, worth, *cut.leaves)
            said = yield [part.call(cut.layer, cut.said_leaves[part.group].grad) for part in cut.parts]
            self.without_gradient += sum(found is None for found in said.values())
            with torch.enable_grad():
                worth = cut.worth(said)
        self._add(key, opened.version, worth, opened.inputs)
        return opened.inputs.grad

    def _add(self, key: Hashable, version: Mapping[str, Tensor], worth: Tensor, *leaves: Tensor) -> None:
        is_good = self._weights.add_gradient_of(version, worth, *leaves)
        found = [leaf.grad for leaf in leaves if leaf.grad is not None]
        if not is_good or not all(torch.linalg.vector_norm(each).isfinite() for each in found):
            raise StageError(f"microbatch {key}: gradient not finite, or too large to be summed")

    def _needs(self, version: object) -> bool:
        return any(opened.version is version for opened in self._open.values())


def _leaf_of(end: Tensor) -> Tensor:
    return end.detach().requires_grad_()


def _asked(
    shape: ModelShape, layer: int, gate_ED: Tensor, x_ND: Tensor, missing: set[int]
) -> Steps[tuple[Choice, list[_Part], dict[int, Tensor]]]:
    """What a layer's experts say, as leaves. Groups that do not answer are `missing` from then on, and all
    tokens choose anew among the others."""
    experts = shape.experts
    while True:
        if len(missing) >= experts.groups:
            raise StageError(f"no peer holds experts of layer {layer}")
        without = [expert for group in sorted(missing) for expert in experts.members(group)]
        with torch.enable_grad():
            choice = choose(gate_ED, shape, x_ND, without)
            parts = _parts(shape, choice, x_ND)
        said = yield [part.call(layer) for part in parts]
        found = {group: _leaf_of(rows_SD) for group, rows_SD in said.items() if rows_SD is not None}
        if len(found) == len(parts):
            return choice, parts, found
        missing |= said.keys() - found.keys()


def _parts(shape: ModelShape, choice: Choice, x_ND: Tensor) -> list[_Part]:
    """Of each group to which a token goes."""
    parts = []
    for group in range(shape.experts.groups):
        wanted = [
            (choice.chosen == expert).nonzero(as_tuple=True) for expert in shape.experts.members(group)
        ]
        tokens_S, places_S = (torch.cat(which) for which in zip(*wanted, strict=True))
        if len(tokens_S):
            counts = tuple(len(tokens) for tokens, _ in wanted)
            parts.append(_Part(group, counts, tokens_S, places_S, x_ND[tokens_S]))
    return parts


def _joined(
    hidden_BTD: Tensor, weights_NA: Tensor, parts: Sequence[_Part], said: Mapping[int, Tensor]
) -> Tensor:
    """[B, T, D] behind the layer."""
    sum_ND = torch.zeros_like(hidden_BTD).flatten(0, 1)
    for part in parts:
        weights_S = weights_NA[part.tokens, part.places, None]
        sum_ND.index_add_(0, part.tokens, said[part.group] * weights_S)
    return hidden_BTD + sum_ND.view_as(hidden_BTD)


def forward_alone(
    weights: Mapping[str, Tensor], shape: ModelShape, span: Span, inputs: Tensor, missing: set[int]
) -> Steps[Tensor]:
    """As `decoder.forward`, for a visitor; no graph. `missing`: groups that nobody holds, to which those that
    do not answer are added. Raises StageError where none is left."""
    hidden_BTD = embedded(weights[EMBEDDING], shape, inputs) if span.has_embedding else inputs
    rotation, of_layers = rotation_of(shape, 0, hidden_BTD.shape[1], hidden_BTD.device), by_layer(weights)
    for layer in range(span.first, span.stop):
        with torch.no_grad():
            hidden_BTD, normed_BTD = attended(of_layers[layer], shape, hidden_BTD, rotation)
        gate_ED, x_ND = of_layers[layer]["mlp.gate"], normed_BTD.flatten(0, 1)
        choice, parts, said = yield from _asked(shape, layer, gate_ED, x_ND, missing)
        with torch.no_grad():
            hidden_BTD = _joined(hidden_BTD, choice.weights, parts, said)
    with torch.no_grad():
        return logits(weights, shape, hidden_BTD) if span.has_head else hidden_BTD
