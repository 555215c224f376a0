"""A peer's part in the way of every microbatch: forward down, gradient up, committed once.

    origin:  start -> forward -> (ACT to a peer of the next stage) -> GRAD -> backward, committed
    middle:  ACT   -> forward -> ACT onwards                       -> GRAD -> backward, committed -> GRAD back
    last:    ACT   -> forward, loss and backward at once, committed                            -> GRAD back

Who sent an ACT keeps its output until GRAD comes. When the next peer dies, refuses or misses the deadline,
the *nearest* sender sends the kept output to another peer: the work above is not lost. A repeated ACT gets
the kept GRAD again and adds nothing. Deadlines are durations that each hop shortens.

No IO and no tensors: `handle(event, now)` returns what the caller must do; bodies stay with the caller,
under the microbatch's id. Times in seconds on the caller's clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.pipeline import events
from swarmnet.pipeline.ledger import Ledger
from swarmnet.pipeline.timeouts import AnswerTimes
from swarmnet.routing.load_balancer import Guide, Router

LEAST_SHARE = 0.5
"""Of the usual answer time: with less left than this another try would be computed in vain."""
MOST_MARGIN = 0.1
"""What a hop keeps, at most, of the time that it has itself, and does not leave to its successor: its part of
the way that is left. A tenth on each of 32 stages left those in the middle less than the way takes
(docs/benchmarks/home_lines.md)."""
MOST_ATTEMPTS = 4
RETRY_SECONDS = 1.0
"""How often a microbatch that nobody has room for is offered again, though nobody has answered, told of room
or come to the end of a pause since: as often as neighbours beat, by which new ones are known."""
GUIDED_RETRY_SECONDS = 0.1
"""Where places are asked for ahead: what a guide waits for is not seen here."""
IS_WELL = frozenset({"committed", "other_path", "cancelled", "out_of_line"})
"""Refusals of a peer that is well: it did this microbatch before, was told that it need not, or does not
trust its numbers, which all peers see at the same moment when a step was large."""
MOST_ASKERS = 4
"""Wait for one answer: each is a peer that was tried and has not said that it gave up."""
MOST_OVERTAKEN = 256
"""Of those that never come; a word of 64 bytes each."""
KEEP_SECONDS = 30.0
"""How long a committed microbatch's GRAD is kept for a repeated ACT."""


Phase = Literal["door", "forward", "unrouted", "waiting", "backward", "done"]


@dataclass(slots=True)
class Job:
    """One microbatch on this peer."""

    phase: Phase
    deadline: float
    own: bool = False
    """Started here."""
    above: dict[PeerId, int] = field(default_factory=dict)
    """Who waits for its answer, and that peer's attempt."""
    next: PeerId | None = None
    attempt: int = 0
    failures: int = 0
    cancelled: bool = False
    """Nobody wants it any more, but it is being computed: what comes of that decides."""
    sent_at: float = 0.0
    next_deadline: float = float("inf")
    tried: dict[PeerId, float] = field(default_factory=dict)
    """Peers that it was sent to, and when first: an answer may be to that, whatever was sent since."""
    answered_by: PeerId | None = None
    """Whose gradient goes through here now."""
    answer_seconds: float | None = None
    """What that took, if it answers the newest attempt."""
    spoilt: set[PeerId] = field(default_factory=set)
    """Whose gradient was no good: no other one of theirs is taken."""
    rerouted: str = ""
    """Why the peer that was tried last did not do it (peers/telemetry/reasons.py)."""
    retry_at: float = float("inf")
    done_at: float = float("inf")


class Pipeline:
    """The machine. `candidates(key, tried)` names the live peers that a microbatch may go to next (None: one
    that would be started now) after it was sent to those `tried`; the last stage has none."""

    def __init__(
        self,
        stages_below: int,
        router: Router,
        candidates: Callable[[MicrobatchId | None, Collection[PeerId]], Collection[PeerId]],
        slots: int,
        ledger: Ledger,
        body_bytes: int = 0,
    ) -> None:
        """`body_bytes`: what a microbatch takes from stage to stage, by which patience begins."""
        self.stages_below = stages_below
        self.router = router
        self.candidates = candidates
        self.slots = slots
        self.ledger = ledger
        self.guide: Guide | None = None
        self.jobs: dict[MicrobatchId, Job] = {}
        """All of them. Each is in one of the next two as well: no event looks through all that is kept."""
        self._open: dict[MicrobatchId, Job] = {}
        self._door: dict[MicrobatchId, Job] = {}
        """Of these, those that came before there was memory for them: nothing but their input is kept."""
        self._kept: OrderedDict[MicrobatchId, Job] = OrderedDict()
        """Done, in the order in which they were."""
        self._overtaken: OrderedDict[tuple[PeerId, MicrobatchId], int] = OrderedDict()
        """Attempts that were called off before they came."""
        self.answers = AnswerTimes(router, stages_below, body_bytes)
        self._effects: list[events.Effect] = []

    @property
    def under_way(self) -> int:
        return len(self._open)

    @property
    def started_here(self) -> int:
        """Microbatches of this origin that are not finished."""
        return sum(job.own for job in self._open.values())

    def has_room_ahead(self, now: float) -> bool:
        """Whether an origin may start one more: somebody would take it, and nothing waits for a route."""
        if not self.stages_below:
            return True
        if any(job.phase == "unrouted" for job in self._open.values()):
            return False
        return (self.guide or self.router).has_room(self.candidates(None, ()), now)

    def grant(self, peer: PeerId) -> int:
        """How many microbatches `peer` of the stage above may have under way here."""
        askers = (asker for job in self._open.values() for asker in job.above)
        return granted(peer, askers, self.slots - self.under_way)

    def expects_answer(self, key: MicrobatchId, peer: PeerId) -> bool:
        """Whether a GRAD of this microbatch from this peer would be taken."""
        job = self.jobs.get(key)
        if job is None or job.phase not in ("waiting", "unrouted"):
            return False
        return peer in job.tried and peer not in job.spoilt

    def handle(self, event: events.Event, now: float) -> list[events.Effect]:
        """Take an event; return what must be done, in order."""
        self._effects = []
        match event:
            case events.Start(key):
                self._begin(
                    key,
                    Job(
                        "forward",
                        now + MOST_ATTEMPTS * self.answers.of_an_attempt(self.candidates(None, ())),
                        own=True,
                    ),
                )
            case events.ActArrived():
                self._act(event, now)
            case events.ForwardDone(key):
                self._route(key, now)
            case events.LastDone(key) | events.BackwardDone(key):
                self._committed(key, event.tokens, now)
            case events.Failed():
                self._failed(event, now)
            case events.GradArrived(peer, key):
                self._grad(peer, key, now)
            case events.BusyArrived(peer, key, attempt):
                if self._is_current(peer, key, attempt):
                    self.router.busy(peer, now)
                    self._reroute(key, "busy", now)
            case events.NackArrived(peer, key, attempt, code):
                if self._is_current(peer, key, attempt):
                    if code not in IS_WELL:
                        self.router.failed(peer, now)
                    self._reroute(key, code, now)
            case events.CancelArrived(peer, key, attempt):
                self._called_off(peer, key, attempt)
            case events.PeerLost(peer):
                self._lost(peer, now)
            case events.Tick():
                self._tick(now)
        if self._door:
            self._admit(now)
        return self._effects

    def next_deadline(self) -> float:
        """When to come with a Tick if nothing else happens."""
        due = float("inf")
        for job in self._open.values():
            if job.phase == "waiting":
                due = min(due, job.next_deadline)
            elif job.phase == "unrouted":
                due = min(due, job.deadline, job.retry_at)
        oldest = next(iter(self._kept.values()), None)
        return due if oldest is None else min(due, oldest.done_at + KEEP_SECONDS)

    # -- events ---------------------------------------------------------------------------------------

    def _act(self, act: events.ActArrived, now: float) -> None:
        job = self.jobs.get(act.key)
        if self._overtaken.pop((act.peer, act.key), 0) >= act.attempt:
            # An answer all the same: the asker may have begun anew and count its attempts from one again.
            reason = "this attempt was called off before it came"
            self._effects.append(events.SendNack(act.key, act.peer, act.attempt, "cancelled", reason))
            return
        if job is not None:
            self._asked_again(job, act, now)
            return
        if self.ledger.is_committed(act.key):
            reason = "its gradient was added here and its answer is no longer kept"
            self._effects.append(events.SendNack(act.key, act.peer, act.attempt, "committed", reason))
            return
        job = Job("forward", now + act.deadline_seconds, above={act.peer: act.attempt})
        if self.under_way - len(self._door) < self.slots and not self._door:
            self._begin(act.key, job)
        elif self.guide is not None and self.guide.expects(act.key, act.peer):
            job.phase = "door"
            self.jobs[act.key] = self._open[act.key] = self._door[act.key] = job
        else:
            self.ledger.refused += 1
            self._effects.append(events.SendBusy(act.key, act.peer, act.attempt))

    def _asked_again(self, job: Job, act: events.ActArrived, now: float) -> None:
        """The sender asks again (its link broke), or another does (the one above them re-routed). Whoever
        asked before may still wait: nobody takes another's answer away."""
        if job.phase == "done":
            self.ledger.repeated += 1
            self._effects.append(events.SendGrad(act.key, act.peer, act.attempt))
        elif act.peer not in job.above and len(job.above) >= MOST_ASKERS:
            self._effects.append(events.SendBusy(act.key, act.peer, act.attempt))
        else:
            job.above[act.peer] = max(act.attempt, job.above.get(act.peer, 0))
            job.cancelled = False
            job.deadline = max(job.deadline, now + act.deadline_seconds)

    def _admit(self, now: float) -> None:
        """Begin those at the door, first come first served, as long as there is memory."""
        while self._door and self.under_way - len(self._door) < self.slots:
            key = next(iter(self._door))
            job = self._door.pop(key)
            if job.deadline <= now:
                self._abandon(key, "deadline", "there was no memory for it in time", now)
            else:
                job.phase = "forward"
                self._effects.append(events.ComputeForward(key))

    def _route(
        self, key: MicrobatchId, now: float, full: Collection[PeerId] | None = None
    ) -> Collection[PeerId] | None:
        """The output is there: send it to the best peer of the next stage. `full`: of these nobody has room,
        as was just seen; returned are those of whom that is known now."""
        job = self.jobs[key]
        if job.cancelled:
            self.ledger.drop("cancelled")
            self._forget(key)
            return full
        hopeless = job.attempt > 0 and job.deadline - now < LEAST_SHARE * (self.answers.usual or 0.0)
        if job.deadline <= now or hopeless or job.failures >= MOST_ATTEMPTS:
            self._abandon(key, "deadline", "no peer of the next stage did it in time", now)
            return full
        candidates = self.candidates(key, job.tried)
        if self.guide is not None:
            peer = self.guide.choose(key, candidates, now, job.tried)
        else:
            peer = None if candidates == full else self.router.choose(candidates, now, avoid=job.tried)
        if peer is None:
            job.phase, job.retry_at = "unrouted", now + GUIDED_RETRY_SECONDS
            if self.guide is None:
                job.retry_at = min(now + RETRY_SECONDS, self.router.room_at(candidates, now))
            return candidates
        left = job.deadline - now
        leaves = left * (1.0 - min(MOST_MARGIN, 1.0 / (self.stages_below + 1)))
        patience = min(self.answers.patience(peer, 0.0 if job.own else left), leaves)
        job.phase, job.next, job.sent_at = "waiting", peer, now
        job.attempt += 1
        job.tried.setdefault(peer, now)
        job.next_deadline = now + patience
        self.router.sent(peer)
        self._effects.append(events.SendAct(key, peer, job.attempt, patience))
        return None

    def _grad(self, peer: PeerId, key: MicrobatchId, now: float) -> None:
        """The first answer counts, whoever gave it: each is a true gradient of this microbatch."""
        if not self.expects_answer(key, peer):
            self.ledger.late_answers += 1
            return
        job = self.jobs[key]
        took = now - job.tried[peer]
        if peer == job.next:
            job.answer_seconds = took
            self.router.ended(peer)
        elif job.phase == "waiting" and job.next is not None:
            self.router.ended(job.next)
            self._effects.append(events.SendCancel(key, job.next, job.attempt))
        job.phase, job.next, job.next_deadline = "backward", None, float("inf")
        job.answered_by = peer
        self._effects.append(events.ComputeBackward(key))
        self._offer(now)

    def _committed(self, key: MicrobatchId, tokens: int, now: float) -> None:
        job = self.jobs[key]
        self.ledger.commit(key, tokens)  # Also if it was cancelled while it was computed.
        if job.answered_by is not None and job.answer_seconds is not None:
            self.router.answered(job.answered_by, job.answer_seconds)
            self.answers.took(job.answer_seconds)
        job.phase, job.done_at = "done", now
        self._kept[key] = self._open.pop(key)
        if job.own:
            self._forget(key)
        elif not job.cancelled:
            self._effects += [events.SendGrad(key, peer, attempt) for peer, attempt in job.above.items()]

    def _lost(self, peer: PeerId, now: float) -> None:
        for key, job in list(self._open.items()):
            if job.phase == "waiting" and job.next == peer:
                self._reroute(key, "gone", now)
            elif peer in job.above:
                self._gone_above(key, job, peer)
        self.router.failed(peer, now)

    def _called_off(self, peer: PeerId, key: MicrobatchId, attempt: int) -> None:
        """That peer does not want the answer any more. Its word is short, and may overtake the body."""
        job = self.jobs.get(key)
        if job is None or job.above.get(peer, 0) < attempt:
            self._overtaken[peer, key] = attempt
            if len(self._overtaken) > MOST_OVERTAKEN:
                self._overtaken.popitem(last=False)
        if job is not None and job.phase != "done" and job.above.get(peer, attempt + 1) <= attempt:
            self._gone_above(key, job, peer)

    def _gone_above(self, key: MicrobatchId, job: Job, peer: PeerId) -> None:
        del job.above[peer]
        if not job.above:
            self._cancel(key)

    def _failed(self, failed: events.Failed, now: float) -> None:
        job = self.jobs[failed.key]
        if failed.again and job.answered_by is not None:  # Else it may be what came from above.
            self.router.failed(job.answered_by, now)
            job.spoilt.add(job.answered_by)
        if failed.again and not job.cancelled:
            self._reroute(failed.key, failed.code, now)
        else:
            self._abandon(failed.key, failed.code, failed.reason, now)

    def _tick(self, now: float) -> None:
        full: Collection[PeerId] | None = None
        for key, job in list(self._open.items()):
            if job.phase == "waiting" and now >= job.next_deadline:
                full = None
                self.answers.missed(job.sent_at, now)
                if job.next is not None:
                    self.router.overdue(job.next, now - job.tried[job.next])
                    self.router.failed(job.next, now)
                    self._effects.append(events.SendCancel(key, job.next, job.attempt))
                self._reroute(key, "deadline", now)
            elif job.phase == "unrouted":
                if now >= job.deadline:
                    self._abandon(key, "deadline", "no peer of the next stage has room", now)
                else:
                    full = self._route(key, now, full)
        for key in list(takewhile(lambda key: now >= self._kept[key].done_at + KEEP_SECONDS, self._kept)):
            self._forget(key)

    def _offer(self, now: float) -> None:
        """Somebody below has room again: microbatches that wait for a route go first."""
        full: Collection[PeerId] | None = None
        for key in [key for key, job in self._open.items() if job.phase == "unrouted"]:
            full = self._route(key, now, full)

    # -- what they have in common ---------------------------------------------------------------------

    def _is_current(self, peer: PeerId, key: MicrobatchId, attempt: int) -> bool:
        job = self.jobs.get(key)
        return job is not None and job.phase == "waiting" and job.next == peer and job.attempt == attempt

    def _reroute(self, key: MicrobatchId, code: str, now: float) -> None:
        job = self.jobs[key]
        if job.next is not None:
            self.router.ended(job.next)
        self.ledger.rerouted[code] = self.ledger.rerouted.get(code, 0) + 1
        if code == "busy" and job.next is not None:
            job.tried.pop(job.next, None)
        else:
            job.failures += 1
        job.phase, job.next, job.next_deadline, job.rerouted = "unrouted", None, float("inf"), code
        job.answered_by = job.answer_seconds = None
        self._route(key, now)

    def _abandon(self, key: MicrobatchId, code: str, reason: str, now: float) -> None:
        job = self.jobs[key]
        self.ledger.drop(code)
        if not job.cancelled:
            self._effects += [
                events.SendNack(key, peer, number, code, reason) for peer, number in job.above.items()
            ]
        self._forget(key)

    def _cancel(self, key: MicrobatchId) -> None:
        job = self.jobs[key]
        if job.phase in ("forward", "backward"):
            job.cancelled = True
            return
        self.ledger.drop("cancelled")
        if job.phase == "waiting" and job.next is not None:
            self.router.ended(job.next)
            self._effects.append(events.SendCancel(key, job.next, job.attempt))
        self._forget(key)

    def _begin(self, key: MicrobatchId, job: Job) -> None:
        self.jobs[key] = self._open[key] = job
        self._effects.append(events.ComputeForward(key))

    def _forget(self, key: MicrobatchId) -> None:
        for held in (self.jobs, self._open, self._kept, self._door):
            held.pop(key, None)
        self._effects.append(events.Forget(key))


def granted(peer: PeerId, askers: Iterable[PeerId], free: int) -> int:
    """How many `peer` may have under way where it asks (CREDIT): what it has, and its share of the `free`
    slots among all that have some. `askers`: of all that is under way there."""
    taken = Counter(askers)
    own = taken[peer]
    return max(1, own + -(-free // max(1, len(taken) + (not own))))
