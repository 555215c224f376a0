"""Compare the answers of two peers to one microbatch: as its sender, the second peer, and the peer below.

    sender  -- Check -->  second peer  -- Check -->  the peer below that the first peer had used
            <- CheckAnswer -               <- CheckAnswer -

Everything is extra: the first answer goes on at once, and no gradient of a check is counted. See `Comparison`
in swarmnet/pipeline/answer_comparison.py. All methods run on the event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torch import Tensor

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
from protocols.messages.table import Check, CheckAnswer, Grad, Path
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.model.stage_compute import Uncounted
from swarmnet.pipeline.answer_comparison import (
    GRADIENT,
    HIDDEN,
    LOCAL_STEPS_GRADIENT,
    MEASURED_STEP,
    PEERS_ASKED,
    AnswerTrust,
    Comparison,
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
FREE_CHECKS, MAX_CHECKS_RATIO = 16, 4.0
"""A peer computes so many microbatches again, and then so many times the compared fraction of its own, so
that peers of the stage above cannot make it work for nothing."""
NEXT_SHARE = 0.8
"""Share of its time that a second peer leaves to the peer below."""


@dataclass(slots=True)
class _Sent:
    """A microbatch of this sender whose answer is compared. `hidden` is the body of its `Act`."""

    comparison: Comparison
    hidden: bytes
    shape: tuple[int, int, int]
    gradients: dict[PeerId, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Helped:
    """A microbatch that is computed again for the peer `sender`."""

    sender: PeerId
    key: MicrobatchId
    kept: MicrobatchState
    via: PeerId
    deadline: float

    @property
    def graph(self) -> Uncounted:
        """Key of its graph, because the microbatch itself may come here too."""
        return Uncounted((self.sender, self.key))


class AnswerChecks:
    """The comparisons in which this peer takes part."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        compute: Compute,
        work: MicrobatchWork,
        neighbourhood: PeerLinks,
        ways: NextHop,
        pipeline: Pipeline,
        bodies: dict[MicrobatchId, MicrobatchState],
        is_serving: Callable[[], bool],
    ) -> None:
        """`bodies` has what the pipeline keeps of each microbatch. `is_serving()` returns whether this peer
        computes microbatches of others, and can leave one uncounted."""
        self.outcomes = Counter[str]()
        """Number of comparisons by outcome (`reasons.COMPARISONS`)."""
        self.alone: int | None = None
        """The next stage, while it has one peer and can therefore not be compared."""
        self._fraction = manifest.compared_fraction if manifest.compares_answers else 0.0
        step = manifest.sync.learning_rate * manifest.sync.config.relative_step / MEASURED_STEP
        gradient = GRADIENT if manifest.sync.local_steps is None else LOCAL_STEPS_GRADIENT
        self._limits, self._hidden_limits = gradient.at_step(step), HIDDEN.at_step(step)
        self._form = ActForm.of(manifest)
        self._compared_bytes = encoded_bytes(manifest.hidden_shape, COMPARED_CODEC)
        self._compute = compute
        self._work = work
        self._links = neighbourhood
        self._ways = ways
        self._pipeline = pipeline
        self._bodies = bodies
        self._chance = pipeline.router.chance
        self._is_serving = is_serving
        self._clock = neighbourhood.clock
        self.trust = AnswerTrust()
        self._sent: dict[MicrobatchId, _Sent] = {}
        self._helped: dict[tuple[PeerId, MicrobatchId], _Helped] = {}
        self._helped_count = 0
        self._timer = Timer(self._drop_late, self._clock)

    def close(self) -> None:
        self._timer.close()

    # -- the sender -----------------------------------------------------------------------------------

    def answered(self, first: PeerId, grad: Grad, kept: MicrobatchState) -> None:
        """Draw whether the answer of `first`, which has just come, is compared. `kept` has the hidden states
        that were sent and the gradient that came back."""
        if self._chance.random() >= self._fraction or len(self._sent) >= MAX_COMPARED:
            return
        key, stage = MicrobatchId(PeerId(grad.origin), grad.counter), self._ways.stage + 1
        is_alone = all(peer == first for peer in self._links.membership.live(stage))
        if is_alone and self.alone is None:
            self._log_compared("gradient", "alone", key, frozenset({first}), Likeness(1.0, 1.0))
        self.alone = stage if is_alone else None
        if is_alone or key in self._sent:
            return
        via = PeerId(grad.via) if grad.via else None
        comparison = Comparison(first, via, {first: grad.digest}, self._limits)
        sent = self._sent[key] = _Sent(comparison, kept.output, kept.shape)
        codec = self._work.codecs["gradient"]
        work = partial(self._work.compare, first, kept.gradient, codec, sent.gradients)
        self._compute.submit(FORWARD, work, lambda _found, _seconds: None)
        self._ask_next(key)

    def _ask_next(self, key: MicrobatchId) -> None:
        """Ask one more peer of the next stage to compute the microbatch again. Without one, judge now."""
        sent, now, stage = self._sent[key], self._clock.time(), self._ways.stage + 1
        shunned = self._pipeline.router.shunned(now)
        usable = [peer for peer in self._links.membership.live(stage) if peer not in shunned]
        seconds = self._pipeline.answers.patience()
        path = Path.of(self._ways.header_for(key, stage))
        while (peer := sent.comparison.ask(usable, self._chance, now + seconds)) is not None:
            check = Check(*key, stage, seconds, sent.shape, path, sent.comparison.via or "")
            if self._links.post(peer, "data", check, sent.hidden):
                self._arm()
                return
        self._judge(key, is_last=True)

    def _judge(self, key: MicrobatchId, is_last: bool = False) -> None:
        """Judge the answers to a microbatch. If they do not decide, ask one more peer."""
        comparison = self._sent[key].comparison
        judgement = comparison.judge(is_last)
        if judgement is None:
            self._ask_next(key)
            return
        del self._sent[key]
        self._arm()
        self.outcomes[judgement.verdict] += 1
        for pair, like in comparison.likenesses.items():
            self._log_compared("gradient", judgement.verdict, key, pair, like)
        if comparison.first in judgement.agreed:
            self._agreed(comparison.first, judgement.agreed)
        self._differed(judgement.odd, judgement.accusers, "gradient")

    def _agreed(self, first: PeerId, others: tuple[PeerId, ...]) -> None:
        """Record that the first answer agreed with others. Those who answer a check know it, so for them it
        shows nothing."""
        if self.trust.agreed(first, others):
            self._pipeline.router.forgive(first)

    def _differed(self, odd: PeerId | None, accusers: tuple[PeerId, ...], what: What) -> None:
        """Record that a peer, if any, differed from others. Avoid it if that repeats."""
        router, now = self._pipeline.router, self._clock.time()
        if odd is None or router.is_shunned(odd, now):  # If it is avoided, the comparison began before.
            return
        group = len(self._links.membership.live(self._ways.stage + (1 if what == "gradient" else -1)))
        if self.trust.differed(odd, accusers, group):
            seconds = router.shun(odd, now)
            self._links.refused(odd, "differs", f"its {what} differs: it gets no work for {seconds:.0f} s")

    def _log_compared(
        self, what: What, code: str, key: MicrobatchId, pair: frozenset[PeerId], like: Likeness
    ) -> None:
        numbers = round(like.cosine, 6), round(min(like.ratio, 1e9), 6)
        self._links.log_event(log_events.AnswersCompared(code, what, key.counter, sorted(pair), numbers))

    def _answer_came(self, key: MicrobatchId, peer: PeerId, checked: CheckAnswer, body: bytes) -> None:
        """Handle the answer of a peer that computed a microbatch again for this sender."""
        sent = self._sent[key]
        sent.comparison.asked = None
        if checked.code or len(body) != self._compared_bytes:
            sent.comparison.unknown += checked.code == "unknown"
            self._judge(key)
            return

        def compared(found: dict[PeerId, Likeness], _seconds: float) -> None:
            sent.comparison.hidden_differ |= not checked.agree
            sent.comparison.digests[peer] = checked.digest
            sent.comparison.likenesses |= {frozenset((peer, one)): like for one, like in found.items()}
            self._judge(key)

        work = partial(self._work.compare, peer, body, COMPARED_CODEC, sent.gradients)
        self._compute.submit(FORWARD, work, compared)

    # -- the second peer --------------------------------------------------------------------------------

    @handles(Check)
    def _check(self, peer: PeerId, check: Check, body: bytes) -> None:
        """Compute a microbatch of the stage above again, or compare one that this peer has answered."""
        key = MicrobatchId(PeerId(check.origin), check.counter)
        membership, ways, came = self._links.membership, self._ways, None
        if not self._form.text.size:  # The labels that it would need stay with their owner.
            self._links.refused(peer, "malformed", "a comparison, which a U-shaped run does without")
            return
        is_below = check.via == self._links.transport.peer
        if is_below:
            wrong = unfit_way(membership, ways, peer, key.origin, check.path.header())
        else:
            came = checked_act(membership, ways, self._form, peer, check, body)
            wrong = came if isinstance(came, ComputeError) else None
        if wrong is not None:
            self._decline(peer, key, wrong.code)
            self._links.refused(peer, wrong.code, wrong.reason)
        elif self._pipeline.router.is_shunned(peer, self._clock.time()):
            self._decline(peer, key, "not_ready")
        elif isinstance(came, Arrival):
            self._help(peer, came, check)
        else:
            self._compare(peer, key, body)

    def _decline(self, peer: PeerId, key: MicrobatchId, code: str) -> None:
        self._links.post(peer, "data", CheckAnswer(*key, code, True, b""))

    def _help(self, peer: PeerId, came: Arrival, check: Check) -> None:
        """Compute a microbatch again that another peer of this stage has answered."""
        key, ledger = came.key, self._pipeline.ledger
        via = self._links.membership.peers.get(PeerId(check.via))
        has_via = self._work.is_last or (via is not None and via.linked)
        is_known = key in self._pipeline.jobs or ledger.is_committed(key)
        allowed = FREE_CHECKS + MAX_CHECKS_RATIO * self._fraction * ledger.committed
        is_busy = len(self._helped) >= MAX_HELPED or self._helped_count >= allowed
        if not self._is_serving() or not has_via or is_known or is_busy or (peer, key) in self._helped:
            self._decline(peer, key, "busy")
            return
        self._helped_count += 1
        passage = self._ways.arrive(key, came.header)
        kept = MicrobatchState(passage, text=came.text, output=came.hidden, shape=check.shape)
        deadline = self._clock.time() + check.deadline_seconds
        helped = self._helped[peer, key] = _Helped(peer, key, kept, PeerId(check.via), deadline)
        self._arm()
        work = partial(self._work.recompute, helped.graph, kept)
        self._compute.submit(FORWARD, work, partial(self._recomputed, helped))

    def _recomputed(self, helped: _Helped, result: Outcome, _seconds: float) -> None:
        """Send on the hidden states of a microbatch that was computed again, or the last stage's gradient."""
        if self._helped.get((helped.sender, helped.key)) is not helped:
            self._drop(helped)  # The deadline had passed before the graph was there.
        elif isinstance(result, ComputeError):
            self._end_help(helped, result.code)
        elif self._work.is_last:
            self._end_help(helped, "", result.encoded)
        else:
            stage = self._ways.stage + 1
            path = Path.of(self._ways.header_for(helped.key, stage))
            seconds = max(0.01, NEXT_SHARE * (helped.deadline - self._clock.time()))
            check = Check(*helped.key, stage, seconds, result.shape, path, helped.via)
            if not self._links.post(helped.via, "data", check, result.encoded):
                self._end_help(helped, "busy")

    def _gradient_came(self, helped: _Helped, checked: CheckAnswer, body: bytes) -> None:
        """Compute on with the gradient that the peer below had sent to the first peer, too."""
        if checked.code or len(body) != self._form.gradient_bytes:
            self._end_help(helped, checked.code or "malformed")
            return
        if helped.kept.gradient:
            return  # The peer below has answered twice, and the first backward pass frees the graph.
        helped.kept.gradient = body

        def done(result: Outcome, _seconds: float) -> None:
            if isinstance(result, ComputeError):
                self._end_help(helped, result.code)
            else:
                self._end_help(helped, "", result.encoded, checked.agree)

        self._compute.submit(BACKWARD, partial(self._work.recompute, helped.graph, helped.kept), done)

    def _end_help(self, helped: _Helped, code: str, gradient: bytes = b"", agree: bool = True) -> None:
        """Answer a sender that is still waiting, and free the graph."""
        if self._helped.pop((helped.sender, helped.key), None) is not None:
            answer = CheckAnswer(*helped.key, code, agree, helped.kept.digest)
            self._links.post(helped.sender, "data", answer, gradient)
            self._arm()
        self._drop(helped)

    def _drop(self, helped: _Helped) -> None:
        """Free the graph of a microbatch that was computed again."""
        drop = partial(self._work.stage_compute.drop, helped.graph)
        self._compute.submit(BACKWARD, drop, lambda _result, _seconds: None)

    # -- the peer below ---------------------------------------------------------------------------------

    def _compare(self, peer: PeerId, key: MicrobatchId, hidden: bytes) -> None:
        """Compare hidden states that `peer` has computed again with those that came before, and send it the
        gradient that answered them."""
        job, kept = self._pipeline.jobs.get(key), self._bodies.get(key)
        if job is None or kept is None or job.phase != "done" or not kept.samples:
            self._decline(peer, key, "not_kept" if self._pipeline.ledger.is_committed(key) else "unknown")
            return
        if len(kept.samples) > PEERS_ASKED:
            self._decline(peer, key, "busy")
            return

        def compared(found: dict[PeerId, Likeness], _seconds: float) -> None:
            kept.likenesses.update({frozenset((peer, one)): like for one, like in found.items()})
            agree = self._judge_hidden(peer, key, kept)
            self._links.post(peer, "data", CheckAnswer(*key, "", agree, b""), kept.answer)

        work = partial(self._work.compare, peer, hidden, COMPARED_CODEC, kept.samples, sampled=True)
        self._compute.submit(FORWARD, work, compared)

    def _judge_hidden(self, newest: PeerId, key: MicrobatchId, kept: MicrobatchState) -> bool:
        """Judge the peers that computed one microbatch by their hidden states. Returns whether all are alike.
        Two that differ show nothing yet; the sender then asks a third peer."""
        likenesses, peers = kept.likenesses, tuple(kept.samples)

        def agree(one: PeerId, other: PeerId) -> bool:
            return self._hidden_limits.agree(likenesses[frozenset((one, other))])

        are_alike = all(map(self._hidden_limits.agree, likenesses.values()))
        odd = None if are_alike else odd_one_out(peers, agree)
        code = "agreed" if are_alike else "differed" if odd is not None else "undecided"
        self.outcomes["differed"] += odd is not None
        for pair, like in likenesses.items():
            if newest in pair:
                self._log_compared("hidden", code, key, pair, like)
        agreed = tuple(peer for peer in peers if peer != odd)
        if kept.sender is not None and kept.sender.peer in agreed and code != "undecided":
            self._agreed(kept.sender.peer, agreed)
        self._differed(odd, agreed, "hidden")
        return are_alike

    # -- answers and deadlines --------------------------------------------------------------------------

    @handles(CheckAnswer)
    def _checked(self, peer: PeerId, checked: CheckAnswer, body: bytes) -> None:
        """Handle the answer of a peer of the next stage: to this sender, or to one that this peer helps."""
        key = MicrobatchId(PeerId(checked.origin), checked.counter)
        sent = self._sent.get(key)
        if sent is not None and sent.comparison.asked == peer:
            self._answer_came(key, peer, checked, body)
            return
        for helped in [one for one in self._helped.values() if (one.key, one.via) == (key, peer)]:
            self._gradient_came(helped, checked, body)

    def _arm(self) -> None:
        due = [sent.comparison.deadline for sent in self._sent.values() if sent.comparison.asked is not None]
        self._timer.arm(min([*due, *(one.deadline for one in self._helped.values())], default=float("inf")))

    def _drop_late(self) -> None:
        now = self._clock.time()
        for helped in [one for one in self._helped.values() if now >= one.deadline]:
            self._end_help(helped, "busy")
        for key, sent in list(self._sent.items()):
            if sent.comparison.asked is not None and now >= sent.comparison.deadline:
                sent.comparison.asked = None
                self._judge(key)
        self._arm()
