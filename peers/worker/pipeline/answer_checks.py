"""Compare the answers of two peers to one microbatch: as its sender, the second peer, and the peer below.

    sender  -- Check -->  second peer  -- Check -->  the peer below that the first peer had used
            <- Checked -               <- Checked -

Everything is extra: the first answer goes on at once, and no gradient of a check is counted. `Comparison` in
swarmnet/pipeline/answer_comparison.py says what is compared where. Everything here runs on the event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Literal

from peers.compute.executor import BACKWARD, FORWARD, Compute
from peers.network.message_router import handles
from peers.network.peer_links import PeerLinks
from peers.runtime.timer import Timer
from peers.telemetry import log_events
from peers.worker.pipeline.microbatch_compute import (
    COMPARED_CODEC,
    ComputeError,
    MicrobatchState,
    MicrobatchWork,
    Outcome,
)
from peers.worker.pipeline.validate_act import ActForm, Arrival, checked_act, unfit_way
from protocols.messages.table import Check, Checked, Grad, Path
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.pipeline.answer_comparison import (
    GRADIENT,
    HIDDEN,
    LOCAL_STEPS_GRADIENT,
    MEASURED_RATE,
    PEERS_ASKED,
    AnswerTrust,
    Comparison,
    Judgement,
    Likeness,
    odd_one_out,
)
from swarmnet.pipeline.pipeline import Pipeline
from swarmnet.routing.next_hop import NextHop
from swarmnet.run.activation_sizes import encoded_bytes
from swarmnet.run.manifest import Manifest

What = Literal["gradient", "hidden"]
"""What is compared: gradients at the sender, or hidden states at the peer below."""
MAX_COMPARED, MAX_HELPED = 4, 4
"""Maximum number of own microbatches that are compared at a time, and of others' that are computed again."""
FREE_CHECKS, CHECKS_PER_COMPARED = 16, 4.0
"""A peer computes so many microbatches again for others, and after them so many times the fraction of its own
that the run compares. Otherwise any peer of the stage above could make it work for nothing."""
NEXT_SHARE = 0.8
"""Share of its time that a second peer leaves to the peer below."""


@dataclass(slots=True)
class _Sent:
    """A microbatch of this sender whose answer is compared."""

    comparison: Comparison
    hidden: bytes
    """The body of its `Act`."""
    shape: tuple[int, int, int]
    gradients: dict[PeerId, bytes]
    """Maps each peer that answered to its encoded gradient."""


@dataclass(frozen=True, slots=True)
class _Helped:
    """A microbatch that is computed again for the peer `sender`."""

    sender: PeerId
    key: MicrobatchId
    kept: MicrobatchState
    via: PeerId
    deadline: float

    @property
    def open_as(self) -> Hashable:
        """Name of the graph, unlike that of the microbatch itself."""
        return "check", self.sender, self.key


class AnswerChecks:
    """The comparisons in which this peer takes part."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        form: ActForm,
        compute: Compute,
        work: MicrobatchWork,
        neighbourhood: PeerLinks,
        ways: NextHop,
        pipeline: Pipeline,
        bodies: dict[MicrobatchId, MicrobatchState],
        chance: Random,
        is_serving: Callable[[], bool],
        log_event: log_events.LogEvent,
        can_help: bool,
    ) -> None:
        """`bodies` has what the pipeline keeps of each microbatch. `can_help` is False if this peer cannot
        compute a microbatch without counting it."""
        self.outcomes = Counter[str]()
        """Number of comparisons by outcome (`reasons.COMPARISONS`)."""
        self.alone: int | None = None
        """The next stage, while it has one peer and can therefore not be compared."""
        self._fraction = manifest.compared_fraction if manifest.compares_answers else 0.0
        rate = manifest.sync.learning_rate / MEASURED_RATE
        gradient = GRADIENT if manifest.sync.local_steps is None else LOCAL_STEPS_GRADIENT
        self._limits, self._hidden_limits = gradient.at_rate(rate), HIDDEN.at_rate(rate)
        self._form = form
        self._compared_bytes = encoded_bytes(form.shape, COMPARED_CODEC)
        self._compute = compute
        self._work = work
        self._neighbourhood = neighbourhood
        self._ways = ways
        self._pipeline = pipeline
        self._bodies = bodies
        self._chance = chance
        self._is_serving = is_serving
        self._log_event = log_event
        self._can_help = can_help and self._fraction > 0.0
        self._clock = neighbourhood.clock
        self._trust = AnswerTrust()
        self._sent: dict[MicrobatchId, _Sent] = {}
        self._helped: dict[tuple[PeerId, MicrobatchId], _Helped] = {}
        self._helped_count = 0
        self._timer = Timer(self._drop_late, self._clock)

    def close(self) -> None:
        self._timer.close()

    # -- the sender -----------------------------------------------------------------------------------

    def answered(self, first: PeerId, grad: Grad, kept: MicrobatchState) -> None:
        """Draw whether the answer of `first`, which has just come, is compared. `kept` has the microbatch,
        with the hidden states that were sent and the gradient that came back."""
        if self._chance.random() >= self._fraction or len(self._sent) >= MAX_COMPARED:
            return
        key = MicrobatchId(PeerId(grad.origin), grad.counter)
        if self._is_alone(first) or key in self._sent:
            return
        via = PeerId(grad.via) if grad.via else None
        comparison = Comparison(first, via, {first: bytes(grad.digest)}, self._limits)
        self._sent[key] = _Sent(comparison, kept.output, kept.shape, {first: kept.gradient})
        self._ask_next(key)

    def _is_alone(self, first: PeerId) -> bool:
        """Return whether the next stage has no other peer. Logs when that changes."""
        stage = self._ways.stage + 1
        is_alone = all(peer == first for peer in self._neighbourhood.membership.live(stage))
        if is_alone and self.alone is None:
            self._log_event(log_events.NotCompared(stage))
        self.alone = stage if is_alone else None
        return is_alone

    def _ask_next(self, key: MicrobatchId) -> None:
        """Ask one more peer of the next stage to compute the microbatch again. Without one, judge now."""
        sent, now = self._sent[key], self._clock.time()
        stage = self._ways.stage + 1
        live = self._neighbourhood.membership.live(stage)
        usable = [peer for peer in live if not self._pipeline.router.is_shunned(peer, now)]
        seconds = self._pipeline.answers.patience()
        path = Path.of(self._ways.header_for(key, stage))
        while (peer := sent.comparison.ask(usable, self._chance, now + seconds)) is not None:
            check = Check(*key, stage, seconds, sent.shape, path, sent.comparison.via or "")
            if self._neighbourhood.post(peer, "data", check, sent.hidden):
                self._arm()
                return
        self._judge(key, is_last=True)

    def _judge(self, key: MicrobatchId, is_last: bool = False) -> None:
        judgement = self._sent[key].comparison.judge(is_last)
        if judgement is None:
            self._ask_next(key)
            return
        sent = self._sent.pop(key)
        self._arm()
        self.outcomes[judgement.verdict] += 1
        for pair, like in sent.comparison.likenesses.items():
            self._log_compared("gradient", judgement.verdict, key, pair, like)
        self._carry_out(judgement, sent.comparison.via)

    def _carry_out(self, judgement: Judgement, via: PeerId | None) -> None:
        peer = judgement.peer
        if judgement.verdict == "contradicted":
            if peer is not None and via is not None and self._trust.contradicted(peer, via):
                self._avoid(peer, "gradient")
        else:
            self._judge_peers(judgement.agreed, peer, self._ways.stage + 1, "gradient")

    def _judge_peers(self, agreed: tuple[PeerId, ...], odd: PeerId | None, stage: int, what: What) -> None:
        """Record which peers of a stage agreed with each other, and which one did not."""
        for peer in agreed:
            if self._trust.agreed(peer, agreed):
                self._pipeline.router.forgive(peer)
        group = len(self._neighbourhood.membership.live(stage))
        if odd is not None and self._trust.differed(odd, agreed, group):
            self._avoid(odd, what)

    def _avoid(self, peer: PeerId, what: What) -> None:
        if self._pipeline.router.is_shunned(peer, self._clock.time()):
            return  # The comparison began before.
        seconds = self._pipeline.router.shun(peer, self._clock.time())
        self._log_event(log_events.PeerAvoided(peer, what, round(seconds)))

    def _log_compared(
        self, what: What, code: str, key: MicrobatchId, pair: frozenset[PeerId], like: Likeness
    ) -> None:
        cosine, ratio = round(like.cosine, 6), round(min(like.ratio, 1e9), 6)
        self._log_event(log_events.AnswersCompared(code, what, key.counter, sorted(pair), cosine, ratio))

    def _answer_came(self, key: MicrobatchId, peer: PeerId, checked: Checked, body: bytes) -> None:
        """Handle the answer of a peer that computed a microbatch again for this sender."""
        sent = self._sent[key]
        comparison = sent.comparison
        comparison.asked = None
        if checked.code or len(body) != self._compared_bytes:
            comparison.unknown += checked.code == "unknown"
            self._judge_or_ask(key)
            return
        comparison.hidden_differ |= not checked.agree
        others = dict(sent.gradients)
        sent.gradients[peer] = body

        def compared(found: dict[PeerId, Likeness], _seconds: float) -> None:
            if self._sent.get(key) is not sent:
                return
            comparison.digests[peer] = bytes(checked.digest)
            for other, like in found.items():
                comparison.likenesses[frozenset((peer, other))] = like
            self._judge(key)

        work = partial(self._work.compare_gradients, body, comparison.first, others)
        self._compute.submit(FORWARD, work, compared)

    def _judge_or_ask(self, key: MicrobatchId) -> None:
        """After a peer gave no answer: end the comparison if that decides it, or ask another peer."""
        if self._sent[key].comparison.unknown >= 2:
            self._judge(key)
        else:
            self._ask_next(key)

    # -- the second peer, and the peer below ------------------------------------------------------------

    @handles(Check)
    def _check(self, peer: PeerId, check: Check, body: bytes) -> None:
        """Compute a microbatch of the stage above again, or compare one that this peer has answered."""
        key = MicrobatchId(PeerId(check.origin), check.counter)
        is_first_hop = check.via != self._neighbourhood.transport.peer
        membership, ways = self._neighbourhood.membership, self._ways
        came: Arrival | ComputeError | None
        if is_first_hop:
            came = checked_act(membership, ways, self._form, peer, check, body)
        else:
            came = unfit_way(membership, ways, peer, key.origin, check.path.header())
        if isinstance(came, ComputeError):
            self._decline(peer, key, came.code)
            self._neighbourhood.refused(peer, came.code, came.reason)
        elif self._pipeline.router.is_shunned(peer, self._clock.time()):
            self._decline(peer, key, "not_ready")
        elif came is None:
            self._compare(peer, key, body)
        else:
            self._help(peer, came, check)

    def _decline(self, peer: PeerId, key: MicrobatchId, code: str) -> None:
        self._neighbourhood.post(peer, "data", Checked(*key, code, True, b""))

    def _help(self, peer: PeerId, came: Arrival, check: Check) -> None:
        """Compute a microbatch again that another peer of this stage has answered."""
        key, stage = came.key, self._ways.stage
        via = self._neighbourhood.membership.peers.get(PeerId(check.via))
        has_via = self._work.is_last or (via is not None and via.linked and via.stage == stage + 1)
        allowed = FREE_CHECKS + CHECKS_PER_COMPARED * self._fraction * self._pipeline.ledger.committed
        is_known = key in self._pipeline.jobs or self._pipeline.ledger.is_committed(key)
        if not self._is_serving() or not self._can_help or not has_via or is_known:
            self._decline(peer, key, "not_ready")
            return
        if len(self._helped) >= MAX_HELPED or self._helped_count >= allowed or (peer, key) in self._helped:
            self._decline(peer, key, "busy")
            return
        self._helped_count += 1
        passage = self._ways.arrive(key, came.header)
        kept = MicrobatchState(passage, text=came.text, output=came.hidden, shape=check.shape)
        deadline = self._clock.time() + check.deadline_seconds
        helped = _Helped(peer, key, kept, PeerId(check.via), deadline)
        self._helped[peer, key] = helped
        self._arm()
        work = partial(self._work.recompute, helped.open_as, kept)
        self._compute.submit(FORWARD, work, partial(self._recomputed, helped))

    def _recomputed(self, helped: _Helped, result: Outcome, _seconds: float) -> None:
        if self._helped.get((helped.sender, helped.key)) is not helped:
            self._drop_graph(helped)
        elif isinstance(result, ComputeError):
            self._end_help(helped, result.code)
        elif self._work.is_last:
            self._end_help(helped, "", result.encoded)
        else:
            stage = self._ways.stage + 1
            path = Path.of(self._ways.header_for(helped.key, stage))
            seconds = max(0.01, NEXT_SHARE * (helped.deadline - self._clock.time()))
            check = Check(*helped.key, stage, seconds, result.shape, path, helped.via)
            if not self._neighbourhood.post(helped.via, "data", check, result.encoded):
                self._end_help(helped, "busy")

    def _gradient_came(self, helped: _Helped, checked: Checked, body: bytes) -> None:
        """Compute on with the gradient that the peer below had sent to the first peer, too."""
        if checked.code or len(body) != self._form.gradient_bytes:
            self._end_help(helped, checked.code or "malformed")
            return
        helped.kept.gradient = body

        def done(result: Outcome, _seconds: float) -> None:
            if isinstance(result, ComputeError):
                self._end_help(helped, result.code)
            else:
                self._end_help(helped, "", result.encoded, checked.agree)

        work = partial(self._work.recompute_gradient, helped.open_as, helped.kept)
        self._compute.submit(BACKWARD, work, done)

    def _end_help(self, helped: _Helped, code: str, gradient: bytes = b"", agree: bool = True) -> None:
        if self._helped.pop((helped.sender, helped.key), None) is None:
            return
        self._drop_graph(helped)
        self._arm()
        answer = Checked(*helped.key, code, agree, helped.kept.digest)
        self._neighbourhood.post(helped.sender, "data", answer, gradient)

    def _drop_graph(self, helped: _Helped) -> None:
        drop = partial(self._work.stage_compute.drop, helped.open_as)
        self._compute.submit(BACKWARD, drop, lambda _result, _seconds: None)

    def _compare(self, peer: PeerId, key: MicrobatchId, hidden: bytes) -> None:
        """Compare hidden states that `peer` has computed again with those that came before, and send it the
        gradient that answered them."""
        ledger = self._pipeline.ledger
        job, kept = self._pipeline.jobs.get(key), self._bodies.get(key)
        if kept is not None and len(kept.samples) > PEERS_ASKED:
            self._decline(peer, key, "busy")
            return
        if job is None or kept is None or job.phase != "done" or not kept.samples:
            self._decline(peer, key, "not_kept" if ledger.is_committed(key) else "unknown")
            return

        def compared(problem: str, _seconds: float) -> None:
            if problem:
                self._neighbourhood.refused(peer, "malformed", problem)
                return
            agree = self._judge_hidden(peer, key, kept)
            self._neighbourhood.post(peer, "data", Checked(*key, "", agree, b""), kept.answer)

        work = partial(self._work.compare_hidden, peer, hidden, kept)
        self._compute.submit(FORWARD, work, compared)

    def _judge_hidden(self, newest: PeerId, key: MicrobatchId, kept: MicrobatchState) -> bool:
        """Judge the peers that computed one microbatch by their hidden states. Returns whether all of these
        are alike. Two that differ show nothing yet; the sender then asks a third peer."""
        peers = tuple(kept.samples)

        def agree(one: PeerId, other: PeerId) -> bool:
            return self._hidden_limits.agree(kept.likenesses[frozenset((one, other))])

        are_alike = all(self._hidden_limits.agree(like) for like in kept.likenesses.values())
        odd = None if are_alike else odd_one_out(peers, agree)
        self.outcomes["differed"] += odd is not None
        for other in peers:
            if other != newest:
                pair = frozenset((newest, other))
                code = "agreed" if agree(newest, other) else "differed" if odd else "undecided"
                self._log_compared("hidden", code, key, pair, kept.likenesses[pair])
        if are_alike or odd is not None:
            agreed = tuple(peer for peer in peers if peer != odd)
            self._judge_peers(agreed, odd, self._ways.stage - 1, "hidden")
        return are_alike

    @handles(Checked)
    def _checked(self, peer: PeerId, checked: Checked, body: bytes) -> None:
        """Handle the answer of a peer of the next stage: to a check of this sender, or of another one that
        this peer helps."""
        key = MicrobatchId(PeerId(checked.origin), checked.counter)
        sent = self._sent.get(key)
        if sent is not None and sent.comparison.asked == peer:
            self._answer_came(key, peer, checked, body)
            return
        for helped in [one for one in self._helped.values() if one.key == key and one.via == peer]:
            self._gradient_came(helped, checked, body)

    # -- deadlines --------------------------------------------------------------------------------------

    def _arm(self) -> None:
        due = [sent.comparison.deadline for sent in self._sent.values() if sent.comparison.asked is not None]
        due += [helped.deadline for helped in self._helped.values()]
        self._timer.arm(min(due, default=float("inf")))

    def _drop_late(self) -> None:
        now = self._clock.time()
        for helped in [one for one in self._helped.values() if now >= one.deadline]:
            self._helped.pop((helped.sender, helped.key))
            self._drop_graph(helped)
        for key, sent in list(self._sent.items()):
            if sent.comparison.asked is not None and now >= sent.comparison.deadline:
                sent.comparison.asked = None
                self._judge_or_ask(key)
        self._arm()
