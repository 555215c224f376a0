"""One peer's decisions to move: it looks, announces, looks again, and goes once a peer that stays has shown
that it knows. What is right is said in policy.py. Times in seconds on the caller's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from swarmnet.identifiers import PeerId
from swarmnet.placement.policy import (
    LONGEST_PERIOD_SECONDS,
    SHORTEST_PERIOD_SECONDS,
    Intent,
    MoveRules,
    View,
    carried_out,
    choose_move,
    period_seconds,
)

STARVING_SECONDS = (1.0, 5.0)
"""When the stage above or below has nobody: drawn, so that not all who notice it come at once."""
PATIENT_STARVING_SECONDS = (10.0, 20.0)
"""The same for who is in its cool-down: announcing takes the others 6 s and more. If nobody goes, everybody
stands still until the cool-down is over (seen: 60 s)."""
LOOKS_IN_VAIN = 3
"""After each so many in a row one richer stage more is not waited for: its peers may be told to stay. Whoever
may go has mostly gone by then: all peers look about as often."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of `next_deadline()` has come."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What the directory says, asked for by `Look`; None if it did not answer. `rate`: the own, measured.
    `on_disk`: stages whose weights this peer has."""

    view: View | None
    rate: float
    on_disk: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Starving:
    """The stage above or below has no live peer."""


@dataclass(frozen=True, slots=True)
class GroupBeat:
    """A peer of the own stage said how it is. `knows`: after it had seen the own announcement; `stays`: it
    serves, and has announced no move itself."""

    peer: PeerId
    knows: bool
    stays: bool


@dataclass(frozen=True, slots=True)
class GroupPeerGone:
    peer: PeerId


MoveEvent = Tick | Looked | Starving | GroupBeat | GroupPeerGone


@dataclass(frozen=True, slots=True)
class Look:
    """Ask the directory for all stages, and come back with `Looked`."""


@dataclass(frozen=True, slots=True)
class AnnounceMove:
    """Say so in the own record and in every beat from the next one on."""

    stage: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """It stays after all."""

    code: str
    """Why: of peers/telemetry/reasons.py."""


@dataclass(frozen=True, slots=True)
class Go:
    """Leave the stage properly and take up the other. The machine ends; a new one begins there."""

    stage: int


MoveEffect = Look | AnnounceMove | Withdraw | Go


@dataclass(slots=True)
class Mover:
    """One peer's decisions, from arriving at a stage to leaving it."""

    me: PeerId
    stage: int
    rules: MoveRules
    chance: Random
    rests_until: float
    """Arrival and cool-down; until then it goes nowhere but to a stage that has nobody."""
    download_seconds: float
    """What fetching another stage is expected to take."""
    phase: str = "resting"
    """resting, looking, announced, checking, confirming, gone"""
    intent: Intent | None = None
    arrived: float | None = None
    """None: when the cool-down is over."""
    _due: float = 0.0
    _period: float = LONGEST_PERIOD_SECONDS
    _staying: set[PeerId] = field(default_factory=set)
    _on_disk: frozenset[int] = frozenset()
    _in_vain: int = 0
    """Looks in a row at which nothing was in the way of a move but that peers of richer stages go first."""

    def __post_init__(self) -> None:
        arrived = self.rests_until if self.arrived is None else self.arrived
        self._due = arrived + self.chance.uniform(0.0, SHORTEST_PERIOD_SECONDS)

    def next_deadline(self) -> float:
        """When to come with a Tick if nothing else happens."""
        return self._due

    def handle(self, event: MoveEvent, now: float) -> list[MoveEffect]:
        """Take an event; return what must be done."""
        match event:
            case Tick():
                return self._tick(now) if now >= self._due else []
            case Looked(view, rate, on_disk):
                self._on_disk = on_disk
                return self._looked(view, rate, now)
            case Starving():
                patience = STARVING_SECONDS if self.rests_until <= now else PATIENT_STARVING_SECONDS
                soon = now + self.chance.uniform(*patience)
                if self.phase == "resting" and soon < self._due:
                    self._due = soon
            case GroupPeerGone(peer):
                self._staying.discard(peer)
            case GroupBeat(peer, knows, stays):
                if not stays:
                    self._staying.discard(peer)
                elif knows and self.intent is not None:
                    self._staying.add(peer)
                    return self._confirm()
        return []

    def _tick(self, now: float) -> list[MoveEffect]:
        if self.phase in ("resting", "announced"):
            self.phase = "looking" if self.phase == "resting" else "checking"
            self._due = float("inf")
            return [Look()]
        if self.phase == "confirming":
            return self._rest(now, "not_confirmed")
        return []

    def _looked(self, view: View | None, rate: float, now: float) -> list[MoveEffect]:
        if self.phase not in ("looking", "checking"):
            return []
        if view is None:  # As it is about stages of which it remembers nothing: those that lack somebody.
            withdrawn = self._rest(now, "directory_silent")
            self._due = min(self._due, now + self.chance.uniform(*PATIENT_STARVING_SECONDS))
            return withdrawn
        self._period = period_seconds(view.peers)
        if self.phase == "checking":
            return self._check(view, now)
        self.intent = self._choose(view, rate)
        if self.intent is not None and now < self.rests_until and view.capacities[self.intent.target] > 0:
            self.intent = None  # A cool-down is cut short for nothing but an empty stage.
        if self.intent is None:
            withdrawn = self._rest(now, "")
            if min(view.capacities) <= 0:  # Whoever announced to go there may not come to it.
                self._due = min(self._due, now + self.chance.uniform(*PATIENT_STARVING_SECONDS))
            return withdrawn
        self.phase, self._due = "announced", now + self.chance.uniform(*self.rules.recheck_seconds)
        self._staying.clear()
        return [AnnounceMove(self.intent.target)]

    def _choose(self, view: View, rate: float) -> Intent | None:
        def passing_over(stages: int) -> Intent | None:
            return choose_move(
                view, self.me, self.stage, rate, self.rules, self.download_seconds, self.chance, stages,
                self._on_disk,
            )

        intent = passing_over(0)
        if intent is not None or passing_over(len(view.capacities)) is None:
            self._in_vain = 0
            return intent
        intent = passing_over(self._in_vain // LOOKS_IN_VAIN)
        self._in_vain += 1
        return intent

    def _check(self, view: View, now: float) -> list[MoveEffect]:
        """Everybody who announced before is in sight now."""
        assert self.intent is not None, "only an announced move is checked"
        others = tuple(intent for intent in view.intents if intent.peer != self.me)
        everybody = replace(view, intents=(*others, self.intent))
        _, going = carried_out(everybody, self.rules, self.download_seconds)
        if self.me not in going:
            return self._rest(now, "not_needed")
        self.phase, self._due = "confirming", now + self.rules.confirm_seconds
        return self._confirm()

    def _confirm(self) -> list[MoveEffect]:
        if self.phase != "confirming" or self.intent is None or not self._staying:
            return []
        self.phase, self._due = "gone", float("inf")
        return [Go(self.intent.target)]

    def _rest(self, now: float, code: str) -> list[MoveEffect]:
        announced, self.intent = self.intent, None
        next_look = now + self._period * self.chance.uniform(0.8, 1.2)
        self.phase, self._due = "resting", next_look
        self._staying.clear()
        return [Withdraw(code)] if announced is not None else []
