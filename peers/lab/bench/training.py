"""Benchmark of a peer's training speed against a plain PyTorch loop: one process, one thread, one text.

The plain loop trains the same decoder under ordinary autograd. It uses torch's fused AdamW, or the Muon of
the local-step methods, and steps as often as the peer does. The peer runs what its compute thread runs:
codecs, local steps and rounds. It is measured with the model in one stage, and with all stages of the run
one after the other. Text, links, events and checkpoints are not measured here (see training_processes.py).

Both are timed by this process's CPU time, in turns, so that other load on the machine matters little. A ratio
compares adjacent turns; reports give the median of these. On a GPU both are timed by the clock, and no other
program may use the GPU meanwhile. There both compute in bfloat16 if the GPU has it, the plain loop through
torch.autocast. Both compile their layers if the caller requests it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from random import Random
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW

from peers.compute.stage_part import CPU, build_stage_part, wait_for
from peers.worker.pipeline.microbatch_compute import Computed, MicrobatchState, MicrobatchWork, Outcome
from peers.worker.rounds.operations import ContributionReady, DecodeContribution, Operation
from peers.worker.rounds.round_counts import RoundCounts
from peers.worker.rounds.update_compute import UpdateWork
from protocols.signed.envelope import EnvelopeKind, open_envelope
from protocols.signed.identity import Identity
from swarmnet.identifiers import MicrobatchId
from swarmnet.model.carried_text import TextCodec
from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.model.decoder import RunLayer, forward, one_layer
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import trained_layout, views_of
from swarmnet.model.flops import operations_per_token
from swarmnet.model.linear import linear
from swarmnet.model.parameters import trains_with_muon, whole
from swarmnet.model.state_layout import first_state
from swarmnet.optimizer.local_steps.inner_optimizer import ADAM_DECAYS
from swarmnet.optimizer.polar_factor import orthogonal
from swarmnet.rounds.events import ApplyRound, MakeContribution, SettleRound
from swarmnet.run.manifest import Manifest
from swarmnet.run.method_config import MUON_RMS

Loop = Literal["plain", "plain-muon", "peer", "stages"]
TEXTS = 16
"""Distinct microbatches; they repeat after that, because token values do not affect the speed."""
RATE = 1e-3
"""Learning rate of the plain loop. Only finite numbers matter here, not what the model learns."""
PEAK_SIDE = 4096
"""Rows and columns of the matrices that measure a GPU's peak: large enough to fill it."""
PEAK_PRODUCTS = 10
"""Products that are timed; the first ones include the time that the library takes to load."""


class _Trains(Protocol):
    def microbatch(self, tokens_BT: Tensor, labels_BT: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class TimeShares:
    """How a peer's time divides, as fractions that add up to 1."""

    microbatches: float
    """Forward and backward passes, codecs and sums of gradients."""
    steps: float
    """Local optimizer steps, and publishing their weights."""
    rounds: float
    """Making, decoding, applying and settling contributions, and publishing their weights."""


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """Result of the benchmark: seconds per microbatch for each loop."""

    parameters: int
    microbatch_tokens: int
    inner_batch_tokens: int
    microbatches: int
    """Number of microbatches timed in each turn."""
    seconds: Mapping[Loop, Sequence[float]]
    """Seconds per microbatch, one value a turn: CPU time, or clock time on a GPU."""
    parts: Mapping[Loop, TimeShares]
    operations: int = 0
    """Floating-point operations per token, forward and backward."""
    peak: float = 0.0
    """Operations per second of the fastest matrix product on the GPU; 0 on a CPU, where none is measured."""

    def ratios(self, baseline: Loop, loop: Loop) -> list[float]:
        """Return the speed of `loop` divided by that of `baseline`, one value a turn."""
        pairs = zip(self.seconds[baseline], self.seconds[loop], strict=True)
        return [plain / other for plain, other in pairs]


@dataclass(frozen=True, slots=True)
class ComputeSetup:
    """Device and numeric settings with which the loops compute."""

    device: torch.device = CPU
    computing: Computing = PLAIN

    def now(self) -> float:
        """Return seconds: this process's CPU time, or on a GPU the clock once its queue is empty."""
        if self.device.type == "cpu":
            return time.process_time()
        wait_for(self.device)
        return time.perf_counter()

    def autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context in which a plain loop computes; it does nothing for fp32."""
        if self.computing.dtype == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


HERE = ComputeSetup()


def bench(manifest: Manifest, microbatches: int, repeats: int, place: ComputeSetup = HERE) -> TrainingReport:
    """Time every loop with one thread: `repeats` turns of `microbatches` microbatches each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _bench(manifest, microbatches, repeats, place)
    finally:
        torch.set_num_threads(threads)


def _bench(manifest: Manifest, microbatches: int, repeats: int, place: ComputeSetup) -> TrainingReport:
    """Time the training loops in turns. Every second one runs them in reverse order. Turn 0 is a warm-up."""
    alone = replace(manifest, stages=(manifest.model.num_hidden_layers,))
    own, inner_batch_tokens = manifest.sync.local_steps, step_tokens_of(manifest)
    first = first_state(alone, 0)
    loops: dict[Loop, _Trains] = {
        "plain": Plain(manifest=alone, first=first, inner_batch_tokens=inner_batch_tokens, place=place)
    }
    if own is not None and own.inner_optimizer == "muon":
        loops["plain-muon"] = Plain(
            manifest=alone, first=first, inner_batch_tokens=inner_batch_tokens, place=place, is_muon=True
        )
    peers: dict[Loop, StagesInOneThread] = {"peer": StagesInOneThread(alone, place)}
    if len(manifest.stages) > 1:
        peers["stages"] = StagesInOneThread(manifest, place)
    loops |= peers
    texts = texts_of(manifest)
    for peer in peers.values():
        peer.open_rounds(texts)
    seconds: dict[Loop, list[float]] = {name: [] for name in loops}
    for turn in range(repeats + 1):
        for name in list(loops)[:: 1 if turn % 2 else -1]:
            began = place.now()
            for number in range(microbatches if turn else min(microbatches, TEXTS)):
                loops[name].microbatch(*texts[number % TEXTS])
            if turn:  # Turn 0 is a warm-up.
                seconds[name].append((place.now() - began) / microbatches)
            elif name in peers:
                peers[name].forget()
    size = trained_layout(alone, 0).parameters
    parts = {name: peer.parts() for name, peer in peers.items()}
    peak = _measure_peak(place.device) if place.device.type == "cuda" else 0.0
    return TrainingReport(
        size,
        manifest.microbatch_tokens,
        inner_batch_tokens,
        microbatches,
        seconds,
        parts,
        operations_per_token(alone, 0),
        peak,
    )


def _measure_peak(gpu: torch.device) -> float:
    """Return the operations per second of the fastest of `PEAK_PRODUCTS` matrix products.

    The products use the arithmetic of a stage's layers on this GPU.
    """
    # Random numbers: a GPU multiplies matrices of ones faster than trained weights.
    matrix = torch.randn(PEAK_SIDE, PEAK_SIDE, generator=torch.Generator().manual_seed(0)).to(gpu)
    if torch.cuda.is_bf16_supported(including_emulation=False):
        matrix = matrix.bfloat16()
    fastest = float("inf")
    for _ in range(PEAK_PRODUCTS):
        began = time.perf_counter()
        with torch.no_grad():
            linear(matrix, matrix)[0, 0].item()  # Waits until the product is there.
        fastest = min(fastest, time.perf_counter() - began)
    return 2.0 * PEAK_SIDE**3 / fastest


def step_tokens_of(manifest: Manifest) -> int:
    """Return the tokens per optimizer step of a peer that is alone in its group."""
    if manifest.sync.local_steps is None:
        return manifest.rounds.global_batch_tokens
    return manifest.sync.inner_batch_tokens or manifest.microbatch_tokens


def render(report: TrainingReport) -> str:
    """Return the report as text: one line per loop, then how each peer's time divides."""
    repeats = len(report.seconds["plain"])
    clock = "its processor time" if not report.peak else f"{report.peak / 1e12:.0f} TFLOP/s at most"
    lines = [
        f"{report.parameters:,} parameters, microbatches of {report.microbatch_tokens:,} tokens, a step for "
        f"every {report.inner_batch_tokens:,}; one thread, {clock}; medians of {repeats} turns of "
        f"{report.microbatches}, each compared with its neighbours (least to most)",
        "",
    ]
    baselines: list[Loop] = [name for name in report.seconds if name.startswith("plain")]
    for name, seconds in report.seconds.items():
        speed = report.microbatch_tokens / statistics.median(seconds)
        line = f"  {NAMES[name]:<40}{speed:>10,.0f} tokens/s"
        if report.peak:
            line += f"  {speed * report.operations / report.peak:.1%} of the GPU"
        for baseline in baselines:
            if name not in baselines:
                ratios = report.ratios(baseline, name)
                line += f"  {statistics.median(ratios):.3f} of {baseline}"
                line += f" ({min(ratios):.3f} to {max(ratios):.3f})"
        lines.append(line)
    for name, parts in report.parts.items():
        lines.append(
            f"  of {NAMES[name]}: microbatches {parts.microbatches:.1%}, own steps {parts.steps:.1%}, "
            f"rounds {parts.rounds:.1%}"
        )
    return "\n".join(lines)


NAMES: Mapping[Loop, str] = {
    "plain": "plain PyTorch, fused AdamW",
    "plain-muon": "plain PyTorch, Muon for the matrices",
    "peer": "a peer with the whole model",
    "stages": "all stages, one after the other",
}


def texts_of(manifest: Manifest) -> list[tuple[Tensor, Tensor]]:
    """Return `TEXTS` random pairs of tokens and labels, int64 [B, T] each."""
    generator = torch.Generator().manual_seed(0)
    size = manifest.data.micro_batch_size, manifest.data.seq_len + 1
    drawn = (torch.randint(manifest.model.vocab_size, size, generator=generator) for _ in range(TEXTS))
    return [(windows[:, :-1].contiguous(), windows[:, 1:].contiguous()) for windows in drawn]


class Plain:
    """The plain PyTorch training loop that is the baseline."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        first: Tensor,
        inner_batch_tokens: int,
        place: ComputeSetup = HERE,
        is_muon: bool = False,
    ) -> None:
        """Start from `first`: int32, the `first_state` of the whole model in one stage."""
        self._shape = manifest.model
        self._step_tokens = inner_batch_tokens
        self._tokens = 0
        self._place = place
        self._run_layers = dict[int, RunLayer]()
        if place.computing.compile:
            compiled: RunLayer = torch.compile(one_layer, dynamic=False)
            self._run_layers = dict.fromkeys(range(manifest.model.num_hidden_layers), compiled)
        manifest = replace(manifest, stages=(manifest.model.num_hidden_layers,))
        layout = trained_layout(manifest, 0)
        units = to_floats(first[: layout.size]).to(place.device)
        self.leaves = {name: view.clone().requires_grad_() for name, view in views_of(units, layout).items()}
        muons = [leaf for name, leaf in self.leaves.items() if is_muon and trains_with_muon(name, leaf.shape)]
        others = [leaf for leaf in self.leaves.values() if not any(leaf is muon for muon in muons)]
        self._steps: list[Callable[[], object]] = [
            AdamW(others, lr=RATE, betas=ADAM_DECAYS, weight_decay=0.0, fused=True).step
        ]
        if muons:
            self._steps.append(_Muon(muons, manifest.sync.momentum).step)

    def microbatch(self, tokens_BT: Tensor, labels_BT: Tensor) -> None:
        """Run one forward and backward pass, and an optimizer step when enough tokens are accumulated."""
        tokens_BT, labels_BT = tokens_BT.to(self._place.device), labels_BT.to(self._place.device)
        with self._place.autocast():
            logits_BTV = forward(
                self.leaves, self._shape, whole(self._shape), tokens_BT, run_layers=self._run_layers or None
            )
        loss = functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum")
        torch.autograd.backward(loss / self._step_tokens)
        loss.item()
        self._tokens += labels_BT.numel()
        if self._tokens < self._step_tokens:
            return
        self._tokens = 0
        torch.nn.utils.clip_grad_norm_(self.leaves.values(), 1.0)
        for step in self._steps:
            step()
        for leaf in self.leaves.values():
            leaf.grad = None


class _Muon:
    """The Muon of the local-step methods, one matrix at a time in float32.

    torch's own Muon works in bf16, which is slower on CPUs.
    """

    def __init__(self, leaves: Sequence[Tensor], decay: float) -> None:
        self._kept = [(leaf, torch.zeros_like(leaf)) for leaf in leaves]
        self._decay = decay

    @torch.no_grad()
    def step(self) -> None:
        for leaf, momentum in self._kept:
            assert leaf.grad is not None
            momentum.lerp_(leaf.grad, 1 - self._decay)
            update = orthogonal(leaf.grad.lerp(momentum, self._decay))
            leaf.add_(update, alpha=-RATE * MUON_RMS * sqrt(max(update.shape)))


class StagesInOneThread:
    """All stages of a run in one thread; each runs what a peer's compute thread runs, alone in its group."""

    def __init__(self, manifest: Manifest, place: ComputeSetup = HERE) -> None:
        self._manifest = manifest
        self._identity = Identity.generate()
        self._count = 0
        self._place = place
        self._text = TextCodec(manifest)
        self._tokens = 0
        self._round = 0
        self._in_all = 0.0
        self._in_steps = 0.0
        self._in_rounds = 0.0
        self.stages = [self._stage(stage) for stage in range(len(manifest.stages))]

    def forget(self) -> None:
        """Discard the times measured before now."""
        self._in_all = 0.0
        self._in_steps = 0.0
        self._in_rounds = 0.0

    def parts(self) -> TimeShares:
        """Return how the time since the last `forget` divides."""
        steps, rounds = self._in_steps / self._in_all, self._in_rounds / self._in_all
        return TimeShares(1.0 - steps - rounds, steps, rounds)

    def _stage(self, stage: int) -> tuple[MicrobatchWork, UpdateWork]:
        part = build_stage_part(self._manifest, stage, self._place.device, self._place.computing)
        data = self._manifest.data
        part.compute.warm_up(data.micro_batch_size, data.seq_len)
        replica = part.replica(part.first_units(), -1)
        work = MicrobatchWork(self._manifest, stage, part.compute, Random(0))
        update = UpdateWork(
            run_id=self._manifest.run_id(),
            stage=stage,
            identity=self._identity,
            stage_compute=part.compute,
            method=part.method,
            replica=replica,
            gathered=work,
            settled=lambda settled: None,
            counts=RoundCounts(),
            undecided=(),
            signs_every=self._manifest.rounds.snapshot_interval,
        )
        work.after_gradient = partial(self._step, update)
        update.publish()
        return work, update

    def _step(self, update: UpdateWork) -> None:
        began = self._place.now()
        update.step_if_due()
        self._in_steps += self._place.now() - began

    def open_rounds(self, texts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Play `rounds.window` rounds of one microbatch each, so that each later round settles one."""
        for number in range(self._manifest.rounds.window):
            self._compute(*texts[number % TEXTS])
            self._play_rounds()

    def microbatch(self, tokens_BT: Tensor, labels_BT: Tensor) -> None:
        """Compute one microbatch through all stages, and a round when it has its tokens."""
        began = self._place.now()
        self._compute(tokens_BT, labels_BT)
        if self._tokens >= self._manifest.rounds.global_batch_tokens:
            at = self._place.now()
            self._play_rounds()
            self._in_rounds += self._place.now() - at
        self._in_all += self._place.now() - began

    def _play_rounds(self) -> None:
        for _, update in self.stages:
            self._play_round(update)
        self._round += 1
        self._tokens = 0

    def _compute(self, tokens_BT: Tensor, labels_BT: Tensor) -> None:
        key = MicrobatchId(self._identity.peer_id, self._count)
        self._count += 1
        self._tokens += labels_BT.numel()
        text = self._text.encode(tokens_BT, labels_BT)
        kept = MicrobatchState(inputs=tokens_BT, text=text, tokens=labels_BT.numel())
        open_bodies: list[MicrobatchState] = []
        for work, _ in self.stages:
            open_bodies.append(kept)
            computed = _done(work.forward(key, kept))
            kept = MicrobatchState(
                text=text, output=computed.encoded, shape=computed.shape, tokens=labels_BT.numel()
            )
        for (work, _), bodies in list(zip(self.stages, open_bodies, strict=True))[-2::-1]:
            bodies.shape, bodies.gradient = computed.shape, computed.encoded
            computed = _done(work.backward(key, bodies))

    def _play_round(self, update: UpdateWork) -> None:
        round, me, tokens = self._round, self._identity.peer_id, self._tokens
        (made,) = (
            one for one in update.run([MakeContribution(round, tokens)]) if isinstance(one, ContributionReady)
        )
        size = update.method.payload_bytes
        envelope = open_envelope(made.data, self._manifest.run_id(), EnvelopeKind.CONTRIBUTION, size)
        operations: list[Operation] = [
            DecodeContribution(round, me, bytes(envelope.payload)),
            ApplyRound(round, (me,), 0.0),
        ]
        settled = round - self._manifest.rounds.window
        if settled >= 0:
            operations.append(SettleRound(settled, (), b""))
        update.run(operations)


def _done(result: Outcome) -> Computed:
    assert isinstance(result, Computed), result
    return result
