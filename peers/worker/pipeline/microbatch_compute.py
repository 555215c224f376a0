"""The tensor side of microbatches: forward and backward passes in the compute thread.

A microbatch that cannot be computed (wrong shape, not finite) is an ordinary result: `ComputeError`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import hypot, inf, prod, sqrt
from random import Random
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from peers.compute.stage_part import Computes
from protocols.fields import Body
from swarmnet.identifiers import MicrobatchId, PeerId, RunId
from swarmnet.model import activation_codec
from swarmnet.model.carried_text import CarriedText
from swarmnet.model.norm_tracker import NormCheck, NormTracker
from swarmnet.model.stage_compute import StageError, Uncounted
from swarmnet.pipeline.answer_comparison import Likeness, likeness
from swarmnet.routing.next_hop import Passage
from swarmnet.run.activation_sizes import Codec
from swarmnet.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class NormSource:
    """The peer that sent a tensor. Norms of its tensors are compared with those of others of the same
    `kind`."""

    peer: PeerId
    stage: int
    path_stages: int
    """Stages that the microbatch had visited (hidden states), or visits in all (a gradient). Norms depend on
    it where stages are skipped."""

    @property
    def kind(self) -> tuple[int, int]:
        return self.stage, self.path_stages


@dataclass(slots=True)
class MicrobatchState:
    """Everything that is kept for one microbatch until `Forget`."""

    passage: Passage = field(default=Passage(1))
    sender: NormSource | None = None
    """The sender of the hidden states first kept in `output`; None if the microbatch starts here."""
    answerer: NormSource | None = None
    """The sender of `gradient`."""

    inputs: Tensor | None = None
    text: CarriedText | None = None
    output: bytes = b""
    """Encoded hidden states and text, for the next peer and for another one if that peer fails."""
    shape: tuple[int, int, int] = (0, 0, 0)
    gradient: bytes = b""
    """Encoded gradient that came from the next stage."""
    digest: bytes = b""
    """Digest of `gradient`, which is freed once it is used."""
    answer: bytes = b""
    """Encoded gradient for the previous stage."""
    samples: dict[PeerId, Tensor] = field(default_factory=dict)
    """Maps each peer that sent its hidden states for this microbatch to some of them, [SAMPLED]."""
    likenesses: dict[frozenset[PeerId], Likeness] = field(default_factory=dict)
    loss_sum: float = 0.0
    tokens: int = 0
    loss_tokens: int = 0
    """Tokens over which `loss_sum` is summed; the others are context."""
    seconds: float = 0.0
    """Compute seconds spent here and on later stages."""
    own_seconds: float = 0.0
    """Compute seconds spent here."""
    queued: float = 0.0
    """Seconds spent waiting for compute here."""
    queued_below: float = 0.0
    """Seconds spent waiting for compute on later stages."""
    submitted_at: float = 0.0
    """Time when it was last submitted to the compute thread."""
    started_at: float | None = None
    """Time when it was cut from the text; None if it came from another peer."""
    answered: float = 0.0
    """Seconds from sending its output to receiving the gradient: compute, queues and network of later
    stages."""
    arrived_at: float | None = None
    """Time when it came from the previous stage; None once its gradient was sent back."""


@dataclass(frozen=True, slots=True)
class ComputeError:
    """The reason why a microbatch was not computed."""

    code: str
    reason: str
    again: bool = False
    """Whether it can still be computed here with another gradient from the next stage."""
    peer: PeerId | None = None
    """The sender of the bad tensor, if one is to blame."""
    outlier: bool = False
    """Whether most recent tensors of that peer are bad."""


@dataclass(frozen=True, slots=True)
class Computed:
    encoded: bytes
    shape: tuple[int, int, int]
    loss_sum: float = 0.0
    tokens: int = 0


Outcome: TypeAlias = Computed | ComputeError


Coded = Literal["activation", "gradient"]


COMPARED_CODEC: Codec = "int4-tiles"
"""Encoding of tensors that are only compared: a third of bf16. It changes a cosine by 0.003."""
SAMPLED = 4096
"""Number of hidden states that are kept of a microbatch to compare it later: 16 KiB. Their places are secret,
so a cosine over them is as good as one over all."""


def _digest(data: Body) -> bytes:
    """Return the digest of an encoded gradient, by which peers see whether they got the same one."""
    return hashlib.blake2b(data, digest_size=16).digest()


class MicrobatchWork:
    def __init__(self, manifest: Manifest, stage: int, stage_compute: Computes, chance: Random) -> None:
        """`chance` draws which hidden states are kept of each microbatch, for comparisons."""
        self.codecs: dict[Coded, Codec] = {
            "activation": manifest.activation_codec,
            "gradient": manifest.effective_gradient_codec,
        }
        self._stage = stage
        self._by_chance = manifest.gradient_rounding == "stochastic"
        self._run_id = manifest.run_id() if self._by_chance else RunId("")
        self._shape = manifest.hidden_shape
        self._left_out = _left_out(manifest)
        self.is_last = stage == manifest.path_rules().last
        self.stage_compute = stage_compute
        self.gathered_tokens = 0
        """Tokens in the gradient that `StageCompute` accumulates; used by the compute thread alone."""
        self.after_gradient: Callable[[], None] = lambda: None
        """Called in the compute thread after a gradient was added."""
        self.hidden_sizes = NormTracker()
        self.gradient_sizes = NormTracker(weighed=True)
        """Norms of hidden states from earlier stages, and of gradients from later ones."""
        size, is_kept = prod(self._shape), stage > 1 and manifest.compares_answers  # None are from origins.
        places = chance.sample(range(size), min(SAMPLED, size)) if is_kept else []
        self._sampled = torch.tensor(places, dtype=torch.int64, device=stage_compute.device)
        self.scaled = 0
        """Number of microbatches whose gradient was too large and was scaled down."""

    def drop(self, key: MicrobatchId) -> None:
        """Drop what is kept of this microbatch. The last stage keeps nothing; where it is also the first, the
        graph under this key is the first stage's."""
        if not self.is_last:
            self.stage_compute.drop(key)

    def left(self, peer: PeerId) -> None:
        """Forget the norms of a peer that left: they no longer define what is usual."""
        for sizes in (self.hidden_sizes, self.gradient_sizes):
            sizes.left(peer)

    def forward(self, key: MicrobatchId, kept: MicrobatchState) -> Outcome:
        """Decode a microbatch, check its norm, and run the forward pass. The last stage runs backward too.

        Returns the encoded output (the gradient of the inputs on the last stage), or the error to report to
        the sender. Called in the compute thread."""
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
                if len(self._sampled) and kept.sender is not None:
                    kept.samples[kept.sender.peer] = inputs.flatten()[self._sampled]
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
        """Decode a gradient, check its norm, and run the backward pass. Returns the encoded gradient of the
        inputs, which is empty on the first stage, or an error with the peer to blame. Called in the compute
        thread."""
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
        kept.digest = _digest(kept.gradient)
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

    # -- for comparisons ------------------------------------------------------------------------------

    def recompute(self, key: Uncounted, kept: MicrobatchState) -> Outcome:
        """Compute as in `forward`, or as in `backward` once the gradient from below is in `kept`. Returns the
        hidden states or the gradient of the inputs in `COMPARED_CODEC`."""
        compute, text = self.stage_compute, kept.text
        assert text is not None, "it came with the hidden states"
        try:
            result: Tensor | None
            if kept.gradient:
                kept.digest = _digest(kept.gradient)
                result = compute.backward(key, self._decode("gradient", kept.gradient, kept.shape))
            else:
                inputs = self._decode("activation", kept.output, kept.shape)
                if self.is_last:
                    result = compute.finish(key, inputs, text.labels, text.tokens).hidden_gradient
                else:
                    result = compute.forward(key, inputs, kept.passage.branch_scale, text.tokens)
            assert result is not None, "the first stage computes nothing again"
            result = result.clamp(-activation_codec.LARGEST, activation_codec.LARGEST)
            return Computed(activation_codec.encode(result, COMPARED_CODEC), kept.shape)
        except (StageError, activation_codec.HiddenError) as error:
            return ComputeError("not_finite", str(error))

    def compare(
        self, peer: PeerId, data: Body, codec: Codec, tensors: dict[PeerId, Tensor], sampled: bool = False
    ) -> dict[PeerId, Likeness]:
        """Decode a tensor of `peer`, return how alike it is to those of others, and add it to them. With
        `sampled`, they are samples. Data that are no tensor count as zeros, which are like no other one."""
        try:
            tensor = activation_codec.decode(data, self._shape, codec, self.stage_compute.device).flatten()
        except activation_codec.HiddenError:
            tensor = torch.zeros(prod(self._shape), device=self.stage_compute.device)
        tensor = tensor[self._sampled] if sampled else tensor
        found = {other: likeness(kept, tensor) for other, kept in tensors.items() if other != peer}
        tensors[peer] = tensor
        return found

    # -- shared steps ---------------------------------------------------------------------------------

    def _far_off(self, sender: NormSource | None, norm: float) -> ComputeError | None:
        """Return why hidden states with this norm are rejected, or None.

        They are rejected and not rescaled: no honest stage computed them, and after rescaling the model would
        train on them."""
        judgement = _judged(self.hidden_sizes, sender, norm)
        if not (judgement.far_off or judgement.outlier):
            return None
        reason = f"hidden states {judgement.ratio:.3g} times as large as is usual"
        return replace(_blamed(sender, "outlier", reason, judgement), again=False)

    def _gathered(self, kept: MicrobatchState, tokens: int) -> None:
        self.gathered_tokens += tokens
        self.after_gradient()

    def _encode(self, kind: Coded, tensor: Tensor, chance: torch.Generator | None = None) -> bytes:
        return activation_codec.encode(tensor, self.codecs[kind], chance)

    def _encode_gradient(self, key: MicrobatchId, gradient: Tensor) -> bytes:
        """Encode a gradient, clamped if need be. It has already been added here, so it must not be lost; a
        value finite in fp32 may exceed the codec's range."""
        chance = (
            activation_codec.rounding_generator(self._run_id, key, self._stage) if self._by_chance else None
        )
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
    """Return the expected norm of what does not cross a narrow boundary because both sides know it.

    That part are the token embeddings, about as large as at initialisation. Without it no norm would be usual
    in the first rounds, in which layers add next to nothing. With it, hidden states are judged as through
    full boundaries."""
    model = manifest.model
    if not model.boundary.is_narrow:
        return 0.0
    return model.initializer_range * sqrt(manifest.microbatch_tokens * model.hidden_size)


def _judged(sizes: NormTracker, source: NormSource | None, norm: float) -> NormCheck:
    """Compare a norm with what is usual for its source. In a single-stage model the only source is this
    peer."""
    return sizes.judge(PeerId(""), norm) if source is None else sizes.judge(source.peer, norm, source.kind)


def _blamed(source: NormSource | None, code: str, reason: str, judgement: NormCheck) -> ComputeError:
    """Return an error that blames the sender; with another peer's tensor the microbatch can still be
    computed."""
    return ComputeError(code, reason, True, source.peer if source is not None else None, judgement.outlier)
