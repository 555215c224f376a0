"""The inference client: sends requests through the stages, and chooses the peer for each attempt.

A client is a peer without a stage that wants the model's output. It contacts a peer of each stage itself:
stage 0 with tokens, the next one with the hidden states that came back, and so on. Petals has the same hub
and spoke form (arXiv:2209.01188). Each stage costs the client's link both ways. In return the client notices
every failure itself, and still holds the inputs for another peer of that stage.

The peers of a stage are equal, so the least loaded one is chosen. One that is silent or refuses is not asked
for a while. A middle stage without peers for `LEAVE_OUT_SECONDS` is skipped as far as the run's rules allow
(run/path_rules.py), and otherwise waited for. The first response of a conversation pins the round of its
weights, and later requests ask for the same round. A text or score then belongs to one model while training
continues.

Time is an argument in seconds. Each method returns what the caller must do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from swarmnet.backoff import doubled
from swarmnet.identifiers import PeerId
from swarmnet.routing.cheapest_path import onward
from swarmnet.run.path_rules import PathHeader, PathRules, begin, needs_swap, visit

ASKED_AT_ONCE = 4
"""Requests of one client at one peer: one computes, two are on their way there and back, and one waits."""
MAX_SEQUENCES = 8
"""Sequences whose next token one request may ask for: the logits of each have the size of the vocabulary."""
BUSY, NOT_READY, NO_ROUND, WRONG_STAGE = "busy", "not_ready", "no_round", "wrong_stage"
MALFORMED, NOT_FINITE = "malformed", "not_finite"
"""Codes of Declined (protocols/messages/inference.py)."""
CODES = frozenset({BUSY, NOT_READY, NO_ROUND, WRONG_STAGE, MALFORMED, NOT_FINITE})
PASSING = {BUSY: 0.2, NOT_READY: 1.0}
"""Temporary refusals, and the seconds after which a peer that sends one is asked again."""
MAX_REFUSALS = 3
"""A request is given up when this many peers refuse it as impossible."""
FIRST_DEADLINE_SECONDS = 15.0
"""Deadline of the first attempts. p2pd needs 5 s for a silent address, and a peer may load its weights."""
DEADLINE_FACTOR = 4.0
"""Ratio of the deadline to a stage's mean response time."""
MIN_DEADLINE_SECONDS, MAX_DEADLINE_SECONDS = 2.0, 30.0
SMOOTHING = 0.2
"""Weight of a new response time in the moving average."""
FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 0.5, 8.0
"""Pause after a failure, doubled with each in a row, and its bound: as for dials (membership/machine.py)."""
GONE_FAILURES = 2
"""Failures in a row after which a peer counts as gone during its pause. One may be a lost message."""
LEAVE_OUT_SECONDS = 5.0
"""How long a stage may have no peer before requests skip it. A peer that restarts takes about as long."""


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Send a request to `peer`, with the inputs of `stage`."""

    request: int
    attempt: int
    peer: PeerId
    stage: int
    round: int
    """The round of the wanted weights; -1: the newest."""
    path: int
    """Number of stages that the request will have visited when it is answered, as far as is known now."""
    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The last stage has answered."""

    request: int
    visited: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Impossible:
    """Several peers refused the request itself as wrong."""

    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class Missing:
    """Requests now wait for these stages; empty: for none."""

    stages: tuple[int, ...]
    busy: tuple[int, ...] = ()
    """Stages among them whose peers are linked and have not answered in time."""


Effect = SendRequest | RequestFinished | Impossible | Missing
Pins = dict[int, int]
"""Stage -> round of the weights with which a conversation began. All its requests share it."""


@dataclass(slots=True)
class _Holder:
    """A peer of a stage that can be asked."""

    stage: int
    in_flight: int = 0
    failures: int = 0
    rest_until: float = float("-inf")

    def gone(self, now: float) -> bool:
        return self.failures >= GONE_FAILURES and now < self.rest_until


@dataclass(slots=True)
class _Request:
    pins: Pins
    done: PathHeader | None = None
    """The header after the last stage that has answered; None: none has."""
    target: PathHeader | None = None
    """The header for the stage that is asked, or was asked last."""
    ask: SendRequest | None = None
    """The open attempt; None: the request waits."""
    attempt: int = 0
    sent_at: float = 0.0
    lacking: set[PeerId] = field(default_factory=set)
    """Peers of the current stage that do not have the round."""
    refusals: int = 0
    """Refusals at the current stage for reasons that lie in the request itself."""


class Requests:
    """All requests of one client."""

    def __init__(self, rules: PathRules, chance: Random, now: float) -> None:
        self.rules = rules
        self.chance = chance
        self._holders: dict[PeerId, _Holder] = {}
        self._requests: dict[int, _Request] = {}
        self._empty_since = dict.fromkeys(range(rules.stages), now)
        """When each stage without a peer lost its last one."""
        self._answer_seconds: dict[int, float] = {}
        """Moving average of each stage's response time."""
        self._missing = Missing(())
        self._now = now

    def __len__(self) -> int:
        return len(self._requests)

    # -- events ---------------------------------------------------------------------------------------

    def reached(self, peer: PeerId, stage: int, now: float) -> list[Effect]:
        """Record that a peer of a stage can be asked."""
        self._holders[peer] = _Holder(stage)
        return self._advance(now)

    def lost(self, peer: PeerId, now: float) -> list[Effect]:
        """Record that a peer can no longer be asked."""
        self._holders.pop(peer, None)
        for request in self._requests.values():
            if request.ask is not None and request.ask.peer == peer:
                request.ask = None
        return self._advance(now)

    def start(self, key: int, pins: Pins, now: float) -> list[Effect]:
        """Start a new request of a conversation."""
        self._requests[key] = _Request(pins)
        return self._advance(now)

    def drop(self, key: int, now: float) -> list[Effect]:
        """Cancel a request."""
        request = self._requests.pop(key, None)
        if request is not None:
            self._release(request)
        return self._advance(now)

    def expects(self, key: int, peer: PeerId, attempt: int) -> SendRequest | None:
        """Return the open attempt that this response belongs to; None if there is none."""
        request = self._requests.get(key)
        if request is None or request.ask is None:
            return None
        return request.ask if (request.ask.peer, request.ask.attempt) == (peer, attempt) else None

    def answered(self, key: int, peer: PeerId, attempt: int, round: int, now: float) -> list[Effect]:
        """Record a valid response that was computed with the weights of `round`."""
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
            return self._advance(now)
        del self._requests[key]
        assert request.done is not None
        return [RequestFinished(key, request.done.visited), *self._advance(now)]

    def declined(
        self, key: int, peer: PeerId, attempt: int, code: str, reason: str, now: float
    ) -> list[Effect]:
        """Record a refusal, or a malformed response (`MALFORMED`)."""
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
            self._pause(peer, now)
            request.refusals += 1
            if request.refusals >= MAX_REFUSALS:
                del self._requests[key]
                return [Impossible(key, reason), *self._advance(now)]
        return self._advance(now)

    def tick(self, now: float) -> list[Effect]:
        """Handle attempts whose deadline has passed. Called at `next_deadline`."""
        for request in self._requests.values():
            if request.ask is not None and request.sent_at + request.ask.deadline_seconds <= now:
                # The stage may be busy: this raises the next deadline there, too.
                self._learn(request.ask.stage, now - request.sent_at)
                self._pause(request.ask.peer, now)
                self._release(request)
        return self._advance(now)

    def next_deadline(self) -> float:
        """Return when `tick` must be called at the latest; infinite: never."""
        asked = [(request.sent_at, request.ask) for request in self._requests.values()]
        times = [sent_at + ask.deadline_seconds for sent_at, ask in asked if ask is not None]
        if len(times) < len(asked):
            times += [holder.rest_until for holder in self._holders.values() if holder.rest_until > self._now]
            ends = [since + LEAVE_OUT_SECONDS for since in self._empty_since.values()]
            times += [end for end in ends if end > self._now]
        return min(times, default=float("inf"))

    # -- decisions ------------------------------------------------------------------------------------

    def _advance(self, now: float) -> list[Effect]:
        """Send an attempt for every request that can continue. Reports the missing stages if they changed."""
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
                request.pins.pop(stage, None)  # No peer has that round any more: use the newest.
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

    def _target(self, request: _Request, now: float) -> tuple[PathHeader | None, Iterable[int]]:
        """Return the header for the next stage, or None and the stages to wait for."""
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
        """Return the least loaded peer of a stage that may be asked, at random among equals; None if none."""
        free = [
            (holder.failures, holder.in_flight, self.chance.random(), peer)
            for peer, holder in self._holders.items()
            if holder.stage == stage and peer not in without
            and holder.in_flight < ASKED_AT_ONCE and holder.rest_until <= now
        ]  # fmt: skip
        return min(free)[-1] if free else None

    def _ask(self, key: int, request: _Request, target: PathHeader, peer: PeerId, now: float) -> SendRequest:
        stage = target.visited[-1]
        seconds = self._deadline_seconds(stage)
        request.target, request.sent_at = target, now
        request.attempt += 1
        pin, path = request.pins.get(stage, -1), target.length
        request.ask = SendRequest(key, request.attempt, peer, stage, pin, path, seconds)
        self._holders[peer].in_flight += 1
        return request.ask

    def _deadline_seconds(self, stage: int) -> float:
        """Return the deadline of an attempt at a stage."""
        known = self._answer_seconds.get(stage)
        if known is None:
            return FIRST_DEADLINE_SECONDS
        return min(MAX_DEADLINE_SECONDS, max(MIN_DEADLINE_SECONDS, DEADLINE_FACTOR * known))

    def _learn(self, stage: int, seconds: float) -> None:
        """Update a stage's mean response time."""
        known = self._answer_seconds.get(stage)
        self._answer_seconds[stage] = seconds if known is None else known + SMOOTHING * (seconds - known)

    def _release(self, request: _Request) -> None:
        """End the open attempt of a request."""
        if request.ask is not None and request.ask.peer in self._holders:
            self._holders[request.ask.peer].in_flight -= 1
        request.ask = None

    def _pause(self, peer: PeerId, now: float) -> None:
        """Pause a peer that failed."""
        holder = self._holders[peer]
        rest = doubled(FIRST_REST_SECONDS, holder.failures, LONGEST_REST_SECONDS)
        holder.rest_until = now + rest * self.chance.uniform(0.8, 1.2)
        holder.failures += 1

    def _count_empty(self, now: float) -> None:
        """Update since when each stage has no peer."""
        present = {holder.stage for holder in self._holders.values() if not holder.gone(now)}
        for stage in range(self.rules.stages):
            if stage in present:
                self._empty_since.pop(stage, None)
            else:
                self._empty_since.setdefault(stage, now)
