"""Assemble one stage for a worker: its layout, its compute, and its optimizer method.

A layout says where each parameter is in the stage's vector. A method makes and applies contributions. A
replica has the stage's settled weights and open rounds. A worker gets the stage as an argument. A simulation
can therefore run the same worker with a cheap compute."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from peers.config.compute_file import ComputeFile
from peers.config.errors import UserError
from swarmnet.identifiers import PeerId
from swarmnet.model.computing.choices import PLAIN, Computing, DtypeName
from swarmnet.model.computing.gradient_sum import Used
from swarmnet.model.computing.private_compute import DocumentNoise, PrivateStageCompute
from swarmnet.model.experts.load import Routed
from swarmnet.model.experts.merging import ExpertMerging
from swarmnet.model.flat_layout import NOTHING, Layout, frozen_layout, trained_layout
from swarmnet.model.stage_compute import LastStageResult, StageCompute, Tiles
from swarmnet.model.state_layout import behind, first_state
from swarmnet.optimizer.method import Method, method_of
from swarmnet.optimizer.replica import Replica
from swarmnet.optimizer.vote_agreement import VoteAgreement
from swarmnet.run.manifest import Manifest

CPU = torch.device("cpu")
FAST_FP16 = (7, 0)
"""Compute capability from which NVIDIA GPUs multiply float16 faster than float32, with Volta's tensor cores
(CUDA C++ Programming Guide, arithmetic instructions)."""


class Computes(Protocol):
    """Forward and backward of a stage, implemented and documented by `swarmnet/model/stage_compute.py`."""

    @property
    def device(self) -> torch.device: ...

    @property
    def routed(self) -> Routed: ...

    def freeze(self, units: Tensor) -> None: ...

    def publish(self, tiles: Tiles) -> None: ...

    def train(self, layout: Layout) -> None: ...

    def warm_up(self, sequences: int, tokens: int) -> None: ...

    def forward(
        self, key: Hashable, inputs: Tensor, branch_scale: float = 1.0, tokens_BT: Tensor | None = None
    ) -> Tensor: ...

    def finish(
        self, key: Hashable, inputs: Tensor, labels_BT: Tensor, tokens_BT: Tensor | None = None
    ) -> LastStageResult: ...

    def backward(self, key: Hashable, hidden_gradient: Tensor) -> Tensor | None: ...

    def drop(self, key: Hashable) -> None: ...

    def use_gradient(self, use: Callable[[Tensor], Used]) -> Used: ...


class HasReplica(Protocol):
    """Settled weights and open rounds of a stage, implemented and documented by
    `swarmnet/optimizer/replica.py`."""

    settled_round: int
    applied_round: int
    corrections: int

    @property
    def size(self) -> int: ...

    def add(self, round: int, peer: PeerId, payload: bytes) -> None: ...

    def remove(self, round: int, peer: PeerId) -> None: ...

    def rate(self, round: int, factor: int) -> None: ...

    def factor(self, round: int) -> int: ...

    def apply(self, round: int) -> None: ...

    def vote_agreement(self, round: int, me: PeerId) -> VoteAgreement | None: ...

    def settle(self, round: int, hashed: bool = True, chain: bytes = b"") -> bytes: ...

    def settled_units(self) -> Tensor: ...

    def settled_now(self) -> Tensor: ...

    def live_tiles(self, ahead: bool) -> Tiles:
        """Return the live weights for `Computes.publish` of the same part."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """All parts of one stage on this peer."""

    layout: Layout
    """Layout of the trained parameters."""
    compute: Computes
    method: Method
    first_units: Callable[[], Tensor]
    """Returns the state before any round, int32 [state.size], from the run's seed."""
    device: torch.device = CPU
    """Device of weights, momentum and gradients."""
    computing: Computing = PLAIN
    merging: ExpertMerging | None = None
    most_graphs: int = 1 << 20
    """Maximum number of open microbatches, if the peer's owner limits the memory."""
    frozen: Layout = NOTHING
    """Layout of the frozen parameters."""
    hold: Callable[[Tensor, int], HasReplica] | None = None
    """Creates a replica from settled weights if several devices hold the stage
    (`peers/compute/devices/part.py`). It takes a while, and therefore runs in the compute thread. None with
    one device."""
    kind: str = ""
    """Type of these devices."""

    @property
    def state(self) -> Layout:
        """Layout of all that the group holds (`swarmnet/model/state_layout.py`)."""
        return behind(self.method.state, self.frozen)

    def replica(self, units: Tensor, settled_round: int) -> HasReplica:
        """Return a replica that starts from `units`, the settled state after `settled_round`, int32. `units`
        has the trained state (`method.state.size` numbers) and, if parameters are frozen, these after it. If
        several devices hold the stage, `self.hold` makes the replica; no parameter is frozen then."""
        if self.hold is not None:
            return self.hold(units, settled_round)
        trained_size = self.method.state.size
        frozen = units[trained_size:]
        self.compute.freeze(frozen)
        trained = units[:trained_size].to(self.device)
        return Replica(
            layout=self.layout,
            method=self.method,
            units=trained,
            settled_round=settled_round,
            frozen=frozen,
            merging=self.merging,
        )


MakePart = Callable[[Manifest, int], StagePart]


def build_stage_part(
    manifest: Manifest,
    stage: int,
    device: torch.device | str = "cpu",
    computing: Computing = PLAIN,
    noise: DocumentNoise | None = None,
) -> StagePart:
    """Return the stage as the manifest describes it, on one device. `computing` has the peer file's choices,
    such as the dtype. A method with local steps has its own optimizer, whose state may be on the CPU.
    `noise` is for the gradients of private documents."""
    layout, frozen = trained_layout(manifest, stage), frozen_layout(manifest, stage)
    method = method_of(manifest, layout, device)
    local_optimizer = method.own
    # An optimizer that steps after each microbatch needs no sum of gradients in a wider dtype.
    steps_each_microbatch = (
        local_optimizer is not None and local_optimizer.tokens <= manifest.microbatch_tokens
    )
    computing = replace(computing, uses_each=steps_each_microbatch)
    if local_optimizer is not None and computing.optimizer_state == "cpu":
        local_optimizer.offload_optimizer_state()

    on = torch.device(device)
    return StagePart(
        layout,
        build_compute(manifest, stage, layout, frozen, computing, on, noise),
        method,
        partial(first_state, manifest, stage),
        on,
        computing,
        ExpertMerging(manifest.model.experts, layout) if manifest.model.experts.merge_rounds else None,
        frozen=frozen,
    )


def build_compute(
    manifest: Manifest,
    stage: int,
    layout: Layout,
    frozen: Layout,
    computing: Computing,
    device: torch.device,
    noise: DocumentNoise | None = None,
) -> StageCompute:
    """Return the compute of a stage on one device; with `noise`, one for private documents."""
    if noise is not None:
        return PrivateStageCompute(
            noise, manifest, layout=layout, frozen=frozen, computing=computing, device=device
        )
    return StageCompute(
        shape=manifest.model,
        span=manifest.span(stage),
        layout=layout,
        computing=computing,
        device=device,
        frozen=frozen,
    )


def computing_of(wish: ComputeFile, device: torch.device) -> Computing:
    """Return what a peer file requests (`wish`) for this device: dtype (bf16 by default if the GPU has it,
    else fp16 if that is fast), checkpointing, compilation, place of the optimizer state. Raises UserError if
    the device cannot do it."""
    on_gpu = device.type == "cuda"
    has_bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    if wish.dtype == "bf16" and on_gpu and not has_bf16:
        raise UserError("compute.dtype is bf16, which this GPU does not have; set it to auto, fp16 or fp32")
    if wish.compile and not on_gpu:
        raise UserError(
            "compute.compile is true, which is for GPUs, and here the processor computes; set it to false"
        )
    if wish.compile and find_spec("triton") is None:
        raise UserError(
            "compute.compile is true, but triton is not here, by which torch makes programs for the GPU; "
            "set it to false, or install torch for this GPU with all that it names"
        )
    dtype: DtypeName = "fp32"
    if wish.dtype != "auto":
        dtype = wish.dtype
    elif has_bf16:
        dtype = "bf16"
    elif on_gpu and torch.cuda.get_device_capability(device) >= FAST_FP16:
        dtype = "fp16"
    return Computing(dtype, wish.activation_checkpointing, wish.compile, wish.optimizer_state)


def devices_of(wish: ComputeFile, device: torch.device) -> list[torch.device]:
    """Return the devices that a peer file requests, of the type of `device`. `wish.devices` is a number of
    devices, a tuple of GPU numbers, or `all`. Without a GPU it is the same device several times, once for
    each process. Raises UserError if a GPU is missing."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    requested = wish.devices
    if isinstance(requested, tuple) and not gpus:
        raise UserError(
            f"compute.devices: {list(requested)} are numbers of GPUs; here the processor computes"
        )
    if requested == "all":
        requested = gpus or 1
    numbers = range(requested) if isinstance(requested, int) else requested
    if not gpus:
        return [device] * len(numbers)
    missing = [number for number in numbers if number >= gpus]
    if missing:
        raise UserError(f"compute.devices: there is no GPU {missing[0]} here, only 0 to {gpus - 1}")
    if len(numbers) + wish.remote_devices > 1 and wish.compile:
        raise UserError("compute.compile is for one device; set it to false, or compute.devices to 1")
    return [torch.device("cuda", number) for number in numbers]


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished its work, so that its duration can be measured."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_of(wish: str) -> torch.device:
    """Return the device that a peer file requests. UserError if it does not exist."""
    if wish == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wish == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch sees no GPU; set device: cpu, or mend the driver")
    return torch.device(wish)
