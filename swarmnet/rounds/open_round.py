"""Tracks the round that accumulates gradients: how many tokens the group has for it, and when it is full.

*Same-branch peers* are the neighbours whose history of settled rounds agrees with this peer's. The caller
(group_rounds.py) decides whether a round may close at all.

Keys are free, so any number of peers can report tokens, and contribute. Where votes weigh by agreement, only
peers whose votes have weight count here, so that the others close no round earlier. All count while too few
are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Set

from swarmnet.identifiers import PeerId
from swarmnet.rounds.contribution_sets import NeighbourView
from swarmnet.rounds.result_table import TagKey, tag_key, tag_of
from swarmnet.rounds.settlement import FinalityRules
from swarmnet.run.schema import Rounds

MIN_CONTRIBUTORS = 5
"""With fewer contributors, liars cannot be told from honest peers, so all weigh the same."""
Votes = Mapping[TagKey, bool]
"""Whether the votes of each known contributor have weight. Empty if all votes count in full."""


class CurrentRound:
    """The round that accumulates gradients. All times are in seconds on the caller's clock.

    `number` is the round. `tokens` counts the tokens whose gradients this peer has added for it. `peers` is
    the known size of the group, this one included. `all_in_sight` is true if it is linked to the whole group.
    `contributors` is the number of peers whose votes count and that contributed to a round that settled
    lately; 0 before the first.
    """

    def __init__(
        self,
        *,
        rules: Rounds,
        me: PeerId,
        number: int,
        same_branch_peers: Mapping[PeerId, NeighbourView],
        now: float,
    ) -> None:
        self.rules = rules
        self.number = number
        self.tokens = 0
        self.peers = 1
        self.contributors = 0
        self.all_in_sight = True
        self.must_close = False
        """True if this peer leaves: it contributes the gathered gradient as soon as the round may close."""
        self._me = me
        self._votes: Votes = {}
        self._recent: deque[frozenset[bytes]] = deque(maxlen=rules.window)
        """The tags of the contributors to the rounds that settled last."""
        self._same_branch_peers = same_branch_peers
        self._in_sight: Set[PeerId] | None = None
        """The neighbours for which `_counting` holds; None if it holds for none."""
        self._counting: frozenset[PeerId] = frozenset()
        self._opened_at = now
        self._left_at = float("inf")
        """When a neighbour was first seen in a later round; infinite if none is."""

    def weigh(self, votes: Votes) -> None:
        """Adopt whose votes have weight after the newest settled round."""
        self._votes = votes
        self._in_sight = None
        self._count_contributors()

    def settled(self, contributors: frozenset[bytes]) -> None:
        """Record the contributors to the round that has just settled, by their tags."""
        self._recent.append(contributors)
        self._count_contributors()

    def _count_contributors(self) -> None:
        self.contributors = max((len(self._with_votes(tags)) for tags in self._recent), default=0)

    def with_weight(self, peers: Iterable[PeerId]) -> frozenset[PeerId]:
        """Return those of `peers` whose votes have weight after the newest settled round."""
        peer_of = {tag_of(peer): peer for peer in peers}
        return frozenset(peer_of[tag] for tag in self._with_votes(peer_of))

    def _with_votes(self, tags: Collection[bytes]) -> Collection[bytes]:
        """Return those whose votes have weight. All count if fewer than `MIN_CONTRIBUTORS` are known, or none
        of these has weight, as when votes are counted (`AgreementLedger.marks`)."""
        found = [(tag, vote) for tag in tags if (vote := self._votes.get(tag_key(tag))) is not None]
        voting = [tag for tag, has_weight in found if has_weight]
        return voting if voting and len(found) >= MIN_CONTRIBUTORS else tags

    def _that_count(self) -> Collection[PeerId]:
        """Return the peers in sight whose tokens count. This peer is among them if its own do."""
        in_sight = self._same_branch_peers.keys()
        if self._in_sight != in_sight:
            self._in_sight = frozenset(in_sight)
            self._counting = self.with_weight((self._me, *in_sight))
        return self._counting

    @property
    def active_peers(self) -> int:
        """Number of peers that are expected to contribute. Any number of keys can join, so of the peers that
        are not linked here only as many count as contributed lately."""
        if not self.contributors:
            return self.peers
        return min(self.peers, max(len(self._that_count()), self.contributors))

    @property
    def share(self) -> int:
        """Tokens that each peer brings to a round if all bring equally many."""
        return self.rules.global_batch_tokens // self.active_peers

    def tokens_of_group(self) -> int:
        """Return the tokens that the group has for this round. If not all peers are linked here, the tokens
        of the linked ones are scaled up to the active peers.

        Reported token counts are unverified, so no neighbour counts for more than half of a round. One
        neighbour alone can then make an idle peer follow it (`is_left`), but cannot close a round."""
        counting = self._that_count()
        linked = len(counting)
        most_of_one = -(-self.rules.global_batch_tokens // 2)  # Rounded up.
        active_peers = max(linked, self.active_peers)
        if not self.all_in_sight:  # The sum is scaled up below, so the limit is scaled down.
            most_of_one = -(-most_of_one * linked // active_peers)
        tokens_in_sight = self.tokens if self._me in counting else 0
        # This runs with every message: a loop is twice as fast as a sum.
        for peer, view in self._same_branch_peers.items():
            tokens = view.tokens_for(self.number)
            if tokens and peer in counting:
                tokens_in_sight += tokens if tokens < most_of_one else most_of_one
        return tokens_in_sight if self.all_in_sight else tokens_in_sight * active_peers // linked

    def full(self, now: float) -> bool:
        """Return whether the group has the round's tokens, or has some tokens and the round's time is up."""
        if self.tokens_of_group() >= self.rules.global_batch_tokens:
            return True
        return now >= self.next_deadline() and self.has_tokens()

    def has_tokens(self) -> bool:
        """Return whether any peer in sight has tokens for this round, whether they count or not."""
        views = self._same_branch_peers.values()
        return self.tokens > 0 or any(view.tokens_for(self.number) > 0 for view in views)

    def is_left(self, agreement: FinalityRules, contributed: bool, now: float) -> bool:
        """Return whether enough neighbours are in a later round for this peer to follow.

        Half of the peers in sight are enough. A single neighbour is enough if the group has half of the
        round's tokens, or if it has been ahead for a while. One peer can then neither drive the others
        through empty rounds nor leave idle peers behind. `contributed`: a signed contribution to this round
        exists, which proves that the round is over. Without it, this peer waits longer."""
        counting, views = self._that_count(), self._same_branch_peers
        left = [(view, view.round > self.number) for peer, view in views.items() if peer in counting]
        if not any(has_left for _, has_left in left):
            self._left_at = float("inf")
            return False
        self._left_at = min(self._left_at, now)
        has_half_of_tokens = 2 * self.tokens_of_group() >= self.rules.global_batch_tokens
        rules = self.rules
        wait_seconds = rules.contribution_timeout_seconds if contributed else rules.max_seconds
        return has_half_of_tokens or now >= self._left_at + wait_seconds or agreement.are_ahead(left)

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
