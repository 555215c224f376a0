"""A peer's move to a pipeline stage that lacks peers, step by step: it looks, announces the move, looks
again, waits for a confirmation, and goes.

To *look* is to query the directory (the DHT) for the records of all peers. The result is a `View`. A stage is
richer or poorer by its capacity in microbatches per second. The confirmation comes from a peer of its stage
that stays and has seen the announcement. An *intent* is a move that is announced. policy.py decides which
moves are right. After an arrival the peer stays for a cool-down. All times are seconds on the same clock.
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
    apply_announced_moves,
    choose_move,
    period_seconds,
)

STARVING_SECONDS = (1.0, 5.0)
"""Bounds of the random delay before a look when an adjacent stage has no peer: not all come at once."""
PATIENT_STARVING_SECONDS = (10.0, 20.0)
"""The same for a peer in its cool-down: announcements of others take 6 s and more. If no other peer moved,
the swarm would stop until the cool-down is over (seen: 60 s)."""
LOOKS_IN_VAIN = 3
"""After every third blocked look in a row, one more richer stage is not waited for: its peers may be
forbidden to move. Peers that can move have usually gone by then, as all look about equally often."""


@dataclass(frozen=True, slots=True)
class PlacementTick:
    """The time of `next_deadline()` has come."""


@dataclass(frozen=True, slots=True)
class DirectoryQueried:
    """Answers `QueryDirectory` with the directory's view; None if it did not answer. `rate` is this peer's
    measured rate in microbatches per second. `on_disk` lists stages whose weights this peer has."""

    view: View | None
    rate: float
    on_disk: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Starving:
    """An adjacent stage has no live peer."""


@dataclass(frozen=True, slots=True)
class GroupBeat:
    """A heartbeat of a peer of the same stage. `knows`: it has seen this peer's announcement. `stays`: it
    serves, and has announced no move itself."""

    peer: PeerId
    knows: bool
    stays: bool


@dataclass(frozen=True, slots=True)
class GroupPeerGone:
    """A peer of the same stage is gone."""

    peer: PeerId


MoveEvent = PlacementTick | DirectoryQueried | Starving | GroupBeat | GroupPeerGone


@dataclass(frozen=True, slots=True)
class QueryDirectory:
    """Query the directory for all stages, then report `DirectoryQueried`."""


@dataclass(frozen=True, slots=True)
class AnnounceMove:
    """Announce the move in this peer's record and in every heartbeat from the next one on."""

    stage: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Withdraw the announcement: the peer stays."""

    code: str
    """The reason (peers/telemetry/reasons.py)."""


@dataclass(frozen=True, slots=True)
class MoveToStage:
    """Leave the stage properly and join the other. This state machine ends, and a new one begins there."""

    stage: int


MoveEffect = QueryDirectory | AnnounceMove | Withdraw | MoveToStage


@dataclass(slots=True)
class Mover:
    """The decisions of one peer from its arrival at a stage to its departure."""

    me: PeerId
    stage: int
    rules: MoveRules
    chance: Random
    rests_until: float
    """End of the cool-down. Until then the peer moves only to a stage without peers."""
    download_seconds: float
    """Expected seconds to fetch the weights of another stage."""
    phase: str = "resting"
    """One of resting, looking, announced, checking, confirming, gone."""
    intent: Intent | None = None
    arrived: float | None = None
    """When the peer arrived; None: at `rests_until`."""
    _due: float = 0.0
    _period: float = LONGEST_PERIOD_SECONDS
    _confirming_peers: set[PeerId] = field(default_factory=set)
    _on_disk: frozenset[int] = frozenset()
    _blocked_looks: int = 0
    """Number of looks in a row after which only the precedence of richer stages prevented a move."""

    def __post_init__(self) -> None:
        arrived = self.rests_until if self.arrived is None else self.arrived
        self._due = arrived + self.chance.uniform(0.0, SHORTEST_PERIOD_SECONDS)

    def next_deadline(self) -> float:
        """Return when to call `handle` with `PlacementTick` if nothing else happens."""
        return self._due

    def handle(self, event: MoveEvent, now: float) -> list[MoveEffect]:
        """Handle an event at `now`. Returns what the caller must do, in order.

        A tick queries the directory when that is due. The directory's answer may start or end a move. An
        adjacent stage without peers brings the next query forward; a peer in its cool-down waits longer. A
        heartbeat of a staying peer that knows of this peer's announcement confirms the move."""
        match event:
            case PlacementTick():
                return self._tick(now) if now >= self._due else []
            case DirectoryQueried(view, rate, on_disk):
                self._on_disk = on_disk
                return self._process_view(view, rate, now)
            case Starving():
                delays = STARVING_SECONDS if self.rests_until <= now else PATIENT_STARVING_SECONDS
                soon = now + self.chance.uniform(*delays)
                if self.phase == "resting" and soon < self._due:
                    self._due = soon
            case GroupPeerGone(peer):
                self._confirming_peers.discard(peer)
            case GroupBeat(peer, knows, stays):
                if not stays:
                    self._confirming_peers.discard(peer)
                elif knows and self.intent is not None:
                    self._confirming_peers.add(peer)
                    return self._move_if_confirmed()
        return []

    def _tick(self, now: float) -> list[MoveEffect]:
        """Do what is due. A resting peer queries the directory for a move, and one that announced a move
        queries it again to check it. A checked move that no peer confirmed in time is given up."""
        if self.phase in ("resting", "announced"):
            self.phase = "looking" if self.phase == "resting" else "checking"
            self._due = float("inf")
            return [QueryDirectory()]
        if self.phase == "confirming":
            return self._end_attempt(now, "not_confirmed")
        return []

    def _process_view(self, view: View | None, rate: float, now: float) -> list[MoveEffect]:
        """Process the directory's answer: announce a move, check an announced one, or end the attempt. `view`
        is None if the directory did not answer. `rate` is this peer's measured speed in microbatches per
        second. During a cool-down the peer announces only a move to an empty stage."""
        if self.phase not in ("looking", "checking"):
            return []  # No answer is awaited.
        if view is None:  # Perhaps only the query for a stage that lacks peers failed: look again soon.
            withdrawn = self._end_attempt(now, "directory_silent")
            self._due = min(self._due, now + self.chance.uniform(*PATIENT_STARVING_SECONDS))
            return withdrawn
        self._period = period_seconds(view.peers)
        if self.phase == "checking":
            return self._check_announced_move(view, now)
        self.intent = self._choose_move(view, rate)
        if self.intent is not None and now < self.rests_until and view.capacities[self.intent.target] > 0:
            self.intent = None  # Only an empty stage ends a cool-down early.
        if self.intent is None:
            effects = self._end_attempt(now, code="")  # No move is announced, so none is withdrawn.
            if min(view.capacities) <= 0:  # A peer that announced a move to an empty stage may fail to go.
                self._due = min(self._due, now + self.chance.uniform(*PATIENT_STARVING_SECONDS))
            return effects
        self.phase = "announced"
        self._due = now + self.chance.uniform(*self.rules.recheck_seconds)
        self._confirming_peers.clear()
        return [AnnounceMove(self.intent.target)]

    def _choose_move(self, view: View, rate: float) -> Intent | None:
        """Return the move to announce, or None. Normally this peer waits until peers of richer stages have
        moved. While only this prevents its move, it waits for one richer stage less after every
        `LOOKS_IN_VAIN` looks."""

        def move_without_waiting_for(stages: int) -> Intent | None:
            """Return the move if that number of richer stages is not waited for."""
            return choose_move(
                view,
                self.me,
                self.stage,
                rate,
                self.rules,
                self.download_seconds,
                self.chance,
                passed_over=stages,
                on_disk=self._on_disk,
            )

        intent = move_without_waiting_for(0)
        if intent is not None or move_without_waiting_for(len(view.capacities)) is None:
            # There is a move, or none would be right even without any wait.
            self._blocked_looks = 0
            return intent
        intent = move_without_waiting_for(self._blocked_looks // LOOKS_IN_VAIN)
        self._blocked_looks += 1
        return intent

    def _check_announced_move(self, view: View, now: float) -> list[MoveEffect]:
        """Check whether the announced move is still right, given the moves that other peers announced. If so,
        wait for a confirmation, or move at once if there is one already; else withdraw."""
        assert self.intent is not None, "only an announced move is checked"
        others = tuple(intent for intent in view.intents if intent.peer != self.me)
        with_own_move = replace(view, intents=(*others, self.intent))
        _, moving_peers = apply_announced_moves(with_own_move, self.rules, self.download_seconds)
        if self.me not in moving_peers:
            return self._end_attempt(now, "not_needed")
        self.phase = "confirming"
        self._due = now + self.rules.confirm_seconds
        return self._move_if_confirmed()

    def _move_if_confirmed(self) -> list[MoveEffect]:
        """Return the move to carry out if it was checked and a peer that stays has confirmed it."""
        if self.phase != "confirming" or self.intent is None or not self._confirming_peers:
            return []
        self.phase = "gone"
        self._due = float("inf")
        return [MoveToStage(self.intent.target)]

    def _end_attempt(self, now: float, code: str) -> list[MoveEffect]:
        """End the attempt to move, and look again after about a period. If a move was announced, the result
        withdraws it for the reason `code`; otherwise the result is empty."""
        announced = self.intent
        self.intent = None
        next_look = now + self._period * self.chance.uniform(0.8, 1.2)
        self.phase = "resting"
        self._due = next_look
        self._confirming_peers.clear()
        return [Withdraw(code)] if announced is not None else []
