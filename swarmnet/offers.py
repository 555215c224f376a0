"""What this peer has contributed, until it is known what became of it: settled, or given back to its maker.

A contribution may be left out of its round's set (it came too late, it lost against the smaller id of an
earlier life of this peer), or the history that holds it may be given up. Its maker decides by the settled
sets, some rounds after the round settled: what is not in the set is given back, once. Sets that this peer
has not settled itself (it jumped ahead with a snapshot) it asks its allies for; what nobody remembers is
given back. Part of `GroupRounds`, and outlives it: a peer that fetches the state anew keeps its offers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarmnet.histories import Histories
from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.manifest import Rounds
from swarmnet.round_events import AskIds, Effect, GiveBack, Reference, Resynchronise
from swarmnet.round_sets import RoundSet

ASK_SECONDS = 1.0
MOST_ASKS = 30
"""Times that allies are asked for a set before it counts as forgotten: a newcomer may be the first who is
met of another side, and knows little."""
DOUBT_SECONDS = 20.0
"""So long nothing is decided after a history was given up: until those that a partition kept apart are linked
again (a dial's deadline, and the pause after one that failed). Theirs may stand in the end (simulated)."""
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
MOST_REFERENCES = 16384
"""Of settled sets remembered, for those who ask: about 2 MB."""


@dataclass(slots=True)
class _Asked:
    times: int = 0
    at: float = float("-inf")


class Offers:
    """Own contributions and settled sets. Not more than one per round is undecided in one history."""

    def __init__(self, rules: Rounds) -> None:
        self.delay = 2 * rules.window
        """Rounds from settling to deciding: a history that a short partition made is given up by then."""
        self.open: OrderedDict[ContributionId, int] = OrderedDict()
        """Undecided ones, with their rounds."""
        self.taken: OrderedDict[ContributionId, int] = OrderedDict()
        """Those in settled sets."""
        self._sets: OrderedDict[int, tuple[Reference, ...]] = OrderedDict()
        self._references = 0
        self._asked: dict[int, _Asked] = {}
        self._unlearned: set[int] = set()
        self._settled = -1
        """As `decide` was told last."""
        self._doubted: set[ContributionId] = set()
        """Open ones that stay settled if nobody remembers the set."""
        self._agreed: OrderedDict[PeerId, int] = OrderedDict()
        self._gave_up = False
        """A history, since `decide` was called last."""
        self._decides_at = float("-inf")
        self._in_doubt = False
        """Whether that is still to come."""

    def agree(self, peer: PeerId, round: int) -> None:
        """Up to `round` this peer's history is ours."""
        self._agreed[peer] = round
        if len(self._agreed) > MOST_PEERS:
            self._agreed.popitem(last=False)

    def replaced(self, wish: Resynchronise, own: Histories, settled: int, chain: bytes) -> None:
        """The state after round `settled`, of the history with this chain value there, has taken the place of
        the own one. It may be of the own history after all: those who were to be followed gave theirs up
        meanwhile. Then nothing until there is in doubt, and this peer may be the last who knows the sets."""
        if wish.fork_round is not None and settled >= wish.fork_round and own.chain.at(settled) == chain:
            self.undo(settled + 1)
        else:
            self.give_up(wish, own.allies)

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

    def made(self, round: int, identity: ContributionId) -> None:
        self.open[identity] = round

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
        self._gave_up = True
        for peer, agreed in self._agreed.items():
            self._agreed[peer] = min(agreed, round - 1)
        for known in [known for known in self._sets if known >= round]:
            self._forget(known)
        for identity, of_round in list(self.taken.items()):
            if of_round >= round:
                self.open[identity] = self.taken.pop(identity)

    def decide(self, settled: int, allies: Sequence[PeerId], now: float) -> list[Effect]:
        """What is known by now, `settled` being the newest settled round."""
        self._settled = settled
        if self._gave_up:
            self._gave_up, self._decides_at = False, now + DOUBT_SECONDS
        self._in_doubt = now < self._decides_at
        effects: list[Effect] = []
        asks: dict[PeerId, set[int]] = {}
        for identity, round in list(self.open.items()):
            if round + self.delay > settled or self._in_doubt:
                continue
            references = self._sets.get(round)
            if references is None:
                ally = self._to_ask(round, allies, now)
                if ally is not None:
                    asks.setdefault(ally, set()).add(round)
            forgotten = references is None and self._asked[round].times > MOST_ASKS
            if references is None and not forgotten:
                continue
            del self.open[identity]
            doubted = identity in self._doubted
            self._doubted.discard(identity)
            if self._holds(round, identity) or (forgotten and doubted):
                self.taken[identity] = round
                if len(self.taken) > MOST_TAKEN:
                    self.taken.popitem(last=False)
            else:
                effects.append(GiveBack(round, identity))
        for round in list(self._unlearned):
            ally = self._to_ask(round, allies, now)
            if ally is not None:
                asks.setdefault(ally, set()).add(round)
            if self._asked[round].times >= LEARN_ASKS:
                self._unlearned.discard(round)
        return effects + [AskIds(ally, tuple(sorted(rounds))) for ally, rounds in asks.items()]

    def next_deadline(self) -> float:
        """When to decide again if nothing else happens."""
        due = {round for round in self.open.values() if round + self.delay <= self._settled}
        asked = self._unlearned if self._in_doubt else self._unlearned | due
        times = [entry.at + ASK_SECONDS for round, entry in self._asked.items() if round in asked]
        if self._in_doubt and due:
            times.append(self._decides_at)
        return min(times, default=float("inf"))

    def _to_ask(self, round: int, allies: Sequence[PeerId], now: float) -> PeerId | None:
        asked = self._asked.setdefault(round, _Asked())
        if now < asked.at + ASK_SECONDS:
            return None
        asked.at = now
        if not allies:
            return None
        asked.times += 1
        return allies[asked.times % len(allies)] if asked.times <= MOST_ASKS else None

    def _holds(self, round: int, identity: ContributionId) -> bool:
        """Whether the set of a round is known and has this contribution."""
        return any(entry.id == identity for entry in self._sets.get(round, ()))

    def _forget(self, round: int) -> None:
        self._references -= len(self._sets.pop(round, ()))
