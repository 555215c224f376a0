"""The inference client: sends requests through the stages, and chooses the peer for each attempt.

A client is a peer without a stage that wants the model's output. It contacts a peer of each stage itself:
stage 0 with tokens, the next one with the hidden states that came back, and so on. Petals has the same hub
and spoke form (arXiv:2209.01188). Each stage costs the client's link both ways. In return the client notices
every failure itself, and still holds the inputs for another peer of that stage. An *attempt* is one try of a
request at one peer, and a *header* lists the stages that a request has visited.

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
from swarmnet.run.path_rules import PathHeader, PathRules, begin, visit

ASKED_AT_ONCE = 4
"""Requests of one client at one peer: one computes, two are on their way there and back, and one waits."""
MAX_SEQUENCES = 8
"""Sequences whose next token one request may ask for: the logits of each have the size of the vocabulary."""
BUSY, NOT_READY, NO_ROUND, WRONG_STAGE = "busy", "not_ready", "no_round", "wrong_stage"
MALFORMED, NOT_FINITE = "malformed", "not_finite"
"""Codes of Declined (protocols/messages/inference_messages.py)."""
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
"""Pause after a failure, doubled with each in a row, and its bound: as for dials (membership.py)."""
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
class _StagePeer:
    """A peer of a stage that can be asked: its open attempts, failures in a row, and until when it rests."""

    stage: int
    in_flight: int = 0
    failures: int = 0
    rest_until: float = float("-inf")

    def gone(self, now: float) -> bool:
        """Return whether it has failed `GONE_FAILURES` times in a row and still rests."""
        return self.failures >= GONE_FAILURES and now < self.rest_until


@dataclass(slots=True)
class _Request:
    """One request on its way through the stages."""

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
        self._peers: dict[PeerId, _StagePeer] = {}
        self._requests: dict[int, _Request] = {}
        self._empty_since = dict.fromkeys(range(rules.stages), now)
        """When each stage without a peer lost its last one."""
        self._mean_seconds: dict[int, float] = {}
        """Moving average of each stage's response time."""
        self._missing = Missing(())
        self._now = now

    def __len__(self) -> int:
        return len(self._requests)

    # -- events ---------------------------------------------------------------------------------------

    def reached(self, peer: PeerId, stage: int, now: float) -> list[Effect]:
        """Record that a peer of a stage can be asked."""
        self._peers[peer] = _StagePeer(stage)
        return self._advance(now)

    def lost(self, peer: PeerId, now: float) -> list[Effect]:
        """Record that a peer can no longer be asked. Attempts at it end, and other peers are asked."""
        self._peers.pop(peer, None)
        for request in self._requests.values():
            if request.ask is not None and request.ask.peer == peer:
                request.ask = None
        return self._advance(now)

    def start(self, key: int, pins: Pins, now: float) -> list[Effect]:
        """Start request `key` of a conversation, whose `pins` (stage -> round) it shares and fills in."""
        self._requests[key] = _Request(pins)
        return self._advance(now)

    def drop(self, key: int, now: float) -> list[Effect]:
        request = self._requests.pop(key, None)
        if request is not None:
            self._release(request)
        return self._advance(now)

    def expects(self, key: int, peer: PeerId, attempt: int) -> SendRequest | None:
        """Return the open attempt that this response belongs to; None if there is none."""
        request = self._requests.get(key)
        if request is None or request.ask is None:
            return None
        is_open = request.ask.peer == peer and request.ask.attempt == attempt
        return request.ask if is_open else None

    def answered(self, key: int, peer: PeerId, attempt: int, round: int, now: float) -> list[Effect]:
        """Record a valid response that was computed with the weights of `round`. It pins that round for the
        stage. Returns the attempt at the next stage, or `RequestFinished` after the last one."""
        ask = self.expects(key, peer, attempt)
        if ask is None:
            return []
        stage, request = ask.stage, self._requests[key]
        request.pins[stage] = round
        self._update_mean_seconds(stage, now - request.sent_at)
        self._peers[peer].failures = 0
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
        """Record a refusal with its `code`, or a malformed response (`MALFORMED`).

        Another peer is asked next. A peer that lacks the pinned round is not asked again for this stage of
        the request. After any other refusal a peer rests: for a fixed time if the reason is temporary. After
        `MAX_REFUSALS` for reasons that are not, the request is given up as `Impossible`."""
        if self.expects(key, peer, attempt) is None:
            return []
        request = self._requests[key]
        self._release(request)
        if code in PASSING:
            rest = PASSING[code] * self.chance.uniform(0.8, 1.2)
            self._peers[peer].rest_until = now + rest
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
                # The stage may be busy. Counting the lost time as a response time raises its next deadline.
                self._update_mean_seconds(request.ask.stage, now - request.sent_at)
                self._pause(request.ask.peer, now)
                self._release(request)
        return self._advance(now)

    def next_deadline(self) -> float:
        """Return when `tick` must be called at the latest; infinite: never."""
        attempts = [(request.sent_at, request.ask) for request in self._requests.values()]
        times = [sent_at + ask.deadline_seconds for sent_at, ask in attempts if ask is not None]
        if len(times) < len(attempts):  # Some requests wait for a peer or a stage.
            ends = [known_peer.rest_until for known_peer in self._peers.values()]
            ends += [since + LEAVE_OUT_SECONDS for since in self._empty_since.values()]
            times += [end for end in ends if end > self._now]
        return min(times, default=float("inf"))

    # -- decisions ------------------------------------------------------------------------------------

    def _advance(self, now: float) -> list[Effect]:
        """Return an attempt for every request that waits and can continue. If the stages for which requests
        wait have changed, they are reported too (`Missing`)."""
        self._now = now
        self._update_empty_since(now)
        effects: list[Effect] = []
        missing: set[int] = set()
        for key, request in self._requests.items():
            if request.ask is not None:
                continue
            target, missing_stages = self._next_header(request, now)
            missing.update(missing_stages)
            if target is None:
                continue
            stage = target.stage
            known_peers = self._peers.items()
            present = {peer for peer, known in known_peers if known.stage == stage and not known.gone(now)}
            if present and present <= request.lacking:
                request.pins.pop(stage, None)  # No peer has the pinned round any more: use the newest.
                request.lacking.clear()
            peer = self._choose_peer(stage, request.lacking, now)
            if peer is None:
                if stage in self._empty_since:  # Its peers are not just busy.
                    missing.add(stage)
                continue
            effects.append(self._start_attempt(key, request, target, peer, now))
        linked = {known_peer.stage for known_peer in self._peers.values()}
        report = Missing(stages=tuple(sorted(missing)), busy=tuple(sorted(missing & linked)))
        if report != self._missing:
            self._missing = report
            effects.append(report)
        return effects

    def _next_header(self, request: _Request, now: float) -> tuple[PathHeader | None, Iterable[int]]:
        """Return the header with which the request goes to its next stage. It lists the stages visited, with
        the next one as the last. If no stage can follow now, return None and the stages to wait for.

        Stages without a peer for `LEAVE_OUT_SECONDS` are skipped as far as the run's rules allow."""
        if request.done is None:
            return begin(self.rules, self.rules.stages), ()
        empty = self._empty_since
        usable = [s for s in range(self.rules.stages) if s not in empty or now < empty[s] + LEAVE_OUT_SECONDS]
        options = onward(request.done, self.rules, usable)
        if not options.stages:
            return None, options.missing
        return visit(options.header, options.stages[0], self.rules), ()

    def _choose_peer(self, stage: int, without: set[PeerId], now: float) -> PeerId | None:
        """Return the peer of a stage with the fewest failures, then the fewest open attempts, at random among
        equals. Peers in `without`, resting ones and those with `ASKED_AT_ONCE` attempts are left out. None if
        no peer is left."""
        free = [
            (known_peer.failures, known_peer.in_flight, self.chance.random(), peer)
            for peer, known_peer in self._peers.items()
            if known_peer.stage == stage
            and peer not in without
            and known_peer.in_flight < ASKED_AT_ONCE
            and known_peer.rest_until <= now
        ]
        if not free:
            return None
        *_, peer = min(free)
        return peer

    def _start_attempt(
        self, key: int, request: _Request, target: PathHeader, peer: PeerId, now: float
    ) -> SendRequest:
        """Record an attempt of request `key` at `peer`, with the header `target`, and return it."""
        stage = target.stage
        seconds = self._deadline_seconds(stage)
        request.target, request.sent_at = target, now
        request.attempt += 1
        pinned_round = request.pins.get(stage, -1)
        request.ask = SendRequest(
            key, request.attempt, peer, stage, pinned_round, path=target.length, deadline_seconds=seconds
        )
        self._peers[peer].in_flight += 1
        return request.ask

    def _deadline_seconds(self, stage: int) -> float:
        """Return how many seconds an attempt at a stage may take: `DEADLINE_FACTOR` mean response times,
        within bounds."""
        mean = self._mean_seconds.get(stage)
        if mean is None:
            return FIRST_DEADLINE_SECONDS
        return min(MAX_DEADLINE_SECONDS, max(MIN_DEADLINE_SECONDS, DEADLINE_FACTOR * mean))

    def _update_mean_seconds(self, stage: int, seconds: float) -> None:
        """Update the moving average of a stage's response times."""
        mean = self._mean_seconds.get(stage)
        self._mean_seconds[stage] = seconds if mean is None else mean + SMOOTHING * (seconds - mean)

    def _release(self, request: _Request) -> None:
        """End the open attempt of a request."""
        if request.ask is not None and request.ask.peer in self._peers:
            self._peers[request.ask.peer].in_flight -= 1
        request.ask = None

    def _pause(self, peer: PeerId, now: float) -> None:
        """Ask a peer that failed no more for some time, which doubles with each failure in a row."""
        known_peer = self._peers[peer]
        rest = doubled(FIRST_REST_SECONDS, known_peer.failures, LONGEST_REST_SECONDS)
        known_peer.rest_until = now + rest * self.chance.uniform(0.8, 1.2)
        known_peer.failures += 1

    def _update_empty_since(self, now: float) -> None:
        """Update since when each stage has no peer, or only peers that are `gone`."""
        present = {known_peer.stage for known_peer in self._peers.values() if not known_peer.gone(now)}
        for stage in range(self.rules.stages):
            if stage in present:
                self._empty_since.pop(stage, None)
            else:
                self._empty_since.setdefault(stage, now)
