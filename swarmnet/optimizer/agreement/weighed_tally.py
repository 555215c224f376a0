"""The votes of one round, each with the weight of its contributor."""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import Layout
from swarmnet.optimizer.agreement.ledger import AgreementLedger
from swarmnet.optimizer.agreement.weight_report import FULL_WEIGHT
from swarmnet.optimizer.sign_votes import VoteTally, VotingMethod
from swarmnet.rounds.result_table import tag_of

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
    """The votes of one round. All count in full until `weigh` is first called; later ones count nothing until
    it is called again."""

    def __init__(
        self,
        *,
        method: ComparedMethod,
        layout: Layout,
        device: torch.device,
        round: int,
        ledger: AgreementLedger,
    ) -> None:
        super().__init__(method=method, layout=layout, device=device, round=round)
        self._compared = method
        self._ledger = ledger
        self._weights: dict[PeerId, int] = {}
        """Weights of contributors whose votes do not count in full."""
        self._is_weighed = False

    def add(self, peer: PeerId, payload: bytes) -> None:
        if self._is_weighed:
            self._weights[peer] = 0  # It counts nothing until it is weighed with the others.
        super().add(peer, payload)

    def weigh(self, ahead: int) -> bool:
        self._is_weighed = True
        contributors = list(self._kept)
        weights = self._ledger.weights(ahead, [tag_of(peer) for peer in contributors])
        changed = [
            (peer, weight)
            for peer, weight in zip(contributors, weights, strict=True)
            if weight != self.weight(peer)
        ]
        for peer, weight in changed:
            if self._sums is not None:
                votes = self._method.votes_of(self._kept[peer])
                self._count(votes, weight - self.weight(peer), self._sums)
            self._weights[peer] = weight
        return bool(changed)

    def weight(self, peer: PeerId) -> int:
        return self._weights.get(peer, FULL_WEIGHT)

    def settle(self, chain: bytes) -> None:
        contributors = sorted(self._kept)
        votes = self._compared.votes_in(self._round)
        places = drawn_places(votes, len(contributors), self._round.to_bytes(8, "little") + chain)
        signs = [self._compared.signs_at(self._kept[peer], places) for peer in contributors]
        signs_CN = np.array(signs, np.int8).reshape(len(signs), len(places))
        tags = [tag_of(peer) for peer in contributors]
        self._ledger.record(self._round, tags, self._ledger.compare(tags, signs_CN))


def drawn_places(votes: int, contributors: int, seed: bytes) -> NDArray[np.int64]:
    """Return places below `votes` on which contributors are compared: all if these are few, or drawn by a
    seed that no contributor knew when it voted."""
    drawn = min(MAX_COMPARED, MAX_COMPARED_OF_ALL // max(1, contributors))
    if votes <= drawn:
        return np.arange(votes)
    numbers = np.frombuffer(hashlib.shake_256(b"agreement" + seed).digest(8 * drawn), "<u8")
    return (numbers % np.uint64(votes)).astype(np.int64)
