"""The tensor side of microbatches: everything here that computes runs in the compute thread.

A microbatch that cannot be computed (wrong shape, not finite) is an ordinary outcome: `ComputeError`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import hypot, inf, sqrt
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from peers.compute.stage_part import Computes
from protocols.fields import Body
from swarmnet.identifiers import MicrobatchId, PeerId, RunId
from swarmnet.model import activation_codec
from swarmnet.model.carried_text import CarriedText
from swarmnet.model.norm_tracker import NormCheck, NormTracker
from swarmnet.model.stage_compute import StageError
from swarmnet.routing.next_hop import Passage
from swarmnet.run.activation_sizes import Codec
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
class MicrobatchState:
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
    shape: tuple[int, int, int] = (0, 0, 0)
    gradient: bytes = b""
    """Encoded gradient that came from below."""
    answer: bytes = b""
    """Encoded gradient for the peer above."""
    loss_sum: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    """Compute spent here and below."""
    own_seconds: float = 0.0
    """Compute spent here."""
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


@dataclass(frozen=True, slots=True)
class ComputeError:
    """Why a microbatch was not computed."""

    code: str
    reason: str
    again: bool = False
    """Nothing is lost here: with another gradient from below it can be computed still."""
    peer: PeerId | None = None
    """Who sent the numbers that are no good."""
    outlier: bool = False
    """Most of what that peer sent lately is no good."""


@dataclass(frozen=True, slots=True)
class Computed:
    encoded: bytes
    shape: tuple[int, int, int]
    loss_sum: float = 0.0
    tokens: int = 0


Outcome: TypeAlias = Computed | ComputeError


Coded = Literal["activation", "gradient"]


class MicrobatchWork:
    def __init__(self, manifest: Manifest, stage: int, stage_compute: Computes) -> None:
        self.codecs: dict[Coded, Codec] = {
            "activation": manifest.activation_codec, "gradient": manifest.codec_back,
        }  # fmt: skip
        self._stage, self._by_chance = stage, manifest.gradient_rounding == "stochastic"
        self._run_id = manifest.run_id() if self._by_chance else RunId("")
        self._left_out = _left_out(manifest)
        self.is_last = stage == len(manifest.stages) - 1
        self.stage_compute = stage_compute
        self.gathered_tokens = 0
        """Tokens in the gradient that StageCompute holds; touched by the compute thread alone."""
        self.after_gradient: Callable[[], None] | None = None
        """Called when one was added, in the compute thread; None where nobody steps by it alone."""
        self.hidden_sizes, self.gradient_sizes = NormTracker(), NormTracker(weighed=True)
        """Of hidden states from above, and of gradients from below."""
        self.scaled = 0
        """Microbatches whose gradient from below was too large."""

    def drop(self, key: MicrobatchId) -> None:
        """Forget what is kept of it."""
        self.stage_compute.drop(key)

    def left(self, peer: PeerId) -> None:
        """What it sent decides no more what is usual."""
        for sizes in (self.hidden_sizes, self.gradient_sizes):
            sizes.left(peer)

    def forward(self, key: MicrobatchId, kept: MicrobatchState) -> Outcome:
        try:
            inputs = kept.inputs
            if inputs is None:
                try:
                    inputs = self._decode("activation", kept.output, kept.shape)
                except activation_codec.HiddenError as error:
                    judgement = _judged(self.hidden_sizes, kept.sender, inf)
                    return replace(_blamed(kept.sender, "malformed", str(error), judgement), again=False)
                if trouble := self._far_off(kept.sender, hypot(_norm(inputs), self._left_out)):
                    return trouble
            text = kept.text
            assert text is not None, "it came with the hidden states, or was cut with the inputs"
            compute = self.stage_compute
            if not self.is_last:
                output_BTD = compute.forward(key, inputs, kept.passage.branch_scale, text.tokens)
                batch, tokens, width = output_BTD.shape
                encoded = self._encode("activation", output_BTD)
                return Computed(encoded, (batch, tokens, width))
            finished = compute.finish(key, inputs, text.labels, text.tokens)
        except (StageError, activation_codec.HiddenError) as error:
            return ComputeError("not_finite" if isinstance(error, StageError) else "malformed", str(error))
        self._gathered(kept, finished.tokens)
        gradient = finished.hidden_gradient
        encoded = b"" if gradient is None else self._encode_gradient(key, gradient)
        return Computed(encoded, kept.shape, finished.loss_sum, finished.tokens)

    def backward(self, key: MicrobatchId, kept: MicrobatchState) -> Outcome:
        source = kept.answerer
        try:
            below = self._decode("gradient", kept.gradient, kept.shape)
        except activation_codec.HiddenError as error:
            return _blamed(source, "malformed", str(error), _judged(self.gradient_sizes, source, inf))
        judgement = _judged(self.gradient_sizes, source, _norm(below))
        if not judgement.gain:
            return _blamed(source, "not_finite", "a gradient too large to be summed", judgement)
        if judgement.outlier:
            reason = f"its gradients are mostly far from others' size, this one {judgement.ratio:.3g} times"
            return _blamed(source, "outlier", reason, judgement)
        if judgement.gain < 1.0:
            self.scaled += 1
            below *= judgement.gain
        try:
            gradient = self.stage_compute.backward(key, below)
        except StageError as error:
            return ComputeError("not_finite", str(error), peer=source.peer if source is not None else None)
        self._gathered(kept, kept.tokens)
        encoded = b"" if gradient is None else self._encode_gradient(key, gradient)
        return Computed(encoded, kept.shape)

    def _far_off(self, sender: Source | None, norm: float) -> ComputeError | None:
        """Why hidden states are not computed with. They are refused and not scaled: whatever they are, they
        are not what an honest stage has computed, and made to fit they would be trained on."""
        judgement = _judged(self.hidden_sizes, sender, norm)
        if not (judgement.far_off or judgement.outlier):
            return None
        reason = f"hidden states {judgement.ratio:.3g} times as large as is usual"
        return replace(_blamed(sender, "outlier", reason, judgement), again=False)

    def _gathered(self, kept: MicrobatchState, tokens: int) -> None:
        self.gathered_tokens += tokens
        if self.after_gradient is not None:
            self.after_gradient()

    def _encode(self, kind: Coded, tensor: Tensor, chance: torch.Generator | None = None) -> bytes:
        return activation_codec.encode(tensor, self.codecs[kind], chance)

    def _encode_gradient(self, key: MicrobatchId, gradient: Tensor) -> bytes:
        """Always, for it is added here already: what is finite in fp32 may be beyond the end of the codec."""
        chance = activation_codec.rounding_of(self._run_id, key, self._stage) if self._by_chance else None
        try:
            return self._encode("gradient", gradient, chance)
        except activation_codec.HiddenError:
            most = activation_codec.LARGEST
            return self._encode("gradient", gradient.clamp(-most, most), chance)

    def _decode(self, kind: Coded, data: Body, shape: tuple[int, int, int]) -> Tensor:
        return activation_codec.decode(data, shape, self.codecs[kind], self.stage_compute.device)


def _norm(hidden_BTD: Tensor) -> float:
    return float(torch.linalg.vector_norm(hidden_BTD))


def _left_out(manifest: Manifest) -> float:
    """The norm of what does not cross a narrow boundary and is known to both sides: what tokens are, about as
    large as first embeddings. Without it nothing would be usual in the first rounds, in which layers begin to
    add from next to nothing; with it, hidden states are judged as they are through open boundaries."""
    model = manifest.model
    if not model.boundary.is_narrow:
        return 0.0
    return model.initializer_range * sqrt(manifest.microbatch_tokens * model.hidden_size)


def _judged(sizes: NormTracker, source: Source | None, norm: float) -> NormCheck:
    """Of a whole model in one stage there is no source but the peer itself."""
    return sizes.judge(PeerId(""), norm) if source is None else sizes.judge(source.peer, norm, source.kind)


def _blamed(source: Source | None, code: str, reason: str, judgement: NormCheck) -> ComputeError:
    """With another peer's numbers it can be computed still."""
    return ComputeError(code, reason, True, source.peer if source is not None else None, judgement.outlier)
