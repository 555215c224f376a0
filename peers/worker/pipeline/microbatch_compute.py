"""The tensor side of microbatches: everything here that computes runs in the compute thread.

A microbatch that cannot be computed (wrong shape, not finite) is an ordinary outcome: `Trouble`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from math import hypot, inf, sqrt
from time import perf_counter
from typing import TypeAlias

import torch
from torch import Tensor

from peers.compute.stage_part import Computes
from peers.telemetry.counters import CodecCounts, Coded, Timings
from protocols.fields import Body
from swarmnet.identifiers import MicrobatchId, PeerId, RunId
from swarmnet.model import activation_codec
from swarmnet.model.carried_text import CarriedText
from swarmnet.model.experts.routed_trunk import ExpertCall, RoutedTrunk, Said
from swarmnet.model.sizes import Judgement, Sizes
from swarmnet.model.stage_compute import StageError
from swarmnet.routing.next_hop import Passage
from swarmnet.run.activation_sizes import EXACT, Codec
from swarmnet.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Source:
    """Whose numbers they are: those of one peer are compared with those of others of the same kind."""

    peer: PeerId
    stage: int
    path_stages: int
    """That the microbatch had visited (hidden states), or visits in all (a gradient): where stages are left
    out, norms depend on it."""

    @property
    def kind(self) -> tuple[int, int]:
        return self.stage, self.path_stages


@dataclass(slots=True)
class Bodies:
    """Everything kept for one microbatch, until Forget."""

    passage: Passage = field(default=Passage(1))
    sender: Source | None = None
    """Whose hidden states `output` holds at first; None: it starts here."""
    answerer: Source | None = None
    """Whose gradient `gradient` is."""

    inputs: Tensor | None = None
    text: CarriedText | None = None
    output: bytes = b""
    """Encoded hidden states and text, for the next peer and for another if that one fails."""
    output_exact: bool = False
    """As they were computed, for or from a sibling in this process; else in the run's codec."""
    to_sibling: bool = False
    """Whether it will probably go on to a sibling."""
    shape: tuple[int, int, int] = (0, 0, 0)
    gradient: bytes = b""
    """Encoded gradient that came from below."""
    gradient_exact: bool = False
    answer: bytes = b""
    """Encoded gradient for the peer above."""
    answer_exact: bool = False
    from_sibling: bool = False
    """Whether a sibling sent it from above."""
    loss_sum: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    """Compute spent here and below."""
    own_seconds: float = 0.0
    """Compute spent here."""
    so_far: float = 0.0
    """Compute spent on a pass that waits for experts."""
    near_groups: frozenset[int] = frozenset()
    """Groups of experts of which a sibling will probably be asked."""
    queued: float = 0.0
    """Waited for compute here."""
    queued_below: float = 0.0
    """Waited for compute on the stages below."""
    submitted_at: float = 0.0
    """When it was last handed to the compute thread."""
    started_at: float | None = None
    """When it was cut from the text; None: it came from above."""
    answered: float = 0.0
    """From sending its output to the gradient: compute, queues and network below."""
    arrived_at: float | None = None
    """When it came from above; None once its gradient was handed up."""
    weights_at: int = 0
    """`MicrobatchWork.applied_rounds` at its forward pass."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a microbatch was not computed."""

    code: str
    reason: str
    again: bool = False
    """Nothing is lost here: with another gradient from below it can be computed still."""
    peer: PeerId | None = None
    """Who sent the numbers that are no good."""
    out_of_line: bool = False
    """Most of what that peer sent lately is no good."""


@dataclass(frozen=True, slots=True)
class Computed:
    encoded: bytes
    shape: tuple[int, int, int]
    loss_sum: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class EncodedCall:
    call: ExpertCall
    body: bytes
    exact: bool
    """As it was computed: for a sibling, or for a visitor."""
    round: int | None = None
    """Of the snapshot that a visitor is to be answered by; -1: the newest; None: it is trained on."""


@dataclass(frozen=True, slots=True)
class Calls:
    """A pass goes on once these are answered."""

    calls: tuple[EncodedCall, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Of experts to one call."""

    peer: PeerId
    body: bytes
    exact: bool
    round: int | None = None
    """By whose snapshot a visitor's was answered."""


Outcome: TypeAlias = Computed | Trouble | Calls
Pass: TypeAlias = Generator[list[ExpertCall], Said, Computed | Trouble]


@dataclass(slots=True)
class _Paused:
    """A pass that waits for experts."""

    going: Pass
    calls: dict[int, ExpertCall]
    """By group."""
    kept: Bodies


class MicrobatchWork:
    def __init__(self, manifest: Manifest, stage: int, stage_compute: Computes) -> None:
        self.codecs: dict[Coded, Codec] = {
            "activation": manifest.hidden_codec, "gradient": manifest.codec_back,
        }  # fmt: skip
        self._stage, self._by_chance = stage, manifest.gradient_rounding == "stochastic"
        self._run_id = manifest.run_id() if self._by_chance else RunId("")
        self._left_out = _left_out(manifest)
        self.is_last = stage == len(manifest.stages) - 1
        self.width, self._stages = manifest.model.width, manifest.all_stages
        self.stage_compute = stage_compute
        self._trunk = stage_compute if isinstance(stage_compute, RoutedTrunk) else None
        self._paused: dict[MicrobatchId, _Paused] = {}
        self.said_sizes, self.returned_sizes = Sizes(), Sizes()
        """Of what experts say, and of gradients that come from them."""
        self.complaints: deque[tuple[int, int, Trouble]] = deque()
        """Layer, group, and what one of its peers said that is no good; taken on the event loop."""
        self.gathered_tokens = 0
        """Tokens in the gradient that StageCompute holds; touched by the compute thread alone."""
        self.after_gradient: Callable[[], None] | None = None
        """Called when one was added, in the compute thread; None where nobody steps by it alone."""
        self.applied_rounds = 0
        """Rounds that have entered the weights here since the start; likewise."""
        self.hidden_sizes, self.gradient_sizes = Sizes(), Sizes(weighed=True)
        """Of hidden states from above, and of gradients from below."""
        self.scaled = 0
        """Microbatches whose gradient from below was too large."""
        self.timings = Timings()
        self.codings = CodecCounts(self.timings, "activation", "gradient")

    def forward(self, key: MicrobatchId, kept: Bodies) -> Outcome:
        return self._advance(key, kept, self._forward(key, kept))

    def backward(self, key: MicrobatchId, kept: Bodies) -> Outcome:
        return self._advance(key, kept, self._backward(key, kept))

    def go_on(self, key: MicrobatchId, answers: Mapping[int, Answer | None]) -> Outcome:
        """With what came of its calls, by group; None: nobody answered."""
        paused = self._paused.pop(key, None)
        if paused is None:
            return Trouble("cancelled", "nobody wants it any more")
        said = {group: self._said(call, answers.get(group)) for group, call in paused.calls.items()}
        return self._advance(key, paused.kept, paused.going, said)

    def drop(self, key: MicrobatchId) -> None:
        """Forget what is kept of it."""
        paused = self._paused.pop(key, None)
        if paused is not None:
            paused.going.close()
        self.stage_compute.drop(key)

    def left(self, peer: PeerId) -> None:
        """What it sent decides no more what is usual."""
        for sizes in (self.hidden_sizes, self.gradient_sizes, self.said_sizes, self.returned_sizes):
            sizes.left(peer)

    def _advance(self, key: MicrobatchId, kept: Bodies, going: Pass, said: Said | None = None) -> Outcome:
        try:
            calls = next(going) if said is None else going.send(said)
        except StopIteration as end:
            outcome: Computed | Trouble = end.value
            return outcome
        try:
            encoded = [
                EncodedCall(call, self.encoded_call(key, call, exact), exact)
                for call in calls
                for exact in (call.group in kept.near_groups,)
            ]
        except activation_codec.HiddenError as error:
            going.close()
            self.stage_compute.drop(key)
            return Trouble("not_finite", str(error))
        self._paused[key] = _Paused(going, {call.group: call for call in calls}, kept)
        return Calls(tuple(encoded))

    def encoded_call(self, key: MicrobatchId, call: ExpertCall, exact: bool) -> bytes:
        """What experts are sent. Raises HiddenError."""
        rows = self._encode("activation", call.rows, exact)
        if call.gradient is None:
            return rows
        # A draw of its own for each layer and group, made again the same.
        place = self._stages * (1 + call.layer) + call.group
        return rows + self._encode_gradient(key, call.gradient, exact, place)

    def _said(self, call: ExpertCall, answer: Answer | None) -> Tensor | None:
        """[S, D]; None where it is no good, which is complained about."""
        if answer is None:
            return None
        backward, rows = call.gradient is not None, sum(call.counts)
        kind: Coded = "gradient" if backward else "activation"
        sizes = self.returned_sizes if backward else self.said_sizes
        of_what = call.layer, call.group
        try:
            said_SD = self._decode(kind, answer.body, (1, rows, self.width), answer.exact)[0]
        except activation_codec.HiddenError as error:
            judged = sizes.judge(answer.peer, inf, of_what)
            trouble = Trouble("malformed", str(error), True, answer.peer, judged.out_of_line)
            self.complaints.append((*of_what, trouble))
            return None
        judged = sizes.judge(answer.peer, _norm(said_SD) / sqrt(rows), of_what)
        if judged.out_of_line or not judged.gain:
            reason = f"what its experts say is {judged.ratio:.3g} times as large as is usual"
            trouble = Trouble("out_of_line", reason, True, answer.peer, judged.out_of_line)
            self.complaints.append((*of_what, trouble))
            return None
        return said_SD if judged.gain == 1.0 else said_SD * judged.gain

    def _forward(self, key: MicrobatchId, kept: Bodies) -> Pass:
        kept.weights_at = self.applied_rounds
        try:
            inputs = kept.inputs
            if inputs is None:
                try:
                    inputs = self._decode("activation", kept.output, kept.shape, kept.output_exact)
                except activation_codec.HiddenError as error:
                    judgement = _judged(self.hidden_sizes, kept.sender, inf)
                    return replace(_blamed(kept.sender, "malformed", str(error), judgement), again=False)
                if trouble := self._far_off(kept.sender, hypot(_norm(inputs), self._left_out)):
                    return trouble
            text = kept.text
            assert text is not None, "it came with the hidden states, or was cut with the inputs"
            trunk, compute = self._trunk, self.stage_compute
            if not self.is_last:
                if trunk is None:
                    output_BTD = compute.forward(key, inputs, kept.passage.branch_scale, text.tokens)
                else:
                    output_BTD = yield from trunk.forward_steps(key, inputs)
                batch, tokens, width = output_BTD.shape
                encoded = self._encode("activation", output_BTD, kept.to_sibling)
                return Computed(encoded, (batch, tokens, width))
            if trunk is None:
                finished = compute.finish(key, inputs, text.labels, text.tokens)
            else:
                finished = yield from trunk.finish_steps(key, inputs, text.labels)
        except (StageError, activation_codec.HiddenError) as error:
            return Trouble("not_finite" if isinstance(error, StageError) else "malformed", str(error))
        self._gathered(kept, finished.tokens)
        gradient = finished.hidden_gradient
        encoded = b"" if gradient is None else self._encode_gradient(key, gradient, kept.from_sibling)
        return Computed(encoded, kept.shape, finished.loss_sum, finished.tokens)

    def _backward(self, key: MicrobatchId, kept: Bodies) -> Pass:
        source, trunk = kept.answerer, self._trunk
        try:
            below = self._decode("gradient", kept.gradient, kept.shape, kept.gradient_exact)
        except activation_codec.HiddenError as error:
            return _blamed(source, "malformed", str(error), _judged(self.gradient_sizes, source, inf))
        judgement = _judged(self.gradient_sizes, source, _norm(below))
        if not judgement.gain:
            return _blamed(source, "not_finite", "a gradient too large to be summed", judgement)
        if judgement.out_of_line:
            reason = f"its gradients are mostly far from others' size, this one {judgement.ratio:.3g} times"
            return _blamed(source, "out_of_line", reason, judgement)
        if judgement.gain < 1.0:
            self.scaled += 1
            below *= judgement.gain
        try:
            if trunk is None:
                gradient = self.stage_compute.backward(key, below)
            else:
                gradient = yield from trunk.backward_steps(key, below)
        except StageError as error:
            return Trouble("not_finite", str(error), peer=source.peer if source is not None else None)
        self._gathered(kept, kept.tokens)
        encoded = b"" if gradient is None else self._encode_gradient(key, gradient, kept.from_sibling)
        return Computed(encoded, kept.shape)

    def _far_off(self, sender: Source | None, norm: float) -> Trouble | None:
        """Why hidden states are not computed with. They are refused and not scaled: whatever they are, they
        are not what an honest stage has computed, and made to fit they would be trained on."""
        judgement = _judged(self.hidden_sizes, sender, norm)
        if not (judgement.far_off or judgement.out_of_line):
            return None
        reason = f"hidden states {judgement.ratio:.3g} times as large as is usual"
        return replace(_blamed(sender, "out_of_line", reason, judgement), again=False)

    def _gathered(self, kept: Bodies, tokens: int) -> None:
        self.gathered_tokens += tokens
        self.timings.append(("staleness", self.applied_rounds - kept.weights_at))
        if self.after_gradient is not None:
            self.after_gradient()

    def recoded(
        self, kind: Coded, key: MicrobatchId, data: Body, shape: tuple[int, int, int], exact: bool
    ) -> bytes:
        """What was encoded for a sibling as others take it, or (`exact`) the other way round: where somebody
        else is asked than was thought. Raises HiddenError where a value is not finite in the run's codec."""
        tensor = self._decode(kind, data, shape, not exact)
        if kind == "gradient":
            return self._encode_gradient(key, tensor, exact)
        return self._encode(kind, tensor, exact)

    def _encode(
        self, kind: Coded, tensor: Tensor, exact: bool, chance: torch.Generator | None = None
    ) -> bytes:
        if exact:
            return activation_codec.encode(tensor, EXACT)
        began = perf_counter()
        encoded = activation_codec.encode(tensor, self.codecs[kind], chance)
        self.codings.encoded(kind, began, tensor.numel(), len(encoded))
        return encoded

    def _encode_gradient(
        self, key: MicrobatchId, gradient: Tensor, exact: bool, place: int | None = None
    ) -> bytes:
        """Always, for it is added here already: what is finite in fp32 may be beyond the end of the codec.
        `place`: whose chance rounds it, the stage's where it is None."""
        place = self._stage if place is None else place
        chance = activation_codec.rounding_of(self._run_id, key, place) if self._by_chance else None
        try:
            return self._encode("gradient", gradient, exact, chance)
        except activation_codec.HiddenError:
            most = activation_codec.LARGEST
            return self._encode("gradient", gradient.clamp(-most, most), exact, chance)

    def _decode(self, kind: Coded, data: Body, shape: tuple[int, int, int], exact: bool) -> Tensor:
        if exact:
            return activation_codec.decode(data, shape, EXACT, self.stage_compute.device)
        began = perf_counter()
        decoded = activation_codec.decode(data, shape, self.codecs[kind], self.stage_compute.device)
        self.timings.append((f"{kind} decode", perf_counter() - began))
        return decoded


def _norm(hidden_BTD: Tensor) -> float:
    return float(torch.linalg.vector_norm(hidden_BTD))


def _left_out(manifest: Manifest) -> float:
    """The norm of what does not cross a narrow boundary and is known to both sides: what tokens are, about as
    large as first embeddings. Without it nothing would be usual in the first rounds, in which layers begin to
    add from next to nothing; with it, hidden states are judged as they are through open boundaries."""
    model = manifest.model
    if not model.boundary.is_narrow:
        return 0.0
    return model.initial_deviation * sqrt(manifest.microbatch_tokens * model.width)


def _judged(sizes: Sizes, source: Source | None, norm: float) -> Judgement:
    """Of a whole model in one stage there is no source but the peer itself."""
    return sizes.judge(PeerId(""), norm) if source is None else sizes.judge(source.peer, norm, source.kind)


def _blamed(source: Source | None, code: str, reason: str, judgement: Judgement) -> Trouble:
    """With another peer's numbers it can be computed still."""
    return Trouble(code, reason, True, source.peer if source is not None else None, judgement.out_of_line)
