"""A visitor's requests on their way through the stages: whom to ask next, again or instead.

A visitor is a peer without a stage that wants the model's answer. It asks a peer of each stage itself:
stage 0 with tokens, the next one with the hidden states that came back, and so on (hub and spoke, as
Petals does, arXiv:2209.01188). That costs the visitor's line both ways per stage, but whoever fails is
noticed by the one who cares, who still holds what it takes to ask another peer of that stage.

Peers of a stage are equal, so the least burdened one is asked. One that is silent or refuses rests for a
while. A middle stage that has had nobody for LEAVE_OUT_SECONDS is left out as far as the run's rules
allow (run/path_rules.py), and otherwise waited for. The first answer of a conversation names the round of its
weights, and the later ones are asked of the same: so a text, or a score, is that of one model while the
run goes on.

Time is an argument in seconds. Each method returns what the caller must now do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from swarmnet.backoff import doubled
from swarmnet.identifiers import PeerId
from swarmnet.routing.cheapest_path import onward
from swarmnet.run.path_rules import Header, Rules, begin, needs_swap, visit

ASKED_AT_ONCE = 4
"""Requests of one visitor at one peer, both for the visitor and for the peer: one computes, one is on its way
there, one on its way back, and one waits."""
MOST_SEQUENCES = 8
"""Whose next token one request asks for: the logits of each are a vocabulary long."""
BUSY, NOT_READY, NO_ROUND, WRONG_STAGE = "busy", "not_ready", "no_round", "wrong_stage"
MALFORMED, NOT_FINITE = "malformed", "not_finite"
"""Codes of Declined (protocols/messages/inference.py)."""
CODES = frozenset({BUSY, NOT_READY, NO_ROUND, WRONG_STAGE, MALFORMED, NOT_FINITE})
PASSING = {BUSY: 0.2, NOT_READY: 1.0}
"""What passes by itself, and after how many seconds a peer that says so is asked again."""
MOST_REFUSALS = 3
"""So many peers find a request itself impossible before that is believed."""
FIRST_DEADLINE_SECONDS = 15.0
"""Before an answer has come: p2pd needs 5 s for a silent address, and a peer may have to load its weights."""
DEADLINE_FACTOR = 4.0
LEAST_DEADLINE_SECONDS, MOST_DEADLINE_SECONDS = 2.0, 30.0
SMOOTHING = 0.2
"""Weight of a new answer time."""
FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 0.5, 8.0
"""After a failure; it doubles with each in a row. The same as membership/machine.py's pauses between
dials."""
GONE_FAILURES = 2
"""Failures in a row after which a peer counts as gone while it rests: one may be a lost message."""
LEAVE_OUT_SECONDS = 5.0
"""How long a stage may have nobody before requests leave it out: a peer that restarts is back after that."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Send this request to `peer`; it has the inputs of `stage`."""

    request: int
    attempt: int
    peer: PeerId
    stage: int
    round: int
    """Of the weights that are wanted; -1: the newest."""
    path: int
    """Stages that the request will have visited when it is answered, as far as is known now."""
    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The last stage has answered."""

    request: int
    visited: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Impossible:
    """Several peers find the request itself wrong."""

    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class Missing:
    """Who waits for whom has changed: requests wait for these stages (empty: for none any more)."""

    stages: tuple[int, ...]
    busy: tuple[int, ...] = ()
    """Of these, those whose peers are linked and have not answered in time."""


Effect = Ask | Finished | Impossible | Missing
Pins = dict[int, int]
"""Stage -> round of the weights that a conversation began with there. Its requests share it."""


@dataclass(slots=True)
class _Holder:
    stage: int
    in_flight: int = 0
    failures: int = 0
    rest_until: float = float("-inf")

    def gone(self, now: float) -> bool:
        return self.failures >= GONE_FAILURES and now < self.rest_until


@dataclass(slots=True)
class _Request:
    pins: Pins
    done: Header | None = None
    """As it left the last stage that has answered; None: none has."""
    target: Header | None = None
    """For the stage that is asked, or was asked last."""
    ask: Ask | None = None
    """What was asked and not answered yet; None: it waits."""
    attempt: int = 0
    sent_at: float = 0.0
    lacking: set[PeerId] = field(default_factory=set)
    """Peers of the present stage that do not hold the round."""
    refusals: int = 0
    """Of the present stage, for reasons that lie in the request itself."""


class Requests:
    """All requests of one visitor."""

    def __init__(self, rules: Rules, chance: Random, now: float) -> None:
        self.rules = rules
        self.chance = chance
        self._holders: dict[PeerId, _Holder] = {}
        self._requests: dict[int, _Request] = {}
        self._empty_since = dict.fromkeys(range(rules.stages), now)
        """When each stage that has nobody lost its last peer."""
        self._answer_seconds: dict[int, float] = {}
        self._missing = Missing(())
        self._now = now

    def __len__(self) -> int:
        return len(self._requests)

    # -- what happens ---------------------------------------------------------------------------------

    def reached(self, peer: PeerId, stage: int, now: float) -> list[Effect]:
        """A peer of this stage can be sent to."""
        self._holders[peer] = _Holder(stage)
        return self._go_on(now)

    def lost(self, peer: PeerId, now: float) -> list[Effect]:
        """It cannot any more."""
        self._holders.pop(peer, None)
        for request in self._requests.values():
            if request.ask is not None and request.ask.peer == peer:
                request.ask = None
        return self._go_on(now)

    def start(self, key: int, pins: Pins, now: float) -> list[Effect]:
        """A new request of a conversation."""
        self._requests[key] = _Request(pins)
        return self._go_on(now)

    def drop(self, key: int, now: float) -> list[Effect]:
        """Nobody waits for it any more."""
        request = self._requests.pop(key, None)
        if request is not None:
            self._release(request)
        return self._go_on(now)

    def expects(self, key: int, peer: PeerId, attempt: int) -> Ask | None:
        """What this would be the answer to; None if nobody waits for it."""
        request = self._requests.get(key)
        if request is None or request.ask is None:
            return None
        return request.ask if (request.ask.peer, request.ask.attempt) == (peer, attempt) else None

    def answered(self, key: int, peer: PeerId, attempt: int, round: int, now: float) -> list[Effect]:
        """The answer has come, is in order, and was computed with the weights of `round`."""
        ask = self.expects(key, peer, attempt)
        if ask is None:
            return []
        stage, request = ask.stage, self._requests[key]
        request.pins[stage] = round
        self._learn(stage, now - request.sent_at)
        self._holders[peer].failures = 0
        self._release(request)
        request.done, request.target = request.target, None
        request.lacking.clear()
        request.refusals = 0
        if stage < self.rules.last:
            return self._go_on(now)
        del self._requests[key]
        assert request.done is not None
        return [Finished(key, request.done.visited), *self._go_on(now)]

    def declined(
        self, key: int, peer: PeerId, attempt: int, code: str, reason: str, now: float
    ) -> list[Effect]:
        """It will not do that, or its answer was not in order (MALFORMED)."""
        if self.expects(key, peer, attempt) is None:
            return []
        request = self._requests[key]
        self._release(request)
        if code in PASSING:
            rest = PASSING[code] * self.chance.uniform(0.8, 1.2)
            self._holders[peer].rest_until = now + rest
        elif code == NO_ROUND:
            request.lacking.add(peer)
        else:
            self._fails(peer, now)
            request.refusals += 1
            if request.refusals >= MOST_REFUSALS:
                del self._requests[key]
                return [Impossible(key, reason), *self._go_on(now)]
        return self._go_on(now)

    def tick(self, now: float) -> list[Effect]:
        """The time that `next_deadline` named has come."""
        for request in self._requests.values():
            if request.ask is not None and request.sent_at + request.ask.deadline_seconds <= now:
                # Who is busy takes longer than it did: the next one is waited for longer, too.
                self._learn(request.ask.stage, now - request.sent_at)
                self._fails(request.ask.peer, now)
                self._release(request)
        return self._go_on(now)

    def next_deadline(self) -> float:
        """When `tick` is to be called, at the latest; infinite: never."""
        asked = [(request.sent_at, request.ask) for request in self._requests.values()]
        times = [sent_at + ask.deadline_seconds for sent_at, ask in asked if ask is not None]
        if len(times) < len(asked):
            times += [holder.rest_until for holder in self._holders.values() if holder.rest_until > self._now]
            ends = [since + LEAVE_OUT_SECONDS for since in self._empty_since.values()]
            times += [end for end in ends if end > self._now]
        return min(times, default=float("inf"))

    # -- what follows ---------------------------------------------------------------------------------

    def _go_on(self, now: float) -> list[Effect]:
        """Ask for every request that waits and can; say whom the others wait for, if that is news."""
        self._now = now
        self._count_empty(now)
        effects: list[Effect] = []
        missing: set[int] = set()
        for key, request in self._requests.items():
            if request.ask is not None:
                continue
            target, waits_for = self._target(request, now)
            missing.update(waits_for)
            if target is None:
                continue
            stage = target.visited[-1]
            there = {peer for peer, h in self._holders.items() if h.stage == stage and not h.gone(now)}
            if there and there <= request.lacking:
                request.pins.pop(stage, None)  # Nobody has that round any more: go on with the newest.
                request.lacking.clear()
            peer = self._choose(stage, request.lacking, now)
            if peer is None:
                missing.update([stage] if stage in self._empty_since else [])
                continue
            effects.append(self._ask(key, request, target, peer, now))
        linked = {holder.stage for holder in self._holders.values()}
        waited_for = Missing(tuple(sorted(missing)), tuple(sorted(missing & linked)))
        if waited_for != self._missing:
            self._missing = waited_for
            effects.append(waited_for)
        return effects

    def _target(self, request: _Request, now: float) -> tuple[Header | None, Iterable[int]]:
        """The stage that is next, and the stages that it must wait for if none is."""
        if request.done is None:
            return begin(self.rules, self.rules.stages), ()
        empty = self._empty_since
        there = [s for s in range(self.rules.stages) if s not in empty or now < empty[s] + LEAVE_OUT_SECONDS]
        way = onward(request.done, self.rules, there)
        # A path that visits all the stages it can never needs to go back to one.
        ahead = [s for s in way.stages if s > way.header.frontier]
        headers = [visit(way.header, s, self.rules) for s in ahead]
        straight = [header for header in headers if not needs_swap(header, self.rules)]
        return (straight[0], ()) if straight else (None, way.missing)

    def _choose(self, stage: int, without: set[PeerId], now: float) -> PeerId | None:
        """The least burdened peer of a stage that may be asked; chance decides between equals."""
        free = [
            (holder.failures, holder.in_flight, self.chance.random(), peer)
            for peer, holder in self._holders.items()
            if holder.stage == stage and peer not in without
            and holder.in_flight < ASKED_AT_ONCE and holder.rest_until <= now
        ]  # fmt: skip
        return min(free)[-1] if free else None

    def _ask(self, key: int, request: _Request, target: Header, peer: PeerId, now: float) -> Ask:
        stage = target.visited[-1]
        seconds = self._deadline_seconds(stage)
        request.target, request.sent_at = target, now
        request.attempt += 1
        pin, path = request.pins.get(stage, -1), target.length
        request.ask = Ask(key, request.attempt, peer, stage, pin, path, seconds)
        self._holders[peer].in_flight += 1
        return request.ask

    def _deadline_seconds(self, stage: int) -> float:
        known = self._answer_seconds.get(stage)
        if known is None:
            return FIRST_DEADLINE_SECONDS
        return min(MOST_DEADLINE_SECONDS, max(LEAST_DEADLINE_SECONDS, DEADLINE_FACTOR * known))

    def _learn(self, stage: int, seconds: float) -> None:
        known = self._answer_seconds.get(stage)
        self._answer_seconds[stage] = seconds if known is None else known + SMOOTHING * (seconds - known)

    def _release(self, request: _Request) -> None:
        """Nobody is asked for it any more."""
        if request.ask is not None and request.ask.peer in self._holders:
            self._holders[request.ask.peer].in_flight -= 1
        request.ask = None

    def _fails(self, peer: PeerId, now: float) -> None:
        holder = self._holders[peer]
        rest = doubled(FIRST_REST_SECONDS, holder.failures, LONGEST_REST_SECONDS)
        holder.rest_until = now + rest * self.chance.uniform(0.8, 1.2)
        holder.failures += 1

    def _count_empty(self, now: float) -> None:
        present = {holder.stage for holder in self._holders.values() if not holder.gone(now)}
        for stage in range(self.rules.stages):
            if stage in present:
                self._empty_since.pop(stage, None)
            else:
                self._empty_since.setdefault(stage, now)
