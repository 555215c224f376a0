"""Reserve a place for every microbatch on its next peer before its *body*, the hidden states, is sent.

Sending a body (a *hop*) takes seconds, and a request takes milliseconds. Therefore a peer requests a place
when the forward pass of a microbatch begins: on the cheapest next peer, for the time at which the body should
arrive there (`reservations.py`). The next peer refuses, or it books the place and requests one on the
following stage in turn. A *quest* is the search for a place for one microbatch, with one or more requests.

The cheapest peer follows from measured hops, and from the bookings and cost tables that neighbours reported
(`cheapest_path.cheapest`).

The module does no IO. All times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from statistics import median

from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.routing.capacity import Booking, Load
from swarmnet.routing.cheapest_path import Neighbour, PathChoice, ToGo, cheapest, costs_to_go
from swarmnet.run.path_rules import PathHeader, PathRules, count_continuations

MAX_QUESTIONS = 4
"""From the request with this number on, a place at any time is accepted: the request is firm."""
GIVE_UP_QUESTIONS = 8
"""After this many requests the router chooses, as it does when no peer has reported anything."""
ANSWER_SECONDS = 1.0
"""Seconds to wait for an answer, in addition to two round trips."""
MEASUREMENTS_KEPT = 5
"""Number of measurements kept for each hop. Their median hides the delay after a lost packet."""
TIE = 0.01
"""Ways whose times differ by less than this share are equal, and the less visited stage is next. If cost
alone decided, the same stage of equal ones would always be left out, and it would learn nothing."""
MIN_SHARE = 0.25
"""Minimum fraction of its fair share that a stage gets of the microbatches from here, unless it is `DEAR`.
The fair share is proportional to the number of ways that lead through the stage. If more microbatches take
full paths, fewer are left to train without a stage; the minimum is then `PathRules.full_path_fraction`. A
stage that is never visited is not trained, and its first slow passes remain its measured speed. When cost
alone decided, two of four equal peers got 3 and 6 of 1,000 microbatches on real processes (measured)."""
DEAR = 2.0
"""Factor on the time of the cheapest way above which a stage does not get its minimum share."""
VISITS_KEPT = 0.98
"""Decay of the visit counts at each further visit, which is a memory of about 50 visits."""
HALVED_VISITS = 200.0
"""Number of other microbatches after which a measured hop counts half, so that a far peer is tried again."""


@dataclass(slots=True)
class KnownNeighbour:
    """What is known about a neighbour."""

    load: Load | None = None
    """Reported load, with the bookings on the local clock; None until the neighbour has reported."""
    to_go: ToGo = field(default_factory=dict)
    latency: float = 0.0
    """Seconds of a message without a body, one way."""
    hop: float | None = None
    """Seconds of a body, one way, as measured; the maximum of all hops while the first one is in flight."""
    measured: tuple[float, ...] = ()
    """Newest measurements of `hop`."""
    measured_at: int | None = None
    """Value of `PathSearch.granted_places` at the last measurement."""


@dataclass(slots=True)
class PathQuery:
    """The search for a place for one microbatch on the next stage."""

    header: PathHeader
    ready: float
    """Expected time of its output."""
    question: int = 0
    """Number of the newest request."""
    asked: PeerId | None = None
    """Peer that has the open request; None if there is none."""
    until: float = 0.0
    """Deadline of the open request."""
    choice: PathChoice | None = None
    """The newest choice that was requested or granted."""
    stages: int = 0
    """Number of stages among which the newest choice was made."""
    granted: PeerId | None = None
    """Peer that granted a place; None if there is none."""
    sent: bool = False
    """Whether the body was sent there. If a place is needed again, that attempt has failed."""
    silent: set[PeerId] = field(default_factory=set)
    """Peers that did not answer a request, or refused a firm one."""


@dataclass(frozen=True, slots=True)
class RequestToSend:
    """A place request to send."""

    key: MicrobatchId
    peer: PeerId
    question: int
    header: PathHeader
    """Header for that peer."""
    arrival: float
    start: float
    firm: bool
    """Whether a place at any time is accepted."""


class PathSearch:
    """What one peer knows about its neighbours, and its place requests to them."""

    def __init__(self, rules: PathRules, stage: int) -> None:
        self.rules = rules
        self.stage = stage
        self.seen: dict[PeerId, KnownNeighbour] = {}
        self.quests: dict[MicrobatchId, PathQuery] = {}
        self.granted_places = 0
        """Number of microbatches that got a place on the next stage."""
        self.visits: dict[int, float] = {}
        """Number of microbatches sent from here to each stage when there was a choice. Old ones decay."""
        self.asked = 0
        self.refused = 0

    # -- knowledge about neighbours ----------------------------------------------------------------------

    def on_load_report(self, peer: PeerId, load: Load, to_go: ToGo, latency: float, now: float) -> None:
        """Record the load and cost table that a peer reported. Its bookings are in seconds from the moment
        of sending, which was `latency` seconds ago. They are kept as times on the local clock."""
        sent_at = now - latency
        bookings = tuple(Booking(b.start + sent_at, b.release + sent_at) for b in load.bookings)
        neighbour = self._known_neighbour(peer)
        neighbour.load = Load(load.memory, load.forward_seconds, load.backward_seconds, bookings)
        neighbour.to_go, neighbour.latency = to_go, latency

    def measured(self, peer: PeerId, hop: float) -> None:
        """Record a measured hop to `peer` in seconds: half the transfer time of a body there and its gradient
        back. The median of the newest measurements becomes the estimate."""
        neighbour = self._known_neighbour(peer)
        neighbour.measured = (*neighbour.measured, hop)[-MEASUREMENTS_KEPT:]
        neighbour.hop, neighbour.measured_at = median(neighbour.measured), self.granted_places

    def forget(self, peer: PeerId) -> None:
        self.seen.pop(peer, None)

    def table(self, live: Iterable[tuple[PeerId, int]]) -> dict[int, float]:
        """Return the own cost table from those of the live neighbours. `live` yields (peer, stage)."""
        return costs_to_go(self.stage, self.rules, self._neighbours(live))

    def rest(self, header: PathHeader, table: ToGo) -> float:
        """Return the expected seconds from the end of the forward pass here to the gradient; 0 if unknown."""
        return table.get(header.hops_left, 0.0)

    # -- place requests -----------------------------------------------------------------------------------

    def seek(
        self,
        key: MicrobatchId,
        live: Iterable[tuple[PeerId, int]],
        now: float,
        avoid: Collection[PeerId] = (),
    ) -> RequestToSend | None:
        """Return the next place request for a microbatch with a quest. It goes to the best peer in `live`
        (pairs of peer and stage); a peer in `avoid` only if no other can take the microbatch. Returns None if
        no known peer can, or after `GIVE_UP_QUESTIONS` requests."""
        quest = self.quests[key]
        quest.asked = quest.granted = None
        if quest.question >= GIVE_UP_QUESTIONS:
            return None
        ahead = self._neighbours(live)
        ready = max(quest.ready, now)
        choice = self._choose_next(quest, ahead, ready, now, quest.silent.union(avoid))
        if choice is None and avoid:
            choice = self._choose_next(quest, ahead, ready, now, quest.silent)
        if choice is None:
            return None
        quest.question += 1
        quest.asked, quest.choice = choice.peer, choice
        chosen = self._known_neighbour(choice.peer)
        quest.until = now + ANSWER_SECONDS + 4 * chosen.latency
        if chosen.hop is None:  # Until this microbatch measures it, other ones assume the longest hop.
            chosen.hop = max((other.hop for other in self.seen.values() if other.hop), default=None)
        self.asked += 1
        firm = quest.question >= MAX_QUESTIONS
        return RequestToSend(
            key, choice.peer, quest.question, choice.header, choice.arrival, choice.start, firm=firm
        )

    def answered(
        self, peer: PeerId, key: MicrobatchId, question: int, start: float | None
    ) -> PathQuery | None:
        """Record a peer's answer to a place request. `start` is the granted start of the forward pass; None
        is a refusal. Returns the quest, or None if this answer was not awaited. A peer that refuses a firm
        request gets no further one. A grant counts as a visit to its stage if there was a choice."""
        quest = self.quests.get(key)
        if quest is None or quest.asked != peer or quest.question != question or quest.choice is None:
            return None
        quest.asked = None
        if start is None:
            self.refused += 1
            if question >= MAX_QUESTIONS:
                quest.silent.add(peer)
            return quest
        quest.granted = peer
        self.granted_places += 1
        if quest.stages > 1:  # There was a choice of stages.
            stage = quest.choice.header.stage  # The chosen stage.
            self.visits = {other: VISITS_KEPT * count for other, count in self.visits.items()}
            self.visits[stage] = self.visits.get(stage, 0.0) + 1.0
        return quest

    def back(self, quest: PathQuery, start: float) -> float:
        """Return the time at which the gradient is expected back if the chosen peer begins the forward pass
        at `start`: the planned time plus the delay of the start."""
        assert quest.choice is not None
        return quest.choice.back + max(0.0, start - quest.choice.start)

    def overdue(self, now: float) -> list[MicrobatchId]:
        """Return the microbatches whose request was not answered in time. They need another request, which
        will not go to the silent peer."""
        late = []
        for key, quest in self.quests.items():
            if quest.asked is not None and now >= quest.until:
                quest.silent.add(quest.asked)
                quest.asked = None
                late.append(key)
        return late

    def lost(self, peer: PeerId) -> list[MicrobatchId]:
        """Forget the places that were requested or granted on a lost peer. Returns their microbatches, which
        need another place. Microbatches whose body was already sent are left alone."""
        affected = []
        for key, quest in self.quests.items():
            if peer in (quest.asked, quest.granted) and not quest.sent:
                quest.asked = quest.granted = None
                affected.append(key)
        return affected

    def _choose_next(
        self,
        quest: PathQuery,
        ahead: Iterable[Neighbour],
        ready: float,
        now: float,
        avoid: Collection[PeerId],
    ) -> PathChoice | None:
        """Find the cheapest choice at each stage, and return one of them; None if there is none. A stage that
        gets too few microbatches comes first, unless it is too slow (`DEAR`). Otherwise it is the one whose
        gradient is `back` first, or among nearly equal ones (`TIE`) that of the least visited stage."""
        by_stage: dict[int, list[Neighbour]] = {}
        # Near peers first: `cheapest` then rules out farther ones without computing their exact start.
        for other in sorted(ahead, key=lambda other: other.hop_seconds):
            by_stage.setdefault(other.stage, []).append(other)
        best = [cheapest(quest.header, self.rules, others, ready, now, avoid) for others in by_stage.values()]
        candidates = [choice for choice in best if choice is not None]
        quest.stages = len(candidates)
        ways = sum(count_continuations(each.header, self.rules) for each in candidates)
        earliest = min((choice.back for choice in candidates), default=0.0)
        undervisited = [choice for choice in candidates if self._is_undervisited(choice, ways)]
        affordable = [c for c in undervisited if c.back - ready <= DEAR * (earliest - ready)]
        if affordable:
            return min(affordable, key=lambda choice: choice.back)
        tied = [choice for choice in candidates if choice.back <= earliest + TIE * (earliest - ready)]
        return min(tied, default=None, key=lambda choice: (self._visits_per_way(choice), choice.back))

    def _visits_per_way(self, choice: PathChoice) -> float:
        """Return how many microbatches the chosen stage got from here, divided by its ways. A way is one
        sequence of stages by which the path can be completed from that stage."""
        ways = count_continuations(choice.header, self.rules)
        return self.visits.get(choice.header.stage, 0.0) / max(1, ways)

    def _is_undervisited(self, choice: PathChoice, ways: int) -> bool:
        """Return whether the chosen stage got less than its minimum share of the microbatches sent from here.
        At a fair share all ways get equally many; `ways` is their number through all candidate stages."""
        least_share = max(MIN_SHARE, self.rules.full_path_fraction)
        visits_if_all_alike = self._visits_per_way(choice) * ways
        return visits_if_all_alike < least_share * sum(self.visits.values())

    def _known_neighbour(self, peer: PeerId) -> KnownNeighbour:
        return self.seen.setdefault(peer, KnownNeighbour())

    def _neighbours(self, live: Iterable[tuple[PeerId, int]]) -> list[Neighbour]:
        """Return the live neighbours that have reported a load."""
        neighbours = []
        for peer, stage in live:
            known = self.seen.get(peer)
            if known is not None and known.load is not None:
                neighbours.append(Neighbour(peer, stage, self._hop_seconds(known), known.load, known.to_go))
        return neighbours

    def _hop_seconds(self, neighbour: KnownNeighbour) -> float:
        """Return the estimated seconds of a hop to this neighbour, at least its latency. An unmeasured hop
        counts as the latency alone, and an old measurement decays, so that the peer is tried again."""
        hop = 0.0 if neighbour.hop is None else neighbour.hop
        if neighbour.measured_at is not None:
            hop *= 0.5 ** ((self.granted_places - neighbour.measured_at) / HALVED_VISITS)
        return max(neighbour.latency, hop)
