"""Owners of different text in the learning benchmark: each peer trains on the text of its owner.

1:10:100         three owners with consecutive parts of the run's text, of these sizes
kinds            an owner for each source of the run
kinds:1:10:100   the same, and their texts are cut to these sizes

Two baselines train all peers on one text. `/pooled` behind a split means the texts of all owners together,
and `/2` that of owner 2 alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from peers.config.errors import UserError

KINDS = "kinds"
POOLED = "pooled"


@dataclass(frozen=True, slots=True)
class TextSplit:
    """How the text of a run is divided among owners, whose peers have their turns: peer n has owner n modulo
    the number of owners."""

    by_kind: bool = False
    """Whether each source of the run has an owner."""
    sizes: tuple[int, ...] = ()
    """Relative sizes of the owners' texts; empty: as they are."""
    trains: str = ""
    """`pooled` if all peers train on the texts of all owners together, the number of an owner if they train
    on its text alone; empty: each on that of its owner."""

    @classmethod
    def parse(cls, text: str) -> TextSplit:
        """Parse the value of `--split`; if it is empty, one owner has all text. Raises UserError."""
        spec, slash, trains = text.partition("/")
        by_kind = spec == KINDS or spec.startswith(f"{KINDS}:")
        numbers = spec.removeprefix(KINDS).removeprefix(":") if by_kind else spec
        sizes = numbers.split(":") if numbers else []
        is_baseline = trains == POOLED or trains.isdecimal()
        if (
            any(not size.isdecimal() or not int(size) for size in sizes)
            or len(sizes) == 1
            or (slash and not (spec and is_baseline))
        ):
            raise UserError(
                f"--split {text}: write the sizes of the owners' texts, such as 1:10:100, or {KINDS} for an "
                f"owner of each source, or both, as {KINDS}:1:10:100; then /{POOLED} or the number of an "
                "owner, as /0, to train on one text"
            )
        return cls(by_kind, tuple(map(int, sizes)), trains)

    def cut(self, sources: Sequence[Tensor], window: int) -> tuple[Tensor, ...]:
        """Return each owner's tokens from each source's; each needs `window` tokens. Raises UserError."""
        texts = tuple(sources) if self.by_kind else (torch.cat(list(sources)),)
        if self.by_kind and self.sizes and len(self.sizes) != len(texts):
            raise UserError(f"--split: {len(self.sizes)} sizes where the run has {len(texts)} sources")
        if self.by_kind and self.sizes:
            unit = min(len(tokens) // size for tokens, size in zip(texts, self.sizes, strict=True))
            texts = tuple(tokens[: unit * size] for tokens, size in zip(texts, self.sizes, strict=True))
        elif self.sizes:
            whole, total = texts[0], sum(self.sizes)
            edges = [len(whole) * size // total for size in accumulate(self.sizes, initial=0)]
            texts = tuple(whole[start:stop] for start, stop in pairwise(edges))
        for number, tokens in enumerate(texts):
            if len(texts) > 1 and len(tokens) < window:
                raise UserError(
                    f"--split: owner {number} has {len(tokens)} tokens where one sequence takes {window}: "
                    "add text"
                )
        if self.trains == POOLED:
            return (torch.cat(texts),)
        if self.trains and int(self.trains) >= len(texts):
            raise UserError(f"--split: there is no owner {self.trains}, only 0 to {len(texts) - 1}")
        return (texts[int(self.trains)],) if self.trains else texts
