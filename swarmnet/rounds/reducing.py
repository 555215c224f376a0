"""Schedules the sharded exchange of one peer: to which reducers its slices go, and when it sums the slices of
others.

The weights are cut into shards, and a *slice* is a contribution's part for one shard. A draw chooses the
*reducer* of each shard among the group's peers, anew for each block of rounds. Peers that only reduce
(*helpers*) are drawn first. The draw's seed is a *chain value*, a hash over all settled rounds. A peer that
closes a round sends each slice to its reducer, or a notice that it has none. The reducer sums the slices and
publishes the *result*. It waits until every peer that is in step has sent either, but at most half of the
round's deadline. A slice that arrives later is left out, and returns to its contributor
(own_contributions.py). Times are in seconds on the caller's clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.contribution_sets import NeighbourView
from swarmnet.rounds.events import OfReducers, RequestChain, SlicesArrived, SlicesSent, Unanswered
from swarmnet.rounds.history import START, Chain
from swarmnet.rounds.result_table import NO_CLASS, Draw, ReducerClass, Table
from swarmnet.run.schema import Rounds

WAIT_SHARE = 0.5
"""Fraction of a round's deadline for which a reducer waits for slices."""
ASK_SECONDS = 1.0
"""Seconds between two requests for older sets. A response is some kilobytes and one round trip away."""
SEARCH_SECONDS = 10.0
"""How long older sets are searched. Ten neighbours have been asked by then, and a group that restarts from an
archive knows none of these sets."""
MAX_LEFT_OUT = 3
"""Consecutive results without this peer's slices after which it avoids a reducer. A peer that is late on the
way to one reducer may be in time for another."""
MAX_AVOIDED_BLOCKS = 64
"""Longest time for which a reducer is avoided, in blocks. At 16 rounds a block it is a thousand rounds, in
which an avoided reducer is tried about twice."""


class SeedSearch:
    """Provides the chain values that seed the draws. A chain value is a hash over all settled rounds up to
    one. Values from before the state that this peer fetched are requested from neighbours."""

    def __init__(self, draw: Draw, same_branch_peers: Mapping[PeerId, NeighbourView], chain: Chain) -> None:
        self._draw = draw
        self._same_branch_peers = same_branch_peers
        self._chain = chain
        self._asked: Counter[PeerId] = Counter()
        self._began = float("inf")
        self._ask_at = float("inf")
        """When the search began, and when the next request is due; infinite while nothing is missing."""
        self._is_over = False

    def seed(self, round: int) -> bytes | None:
        """Return the chain value that seeds the draw of a round; None if it is not known yet. If the search
        for an older one has failed, the oldest known value takes its place."""
        number = self._draw.seed_round(round)
        if number < 0:  # The draw precedes the first round.
            return START
        if number < self._chain.base and self._is_over:
            return self._chain.values[0]  # All peers that fetched this state have it.
        return self._chain.at(number)

    def to_ask(self, round: int, now: float) -> PeerId | None:
        """Return the neighbour to ask now for settled sets older than those that this peer knows: the one
        asked least often. None if the seed of `round` does not need them, no request is due, or the search is
        over."""
        is_seed_unknown = 0 <= self._draw.seed_round(round) < self._chain.base
        if self._is_over or not is_seed_unknown:
            self._began = float("inf")
            self._ask_at = float("inf")
            return None
        self._began = min(self._began, now)
        if now >= self._began + SEARCH_SECONDS:
            self._is_over = True
            self._ask_at = float("inf")
            return None
        if now < self._ask_at < float("inf"):  # The last request is too recent.
            return None
        self._ask_at = now + ASK_SECONDS
        branch_peer = min(self._same_branch_peers, key=lambda peer: (self._asked[peer], peer), default=None)
        if branch_peer is not None:
            self._asked[branch_peer] += 1
        return branch_peer

    def next_deadline(self) -> float:
        return self._ask_at


@dataclass(eq=False, kw_only=True)
class ReductionSchedule:
    """The reducing of one peer: draws, slices that have arrived, and rounds to sum. `chain` is this peer's
    chain of settled sets, which seeds the draws of later rounds."""

    rules: Rounds
    draw: Draw
    me: PeerId
    same_branch_peers: Mapping[PeerId, NeighbourView]
    chain: Chain

    def __post_init__(self) -> None:
        self._search = SeedSearch(self.draw, self.same_branch_peers, self.chain)
        self.members: frozenset[PeerId] = frozenset((self.me,))
        """The known active peers of the group, this one included. Reducers are drawn among them."""
        self.classes: Mapping[PeerId, ReducerClass] = {}
        """What members offer as reducers."""
        self._avoided: dict[PeerId, tuple[int, int]] = {}
        """Avoided members: the first round in which each is drawn again, and for how many rounds."""
        self._sent: dict[int, tuple[ContributionId, tuple[PeerId, ...]]] = {}
        """This peer's contribution to each round, and the reducers of its slices."""
        self._results_from: defaultdict[int, set[PeerId]] = defaultdict(set)
        """Round -> the reducers of this peer's slices whose results have arrived."""
        self._omissions: Counter[PeerId] = Counter()
        """Consecutive results of each reducer that left out this peer's slices."""
        self._largest: Counter[int] = Counter()
        """Round -> the most contributors that a result, as far as read, has in a shard."""
        self._left_out: defaultdict[int, dict[PeerId, int]] = defaultdict(dict)
        """Round -> reducers that left out slices of this peer -> the fewest contributors that their result
        has in such a shard."""
        self._responded: defaultdict[int, set[PeerId]] = defaultdict(set)
        """Round -> the peers that have sent their slices, or a notice that they have none."""
        self._sent_slices: defaultdict[int, set[PeerId]] = defaultdict(set)
        """Round -> the peers that have sent slices."""
        self._sum_by: dict[int, float] = {}
        """Rounds whose slices this peer must sum, and the latest time for each."""
        self._summed: set[int] = set()
        """Rounds whose slices it has summed."""

    @property
    def helpers(self) -> frozenset[PeerId]:
        """The members that only reduce."""
        return frozenset(peer for peer in self.members if self.classes.get(peer, NO_CLASS).is_helper)

    def knows(self, round: int) -> bool:
        """Return whether the reducers of a round can be drawn. The chain value that seeds the draw must be
        known: its round is settled, and a newcomer has learned what settled before its state."""
        return self._search.seed(round) is not None

    def asks(self, round: int, now: float) -> list[RequestChain]:
        """Return the request for older settled sets to send now, at most one. It is needed if the seed of
        the draw for `round` is older than this peer's chain."""
        branch_peer = self._search.to_ask(round, now)
        return [RequestChain(branch_peer, self.chain.base)] if branch_peer is not None else []

    def reducers(self, round: int) -> tuple[PeerId, ...]:
        """Return the reducer of each shard of a round. Requires `knows(round)`."""
        seed = self._search.seed(round)
        assert seed is not None, "rounds are not closed before their reducers can be drawn"
        avoided = {peer for peer, (until, _) in self._avoided.items() if round < until}
        return self.draw.reducers(round, self.members - avoided, seed, self.classes)

    def avoid(self, peer: PeerId, round: int) -> None:
        """Do not draw `peer` as a reducer of this peer's slices for one block of rounds from `round` on.

        The time doubles if it must be avoided again within as many rounds afterwards. Other peers may still
        draw it, and its result then has weight too."""
        if peer == self.me:
            return
        drawn_again_at, avoided_rounds = self._avoided.get(peer, (-1, 0))
        if round >= drawn_again_at + avoided_rounds:  # It was never avoided, or long ago.
            avoided_rounds = self.draw.block_rounds
        elif round >= drawn_again_at:  # It was drawn again only a short time ago.
            avoided_rounds = min(2 * avoided_rounds, MAX_AVOIDED_BLOCKS * self.draw.block_rounds)
        self._avoided[peer] = max(drawn_again_at, round + avoided_rounds), avoided_rounds

    def soon(
        self, round: int, others: Iterable[PeerId], classes: Mapping[PeerId, ReducerClass]
    ) -> frozenset[PeerId]:
        """Return the reducers in the block of `round` and in the next block, so that links to them exist in
        time. They are drawn among this peer and `others` of these classes, as far as the seeds are known."""
        known = (self.me, *others)
        reducers: set[PeerId] = set()
        for number in (round, round + self.draw.block_rounds):
            seed = self._search.seed(number)
            if seed is not None:
                reducers.update(self.draw.reducers(number, known, seed, classes))
        return frozenset(reducers)

    def sliced(self, round: int, contribution: ContributionId, reducers: tuple[PeerId, ...]) -> None:
        """Record that this peer's contribution is being sent to its reducers."""
        self._sent[round] = contribution, reducers

    def read(self, contributor: PeerId, round: int, table: Table) -> None:
        """Record the result of the reducer `contributor` for a round. `table` lists whose slices it sums.

        The reducer is avoided after `MAX_LEFT_OUT` results in a row without all slices that it was sent. If
        they are missing in a shard in which the result is too small to count, it is avoided at once: it left
        out most contributors, so the cause is not that this peer was late. What is left out returns to this
        peer (own_contributions.py), but it costs time."""
        self._largest[round] = max(self._largest[round], *map(len, table.shards.values()))
        contribution, reducers = self._sent.get(round, (None, ()))
        if contribution is not None and contributor != self.me and contributor in reducers:
            sent_shards = {shard for shard, reducer in enumerate(reducers) if reducer == contributor}
            self._results_from[round].add(contributor)
            missing = sent_shards - table.holding(contribution)
            if missing:
                self._count_omission(contributor, round)
                if in_result := missing & table.shards.keys():
                    self._left_out[round][contributor] = min(len(table.shards[shard]) for shard in in_result)
            else:
                del self._omissions[contributor]
        for reducer, size in self._left_out[round].items():
            if not self._may_count(round, size):
                self.avoid(reducer, round)

    def countable(self, round: int, table: Table) -> Table:
        """Return the shards of a result in which it may count, by the results of the round read so far."""
        held_by_shard = table.shards.items()
        return Table({shard: held for shard, held in held_by_shard if self._may_count(round, len(held))})

    def _may_count(self, round: int, contributors: int) -> bool:
        """Return whether a result with so many contributors in a shard may count there (`counting`)."""
        return 2 * contributors >= self._largest[round]

    def _count_omission(self, contributor: PeerId, round: int) -> None:
        """Count that a reducer left out slices of this peer. After `MAX_LEFT_OUT` in a row, avoid it from
        `round` on, and count from 0 again."""
        self._omissions[contributor] += 1
        if self._omissions[contributor] >= MAX_LEFT_OUT:
            del self._omissions[contributor]
            self.avoid(contributor, round)

    def close(self, round: int, contributes: bool, now: float) -> bool:
        """Close a round. Returns whether this peer has to sum slices for it, because it is drawn as a reducer
        or was sent slices. `contributes`: this peer sends slices itself."""
        if not contributes:
            self._responded[round].add(self.me)  # No slices of its own are to be waited for.
        if self.me not in self.reducers(round) and not self._sent_slices[round]:
            return False
        self._sum_by[round] = now + WAIT_SHARE * self.rules.contribution_timeout_seconds
        return True

    def slices_arrived(self, peer: PeerId, round: int, has_slices: bool, is_closed: bool, now: float) -> None:
        """Record that `peer` has sent its slices of a round, or a notice that it has none.

        This peer may have closed the round (`is_closed`) without drawing itself as a reducer. Slices then
        show that other peers have drawn it, so it sums them after the usual wait."""
        self._responded[round].add(peer)
        if not has_slices:
            return
        self._sent_slices[round].add(peer)
        if is_closed and round not in self._summed:
            self._sum_by.setdefault(round, now + WAIT_SHARE * self.rules.contribution_timeout_seconds)

    def take(self, event: OfReducers, settled: int, current: int, now: float) -> None:
        """Handle an event. `settled` and `current` are the newest settled round and the current one. Slices
        of settled rounds, or of more than `window` rounds ahead, are ignored."""
        match event:
            case Unanswered(peer, round):
                self.avoid(peer, round)
            case SlicesSent(round, identity, reducers):
                self.sliced(round, identity, reducers)
            case SlicesArrived(peer, round, has_slices):
                if settled < round <= current + self.rules.window:
                    self.slices_arrived(peer, round, has_slices, round < current, now)

    def takes(self, peer: PeerId, round: int) -> bool:
        """Return whether slices of that peer can still be summed: those of the round are not summed yet, and
        it has not sent any."""
        return round not in self._summed and peer not in self._sent_slices[round]

    def due(self, now: float) -> list[int]:
        """Return the rounds whose slices to sum now, each once: all expected slices and notices have arrived,
        or the time is up."""
        rounds = [round for round, until in self._sum_by.items() if now >= until or self._all_arrived(round)]
        for round in rounds:
            del self._sum_by[round]
            self._summed.add(round)
        return rounds

    def next_deadline(self) -> float:
        return min([self._search.next_deadline(), *self._sum_by.values()])

    def forget_until(self, settled: int) -> None:
        """Forget rounds up to `settled`. A reducer from which no result of such a round has arrived has left
        out this peer's slices, which `_count_omission` counts. An avoided reducer is forgotten after it was
        drawn again for as many rounds as it was avoided."""
        for round in [round for round in self._sent if round <= settled]:
            _, reducers = self._sent[round]
            without_result = {*reducers} - {self.me} - self._results_from[round]
            for reducer in sorted(without_result):
                # Rounds settle about `window` rounds late, so an earlier round could not avoid it any more.
                self._count_omission(reducer, round + self.rules.window)
        for by_round in (
            self._responded,
            self._sent_slices,
            self._sum_by,
            self._sent,
            self._results_from,
            self._largest,
            self._left_out,
        ):
            for round in [round for round in by_round if round <= settled]:
                del by_round[round]
        self._summed = {round for round in self._summed if round > settled}
        for peer, (drawn_again_at, avoided_rounds) in list(self._avoided.items()):
            if drawn_again_at + avoided_rounds <= settled:
                del self._avoided[peer]

    def _all_arrived(self, round: int) -> bool:
        """Return whether each expected peer has sent its slices of a round, or a notice that it has none."""
        unheard = self.members.union(self.same_branch_peers) - self._responded[round]
        return not any(self._is_awaited(peer, round) for peer in unheard)

    def _is_awaited(self, peer: PeerId, round: int) -> bool:
        """Return whether slices or a notice of that peer are still expected. They are not if it is catching
        up, or has settled the round."""
        view = self.same_branch_peers.get(peer)
        return view is None or (view.in_step and view.settled < round)
