"""What this peer has contributed, until it is known what became of it: settled, or given back to its maker.

A contribution may be left out of its round's set (it came too late, it lost against the smaller id of an
earlier life of this peer), or the history that holds it may be given up. Its maker decides by the settled
sets, some rounds after the round settled: what is not in the set is given back, once. Sets that this peer
has not settled itself (it jumped ahead with a snapshot) it asks its allies for; what nobody remembers is
given back. Where there are reducers, sets consist of results, and a contribution is in a set shard by shard:
what counts of a set is read in the results' tables, and the shards that it is not in are given back. Part of
`GroupRounds`, and outlives it: a peer that fetches the state anew keeps its offers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.contribution_sets import RoundSet
from swarmnet.rounds.events import (
    AskIds,
    Effect,
    GiveBack,
    Reference,
    Resynchronise,
    Sets,
    Want,
)
from swarmnet.rounds.fork_choice import Histories
from swarmnet.rounds.history import Chain, Earlier
from swarmnet.rounds.result_table import Draw, Table, counting
from swarmnet.run.manifest import Rounds

ASK_SECONDS = 1.0
MOST_ASKS = 30
"""Times that allies are asked for a set before it counts as forgotten: a newcomer may be the first who is
met of another side, and knows little."""
EACH_ASKS = 3
"""Of these to whoever is met after so many: the one who knows may have been away all the time (simulated)."""
AWAY_SECONDS = 90.0
"""So long nothing is given back while somebody who may hold it is away or on another history: a partition of
a minute, and its healing. In the history that stands in the end it may be settled (simulated)."""
LONGEST_WAIT_SECONDS = 600.0
"""Of a contribution, however many come and go meanwhile."""
HEARD_SECONDS = 2.0
"""Who was an ally so short a time before may have taken a contribution: allies are heard once a second."""
MOST_TAKEN = 4096
"""Own settled contributions remembered, in case their history is given up."""
MOST_PEERS = 4096
DOUBTED_ROUNDS = 128
"""Looked up again where it is not known since when histories differ."""
LEARNED_ROUNDS = 64
"""Sets before a fetched state that are asked for: whoever meets this peer first after a partition may have
contributed to them, and would be told by nobody else that it counted (simulated)."""
LEARN_ASKS = 10
"""Times they are asked for."""
MOST_GIVEN_UP = 4
"""Histories remembered that this peer has left: another may have taken one up and go on with it, and nobody
else knows the sets (simulated)."""
MOST_REFERENCES = 16384
"""Of settled sets remembered, for those who ask: about 2 MB."""
MOST_TABLES = 1024
"""Of results, the newest: an own contribution is decided long before so many came."""
WHOLE = (0,)
"""The parts of a contribution that is in a set or is not."""


@dataclass(frozen=True, slots=True)
class Past:
    """What a peer leaves to its later life of the rounds up to one."""

    sets: Sets = field(default_factory=dict)
    """The newest settled ones that it knows."""
    earlier: Earlier | None = None
    """The chain of its history, farther back."""


NOTHING_PAST = Past()


@dataclass(slots=True)
class _Asked:
    """For the set of one round."""

    times: Counter[PeerId] = field(default_factory=Counter)
    at: float = float("-inf")
    is_over: bool = False
    """Everybody who was there was asked often enough, and has had time to answer."""

    def next_of(self, allies: Sequence[PeerId]) -> PeerId | None:
        """Whom to ask now; None: nobody is left to ask."""
        ally = min(allies, key=self.times.__getitem__, default=None)
        is_over = ally is None or (self.times.total() >= MOST_ASKS and self.times[ally] >= EACH_ASKS)
        return None if is_over else ally


class Offers:
    """Own contributions and settled sets. Not more than one per round is undecided in one history."""

    def __init__(self, rules: Rounds, draw: Draw | None = None) -> None:
        """`draw`: of reducers, where there are any."""
        self._draw = draw
        self._parts = WHOLE if draw is None else tuple(range(draw.shards))
        self._returned: dict[ContributionId, frozenset[int]] = {}
        """Parts that were given back already, of those in `open` and `taken`."""
        self._tables: OrderedDict[ContributionId, Table] = OrderedDict()
        self.delay = 2 * rules.window
        """Rounds from settling to deciding: a history that a short partition made is given up by then."""
        self.open: OrderedDict[ContributionId, int] = OrderedDict()
        """Undecided ones, with their rounds."""
        self.taken: OrderedDict[ContributionId, int] = OrderedDict()
        """Those in settled sets."""
        self._sets: OrderedDict[int, tuple[Reference, ...]] = OrderedDict()
        self._references = 0
        self._given_up: deque[tuple[Chain, Sets]] = deque(maxlen=MOST_GIVEN_UP)
        """Histories, and their sets that this peer settled."""
        self._asked: dict[int, _Asked] = {}
        self._unlearned: set[int] = set()
        self._settled = -1
        """As `decide` was told last."""
        self._doubted: set[ContributionId] = set()
        """Open ones that stay settled if nobody remembers the set."""
        self._agreed: OrderedDict[PeerId, int] = OrderedDict()
        self._allied_at: OrderedDict[PeerId, float] = OrderedDict()
        """When each was heard last as one of our history."""
        self._made_at: dict[ContributionId, float] = {}
        """Of those in `open` and `taken`."""
        self._reducers: dict[ContributionId, frozenset[PeerId]] = {}
        """The other peers that the slices of those were sent to."""
        self._waits_until = float("inf")
        """For somebody who is away and may hold an own contribution; infinite: for nobody."""

    def agree(self, peer: PeerId, round: int, now: float) -> None:
        """Up to `round` this peer's history is ours."""
        self._agreed[peer], self._allied_at[peer] = round, now
        self._allied_at.move_to_end(peer)
        if len(self._agreed) > MOST_PEERS:
            self._agreed.popitem(last=False)
        if len(self._allied_at) > MOST_PEERS:
            self._allied_at.popitem(last=False)

    def released(self, peer: PeerId) -> None:
        """It is a neighbour no longer, but of our history as before."""
        self._allied_at.pop(peer, None)

    def replaced(self, wish: Resynchronise, own: Histories, settled: int, chain: bytes) -> None:
        """The state after round `settled`, of the history with this chain value there, has taken the place of
        the own one. It may be of the own history after all: those who were to be followed gave theirs up
        meanwhile. Then nothing until there is in doubt, and this peer may be the last who knows the sets."""
        before = dict(self._sets)
        if wish.fork_round is not None and settled >= wish.fork_round and own.chain.at(settled) == chain:
            self.undo(settled + 1)
        else:
            self.give_up(wish, own.allies)
        for kept, sets in self._given_up:  # Two who gave up theirs for each other's: one of them stands.
            if kept.at(settled) == chain:
                self.restored({of: sets[of] for of in sets if of <= settled and of not in self._sets})
        self._given_up.append((own.chain, before))

    def give_up(self, wish: Resynchronise, allies: Container[PeerId]) -> None:
        """The state is fetched anew; `allies` were on the own history to its end. Where it is not known from
        which round on the other history differs, it is at the latest after what was last agreed upon. Not
        with an ally: who was on this history and is far ahead at once has taken up the other itself."""
        if wish.fork_round is not None and wish.exact:
            self.undo(wish.fork_round)
            return
        known = [self._agreed[peer] for peer in wish.peers if peer in self._agreed and peer not in allies]
        others = [round for peer, round in self._agreed.items() if peer not in allies]
        agreed = max(known) if known else min(others, default=-1)
        self.undo(1 + agreed)
        # Who agreed may have given that history up since: what its sets hold is looked up again.
        self._doubted.update(name for name, of in self.taken.items() if of > agreed - DOUBTED_ROUNDS)
        self._doubted.update(name for name, of in self.open.items() if of <= agreed and self._holds(of, name))
        self.undo(1 + agreed - DOUBTED_ROUNDS)

    def jumped(self, settled: int) -> None:
        """The state after `settled` was fetched or read from a disk: the newest sets up to there that are
        not known are learned from allies."""
        first = max(0, settled + 1 - LEARNED_ROUNDS)
        self._unlearned = {round for round in range(first, settled + 1) if round not in self._sets}

    def restored(self, sets: Sets) -> None:
        """Sets of the own history that an earlier life of this peer has left on its disk: when a whole group
        starts again, nobody else may know them."""
        for round in sorted(sets):
            self.settled(round, sets[round])

    def known(self, until: int) -> Sets:
        """The newest sets up to this round, for a later life."""
        first = until + 1 - LEARNED_ROUNDS
        return {round: self._sets[round] for round in sorted(self._sets) if first <= round <= until}

    def remembers(self, round: int) -> bool:
        """Return whether the settled set of this round is known here, so that others can be told of it."""
        return round in self._sets

    def made(
        self, round: int, identity: ContributionId, now: float, reducers: frozenset[PeerId] = frozenset()
    ) -> None:
        """Add an own contribution to a round. `reducers`: the other peers that its slices were sent to."""
        self.open[identity], self._made_at[identity] = round, now
        if reducers:
            self._reducers[identity] = reducers

    def read(self, identity: ContributionId, table: Table) -> None:
        """Who is in a result."""
        self._tables[identity] = table
        if len(self._tables) > MOST_TABLES:
            self._tables.popitem(last=False)

    def wants(self, identity: ContributionId) -> bool:
        """Whether what became of an own contribution is to be read in this result."""
        if self._draw is None or identity in self._tables:
            return False
        rounds = set(self.open.values())
        return any(entry.id == identity for round in rounds for entry in self._sets.get(round, ()))

    def is_held(self, identity: ContributionId, state: RoundSet) -> bool:
        """Whether an own contribution is in an open round's set as held here, all of it."""
        return self._left_out(identity, tuple(state.held.values())) == ()

    def are_held(self, rounds: Mapping[int, RoundSet]) -> bool:
        """Whether all own contributions to these open rounds are in their sets."""
        return all(self.is_held(name, rounds[of]) for name, of in self.open.items() if of in rounds)

    def makers(self, references: Iterable[Reference]) -> frozenset[bytes]:
        """Those whose slices are in a set's results, as tables name them (`tag_of`)."""
        tables = (self._tables.get(entry.id) for entry in references)
        return frozenset(one.peer for table in tables if table is not None for one in table.contributors)

    def settled(self, round: int, references: tuple[Reference, ...]) -> None:
        """The set of a round of the own history."""
        self._forget(round)
        self._asked.pop(round, None)
        self._unlearned.discard(round)
        self._sets[round] = references
        self._references += len(references)
        while self._references > MOST_REFERENCES and len(self._sets) > 1:
            self._forget(next(iter(self._sets)))

    def told(self, complete: Iterable[int], references: Sequence[Reference]) -> None:
        """An ally's answer: whole sets of rounds that are settled there."""
        for round in complete:
            if round in self._asked:
                self.settled(round, tuple(entry for entry in references if entry.round == round))

    def answer(
        self, asked: Iterable[int], open_sets: Mapping[int, RoundSet], settled: int
    ) -> tuple[tuple[Reference, ...], tuple[int, ...]]:
        """What is held of the rounds that somebody asks for, and those that are settled here and remembered:
        of these it is the whole set."""
        asked = tuple(asked)
        complete = tuple(round for round in asked if round <= settled and round in self._sets)
        references = [entry for round in complete for entry in self._sets[round]]
        for round in asked:
            if round in open_sets:
                references += open_sets[round].held.values()
        return tuple(references), complete

    def undo(self, round: int) -> None:
        """The history from `round` on is given up: what became of contributions to it is open again."""
        for peer, agreed in self._agreed.items():
            self._agreed[peer] = min(agreed, round - 1)
        for known in [known for known in self._sets if known >= round]:
            self._forget(known)
        for identity, of_round in list(self.taken.items()):
            if of_round >= round:
                self.open[identity] = self.taken.pop(identity)
                self._asked.pop(of_round, None)

    def decide(self, settled: int, allies: Sequence[PeerId], now: float) -> list[Effect]:
        """What is known by now, `settled` being the newest settled round."""
        self._settled = settled
        effects: list[Effect] = []
        asks: dict[PeerId, set[int]] = {}
        self._waits_until = float("inf")
        due = [(identity, round) for identity, round in self.open.items() if round + self.delay <= settled]
        if not due and not self._unlearned:
            return effects
        for identity, round in due:
            references = self._sets.get(round)
            left_out = None if references is None else self._left_out(identity, references)
            if left_out is None:
                ally = self._to_ask(round, allies, now)
                if ally is not None or not self._is_forgotten(identity, round, allies, now):
                    if ally is not None and references is None:
                        asks.setdefault(ally, set()).add(round)
                    elif ally is not None:
                        unread = (entry.id for entry in references or () if entry.id not in self._tables)
                        effects.append(Want(ally, tuple(unread)))
                    continue
                # Nobody remembers the set, or who is in a result of it.
                left_out = () if identity in self._doubted else self._parts
            elif references is not None:
                self._asked.pop(round, None)
            if left_out:
                until = self._waits_for_others(identity, round, allies)
                if until > now:
                    self._waits_until = min(self._waits_until, until)
                    continue
            effects += self._decided(identity, round, left_out)
        for round in list(self._unlearned):
            ally = self._to_ask(round, allies, now)
            if ally is not None:
                asks.setdefault(ally, set()).add(round)
            if self._asked[round].times.total() >= LEARN_ASKS:
                self._unlearned.discard(round)
        return effects + [AskIds(ally, tuple(sorted(rounds))) for ally, rounds in asks.items()]

    def next_deadline(self) -> float:
        """When to decide again if nothing else happens."""
        if not self._asked:
            return self._waits_until
        due = {round for round in self.open.values() if round + self.delay <= self._settled}
        undecided = due | self._unlearned
        asked = (entry.at + ASK_SECONDS for round, entry in self._asked.items() if round in undecided)
        return min([self._waits_until, *asked])

    def _away_since(self, allies: Container[PeerId], round: int) -> float:
        """When one was an ally last of those who are none now, or have not settled this round yet: after a
        partition they may be about to settle what they alone have of it (simulated)."""
        last = (
            at for peer, at in reversed(self._allied_at.items())
            if peer not in allies or self._agreed.get(peer, -1) < round
        )  # fmt: skip
        return next(last, float("-inf"))

    def _waits_for_others(self, identity: ContributionId, round: int, allies: Container[PeerId]) -> float:
        """Until when a contribution is not given back, since somebody who may hold it is away."""
        made_at = self._made_at[identity]
        away_since = self._away_since(allies, round)
        if away_since + HEARD_SECONDS < made_at:
            if not self._reducers_may_differ(identity, round):
                return float("-inf")
            away_since = made_at
        return min(away_since + AWAY_SECONDS, made_at + LONGEST_WAIT_SECONDS)

    def _reducers_may_differ(self, identity: ContributionId, round: int) -> bool:
        """Return whether a reducer of this contribution is neither in the round's set nor known to have
        settled the round as this peer did. Slices reach a reducer that is not heard: a line may be cut in one
        direction only. It may then sum them in a history that stands in the end (simulated)."""
        makers = {entry.peer for entry in self._sets.get(round, ())}
        others = self._reducers.get(identity, frozenset()) - makers
        return any(self._agreed.get(reducer, -1) < round for reducer in others)

    def _decided(self, identity: ContributionId, round: int, left_out: tuple[int, ...]) -> list[Effect]:
        """These parts of it are in no set of the history that stands, the others are."""
        del self.open[identity]
        self._doubted.discard(identity)
        before = self._returned.get(identity, frozenset())
        returned = before.union(left_out)
        if len(returned) < len(self._parts):
            self._returned[identity] = returned
            self._take(identity, round)
        else:
            self._forget_own(identity)
        news = tuple(sorted(returned - before))
        if not news:
            return []
        return [GiveBack(round, identity, () if self._draw is None else news)]

    def _left_out(self, identity: ContributionId, references: Sequence[Reference]) -> tuple[int, ...] | None:
        """The parts of an own contribution that are in none of a set; None: not known yet."""
        if self._draw is None:
            return () if any(entry.id == identity for entry in references) else WHOLE
        tables = {entry.peer: self._tables.get(entry.id) for entry in references}
        known = {maker: table for maker, table in tables.items() if table is not None}
        if len(known) < len(tables):
            return None
        round = references[0].round if references else 0
        counted = counting(known, self._draw, round)
        held = {
            shard
            for shard, makers in counted.items()
            if any(shard in known[maker].holding(identity) for maker in makers)
        }
        return tuple(part for part in self._parts if part not in held)

    def _forget_own(self, identity: ContributionId) -> None:
        self._made_at.pop(identity, None)
        self._reducers.pop(identity, None)
        self._returned.pop(identity, None)

    def _take(self, identity: ContributionId, round: int) -> None:
        self.taken[identity] = round
        if len(self.taken) > MOST_TAKEN:
            oldest, _ = self.taken.popitem(last=False)
            self._forget_own(oldest)

    def _to_ask(self, round: int, allies: Sequence[PeerId], now: float) -> PeerId | None:
        asked = self._asked.setdefault(round, _Asked())
        if now < asked.at + ASK_SECONDS:
            return None
        asked.at = now
        ally = asked.next_of(allies)
        asked.is_over = ally is None and asked.times.total() >= MOST_ASKS
        if ally is not None:
            asked.times[ally] += 1
        return ally

    def _is_forgotten(
        self, identity: ContributionId, round: int, allies: Sequence[PeerId], now: float
    ) -> bool:
        """Whether nobody remembers the set of a round, or who is in a result of it, so that an own
        contribution to it need not wait for that."""
        asked = self._asked[round]
        if now >= self._made_at[identity] + LONGEST_WAIT_SECONDS:
            return True
        return asked.is_over and asked.next_of(allies) is None

    def _holds(self, round: int, identity: ContributionId) -> bool:
        """Whether the set of a round is known and has this contribution, or a part of it."""
        references = self._sets.get(round)
        left_out = None if references is None else self._left_out(identity, references)
        return left_out is not None and left_out != self._parts

    def _forget(self, round: int) -> None:
        self._references -= len(self._sets.pop(round, ()))
