"""The tensor side of microbatches: everything here that computes runs in the compute thread.

A microbatch that cannot be computed (wrong shape, not finite) is an ordinary outcome: `Trouble`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from peers.codec_counts import CodecCounts, Coded
from peers.stage_part import Computes
from peers.timings import Timings
from swarmnet import hidden
from swarmnet.identifiers import MicrobatchId
from swarmnet.manifest import Manifest
from swarmnet.stage import StageError

UNKNOWN_MEMORY_BYTES = 4 << 30
"""Assumed where the system does not tell (Windows)."""


def memory_bytes(device: torch.device) -> int:
    """The memory that tensors on `device` share with everything else there."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return UNKNOWN_MEMORY_BYTES


@dataclass(slots=True)
class Bodies:
    """Everything kept for one microbatch, until Forget."""

    inputs: Tensor | None = None
    labels: Tensor | None = None
    output: bytes = b""
    """Encoded hidden states and labels, for the next peer and for another if that one fails."""
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
    weights_at: int = 0
    """`MicrobatchWork.applied_rounds` at its forward pass."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a microbatch was not computed."""

    code: str
    reason: str
    again: bool = False
    """Nothing is lost here: with another gradient from below it can be computed still."""


@dataclass(frozen=True, slots=True)
class Computed:
    encoded: bytes
    shape: tuple[int, int, int]
    loss_sum: float = 0.0
    tokens: int = 0


class MicrobatchWork:
    def __init__(self, manifest: Manifest, stage: int, stage_compute: Computes) -> None:
        self.codec = manifest.hidden_codec
        self.is_last = stage == len(manifest.stages) - 1
        self.stage_compute = stage_compute
        self.gathered_tokens = 0
        """Tokens in the gradient that StageCompute holds; touched by the compute thread alone."""
        self.applied_rounds = 0
        """Rounds that have entered the weights here since the start; likewise."""
        self.timings = Timings()
        self.codings = CodecCounts(self.timings, "activation", "gradient")

    def forward(self, key: MicrobatchId, kept: Bodies, branch_scale: float = 1.0) -> Computed | Trouble:
        """`branch_scale` (StageCompute.forward) is of middle stages alone: for the last one it is 1."""
        kept.weights_at = self.applied_rounds
        try:
            inputs = kept.inputs
            if inputs is None:
                inputs = self._decode("activation", kept.output, kept.shape)
            if not self.is_last:
                output_BTD = self.stage_compute.forward(key, inputs, branch_scale)
                return Computed(self._encode("activation", output_BTD), _shape(output_BTD))
            assert kept.labels is not None, "the last stage got its labels with the ACT"
            finished = self.stage_compute.finish(key, inputs, kept.labels)
        except (StageError, hidden.HiddenError) as error:
            return Trouble("not_finite" if isinstance(error, StageError) else "malformed", str(error))
        self._gathered(kept, finished.tokens)
        gradient = finished.hidden_gradient
        encoded = b"" if gradient is None else self._encode_gradient(gradient)
        return Computed(encoded, kept.shape, finished.loss_sum, finished.tokens)

    def backward(self, key: MicrobatchId, kept: Bodies) -> Computed | Trouble:
        try:
            below = self._decode("gradient", kept.gradient, kept.shape)
        except hidden.HiddenError as error:
            return Trouble("malformed", str(error), again=True)
        try:
            gradient = self.stage_compute.backward(key, below)
        except StageError as error:
            return Trouble("not_finite", str(error))
        self._gathered(kept, kept.tokens)
        return Computed(b"" if gradient is None else self._encode_gradient(gradient), kept.shape)

    def _gathered(self, kept: Bodies, tokens: int) -> None:
        self.gathered_tokens += tokens
        self.timings.add("staleness", self.applied_rounds - kept.weights_at)

    def _encode(self, kind: Coded, tensor: Tensor) -> bytes:
        began = perf_counter()
        encoded = hidden.encode(tensor, self.codec)
        self.codings.encoded(kind, began, tensor.numel(), len(encoded))
        return encoded

    def _encode_gradient(self, gradient: Tensor) -> bytes:
        """Always, for it is added here already: what is finite in fp32 may be beyond the end of bf16."""
        try:
            return self._encode("gradient", gradient)
        except hidden.HiddenError:
            most = torch.finfo(torch.bfloat16).max
            return self._encode("gradient", gradient.clamp(-most, most))

    def _decode(self, kind: Coded, data: bytes, shape: tuple[int, int, int]) -> Tensor:
        began = perf_counter()
        decoded = hidden.decode(data, shape, self.codec)
        self.codings.decoded(kind, began)
        return decoded


def _shape(hidden_BTD: Tensor) -> tuple[int, int, int]:
    batch, tokens, width = hidden_BTD.shape
    return batch, tokens, width
