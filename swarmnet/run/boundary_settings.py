"""Configuration of the hidden states that are sent between pipeline stages: whole, or compressed.

A *boundary* is the place between two layers where hidden states may go from one stage to the next. At a
*narrow* boundary fewer values per token are sent than the hidden size. An *anchor* is a learned vector per
token that both sides know. Only the difference from it is sent. This module has the keys of the run
file and their checks. The mathematics is in `swarmnet/model/boundary.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

Form = Literal["full", "token-anchored", "shared-subspace"]


@dataclass(frozen=True, slots=True)
class Boundary:
    """How hidden states go from one stage to the next. Another boundary makes it another model."""

    kind: Form = "full"
    """`full`: hidden states are sent unchanged. `token-anchored`: a fixed random projector sends the
    difference from an anchor, a learned vector per token; the next stage adds its own anchors.
    `shared-subspace`: layers before the last boundary write only into `width` fixed directions, which are
    sent. Narrow kinds need less upload and export as a plain Llama or Qwen3."""
    width: int = 0
    """Values per token that cross a narrow boundary."""
    after: tuple[int, ...] = ()
    """Layers after which there is a boundary, ascending. Every cut between stages needs one; more allow other
    cuts later."""
    anchor_rows: int = 0
    """Rows of each anchor table. `0`: one per token. Otherwise an anchor is the sum of two rows, one of each
    half, which saves memory with a large vocabulary."""
    seed: int = 0
    """Seed of the projectors and, with shared-subspace, of the tokens' fixed vectors."""

    @property
    def is_narrow(self) -> bool:
        return self.kind != "full"

    def is_shared_at(self, layer: int) -> bool:
        """Return whether that layer writes only into the shared directions. Layers after the last boundary
        need not."""
        return self.kind == "shared-subspace" and layer < self.after[-1]


def contradictions(
    boundary: Boundary, width: int, vocabulary: int, stages: Sequence[int], skips_stages: bool
) -> Iterator[str]:
    """Yield an error message for each key of `boundary` that does not fit the model. `width` is the model's
    hidden size, `vocabulary` its number of tokens, and `stages` the number of layers of each stage.
    `skips_stages` means that microbatches may skip stages."""
    if not boundary.is_narrow:
        if boundary != Boundary():  # Some other key was set.
            yield "model.boundary: its other keys say nothing without kind: token-anchored or shared-subspace"
        return
    layers, cuts = sum(stages), list(accumulate(stages))[:-1]
    if not 1 <= boundary.width <= width:
        yield (
            f"model.boundary.width is {boundary.width}; it must lie between 1 and model.hidden_size, {width}"
        )
    after = boundary.after
    missing = sorted(set(cuts) - set(after))
    if not after or any(layer >= following for layer, following in pairwise(after)):
        yield f"model.boundary.after is {list(after)}; name at least one place, in ascending order"
    elif not 1 <= after[0] <= after[-1] < layers:
        yield f"model.boundary.after is {list(after)}; a boundary stands between two of {layers} layers"
    elif missing:
        yield (
            f"model.boundary.after is {list(after)}, and stages are cut after layers {cuts}: add {missing}, "
            "because hidden states of full width do not cross"
        )
    rows, half = boundary.anchor_rows, boundary.anchor_rows // 2
    has_too_few_pairs = rows > 0 and half * half < vocabulary  # An anchor is a row of each half.
    if rows and boundary.kind == "shared-subspace":
        yield "model.boundary.anchor_rows: with kind shared-subspace no table holds the fixed part of a token"
    if rows < 0 or rows % 2 != 0 or has_too_few_pairs:
        yield (
            f"model.boundary.anchor_rows is {rows}; it must be even, and the square of its half at least "
            f"the vocabulary, {vocabulary}, so that no two tokens have the same anchor"
        )
    if rows >= vocabulary > 0:
        yield f"model.boundary.anchor_rows: 0 gives each of {vocabulary} tokens a row, which is less"
    if skips_stages:
        yield (
            "paths: with model.boundary every stage goes on from the boundary before it, so none can be left "
            "out"
        )
