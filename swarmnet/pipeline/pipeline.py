"""Carry every microbatch through one peer: forward to the next stage, gradient back to the previous one.

A microbatch starts at its *origin*, a peer of the first stage. *Above* are earlier stages, *below* are later
ones. The message ACT sends hidden states below, and GRAD sends their gradient back. BUSY and NACK refuse an
ACT, and CANCEL withdraws it. An *attempt* is one ACT to one peer; attempts are counted. A microbatch is
*committed* when its gradient has been added to the open round, once on each peer.

    origin:  start -> forward -> (ACT to a peer of the next stage) -> GRAD -> backward, committed
    middle:  ACT   -> forward -> ACT onwards                       -> GRAD -> backward, committed -> GRAD back
    last:    ACT   -> forward, loss and backward at once, committed                            -> GRAD back

The sender of an ACT keeps its output until GRAD comes. The next peer may die, refuse or miss the deadline.
Then the *nearest* sender sends the kept output to another peer, so the work above is not lost. A repeated ACT
gets the kept GRAD again and adds nothing. Deadlines are durations, and each hop shortens them.

The *router* chooses the next peer. A *guide*, if there is one, reserves paths ahead and chooses instead. The
state machine does no IO and holds no tensors. `handle(event, now)` returns what the caller must do. The
caller keeps the tensors under the microbatch's id. Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.pipeline import events
from swarmnet.pipeline.ledger import MicrobatchLedger
from swarmnet.pipeline.timeouts import AnswerTimes
from swarmnet.routing.load_balancer import Guide, Router

MIN_SHARE = 0.5
"""Share of the usual answer time. With less time left, another attempt could not finish."""
MAX_MARGIN = 0.1
"""Maximum share of its time that a hop keeps and does not leave to its successor. A hop keeps its share of
the remaining path, but no more. A fixed tenth on each of 32 stages left those in the middle less than the
path takes (docs/benchmarks/home_lines.md)."""
MAX_ATTEMPTS = 4
RETRY_SECONDS = 1.0
"""Interval at which a microbatch without a next peer is offered again if no answer, report of room or end of
a pause comes earlier. It equals the heartbeat interval, by which new neighbours become known."""
GUIDED_RETRY_SECONDS = 0.1
"""Retry interval where places are reserved ahead: this module does not see what the guide waits for."""
IS_WELL = frozenset({"committed", "other_path", "cancelled", "outlier"})
"""Codes of refusals after which a peer still counts as healthy: it computed this microbatch before, it
received a cancel, or it rejects outliers. All peers see outliers at once when a step was large."""
MAX_ASKERS = 4
"""Maximum number of peers that wait for one answer. Each was tried and has not sent CANCEL."""
MAX_OVERTAKEN = 256
"""Maximum number of cancelled attempts to remember whose ACT has not come, at 64 bytes each."""
KEEP_SECONDS = 30.0
"""Seconds for which a committed microbatch's GRAD is kept for a repeated ACT."""


Phase = Literal["door", "forward", "unrouted", "waiting", "backward", "done"]
"""door: the input waits for memory. unrouted: the output waits for a next peer. waiting: the output was sent,
and its GRAD has not come. done: the microbatch is committed. In the other two it is being computed."""


@dataclass(slots=True)
class Job:
    """The state of one microbatch on this peer."""

    phase: Phase
    deadline: float
    own: bool = False
    """Whether it was started here."""
    above: dict[PeerId, int] = field(default_factory=dict)
    """Maps each peer that waits for the answer to its newest attempt."""
    next: PeerId | None = None
    attempt: int = 0
    failures: int = 0
    cancelled: bool = False
    """Whether no peer wants it any more while it is being computed. The result decides how it ends."""
    sent_at: float = 0.0
    next_deadline: float = float("inf")
    tried: dict[PeerId, float] = field(default_factory=dict)
    """Maps each peer that was tried to the first send time. An answer may belong to any attempt."""
    answered_by: PeerId | None = None
    """Peer whose gradient is in the backward pass now."""
    answer_seconds: float | None = None
    """Seconds until that gradient came, if it answers the newest attempt."""
    rejected: set[PeerId] = field(default_factory=set)
    """Peers whose gradient was invalid. No further gradient from them is accepted."""
    rerouted: str = ""
    """Reason why the newest peer that was tried gave no answer (`peers/telemetry/reasons.py`)."""
    retry_at: float = float("inf")
    done_at: float = float("inf")


class Pipeline:
    """The state machine of all microbatches on one peer. `candidates(key, tried)` returns the live peers to
    which microbatch `key` may go after it was sent to `tried`. With None as `key`, they are those for a
    microbatch that would start now. The last stage has no candidates."""

    def __init__(
        self,
        *,
        stages_below: int,
        router: Router,
        candidates: Callable[[MicrobatchId | None, Collection[PeerId]], Collection[PeerId]],
        slots: int,
        ledger: MicrobatchLedger,
        body_bytes: int = 0,
    ) -> None:
        """Create the machine. `slots` is how many microbatches fit into memory. `body_bytes` is the size of a
        body between stages; it sets the deadlines before any answer is measured."""
        self.stages_below = stages_below
        self.router = router
        self.candidates = candidates
        self.slots = slots
        self.ledger = ledger
        self.guide: Guide | None = None
        self.jobs: dict[MicrobatchId, Job] = {}
        """All jobs. Each is also in `_open` or in `_done`, so that no event scans all jobs."""
        self._open: dict[MicrobatchId, Job] = {}
        """Jobs that are not done."""
        self._queued: dict[MicrobatchId, Job] = {}
        """Jobs of `_open` that came before there was memory for them. Only their input is kept."""
        self._done: OrderedDict[MicrobatchId, Job] = OrderedDict()
        """Jobs that are done, oldest first. Their GRAD is kept for `KEEP_SECONDS`."""
        self._cancelled_early: OrderedDict[tuple[PeerId, MicrobatchId], int] = OrderedDict()
        """Maps (peer, microbatch) to the attempt whose CANCEL came before its ACT."""
        self.answers = AnswerTimes(router, stages_below, body_bytes)
        self._effects: list[events.Effect] = []

    @property
    def under_way(self) -> int:
        return len(self._open)

    @property
    def started_here(self) -> int:
        """Number of microbatches of this origin that are not finished."""
        return sum(job.own for job in self._open.values())

    def has_room_ahead(self, now: float) -> bool:
        """Return whether an origin may start one more microbatch. A peer of the next stage must have room,
        and no microbatch may wait for a next peer. Always True on the last stage, which has no next peer."""
        if not self.stages_below:
            return True
        if any(job.phase == "unrouted" for job in self._open.values()):
            return False
        chooser = self.guide or self.router
        return chooser.has_room(self.candidates(None, ()), now)

    def grant(self, peer: PeerId) -> int:
        """Return how many microbatches `peer` of the stage above may have in flight here."""
        askers = (asker for job in self._open.values() for asker in job.above)
        return granted(peer, askers, self.slots - self.under_way)

    def expects_answer(self, key: MicrobatchId, peer: PeerId) -> bool:
        """Return whether a GRAD of this microbatch from this peer would be accepted."""
        job = self.jobs.get(key)
        if job is None or job.phase not in ("waiting", "unrouted"):
            return False
        return peer in job.tried and peer not in job.rejected

    def handle(self, event: events.Event, now: float) -> list[events.Effect]:
        """Process an event, which reports one step of a microbatch, the loss of a peer or passed time. Then
        begin queued microbatches if there is memory. Returns what the caller must do, in order (`_effects`).
        A BUSY or NACK is ignored unless it answers the newest attempt."""
        self._effects = []
        match event:
            case events.MicrobatchCut(key):  # This peer is the origin, and the text is ready.
                seconds = MAX_ATTEMPTS * self.answers.attempt_seconds(self.candidates(None, ()))
                self._begin(key, Job("forward", now + seconds, own=True))
            case events.ActArrived():
                self._accept_act(event, now)
            case events.ForwardDone(key):
                self._route(key, now)
            case events.LastDone(key) | events.BackwardDone(key):
                self._finish(key, event.tokens, now)
            case events.ComputeFailed():
                self._handle_failure(event, now)
            case events.GradArrived(peer, key):
                self._accept_grad(peer, key, now)
            case events.BusyArrived(peer, key, attempt):
                if self._is_current(peer, key, attempt):
                    self.router.busy(peer, now)
                    self._reroute(key, "busy", now)
            case events.NackArrived(peer, key, attempt, code):
                if self._is_current(peer, key, attempt):
                    if code not in IS_WELL:  # The refusal shows a fault of the peer.
                        self.router.failed(peer, now)
                    self._reroute(key, code, now)
            case events.CancelArrived(peer, key, attempt):
                self._handle_cancel(peer, key, attempt)
            case events.PeerLost(peer):
                self._handle_lost_peer(peer, now)
            case events.PipelineTick():
                self._handle_tick(now)
        if self._queued:
            self._begin_queued(now)
        return self._effects

    def next_deadline(self) -> float:
        """Return when the caller must pass a `PipelineTick` if no other event comes before; inf: never."""
        due = float("inf")
        for job in self._open.values():
            if job.phase == "waiting":
                due = min(due, job.next_deadline)
            elif job.phase == "unrouted":
                due = min(due, job.deadline, job.retry_at)
        oldest_done = next(iter(self._done.values()), None)  # Its GRAD is freed after `KEEP_SECONDS`.
        return due if oldest_done is None else min(due, oldest_done.done_at + KEEP_SECONDS)

    # -- events ---------------------------------------------------------------------------------------

    def _accept_act(self, act: events.ActArrived, now: float) -> None:
        """Handle an ACT: begin a new microbatch if there is memory. Else it waits if the guide expects it (it
        has a reservation), or gets BUSY. NACK answers an attempt whose CANCEL came first, and a committed
        microbatch whose GRAD is no longer kept."""
        job = self.jobs.get(act.key)
        cancelled_attempt = self._cancelled_early.pop((act.peer, act.key), 0)
        if cancelled_attempt >= act.attempt:
            # Send a reply anyway, because the sender may have restarted and count attempts from one again.
            reason = "this attempt was called off before it came"
            self._effects.append(events.SendNack(act.key, act.peer, act.attempt, "cancelled", reason))
            return
        if job is not None:
            self._handle_repeated_act(job, act, now)
            return
        if self.ledger.is_committed(act.key):
            reason = "its gradient was added here and its answer is no longer kept"
            self._effects.append(events.SendNack(act.key, act.peer, act.attempt, "committed", reason))
            return
        job = Job("forward", now + act.deadline_seconds, above={act.peer: act.attempt})
        microbatches_in_memory = self.under_way - len(self._queued)
        if microbatches_in_memory < self.slots and not self._queued:
            self._begin(act.key, job)
        elif self.guide is not None and self.guide.expects(act.key, act.peer):
            job.phase = "door"
            self.jobs[act.key] = job
            self._open[act.key] = job
            self._queued[act.key] = job
        else:
            self.ledger.refused += 1
            self._effects.append(events.SendBusy(act.key, act.peer, act.attempt))

    def _handle_repeated_act(self, job: Job, act: events.ActArrived, now: float) -> None:
        """Handle an ACT for a known microbatch, from the same sender (its link broke) or from another peer
        after a re-route above. If it is done, GRAD is sent again. Otherwise the sender is added to `above`,
        the peers that wait for GRAD, or gets BUSY if too many wait."""
        if job.phase == "done":
            self.ledger.repeated += 1
            self._effects.append(events.SendGrad(act.key, act.peer, act.attempt))
        elif act.peer not in job.above and len(job.above) >= MAX_ASKERS:
            self._effects.append(events.SendBusy(act.key, act.peer, act.attempt))
        else:
            job.above[act.peer] = max(act.attempt, job.above.get(act.peer, 0))
            job.cancelled = False
            job.deadline = max(job.deadline, now + act.deadline_seconds)

    def _begin_queued(self, now: float) -> None:
        """Begin queued microbatches in order while there is memory. Drop those whose deadline has passed."""
        while self._queued and self.under_way - len(self._queued) < self.slots:
            key = next(iter(self._queued))
            job = self._queued.pop(key)
            if job.deadline <= now:
                self._abandon(key, "deadline", "there was no memory for it in time", now)
            else:
                job.phase = "forward"
                self._effects.append(events.ComputeForward(key))

    def _route(
        self, key: MicrobatchId, now: float, full: Collection[PeerId] | None = None
    ) -> Collection[PeerId] | None:
        """Send a ready output to the best peer of the next stage. Without a peer that has room, try again
        later. Drop a microbatch that is cancelled, late or out of attempts. `full` are the candidates among
        which the call before found no room, if it did. Returns such a set for the next call, or None."""
        job = self.jobs[key]
        if job.cancelled:
            self.ledger.drop("cancelled")
            self._forget(key)
            return full
        time_left = job.deadline - now
        # Another attempt could not finish in this time.
        is_too_short = job.attempt > 0 and time_left < MIN_SHARE * (self.answers.usual or 0.0)
        if time_left <= 0.0 or is_too_short or job.failures >= MAX_ATTEMPTS:
            self._abandon(key, "deadline", "no peer of the next stage did it in time", now)
            return full
        candidates = self.candidates(key, job.tried)
        if self.guide is not None:
            peer = self.guide.choose(key, candidates, now, job.tried)
        elif candidates == full:  # The router would find no room either.
            peer = None
        else:
            peer = self.router.choose(candidates, now, avoid=job.tried)
        if peer is None:
            job.phase, job.retry_at = "unrouted", now + GUIDED_RETRY_SECONDS
            if self.guide is None:
                job.retry_at = min(now + RETRY_SECONDS, self.router.room_at(candidates, now))
            return candidates
        # This hop keeps a share of the time for itself, so that it can answer before the peer above gives up.
        kept_share = min(MAX_MARGIN, 1.0 / (self.stages_below + 1))
        wait_seconds = self.answers.patience(peer, 0.0 if job.own else time_left)
        wait_seconds = min(wait_seconds, time_left * (1.0 - kept_share))
        job.phase, job.next, job.sent_at = "waiting", peer, now
        job.attempt += 1
        job.tried.setdefault(peer, now)
        job.next_deadline = now + wait_seconds
        self.router.sent(peer)
        self._effects.append(events.SendAct(key, peer, job.attempt, wait_seconds))
        return None

    def _accept_grad(self, peer: PeerId, key: MicrobatchId, now: float) -> None:
        """Start the backward pass with the first GRAD that comes, from any peer that was tried. If it answers
        an earlier attempt, cancel the newest. A GRAD that no microbatch needs is only counted."""
        if not self.expects_answer(key, peer):
            self.ledger.late_answers += 1
            return
        job = self.jobs[key]
        if peer == job.next:  # It answers the newest attempt.
            job.answer_seconds = now - job.tried[peer]
            self.router.ended(peer)
        elif job.phase == "waiting" and job.next is not None:
            self.router.ended(job.next)
            self._effects.append(events.SendCancel(key, job.next, job.attempt))
        job.phase, job.next, job.next_deadline = "backward", None, float("inf")
        job.answered_by = peer
        self._effects.append(events.ComputeBackward(key))
        self._route_all_unrouted(now)

    def _finish(self, key: MicrobatchId, tokens: int, now: float) -> None:
        """Count a microbatch as committed and send its gradient to all peers that wait for it. At the origin
        none does, and the microbatch is forgotten. Elsewhere it is kept for a repeated ACT."""
        job = self.jobs[key]
        self.ledger.commit(key, tokens)  # It counts even if it was cancelled while it was computed.
        if job.answered_by is not None and job.answer_seconds is not None:
            self.router.answered(job.answered_by, job.answer_seconds)
            self.answers.took(job.answer_seconds)
        job.phase, job.done_at = "done", now
        self._done[key] = self._open.pop(key)
        if job.own:
            self._forget(key)
        elif not job.cancelled:
            self._effects += [events.SendGrad(key, peer, attempt) for peer, attempt in job.above.items()]

    def _handle_lost_peer(self, peer: PeerId, now: float) -> None:
        """Send what waits for a lost peer to other peers, and cancel what only the lost peer wanted."""
        for key, job in list(self._open.items()):
            if job.phase == "waiting" and job.next == peer:
                self._reroute(key, "gone", now)
            elif peer in job.above:
                self._remove_waiting_peer(key, job, peer)
        self.router.failed(peer, now)

    def _handle_cancel(self, peer: PeerId, key: MicrobatchId, attempt: int) -> None:
        """Handle a CANCEL from a peer above, for its attempts up to `attempt`. The peer no longer waits for
        GRAD. The short CANCEL may overtake its long ACT; then it is remembered until the ACT comes."""
        job = self.jobs.get(key)
        newest_attempt = job.above.get(peer, 0) if job is not None else 0
        if job is None or newest_attempt < attempt:  # The ACT has not come yet.
            self._cancelled_early[peer, key] = attempt
            if len(self._cancelled_early) > MAX_OVERTAKEN:
                self._cancelled_early.popitem(last=False)
        if job is not None and job.phase != "done" and peer in job.above and newest_attempt <= attempt:
            self._remove_waiting_peer(key, job, peer)

    def _remove_waiting_peer(self, key: MicrobatchId, job: Job, peer: PeerId) -> None:
        """Remove `peer` from those that wait for the answer. Cancel the microbatch if no other peer waits."""
        del job.above[peer]
        if not job.above:
            self._cancel(key)

    def _handle_failure(self, failed: events.ComputeFailed, now: float) -> None:
        """Send the microbatch to another peer below if only the gradient from below was invalid (`again`) and
        a peer still waits for the microbatch. Otherwise drop it."""
        job = self.jobs[failed.key]
        # Without an answer from below, the fault may lie in what came from above: blame no peer.
        if failed.again and job.answered_by is not None:
            self.router.failed(job.answered_by, now)
            job.rejected.add(job.answered_by)
        if failed.again and not job.cancelled:
            self._reroute(failed.key, failed.code, now)
        else:
            self._abandon(failed.key, failed.code, failed.reason, now)

    def _handle_tick(self, now: float) -> None:
        """Handle passed time: re-route microbatches whose answer is late, look for a next peer again for
        those without one, and free GRADs that were kept long enough. `full` is as in `_route`."""
        full: Collection[PeerId] | None = None
        for key, job in list(self._open.items()):
            if job.phase == "waiting" and now >= job.next_deadline:
                full = None  # The re-route changes who has room.
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
        expired = takewhile(lambda key: now >= self._done[key].done_at + KEEP_SECONDS, self._done)
        for key in list(expired):
            self._forget(key)

    def _route_all_unrouted(self, now: float) -> None:
        """Look for a next peer for all microbatches without one, because a peer below has room again."""
        full: Collection[PeerId] | None = None
        for key in [key for key, job in self._open.items() if job.phase == "unrouted"]:
            full = self._route(key, now, full)

    # -- shared steps -------------------------------------------------------------------------------------

    def _is_current(self, peer: PeerId, key: MicrobatchId, attempt: int) -> bool:
        """Return whether the reply belongs to the newest attempt of a microbatch that still waits."""
        job = self.jobs.get(key)
        return job is not None and job.phase == "waiting" and job.next == peer and job.attempt == attempt

    def _reroute(self, key: MicrobatchId, code: str, now: float) -> None:
        """End the newest attempt for the reason `code`, and send the microbatch to another peer. After BUSY
        the same peer may be tried again, and the attempt does not count as a failure."""
        job = self.jobs[key]
        if job.next is not None:
            self.router.ended(job.next)
        self.ledger.rerouted[code] = self.ledger.rerouted.get(code, 0) + 1
        if code == "busy" and job.next is not None:  # The peer did nothing yet and may be tried again.
            job.tried.pop(job.next, None)
        else:
            job.failures += 1
        job.phase, job.next, job.next_deadline, job.rerouted = "unrouted", None, float("inf"), code
        job.answered_by = job.answer_seconds = None
        self._route(key, now)

    def _abandon(self, key: MicrobatchId, code: str, reason: str, now: float) -> None:
        """Drop a microbatch. Sends NACK to the peers that wait for it, unless it is cancelled."""
        job = self.jobs[key]
        self.ledger.drop(code)
        if not job.cancelled:
            self._effects += [
                events.SendNack(key, peer, number, code, reason) for peer, number in job.above.items()
            ]
        self._forget(key)

    def _cancel(self, key: MicrobatchId) -> None:
        """Drop a microbatch that no peer wants, and cancel its attempt below. If it is being computed, only
        mark it; the result decides how it ends."""
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
        self.jobs[key] = job
        self._open[key] = job
        self._effects.append(events.ComputeForward(key))

    def _forget(self, key: MicrobatchId) -> None:
        for jobs in (self.jobs, self._open, self._done, self._queued):
            jobs.pop(key, None)
        self._effects.append(events.Forget(key))


def granted(peer: PeerId, askers: Iterable[PeerId], free: int) -> int:
    """Return how many microbatches `peer` may have in flight at this receiver, at least 1: those that it has
    here already, and a share of the `free` slots. `peer` and all peers with microbatches here get equal
    shares, rounded up. `askers` has one entry for each microbatch in flight: the peer that sent it."""
    in_flight = Counter(askers)
    peers = in_flight.keys() | {peer}
    free_share = -(-free // len(peers))
    return max(1, in_flight[peer] + free_share)
