"""Move similar experts towards each other at the start of a run, so that each learns from more text.

This is the merging warm-up of SPES (arXiv:2602.11543), on settled weights and in integers.

    W_e += share(round) * (mean of its nearest W_f - W_e)         share(round) = first * (1 - round / until)

Here f are the experts of the layer that are nearest to e. Nearness is the cosine of the input matrices
(gate_proj). Every peer finds the same nearest experts and the same bits: cosines are compared as fractions of
sums that float64 represents exactly. Weights are integers on a grid, *units* (`fixed_point.py`).

Shapes: E experts of a layer, P numbers of one of their matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from swarmnet.model.fixed_point import GRID_BITS
from swarmnet.model.flat_layout import Entry, Layout, expert_of
from swarmnet.run.schema import Experts

COMPARED_BITS = 14
"""Bits of a compared weight below 1, including the sign. Sums of products over LARGEST_COMPARED
(`swarmnet/run/manifest_check.py`) numbers stay below 2**53."""
SHARE_BITS = 16
"""A share is a multiple of 2**-16."""


class ExpertMerging:
    """Expert merging of one stage."""

    def __init__(self, experts: Experts, layout: Layout) -> None:
        """Create it for the stage with this `layout`; layers without experts are ignored."""
        self._experts = experts
        self._layers: dict[str, dict[str, dict[int, Entry]]] = {}
        """Maps layer -> matrix -> expert -> place in the flat vector."""
        for entry in layout.entries:
            expert = expert_of(entry.name)
            if expert is not None:
                layer, _, rest = entry.name.partition(".mlp.experts.")
                matrices = self._layers.setdefault(layer, {})
                matrices.setdefault(rest.partition(".")[2], {})[expert] = entry

    def merge(self, units: Tensor, round: int) -> None:
        """Move each expert of the stage towards its nearest experts, in place, as part of settling `round`.
        `units` is int32 [layout.size]. Does nothing in most rounds, in which `share` returns 0."""
        share = self.share(round)
        if not share:
            return
        for matrices in self._layers.values():
            nearest = nearest_of(_stacked(units, matrices["gate_proj.weight"]), self._experts.merge_nearest)
            for entries in matrices.values():
                old_EP = _stacked(units, entries)
                for expert, entry in entries.items():
                    units[entry.place] += _merge_step(old_EP, expert, nearest[expert], share).to(torch.int32)

    def share(self, round: int) -> int:
        """Return the step towards the mean in units of 2**-SHARE_BITS; 0 if this round merges nothing."""
        experts = self._experts
        if not experts.merge_rounds or (round + 1) % experts.merge_rounds or round >= experts.merge_until:
            return 0
        first = int(experts.merge_share * (1 << SHARE_BITS) + 0.5)
        return first * (experts.merge_until - round) // experts.merge_until


def nearest_of(gates_EP: Tensor, count: int) -> list[list[int]]:
    """Return for each expert the `count` others with the largest cosine, nearest first; ties by number. The
    matrices `gates_EP` are in units. They are rounded down to `COMPARED_BITS` bits and limited to 1, so that
    all sums are exact in float64."""
    compared_EP = (gates_EP >> (GRID_BITS - COMPARED_BITS + 1)).to(torch.float64)
    largest = float(1 << (COMPARED_BITS - 1))
    compared_EP.clamp_(-largest, largest)
    products = (compared_EP @ compared_EP.T).to(torch.int64).tolist()

    def nearness(expert: int, other: int) -> Fraction:
        """Return cosine * abs(cosine) up to a factor that is the same for all others of this expert. It
        orders them as the cosine does, and needs no square root."""
        product = products[expert][other]
        squared_norm = products[other][other]
        return Fraction(product * abs(product), max(1, squared_norm))

    nearest = []
    for expert in range(len(products)):
        others = [other for other in range(len(products)) if other != expert]
        nearest.append(sorted(others, key=lambda other: -nearness(expert, other))[:count])
    return nearest


def _merge_step(old_EP: Tensor, expert: int, nearest: Sequence[int], share: int) -> Tensor:
    """Return the change of one expert's matrix, int64 [P]: `share` / 2**SHARE_BITS of the way to the mean of
    its nearest experts. It is rounded to nearest, halves upwards."""
    difference_P = old_EP[list(nearest)].sum(dim=0) - len(nearest) * old_EP[expert]
    divisor = len(nearest) << SHARE_BITS
    return torch.div(2 * share * difference_P + divisor, 2 * divisor, rounding_mode="floor")


def _stacked(units: Tensor, entries: Mapping[int, Entry]) -> Tensor:
    """Return a copy of one matrix of all experts, int64 [E, P]. `entries` has its place for each expert."""
    return torch.stack([units[entries[expert].place] for expert in sorted(entries)]).to(torch.int64)
