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
from swarmnet.rounds.result_table import Draw, Table
from swarmnet.run.manifest import Rounds

WAIT_SHARE = 0.5
"""Of a round's deadline, for slices."""


MOST_LEFT_OUT = 3
"""Results in a row in which a reducer leaves this peer's slices out: who is late on the way to one may be in
time for another."""


class Reducing:
    """What one peer has to add up."""

    def __init__(self, rules: Rounds, draw: Draw, me: PeerId, allies: Mapping[PeerId, NeighbourView]) -> None:
        self.rules, self.draw, self.me = rules, draw, me
        self.members: frozenset[PeerId] = frozenset((me,))
        """Those among whom reducers are drawn: who takes part in the group as far as known, this peer
        included."""
        self._allies = allies
        self._avoided: dict[PeerId, int] = {}
        """Members that this peer sends nothing to before that round."""
        self._sent: dict[int, tuple[ContributionId, tuple[PeerId, ...]]] = {}
        """The own contribution to a round, and to whom its slices went."""
        self._left_out: Counter[PeerId] = Counter()
        self._spoken: defaultdict[int, set[PeerId]] = defaultdict(set)
        """Who has sent its slices of a round, or a word that it has none."""
        self._given: defaultdict[int, set[PeerId]] = defaultdict(set)
        """Who has sent slices."""
        self._until: dict[int, float] = {}
        """Rounds that are to be added up, and when at the latest."""
        self._done: set[int] = set()

    def reducers(self, round: int) -> tuple[PeerId, ...]:
        """To whom the slices of a round go, by shard."""
        avoided = {peer for peer, until in self._avoided.items() if round < until}
        return self.draw.reducers(round, self.members - avoided)

    def avoid(self, peer: PeerId, round: int) -> None:
        """Let somebody else reduce for as many rounds as one is drawn for. Others may send to it: both
        results count."""
        if peer != self.me:
            self._avoided[peer] = round + self.draw.block_rounds

    def soon(self, round: int, others: Iterable[PeerId]) -> frozenset[PeerId]:
        """Who is drawn among all that are known in the block of that round and in the next: links to them
        must stand before they are needed."""
        known = (self.me, *others)
        later = round + self.draw.block_rounds
        return frozenset((*self.draw.reducers(round, known), *self.draw.reducers(later, known)))

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
        if table.holding(contribution) >= sent:
            del self._left_out[maker]
            return
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
        return min(self._until.values(), default=float("inf"))

    def forget_until(self, settled: int) -> None:
        """Rounds up to this one are settled."""
        for kept in (self._spoken, self._given, self._until, self._sent):
            for round in [round for round in kept if round <= settled]:
                del kept[round]
        self._done = {round for round in self._done if round > settled}
        self._avoided = {peer: until for peer, until in self._avoided.items() if until > settled}

    def _all_spoke(self, round: int) -> bool:
        return not any(self._is_awaited(peer, round) for peer in self._silent(round))

    def _silent(self, round: int) -> Iterable[PeerId]:
        """Also those who are about to leave, and are drawn no more."""
        return self.members.union(self._allies) - self._spoken[round]

    def _is_awaited(self, peer: PeerId, round: int) -> bool:
        view = self._allies.get(peer)
        return view is None or (view.in_step and view.settled < round)
