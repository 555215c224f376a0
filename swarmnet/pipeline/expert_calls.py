"""What a stage asks of peers that hold its experts, where these are routed: whom, how long, and whom next.

A microbatch that has come to a layer's experts waits for an answer of each group that its tokens go to. If
the peer that was asked dies, refuses or misses its deadline, another of that group is asked; nothing but the
call itself is needed for that, forward or backward, for who holds experts keeps nothing of a microbatch.
Where there is nobody to ask, or nobody did it, the call is given up: forward, its tokens go to the next best
experts; backward, they learn nothing through these. So a microbatch never fails for one group's sake.

No IO and no tensors: `handle(event, now)` returns what the caller must do. Times in seconds on its clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from random import Random

from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.pipeline.machine import IS_WELL, MOST_ATTEMPTS, RETRY_SECONDS
from swarmnet.pipeline.timeouts import AnswerTimes
from swarmnet.routing.load_balancer import Router

DOES_WELL = IS_WELL | {"no_round"}
"""Likewise a peer without the snapshot of a visitor's round."""


@dataclass(frozen=True, slots=True)
class CallId:
    key: MicrobatchId
    layer: int
    group: int
    backward: bool


# -- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """A microbatch waits for it."""

    call: CallId


@dataclass(frozen=True, slots=True)
class SaidArrived:
    peer: PeerId
    call: CallId
    attempt: int


@dataclass(frozen=True, slots=True)
class DeclineArrived:
    peer: PeerId
    call: CallId
    attempt: int
    code: str


@dataclass(frozen=True, slots=True)
class HolderLost:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Look:
    """Nothing but time has passed, or a peer has room again."""


CallEvent = Wanted | SaidArrived | DeclineArrived | HolderLost | Look


# -- effects --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendCall:
    call: CallId
    peer: PeerId
    attempt: int
    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class TakeAnswer:
    """The one that has just arrived: the microbatch goes on with it."""

    call: CallId


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Nobody does it: the microbatch goes on without."""

    call: CallId


CallEffect = SendCall | TakeAnswer | GiveUp


@dataclass(slots=True)
class _Asked:
    deadline: float
    peer: PeerId | None = None
    """Who is asked now; None: nobody has room."""
    attempt: int = 0
    failures: int = 0
    due: float = float("inf")
    """When the peer has missed its deadline, or somebody is looked for again."""
    tried: dict[PeerId, tuple[int, float]] = field(default_factory=dict)
    """Who was asked, the newest attempt of theirs, and when that was: an answer may be to it, whoever was
    asked since."""


class ExpertCalls:
    """The machine. `holders(group)` names the live peers of a group's stage."""

    def __init__(
        self, groups: int, chance: Random, holders: Callable[[int], Collection[PeerId]],
        is_near: Callable[[PeerId], bool] | None = None, body_bytes: int = 0,
    ) -> None:  # fmt: skip
        """`body_bytes`: of the longest call, by which patience begins."""
        self.holders = holders
        self.routers = [Router(chance, is_near) for _ in range(groups)]
        """By group."""
        self.answers = [AnswerTimes(router, 1, body_bytes) for router in self.routers]
        self.rerouted: dict[str, int] = {}
        """Reason -> times that another peer was asked."""
        self.wanted = self.answered = self.given_up = 0
        """Calls: each ends in one of the other two, unless its microbatch does before."""
        self.late_answers = 0
        self._open: dict[CallId, _Asked] = {}
        self._attempts = 0
        """Of all calls: one that is made anew, of other tokens, takes no answer to what it was before."""
        self._effects: list[CallEffect] = []

    @property
    def under_way(self) -> int:
        return len(self._open)

    def outcomes(self) -> dict[str, int]:
        """Of all calls so far."""
        return {
            "wanted": self.wanted, "answered": self.answered, "rerouted": sum(self.rerouted.values()),
            "given_up": self.given_up, "late_answers": self.late_answers,
        }  # fmt: skip

    def missing(self) -> frozenset[int]:
        """Groups of which no peer is there."""
        return frozenset(group for group in range(len(self.routers)) if not self.holders(group))

    def expects(self, peer: PeerId, call: CallId, attempt: int) -> bool:
        """Whether this answer would be taken."""
        asked = self._open.get(call)
        return asked is not None and peer in asked.tried and asked.tried[peer][0] == attempt

    def handle(self, event: CallEvent, now: float) -> list[CallEffect]:
        """Take an event; return what must be done, in order."""
        self._effects = []
        match event:
            case Wanted(call):
                self.wanted += 1
                answers = self.answers[call.group]
                whole = MOST_ATTEMPTS * answers.of_an_attempt(self.holders(call.group))
                self._open[call] = _Asked(now + whole)
                self._ask(call, now)
            case SaidArrived(peer, call, attempt):
                self._said(peer, call, attempt, now)
            case DeclineArrived(peer, call, attempt, code):
                asked = self._open.get(call)
                if asked is not None and (asked.peer, asked.attempt) == (peer, attempt):
                    if code == "busy":
                        self.routers[call.group].busy(peer, now)
                    elif code not in DOES_WELL:
                        self.routers[call.group].failed(peer, now)
                    self._ask_another(call, code, now)
            case HolderLost(peer):
                for call in [call for call, asked in self._open.items() if asked.peer == peer]:
                    self.routers[call.group].failed(peer, now)
                    self._ask_another(call, "lost", now)
            case Look():
                self._look(now)
        return self._effects

    def drop(self, key: MicrobatchId) -> None:
        """Nobody wants this microbatch any more."""
        for call in [call for call in self._open if call.key == key]:
            asked = self._open.pop(call)
            if asked.peer is not None:
                self.routers[call.group].ended(asked.peer)

    def next_deadline(self) -> float:
        """When to come with a Look if nothing else happens."""
        return min((asked.due for asked in self._open.values()), default=float("inf"))

    def _said(self, peer: PeerId, call: CallId, attempt: int, now: float) -> None:
        if not self.expects(peer, call, attempt):
            self.late_answers += 1
            return
        asked = self._open.pop(call)
        router, answers = self.routers[call.group], self.answers[call.group]
        if asked.peer is not None:
            router.ended(asked.peer)
        if asked.peer == peer:
            took = now - asked.tried[peer][1]
            router.answered(peer, took)
            answers.took(took)
        self.answered += 1
        self._effects.append(TakeAnswer(call))
        self._offer(now)

    def _ask(self, call: CallId, now: float) -> None:
        asked, holders = self._open[call], self.holders(call.group)
        if not holders or asked.deadline <= now or asked.failures >= MOST_ATTEMPTS:
            del self._open[call]
            self.given_up += 1
            self._effects.append(GiveUp(call))
            return
        router, answers = self.routers[call.group], self.answers[call.group]
        peer = router.choose(holders, now, avoid=asked.tried)
        if peer is None:
            asked.peer, asked.due = None, min(now + RETRY_SECONDS, router.room_at(holders, now))
            asked.due = min(asked.due, asked.deadline)
            return
        patience = min(answers.patience(peer), asked.deadline - now)
        asked.peer, asked.due = peer, now + patience
        self._attempts += 1
        asked.attempt = self._attempts
        asked.tried[peer] = asked.attempt, now
        router.sent(peer)
        self._effects.append(SendCall(call, peer, asked.attempt, patience))

    def _ask_another(self, call: CallId, code: str, now: float) -> None:
        asked = self._open[call]
        if asked.peer is not None:
            self.routers[call.group].ended(asked.peer)
            if code == "busy":
                asked.tried.pop(asked.peer, None)
            else:
                asked.failures += 1
        asked.peer = None
        self._ask(call, now)
        if call in self._open:
            self.rerouted[code] = self.rerouted.get(code, 0) + 1

    def _look(self, now: float) -> None:
        for call, asked in list(self._open.items()):
            if asked.peer is not None and asked.due <= now:
                router, sent_at = self.routers[call.group], asked.tried[asked.peer][1]
                router.overdue(asked.peer, now - sent_at)
                router.failed(asked.peer, now)
                self.answers[call.group].missed(sent_at, now)
                self._ask_another(call, "deadline", now)
        self._offer(now)

    def _offer(self, now: float) -> None:
        """Those that wait for room, first come first served."""
        for call in [call for call, asked in self._open.items() if asked.peer is None]:
            self._ask(call, now)
