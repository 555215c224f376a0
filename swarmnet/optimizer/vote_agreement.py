"""Measure how far the other peers of a group agree with one peer's votes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VoteAgreement:
    """Agreement about one peer's votes in one round. Noise is agreed with and opposed equally often."""

    agreed: int
    """Number of votes with which the majority of the other votes on that coefficient agrees."""
    opposed: int
    """Number of votes against the majority of the others."""
    alone: int
    """Number of votes on coefficients without other votes, or with a tie among them."""

    def __add__(self, other: VoteAgreement) -> VoteAgreement:
        return VoteAgreement(
            self.agreed + other.agreed, self.opposed + other.opposed, self.alone + other.alone
        )


def vote_agreement(votes: Tensor, sums: Tensor, weight: int = 1) -> VoteAgreement:
    """Compare votes (+1, -1; 0: none) with `sums`, which include them at this weight. Return counts."""
    product = votes * (sums - weight * votes)
    agreed, opposed = int(torch.count_nonzero(product > 0)), int(torch.count_nonzero(product < 0))
    return VoteAgreement(agreed, opposed, product.numel() - agreed - opposed)
