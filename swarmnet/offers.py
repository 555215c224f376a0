"""What this peer has contributed, until it is known what became of it: settled, or given back to its maker.

A contribution may be left out of its round's set (it came too late, it lost against the smaller id of an
earlier life of this peer), or the history that holds it may be given up. Its maker decides by the settled
sets, some rounds after the round settled: what is not in the set is given back, once. Sets that this peer
has not settled itself (it jumped ahead with a snapshot) it asks its allies for; what nobody remembers is
given back. Part of `GroupRounds`, and outlives it: a peer that fetches the state anew keeps its offers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.manifest import Rounds
from swarmnet.round_events import AskIds, Effect, GiveBack, Reference

ASK_SECONDS = 1.0
MOST_ASKS = 8
"""Allies asked for a set before it counts as forgotten."""
MOST_TAKEN = 4096
"""Own settled contributions remembered, in case their history is given up."""
MOST_PEERS = 4096
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
        self._agreed: OrderedDict[PeerId, int] = OrderedDict()

    def agree(self, peer: PeerId, round: int) -> None:
        """Up to `round` this peer's history is ours."""
        self._agreed[peer] = round
        if len(self._agreed) > MOST_PEERS:
            self._agreed.popitem(last=False)

    def agreed(self, peers: Iterable[PeerId]) -> int:
        """Up to which round one of these peers had our history when it was last heard; -1: nobody knows."""
        return max((self._agreed.get(peer, -1) for peer in peers), default=-1)

    def made(self, round: int, identity: ContributionId) -> None:
        self.open[identity] = round

    def settled(self, round: int, references: tuple[Reference, ...]) -> None:
        """The set of a round of the own history."""
        self._forget(round)
        self._asked.pop(round, None)
        self._sets[round] = references
        self._references += len(references)
        while self._references > MOST_REFERENCES and len(self._sets) > 1:
            self._forget(next(iter(self._sets)))

    def told(self, complete: Iterable[int], references: Sequence[Reference]) -> None:
        """An ally's answer: whole sets of rounds that are settled there."""
        for round in complete:
            if round in self._asked:
                self.settled(round, tuple(entry for entry in references if entry.round == round))

    def of_round(self, round: int) -> tuple[Reference, ...] | None:
        """The settled set, if it is remembered."""
        return self._sets.get(round)

    def undo(self, round: int) -> None:
        """The history from `round` on is given up: what became of contributions to it is open again."""
        for peer, agreed in self._agreed.items():
            self._agreed[peer] = min(agreed, round - 1)
        for known in [known for known in self._sets if known >= round]:
            self._forget(known)
        for identity, of_round in list(self.taken.items()):
            if of_round >= round:
                self.open[identity] = self.taken.pop(identity)

    def decide(self, settled: int, allies: Sequence[PeerId], now: float) -> list[Effect]:
        """What is known by now, `settled` being the newest settled round."""
        effects: list[Effect] = []
        for identity, round in list(self.open.items()):
            if round + self.delay > settled:
                continue
            references = self._sets.get(round)
            if references is None:
                effects += self._ask(round, allies, now)
            forgotten = references is None and self._asked[round].times > MOST_ASKS
            if references is None and not forgotten:
                continue
            del self.open[identity]
            if references is not None and any(entry.id == identity for entry in references):
                self.taken[identity] = round
                if len(self.taken) > MOST_TAKEN:
                    self.taken.popitem(last=False)
            else:
                effects.append(GiveBack(round, identity))
        return effects

    def next_deadline(self) -> float:
        """When to decide again if nothing else happens."""
        undecided = set(self.open.values())
        return min(
            (asked.at + ASK_SECONDS for round, asked in self._asked.items() if round in undecided),
            default=float("inf"),
        )

    def _ask(self, round: int, allies: Sequence[PeerId], now: float) -> list[Effect]:
        asked = self._asked.setdefault(round, _Asked())
        if now < asked.at + ASK_SECONDS:
            return []
        asked.at = now
        if not allies:
            return []
        asked.times += 1
        if asked.times > MOST_ASKS:
            return []
        return [AskIds(allies[(asked.times + round) % len(allies)], (round,))]

    def _forget(self, round: int) -> None:
        self._references -= len(self._sets.pop(round, ()))
