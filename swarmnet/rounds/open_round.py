"""The round that takes gradients: what the group has gathered for it, and when it closes.

Part of `GroupRounds`; the caller decides whether a round may close at all.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarmnet.identifiers import PeerId
from swarmnet.rounds.contribution_sets import NeighbourView
from swarmnet.rounds.settlement import Agreement
from swarmnet.run.manifest import Rounds


class CurrentRound:
    """`peers` is the size of the group as far as known, this one included; `tokens` were committed here for
    round `number`. Times in seconds on the caller's clock."""

    def __init__(
        self, rules: Rounds, number: int, allies: Mapping[PeerId, NeighbourView], now: float
    ) -> None:
        self.rules = rules
        self.number = number
        self.tokens = 0
        self.peers = 1
        self.all_in_sight = True
        self._allies = allies
        self._opened_at = now
        self._left_at = float("inf")
        """Since when an ally is in a later round."""

    @property
    def share(self) -> int:
        """Tokens that each peer brings to a round."""
        return self.rules.target_tokens // self.peers

    def tokens_of_group(self) -> int:
        """Of a group that is not all in sight, what it has if the others do as those in sight. Tokens are
        claims: nobody's count for more than half of a round. That is enough to be followed by those who have
        nothing, and not enough to close a round for the others."""
        most = -(-self.rules.target_tokens // 2)
        if not self.all_in_sight:
            most = -(-most * (1 + len(self._allies)) // self.peers)
        seen = self.tokens
        for view in self._allies.values():  # With every message: a loop is twice as fast as a sum of calls.
            tokens = view.tokens_for(self.number)
            seen += tokens if tokens < most else most
        return seen if self.all_in_sight else seen * self.peers // (1 + len(self._allies))

    def full(self, now: float) -> bool:
        """Whether the group has the round's tokens, or some of them and its time is up."""
        tokens = self.tokens_of_group()
        return tokens >= self.rules.target_tokens or (tokens > 0 and now >= self.next_deadline())

    def is_left(self, agreement: Agreement, contributed: bool, now: float) -> bool:
        """Whether half of the group has left it, or somebody if half of the tokens are there or some time
        ago: one peer must not drive the others through empty rounds, nor leave the idle behind. That
        somebody has `contributed` to it, signed, is proof that it is over; a mere claim counts later."""
        left = [view.round > self.number for view in self._allies.values()]
        if not any(left):
            self._left_at = float("inf")
            return False
        self._left_at = min(self._left_at, now)
        enough = 2 * self.tokens_of_group() >= self.rules.target_tokens
        patience = self.rules.deadline_seconds if contributed else self.rules.longest_seconds
        return enough or now >= self._left_at + patience or agreement.are_ahead(left)

    def go_on(self, now: float) -> None:
        """To the next round; tokens that were too late for this one stay, and count in the next."""
        self.number += 1
        self._opened_at, self._left_at = now, float("inf")
        for view in self._allies.values():
            if view.round < self.number:
                view.tokens = 0

    def next_deadline(self) -> float:
        """When its time is up."""
        return self._opened_at + self.rules.longest_seconds
