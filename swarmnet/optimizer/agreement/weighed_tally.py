"""The votes of one round, each with the weight of its contributor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import Layout
from swarmnet.optimizer.agreement.comparison import FULL_WEIGHT
from swarmnet.optimizer.sign_votes import VoteTally, VotingMethod

MAX_COMPARED = 1 << 14
"""Numbers of a round on which contributors are compared. The standard error of a correlation is 0.8 %."""
MAX_COMPARED_OF_ALL = 1 << 21
"""Compared numbers of all contributors of a round. With many contributors, each is compared with more."""


class ComparedMethod(VotingMethod, Protocol):
    """What a weighed tally needs from its method: dense votes."""

    def votes_in(self, round: int) -> int:
        """Return the number of votes of a contribution to `round`, without padding."""

    def signs_at(self, payload: bytes, places: NDArray[np.int64]) -> NDArray[np.int8]:
        """Return the votes at these places of a payload, +1 or -1."""


class WeighedTally(VoteTally):
    """The votes of one round. Every vote counts in full until `weigh` is called."""

    def __init__(self, *, method: ComparedMethod, layout: Layout, device: torch.device, round: int) -> None:
        super().__init__(method=method, layout=layout, device=device, round=round)
        self._compared = method
        self._weights: dict[PeerId, int] = {}
        """Weights of contributors whose votes do not count in full."""

    @property
    def contributors(self) -> list[PeerId]:
        """The contributors, sorted."""
        return sorted(self._payloads)

    def weigh(self, weights: Mapping[PeerId, int]) -> bool:
        """Set the weight of each contributor. Returns whether one has changed."""
        changed = [peer for peer in self._payloads if weights[peer] != self.weight(peer)]
        for peer in changed:
            if self._sums is not None:
                votes = self._method.votes_of(self._payloads[peer])
                self._count(votes, weights[peer] - self.weight(peer), self._sums)
            self._weights[peer] = weights[peer]
        return bool(changed)

    def weight(self, peer: PeerId) -> int:
        return self._weights.get(peer, FULL_WEIGHT)

    def drawn_votes(self, chain: bytes) -> NDArray[np.int8]:
        """Return the votes of each contributor at some places, int8 [contributors, places]. `chain`, the
        chain value after the round, draws the places. No contributor knows it when it votes."""
        contributors, votes = self.contributors, self._compared.votes_in(self._round)
        drawn = min(MAX_COMPARED, MAX_COMPARED_OF_ALL // max(1, len(contributors)))
        places = np.arange(votes)
        if votes > drawn:
            seed = b"agreement" + self._round.to_bytes(8, "little") + chain
            numbers = np.frombuffer(hashlib.shake_256(seed).digest(8 * drawn), "<u8")
            places = (numbers % np.uint64(votes)).astype(np.int64)
        signs = [self._compared.signs_at(self._payloads[peer], places) for peer in contributors]
        return np.array(signs, np.int8).reshape(len(signs), len(places))
