"""Finds the way of every microbatch ahead of its body: a peer asks the cheapest next one for a place.

A body takes seconds for a hop, a question milliseconds. When a microbatch's forward begins on its origin, the
next peer is asked whether it can begin then and then (reservations.py); that one books it or says no, and
having said yes it asks on in turn. What a peer knows: its own bookings, what its neighbours told of theirs
and of their costs to go, and the hops as it measured them. The choice is `cheapest_path.cheapest`.

Swaps are never asked for: nobody may wait for them (cheapest_path.py), and they gain nothing online.

No IO. Times in seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from statistics import median

from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.routing.capacity import Booking, Load
from swarmnet.routing.cheapest_path import Choice, Neighbour, ToGo, cheapest, costs_to_go
from swarmnet.run.path_rules import Header, Rules, ways_on

MOST_QUESTIONS = 4
"""The last of them asks whoever it is for a place at any time."""
GIVE_UP_QUESTIONS = 8
"""Then the router chooses, as it does where nobody has told anything."""
ANSWER_SECONDS = 1.0
"""How long to wait for an answer, besides two round trips."""
MEASUREMENTS_KEPT = 5
"""Of each hop; their median counts: one lost packet must not keep microbatches away for long."""
TIE = 0.01
"""Ways whose times differ by less than this share are equal, and the stage that was visited less is next: by
cost alone the same one would always be left out where all are alike, and it would learn nothing."""
LEAST_SHARE = 0.25
"""Of its share of the microbatches that go from here: what a stage gets at least, where it is not DEAR. Its
share is that of the ways on that lead through it, by which all stages would be visited alike. Where more
microbatches are whole, fewer are left to learn from what it is to be without a stage, so there the least is
Rules.whole_share.
A stage that nobody visits is not only left untrained: its first, slow passes stand for its speed. By cost
alone two of four alike ones got 3 and 6 of 1,000 microbatches on real processes (measured)."""
DEAR = 2.0
"""Times the seconds of the cheapest way: what would be too much for that share."""
VISITS_KEPT = 0.98
"""Of the counts of visits, at each further one: the last 50 count."""
HALVED_VISITS = 200.0
"""After so many microbatches that went elsewhere a hop counts half: whoever seemed far is tried again."""


@dataclass(slots=True)
class Seen:
    """What is known of a neighbour."""

    load: Load | None = None
    """With bookings on the own clock."""
    to_go: ToGo = field(default_factory=dict)
    latency: float = 0.0
    """One way, of a message without a body."""
    hop: float | None = None
    """Of a body, as measured; while the first one is under way, as others are."""
    measured: tuple[float, ...] = ()
    measured_at: int | None = None
    """In microbatches that had gone on from here."""


@dataclass(slots=True)
class Quest:
    """A microbatch that is to go on from here."""

    header: Header
    ready: float
    """When its output is expected to be there."""
    question: int = 0
    asked: PeerId | None = None
    until: float = 0.0
    """An answer is waited for so long."""
    choice: Choice | None = None
    """The last one that was asked for, or given ..."""
    stages: int = 0
    """... and among how many stages it was."""
    granted: PeerId | None = None
    sent: bool = False
    """The body was on its way there: if it is asked for again, it has failed."""
    silent: set[PeerId] = field(default_factory=set)
    """Asked in vain."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A question to send."""

    key: MicrobatchId
    peer: PeerId
    question: int
    header: Header
    """For that peer."""
    arrival: float
    start: float
    firm: bool


class Scouting:
    """One peer's knowledge and questions."""

    def __init__(self, rules: Rules, stage: int) -> None:
        self.rules = rules
        self.stage = stage
        self.seen: dict[PeerId, Seen] = {}
        self.quests: dict[MicrobatchId, Quest] = {}
        self.gone_on = 0
        """Microbatches that have got a place below."""
        self.visits: dict[int, float] = {}
        """Microbatches that went from here to each stage of several, those of long ago count less."""
        self.asked = self.refused = self.unanswered = 0

    # -- what is known --------------------------------------------------------------------------------

    def told(self, peer: PeerId, load: Load, to_go: ToGo, latency: float, now: float) -> None:
        """A peer's own word. Its bookings are in seconds from the moment when it said so."""
        since = now - latency
        bookings = tuple(Booking(b.start + since, b.release + since) for b in load.bookings)
        seen = self._seen(peer)
        seen.load = Load(load.memory, load.forward_seconds, load.backward_seconds, bookings)
        seen.to_go, seen.latency = to_go, latency

    def measured(self, peer: PeerId, hop: float) -> None:
        """A body there and its gradient back took twice as long."""
        seen = self._seen(peer)
        seen.measured = (*seen.measured, hop)[-MEASUREMENTS_KEPT:]
        seen.hop, seen.measured_at = median(seen.measured), self.gone_on

    def forget(self, peer: PeerId) -> None:
        self.seen.pop(peer, None)

    def table(self, live: Iterable[tuple[PeerId, int]]) -> dict[tuple[int, int], float]:
        """The own costs to go, by those of the live neighbours and their stages."""
        return costs_to_go(self.stage, self.rules, self._neighbours(live))

    def rest(self, header: Header, table: ToGo) -> float:
        """What is still to come from the end of the own forward, as far as is known."""
        return table.get((header.frontier, header.hops_left), 0.0)

    # -- questions ------------------------------------------------------------------------------------

    def seek(
        self, key: MicrobatchId, live: Iterable[tuple[PeerId, int]], now: float,
        avoid: Collection[PeerId] = (),
    ) -> Asking | None:  # fmt: skip
        """The next question for a microbatch with a quest; None: nobody is known who could take it."""
        quest = self.quests[key]
        quest.asked = quest.granted = None
        if quest.question >= GIVE_UP_QUESTIONS:
            return None
        ahead = [other for other in self._neighbours(live) if other.stage > quest.header.frontier]
        ready = max(quest.ready, now)
        choice = self._choice(quest, ahead, ready, now, quest.silent.union(avoid))
        if choice is None and avoid:
            choice = self._choice(quest, ahead, ready, now, quest.silent)
        if choice is None:
            return None
        quest.question += 1
        quest.asked, quest.choice = choice.peer, choice
        quest.until = now + ANSWER_SECONDS + 4 * self._seen(choice.peer).latency
        if self._seen(choice.peer).hop is None:  # One is enough to hear how far it is.
            self._seen(choice.peer).hop = max((s.hop for s in self.seen.values() if s.hop), default=None)
        self.asked += 1
        firm = quest.question >= MOST_QUESTIONS
        return Asking(key, choice.peer, quest.question, choice.header, choice.arrival, choice.start, firm)

    def answered(self, peer: PeerId, key: MicrobatchId, question: int, start: float | None) -> Quest | None:
        """An answer came: its quest, if it was the one that is waited for. `start`: None for a no."""
        quest = self.quests.get(key)
        if quest is None or quest.asked != peer or quest.question != question or quest.choice is None:
            return None
        quest.asked = None
        if start is None:
            self.refused += 1
            if question >= MOST_QUESTIONS:
                quest.silent.add(peer)
            return quest
        quest.granted = peer
        self.gone_on += 1
        if quest.stages > 1:
            stage = quest.choice.header.visited[-1]
            self.visits = {s: VISITS_KEPT * count for s, count in self.visits.items()}
            self.visits[stage] = self.visits.get(stage, 0.0) + 1.0
        return quest

    def back(self, quest: Quest, start: float) -> float:
        """When the gradient is expected here, if the forward there begins then."""
        assert quest.choice is not None
        return quest.choice.back + max(0.0, start - quest.choice.start)

    def overdue(self, now: float) -> list[MicrobatchId]:
        """Those whose question was not answered in time: they need another."""
        late = []
        for key, quest in self.quests.items():
            if quest.asked is not None and now >= quest.until:
                self.unanswered += 1
                quest.silent.add(quest.asked)
                quest.asked = None
                late.append(key)
        return late

    def lost(self, peer: PeerId) -> list[MicrobatchId]:
        """That peer is gone: those that had asked it, or had a place there, need another."""
        hit = []
        for key, quest in self.quests.items():
            if peer in (quest.asked, quest.granted) and not quest.sent:
                quest.asked = quest.granted = None
                hit.append(key)
        return hit

    def _choice(
        self, quest: Quest, ahead: Iterable[Neighbour], ready: float, now: float, avoid: Collection[PeerId]
    ) -> Choice | None:
        """The cheapest, or what is nearly as cheap by a stage that was sent fewer microbatches."""
        by_stage: dict[int, list[Neighbour]] = {}
        for other in sorted(ahead, key=lambda other: other.hop_seconds):  # The first ones rule out others.
            by_stage.setdefault(other.stage, []).append(other)
        found = [
            choice
            for others in by_stage.values()
            for choice in (cheapest(quest.header, self.rules, others, ready, now, avoid),)
            if choice is not None
        ]
        quest.stages, ways = len(found), sum(ways_on(choice.header, self.rules) for choice in found)
        least = min((choice.back for choice in found), default=0.0)
        scarce = [
            choice for choice in found
            if self._is_scarce(choice, ways)
            and choice.back - ready <= DEAR * (least - ready)
        ]  # fmt: skip
        if scarce:
            return min(scarce, key=lambda choice: choice.back)
        near = [choice for choice in found if choice.back <= least + TIE * (least - ready)]
        return min(near, default=None, key=lambda c: (self._had(c), c.back))

    def _had(self, choice: Choice) -> float:
        """Microbatches that its stage has had from here, for each way on."""
        return self.visits.get(choice.header.visited[-1], 0.0) / max(1, ways_on(choice.header, self.rules))

    def _is_scarce(self, choice: Choice, ways: int) -> bool:
        """Whether its stage gets too few of the microbatches that go from here by one of so many ways."""
        least = max(LEAST_SHARE, self.rules.whole_share)
        return self._had(choice) * ways < least * sum(self.visits.values())

    def _seen(self, peer: PeerId) -> Seen:
        return self.seen.setdefault(peer, Seen())

    def _neighbours(self, live: Iterable[tuple[PeerId, int]]) -> list[Neighbour]:
        """Those that have told something."""
        return [
            Neighbour(peer, stage, self._hop(seen), seen.load, seen.to_go)
            for peer, stage in live
            for seen in (self.seen.get(peer),)
            if seen is not None and seen.load is not None
        ]

    def _hop(self, seen: Seen) -> float:
        """Unknown ones count as near as their latency allows: they are tried."""
        hop = 0.0 if seen.hop is None else seen.hop
        if seen.measured_at is not None:
            hop *= 0.5 ** ((self.gone_on - seen.measured_at) / HALVED_VISITS)
        return max(seen.latency, hop)
