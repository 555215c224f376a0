"""Rounds whose contributions go to few, who add them up: whom the slices of a round are for, and when what
came is added up.

A peer that closes a round sends each slice of what it has to say to one reducer, or a word that it has
nothing. A reducer waits until everybody who is in step has spoken, at most half of the round's deadline: the
other half is for the results to come around. What comes after that is left out, and goes back to its
contributor once the round has settled without it (own_contributions.py). Part of `GroupRounds`. Times in
seconds on the caller's clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.contribution_sets import NeighbourView
from swarmnet.rounds.events import AskChain, OfReducers, Sliced, SlicesArrived, Unanswered
from swarmnet.rounds.history import START, Chain
from swarmnet.rounds.result_table import Draw, Table
from swarmnet.run.manifest import Rounds

WAIT_SHARE = 0.5
"""Of a round's deadline, for slices."""
ASK_SECONDS = 1.0
"""Between two questions for older sets: an answer is some kilobytes and one round trip away."""
SEARCH_SECONDS = 10.0
"""After so long nobody in sight has these sets: a group that begins anew from an archive knows none of them.
Ten allies have been asked by then."""
MOST_LEFT_OUT = 3
"""Results in a row in which a reducer leaves this peer's slices out: who is late on the way to one may be in
time for another."""
MOST_AVOIDED_BLOCKS = 64
"""So long at most is a reducer avoided: at 16 rounds a block a thousand rounds, in which it gives no answer
about two."""


class SeedSearch:
    """The chain's values from which draws follow, and the search for those before the own history."""

    def __init__(self, draw: Draw, allies: Mapping[PeerId, NeighbourView], chain: Chain) -> None:
        self._draw, self._allies, self._chain = draw, allies, chain
        self._asked: Counter[PeerId] = Counter()
        self._began = self._ask_at = float("inf")
        """Infinite: nothing is missing."""
        self._is_over = False

    def seed(self, round: int) -> bytes | None:
        """Return the chain's value from which the draw of a round follows; None: it is not known yet."""
        number = self._draw.seed_round(round)
        if number < 0:
            return START
        if number < self._chain.base and self._is_over:
            return self._chain.values[0]  # All who began with this state have it.
        return self._chain.at(number)

    def to_ask(self, round: int, now: float) -> PeerId | None:
        """Return the ally to ask now for the sets up to the oldest that is known here; None: nobody."""
        if self._is_over or not 0 <= self._draw.seed_round(round) < self._chain.base:
            self._began = self._ask_at = float("inf")
            return None
        self._began = min(self._began, now)
        if now >= self._began + SEARCH_SECONDS:
            self._is_over, self._ask_at = True, float("inf")
            return None
        if self._ask_at > now and self._ask_at < float("inf"):
            return None
        self._ask_at = now + ASK_SECONDS
        ally = min(self._allies, key=lambda peer: (self._asked[peer], peer), default=None)
        if ally is not None:
            self._asked[ally] += 1
        return ally

    def next_deadline(self) -> float:
        return self._ask_at


class Reducing:
    """What one peer has to add up."""

    def __init__(
        self, rules: Rounds, draw: Draw, me: PeerId, allies: Mapping[PeerId, NeighbourView], chain: Chain
    ) -> None:
        """`chain`: of this peer's settled sets, from which the draws of later rounds follow."""
        self.rules, self.draw, self.me = rules, draw, me
        self._chain = chain
        self._search = SeedSearch(draw, allies, chain)
        self.members: frozenset[PeerId] = frozenset((me,))
        """Those among whom reducers are drawn: who takes part in the group as far as known, this peer
        included."""
        self._allies = allies
        self._avoided: dict[PeerId, tuple[int, int]] = {}
        """Members that this peer sends nothing to before that round, and for how many rounds in all."""
        self._sent: dict[int, tuple[ContributionId, tuple[PeerId, ...]]] = {}
        """The own contribution to a round, and to whom its slices went."""
        self._read: defaultdict[int, set[PeerId]] = defaultdict(set)
        """Whose results of a round have come, of those to whom the own slices went."""
        self._left_out: Counter[PeerId] = Counter()
        self._spoken: defaultdict[int, set[PeerId]] = defaultdict(set)
        """Who has sent its slices of a round, or a word that it has none."""
        self._given: defaultdict[int, set[PeerId]] = defaultdict(set)
        """Who has sent slices."""
        self._until: dict[int, float] = {}
        """Rounds that are to be added up, and when at the latest."""
        self._done: set[int] = set()

    def knows(self, round: int) -> bool:
        """Whether the reducers of a round can be drawn. Not before the round has settled from which the draw
        follows; a newcomer has to learn what settled before the state that it fetched."""
        return self._search.seed(round) is not None

    def asks(self, round: int, now: float) -> list[AskChain]:
        """Return the question to ask now for older sets, if without them a round's reducers cannot be
        drawn."""
        ally = self._search.to_ask(round, now)
        return [AskChain(ally, self._chain.base)] if ally is not None else []

    def reducers(self, round: int) -> tuple[PeerId, ...]:
        """To whom the slices of a round go, by shard. The caller asks first whether it `knows`."""
        seed = self._search.seed(round)
        assert seed is not None, "rounds are not closed before their reducers can be drawn"
        avoided = {peer for peer, (until, _) in self._avoided.items() if round < until}
        return self.draw.reducers(round, self.members - avoided, seed)

    def avoid(self, peer: PeerId, round: int) -> None:
        """Let another peer reduce for as many rounds as one is drawn for; twice as long each time where it
        happens again within as many rounds afterwards. Others may send to it: both results count if both are
        large."""
        if peer == self.me:
            return
        until, rounds = self._avoided.get(peer, (-1, 0))
        if round >= until + rounds:
            rounds = self.draw.block_rounds
        elif round >= until:
            rounds = min(2 * rounds, MOST_AVOIDED_BLOCKS * self.draw.block_rounds)
        self._avoided[peer] = max(until, round + rounds), rounds

    def soon(self, round: int, others: Iterable[PeerId]) -> frozenset[PeerId]:
        """Who is drawn among all that are known in the block of that round and in the next, as far as these
        draws are known: links to them must stand before they are needed."""
        known, found = (self.me, *others), set[PeerId]()
        for number in (round, round + self.draw.block_rounds):
            seed = self._search.seed(number)
            if seed is not None:
                found.update(self.draw.reducers(number, known, seed))
        return frozenset(found)

    def sliced(self, round: int, contribution: ContributionId, reducers: tuple[PeerId, ...]) -> None:
        """The own contribution is on its way."""
        self._sent[round] = contribution, reducers

    def read(self, maker: PeerId, round: int, table: Table) -> None:
        """A result has come. Who leaves out again and again what this peer sends to it costs it time, if
        nothing else: what is left out comes back (own_contributions.py)."""
        contribution, reducers = self._sent.get(round, (None, ()))
        sent = {shard for shard, reducer in enumerate(reducers) if reducer == maker != self.me}
        if contribution is None or not sent:
            return
        self._read[round].add(maker)
        if table.holding(contribution) >= sent:
            del self._left_out[maker]
        else:
            self._leaves_out(maker, round)

    def _leaves_out(self, maker: PeerId, round: int) -> None:
        self._left_out[maker] += 1
        if self._left_out[maker] >= MOST_LEFT_OUT:
            del self._left_out[maker]
            self.avoid(maker, round)

    def close(self, round: int, contributes: bool, now: float) -> bool:
        """The round is closed here. Whether this peer has to add something up for it."""
        if not contributes:
            self._spoken[round].add(self.me)
        if self.me not in self.reducers(round) and not self._given[round]:
            return False
        self._until[round] = now + WAIT_SHARE * self.rules.deadline_seconds
        return True

    def spoken(self, peer: PeerId, round: int, has_slices: bool, is_closed: bool, now: float) -> None:
        """`peer` has sent its slices of a round, or a word that it has none. Who was drawn by others only
        begins when the first come."""
        self._spoken[round].add(peer)
        if not has_slices:
            return
        self._given[round].add(peer)
        if is_closed and round not in self._done:
            self._until.setdefault(round, now + WAIT_SHARE * self.rules.deadline_seconds)

    def take(self, event: OfReducers, settled: int, current: int, now: float) -> None:
        """Of events of a group whose newest settled round and round under way are these."""
        match event:
            case Unanswered(peer, round):
                self.avoid(peer, round)
            case Sliced(round, identity, reducers):
                self.sliced(round, identity, reducers)
            case SlicesArrived(peer, round, has_slices):
                if settled < round <= current + self.rules.window:
                    self.spoken(peer, round, has_slices, round < current, now)

    def takes(self, peer: PeerId, round: int) -> bool:
        """Whether slices of that peer can still be added up."""
        return round not in self._done and peer not in self._given[round]

    def due(self, now: float) -> list[int]:
        """The rounds to be added up now: each once."""
        rounds = [round for round, until in self._until.items() if now >= until or self._all_spoke(round)]
        for round in rounds:
            del self._until[round]
            self._done.add(round)
        return rounds

    def next_deadline(self) -> float:
        return min([self._search.next_deadline(), *self._until.values()])

    def forget_until(self, settled: int) -> None:
        """Rounds up to this one are settled. A reducer whose result is not there has left out everything."""
        for round in [round for round in self._sent if round <= settled]:
            _, reducers = self._sent[round]
            for maker in sorted({*reducers} - {self.me} - self._read[round]):
                self._leaves_out(maker, round + self.rules.window)
        for kept in (self._spoken, self._given, self._until, self._sent, self._read):
            for round in [round for round in kept if round <= settled]:
                del kept[round]
        self._done = {round for round in self._done if round > settled}
        self._avoided = {peer: of for peer, of in self._avoided.items() if sum(of) > settled}

    def _all_spoke(self, round: int) -> bool:
        return not any(self._is_awaited(peer, round) for peer in self._silent(round))

    def _silent(self, round: int) -> Iterable[PeerId]:
        """Also those who are about to leave, and are drawn no more."""
        return self.members.union(self._allies) - self._spoken[round]

    def _is_awaited(self, peer: PeerId, round: int) -> bool:
        view = self._allies.get(peer)
        return view is None or (view.in_step and view.settled < round)
