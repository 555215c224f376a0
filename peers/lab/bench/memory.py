"""Benchmark of a stage's memory: the product's code of one peer runs rounds in this process.

Permanent memory is measured between two rounds. Temporary memory is the peak while a microbatch is computed,
and while a round is made, applied and settled. On a GPU, torch's count of tensor memory is used; on a CPU the
measurement needs Linux.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from peers.compute.devices.part import spread_part
from peers.compute.process_memory import release_memory, resident_bytes
from peers.compute.stage_part import CPU, StagePart, build_stage_part
from peers.config.errors import UserError
from peers.lab.bench.learning.play_rounds import set_of
from swarmnet.identifiers import PeerId
from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.pipeline.flow_control import graph_at_work, graph_bytes
from swarmnet.resources.memory_estimate import PROCESS_BYTES, needs_of, waits
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import InitCheckpoint, ModelShape

ME, ANOTHER = PeerId("this peer"), PeerId("another")
RESET_PEAK = "5"
"""Value to write to /proc/PID/clear_refs to reset VmHWM (proc(5))."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Memory of a stage in bytes per parameter."""

    parameters: int
    held: float
    """Memory between two rounds, with as many open rounds as the manifest allows."""
    microbatch: float
    """Additional memory while a microbatch is computed, without the estimated size of its graph."""
    round: float
    """Additional memory while a round is contributed to, applied and settled."""
    said: float
    """Total memory that swarmnet/resources/memory_estimate.py estimates."""


def bench(manifest: Manifest, stage: int, computing: Computing = PLAIN, device: torch.device = CPU) -> Taken:
    """Measure the memory of a stage on `device`. Raises UserError if the system does not report it."""
    memory: _Memory = _Card() if device.type == "cuda" else _Machine()
    _warm_up(manifest, stage, computing, device)
    before = memory.taken()
    part = build_stage_part(manifest, stage, device, computing)
    if part.method.held is not None and part.method.held.begins(ME):
        part.compute.train(part.method.held.trained)
    peer = _Peer(manifest, stage, part)
    for _ in range(manifest.rounds.window + 2):  # After these the number of open rounds is constant.
        peer.compute()
        peer.play_round()
    graph = graph_bytes(manifest, stage, computing)
    if waits(manifest, stage):
        before += graph
    held = memory.taken() - before
    graph += graph_at_work(manifest, stage, computing)
    microbatch = max(0, _highest_in(peer.compute, memory) - before - held - graph)
    round = max(0, _highest_in(peer.play_round, memory) - before - held)
    size = part.layout.size
    process = 0 if device.type == "cuda" else PROCESS_BYTES
    needs = needs_of(manifest, stage, process, computing, is_small=True)
    said = needs.least - needs.process - graph_bytes(manifest, stage, computing)
    return Taken(part.layout.parameters, held / size, microbatch / size, round / size, said / size)


def render(taken: Taken) -> str:
    """Return the result as text."""
    most = taken.held + max(taken.microbatch, taken.round)
    return "\n".join(
        [
            f"{taken.parameters:,} parameters; bytes per parameter",
            f"  {taken.held:6.1f}  between two rounds",
            f"  {taken.microbatch:6.1f}  more while a microbatch is computed, besides its graph",
            f"  {taken.round:6.1f}  more while a round is made, applied and settled",
            f"  {most:6.1f}  at most",
            f"  {taken.said:6.1f}  as peers say before they begin",
        ]
    )


@dataclass(frozen=True, slots=True)
class TakenByDevices:
    """Memory of the processes of a device group on this CPU, in bytes."""

    parameters: int
    """Number of parameters, padding included."""
    alone: float
    """Mean peak of a process with a tiny stage, after some rounds."""
    most: tuple[int, ...]
    """Peak resident memory of each process during some rounds, graphs included."""


def bench_devices(
    manifest: Manifest, stage: int, devices: int, computing: Computing = PLAIN
) -> TakenByDevices:
    """Measure a stage on `devices` processes. Raises UserError if the system does not report memory."""
    small = ModelShape(hidden_size=64, num_hidden_layers=1, head_dim=16, intermediate_size=128)
    _, nothing = _play(replace(manifest, model=small, stages=(1,)), 0, devices, computing)
    size, most = _play(manifest, stage, devices, computing)
    return TakenByDevices(size, sum(nothing) / devices, tuple(most))


def _play(manifest: Manifest, stage: int, devices: int, computing: Computing) -> tuple[int, list[int]]:
    """Run some rounds; return the number of parameters, and the peak memory of each process."""
    part, processes = spread_part(manifest, stage, [CPU] * devices, computing, 1)
    try:
        processes.ready()
        peer = _Peer(manifest, stage, part)
        for _ in range(manifest.rounds.window + 3):
            peer.compute()
            peer.play_round()
        return part.layout.size, [_highest(pid) for pid in processes.pids]
    finally:
        processes.close()


def render_devices(taken: TakenByDevices) -> str:
    """Return the result as text, one line for each device."""
    rows = (
        f"  {(most - taken.alone) / taken.parameters:6.1f}  at most in the process of device {number}, "
        f"{most / 1e6:.0f} MB in all"
        for number, most in enumerate(taken.most)
    )
    programs = f"{taken.alone / 1e6:.0f} MB of programs"
    head = f"{taken.parameters:,} parameters; bytes per parameter, in addition to {programs}"
    return "\n".join([head, *rows])


class _Peer:
    """Runs microbatches and rounds as a peer's compute thread does."""

    def __init__(self, manifest: Manifest, stage: int, part: StagePart) -> None:
        self._manifest = manifest
        self._part = part
        self._span = manifest.span(stage)
        self._replica = part.replica(part.first_units(), -1)
        self._generator = torch.Generator().manual_seed(0)
        self._round = 0
        self._waiting: Callable[[], object] | None = None
        """Backward pass of a microbatch that was started before the last weights were published."""
        self._next: Callable[[], object] | None = None
        """Backward pass of a microbatch that was started after that."""
        part.compute.publish(self._replica.live_tiles(ahead=False))

    def compute(self) -> None:
        data, model = self._manifest.data, self._manifest.model
        shape = data.micro_batch_size, data.seq_len
        tokens_BT = torch.randint(model.vocab_size, shape, generator=self._generator)
        inputs = tokens_BT if self._span.has_embedding else self._hidden()
        compute = self._part.compute
        if self._span.has_head:
            compute.finish(0, inputs, tokens_BT)
        else:
            later = self._round + 1
            for key in (0, later):
                compute.forward(key, inputs)
            compute.backward(0, self._hidden())
            self._next = partial(compute.backward, later, self._hidden())

    def play_round(self) -> None:
        method, replica, round = self._part.method, self._replica, self._round
        payload = self._part.compute.use_gradient(lambda gradient: method.contribute(gradient, 1, round, ME))
        for contributor, member in set_of(method, self._with_others(payload), round).items():
            replica.add(round, contributor, member)
        replica.apply(round)
        replica.vote_agreement(round, ME)
        if round - self._manifest.rounds.window > replica.settled_round:
            replica.settle(replica.settled_round + 1)
        if self._waiting is not None:
            self._waiting()
        self._waiting = self._next
        self._part.compute.publish(replica.live_tiles(ahead=False))
        self._round += 1

    def _with_others(self, payload: bytes) -> dict[PeerId, bytes]:
        """Return this peer's contribution and others': one more, or one from each other expert shard."""
        held = self._part.method.held
        if held is None:
            return {ME: payload, ANOTHER: payload}
        others = [group for group in range(held.groups) if group != held.group]
        return {ME: payload} | {PeerId(f"of {group}"): bytes([group]) + payload[1:] for group in others}

    def _hidden(self) -> torch.Tensor:
        return torch.randn(self._manifest.hidden_shape, generator=self._generator)


def _warm_up(manifest: Manifest, stage: int, computing: Computing, device: torch.device) -> None:
    """Run a tiny stage, so that the libraries' own memory (about 20 MB) is not measured."""
    model = manifest.model
    small = replace(
        manifest,
        init_checkpoint=InitCheckpoint(),
        model=ModelShape(
            hidden_size=64,
            num_hidden_layers=model.num_hidden_layers,
            head_dim=16,
            intermediate_size=128,
            qk_norm=model.qk_norm,
            experts=model.experts,
        ),
    )
    part = build_stage_part(small, stage, device, computing)
    if part.method.held is not None and part.method.held.begins(ME):
        part.compute.train(part.method.held.trained)
    peer = _Peer(small, stage, part)
    for _ in range(manifest.rounds.window + 3):
        peer.compute()
        peer.play_round()


class _Memory(Protocol):
    """A source of memory figures, in bytes."""

    def taken(self) -> int: ...

    def forget_peak(self) -> None: ...

    def highest(self) -> int: ...


class _Machine:
    """Resident memory of this process."""

    def taken(self) -> int:
        release_memory()
        return resident_bytes()

    def forget_peak(self) -> None:
        _forget_peak(os.getpid())

    def highest(self) -> int:
        return _highest(os.getpid())


class _Card:
    """Memory of this process's tensors on its GPU, without what torch's allocator caches."""

    def taken(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def highest(self) -> int:
        return torch.cuda.max_memory_allocated()


def _highest_in(work: Callable[[], None], memory: _Memory) -> int:
    """Return the peak bytes of memory while `work` runs."""
    memory.taken()  # Returns freed memory to the system.
    memory.forget_peak()
    work()
    return memory.highest()


def _forget_peak(pid: int) -> None:
    with _from_proc():
        Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAK)


def _highest(pid: int) -> int:
    """Return the peak resident bytes of a process since the last reset."""
    with _from_proc():
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


@contextmanager
def _from_proc() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"measuring needs Linux' /proc: {error}") from None
