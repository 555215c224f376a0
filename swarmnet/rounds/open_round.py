"""Tracks the round that accumulates gradients: how many tokens the group has for it, and when it is full.

Part of `GroupRounds`. The caller decides whether a round may close at all.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarmnet.identifiers import PeerId
from swarmnet.rounds.contribution_sets import NeighbourView
from swarmnet.rounds.settlement import FinalityRules
from swarmnet.run.manifest import Rounds


class CurrentRound:
    """The round that accumulates gradients. All times are in seconds on the caller's clock.

    `number` is the round and `tokens` what was committed here for it. `peers` is the known size of the group,
    this peer included. `all_in_sight` is true if this peer is linked to the whole group."""

    def __init__(
        self, rules: Rounds, number: int, same_branch_peers: Mapping[PeerId, NeighbourView], now: float
    ) -> None:
        self.rules = rules
        self.number = number
        self.tokens = 0
        self.peers = 1
        self.all_in_sight = True
        self._same_branch_peers = same_branch_peers
        self._opened_at = now
        self._left_at = float("inf")
        """When a neighbour was first seen in a later round; infinite if none is."""

    @property
    def share(self) -> int:
        """Tokens that each peer brings to a round."""
        return self.rules.global_batch_tokens // self.peers

    def tokens_of_group(self) -> int:
        """Return the tokens that the group has for this round. If not all peers are linked here, the tokens
        of the linked ones are scaled up to the group.

        Reported token counts are unverified, so no neighbour counts for more than half of a round. Idle peers
        follow half a round, but it cannot close a round for the others."""
        most = -(-self.rules.global_batch_tokens // 2)
        if not self.all_in_sight:
            most = -(-most * (1 + len(self._same_branch_peers)) // self.peers)
        seen = self.tokens
        for (
            view
        ) in self._same_branch_peers.values():  # Runs with every message: a loop is twice as fast as a sum.
            tokens = view.tokens_for(self.number)
            seen += tokens if tokens < most else most
        return seen if self.all_in_sight else seen * self.peers // (1 + len(self._same_branch_peers))

    def full(self, now: float) -> bool:
        """Return whether the group has the round's tokens, or has some tokens and the round's time is up."""
        tokens = self.tokens_of_group()
        return tokens >= self.rules.global_batch_tokens or (tokens > 0 and now >= self.next_deadline())

    def is_left(self, agreement: FinalityRules, contributed: bool, now: float) -> bool:
        """Return whether enough neighbours are in a later round for this peer to follow.

        Half of the group is enough. A single neighbour is enough if half of the tokens are there, or some
        time after it left. One peer must not drive the others through empty rounds, nor leave idle peers
        behind. `contributed`: a signed contribution to this round exists. It proves that the round is over;
        an unsigned report is believed later."""
        left = [view.round > self.number for view in self._same_branch_peers.values()]
        if not any(left):
            self._left_at = float("inf")
            return False
        self._left_at = min(self._left_at, now)
        enough = 2 * self.tokens_of_group() >= self.rules.global_batch_tokens
        patience = self.rules.contribution_timeout_seconds if contributed else self.rules.max_seconds
        return enough or now >= self._left_at + patience or agreement.are_ahead(left)

    def go_on(self, now: float) -> None:
        """Begin the next round. Tokens that were too late for this one stay, and count in the next."""
        self.number += 1
        self._opened_at, self._left_at = now, float("inf")
        for view in self._same_branch_peers.values():
            if view.round < self.number:
                view.tokens = 0

    def next_deadline(self) -> float:
        """Return when the round's time is up."""
        return self._opened_at + self.rules.max_seconds
