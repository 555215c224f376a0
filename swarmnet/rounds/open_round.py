"""Tracks the round that accumulates gradients: how many tokens the group has for it, and when it is full.

*Same-branch peers* are the neighbours whose history of settled rounds agrees with this peer's. The caller
(group_rounds.py) decides whether a round may close at all.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarmnet.identifiers import PeerId
from swarmnet.rounds.contribution_sets import NeighbourView
from swarmnet.rounds.settlement import FinalityRules
from swarmnet.run.schema import Rounds


class CurrentRound:
    """The round that accumulates gradients. All times are in seconds on the caller's clock.

    `number` is the round. `tokens` counts the tokens whose gradients this peer has added for it. `peers` is
    the known size of the group, this one included. `all_in_sight` is true if it is linked to the whole group.
    `contributors` is the number of peers that contributed to a round that settled lately; 0 before the first.
    """

    def __init__(
        self, *, rules: Rounds, number: int, same_branch_peers: Mapping[PeerId, NeighbourView], now: float
    ) -> None:
        self.rules = rules
        self.number = number
        self.tokens = 0
        self.peers = 1
        self.contributors = 0
        self.all_in_sight = True
        self.must_close = False
        """True if this peer leaves: it contributes the gathered gradient as soon as the round may close."""
        self._same_branch_peers = same_branch_peers
        self._opened_at = now
        self._left_at = float("inf")
        """When a neighbour was first seen in a later round; infinite if none is."""

    @property
    def active_peers(self) -> int:
        """Number of peers that are expected to contribute. Any number of keys can join, so of the peers that
        are not linked here only as many count as contributed lately."""
        if not self.contributors:
            return self.peers
        linked = 1 + len(self._same_branch_peers)
        return min(self.peers, max(linked, self.contributors))

    @property
    def share(self) -> int:
        """Tokens that each peer brings to a round if all bring equally many."""
        return self.rules.global_batch_tokens // self.active_peers

    def tokens_of_group(self) -> int:
        """Return the tokens that the group has for this round. If not all peers are linked here, the tokens
        of the linked ones are scaled up to the active peers.

        Reported token counts are unverified, so no neighbour counts for more than half of a round. One
        neighbour alone can then make an idle peer follow it (`is_left`), but cannot close a round."""
        linked = 1 + len(self._same_branch_peers)
        most_of_one = -(-self.rules.global_batch_tokens // 2)  # Rounded up.
        active_peers = max(linked, self.active_peers)
        if not self.all_in_sight:  # The sum is scaled up below, so the limit is scaled down.
            most_of_one = -(-most_of_one * linked // active_peers)
        tokens_in_sight = self.tokens
        # This runs with every message: a loop is twice as fast as a sum.
        for view in self._same_branch_peers.values():
            tokens = view.tokens_for(self.number)
            tokens_in_sight += tokens if tokens < most_of_one else most_of_one
        return tokens_in_sight if self.all_in_sight else tokens_in_sight * active_peers // linked

    def full(self, now: float) -> bool:
        """Return whether the group has the round's tokens, or has some tokens and the round's time is up."""
        tokens = self.tokens_of_group()
        return tokens >= self.rules.global_batch_tokens or (tokens > 0 and now >= self.next_deadline())

    def is_left(self, agreement: FinalityRules, contributed: bool, now: float) -> bool:
        """Return whether enough neighbours are in a later round for this peer to follow.

        Half of the peers in sight are enough. A single neighbour is enough if the group has half of the
        round's tokens, or if it has been ahead for a while. One peer can then neither drive the others
        through empty rounds nor leave idle peers behind. `contributed`: a signed contribution to this round
        exists, which proves that the round is over. Without it, this peer waits longer."""
        if not any(map(self._has_left, self._same_branch_peers.values())):
            self._left_at = float("inf")
            return False
        self._left_at = min(self._left_at, now)
        has_half_of_tokens = 2 * self.tokens_of_group() >= self.rules.global_batch_tokens
        rules = self.rules
        wait_seconds = rules.contribution_timeout_seconds if contributed else rules.max_seconds
        return (
            has_half_of_tokens or now >= self._left_at + wait_seconds or agreement.are_ahead(self._has_left)
        )

    def _has_left(self, view: NeighbourView) -> bool:
        return view.round > self.number

    def go_on(self, now: float) -> None:
        """Begin the next round. `tokens` is not reset: the caller sets it to 0 when it contributes, and what
        is left counts in the next round. The reported tokens of neighbours in earlier rounds are reset."""
        self.number += 1
        self.must_close = False
        self._opened_at = now
        self._left_at = float("inf")
        for view in self._same_branch_peers.values():
            if view.round < self.number:
                view.tokens = 0

    def next_deadline(self) -> float:
        """Return when the round's time is up."""
        return self._opened_at + self.rules.max_seconds
