"""Benchmark of contributions: bytes and time of methods with votes, compared with a plain float DeMo.

All timings are medians over interleaved repeats in one process with one thread. The ratios therefore hold on
other machines, unlike the nanoseconds. On a GPU both run there; contributions are copied to and from host
memory as bytes, and the baseline stays on the GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil, cos, pi, sqrt
from time import perf_counter

import torch
from torch import Tensor

from peers.compute.stage_part import CPU, wait_for
from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import CHUNK, Layout, layout_of
from swarmnet.optimizer.method import Method, method_of
from swarmnet.optimizer.step import Step
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import ModelShape, Sync

PEERS = 4
BANDS = 16
"""Rows of chunks in the baseline's matrix; it is about square at a million parameters, like real matrices."""
CASES = (
    Sync(selection="top-k", topk_per_chunk=32, transform="dct"),
    Sync(selection="top-k", topk_per_chunk=32, transform="hadamard"),
    Sync(selection="top-k", topk_per_chunk=128, transform="hadamard"),
    Sync(selection="group", topk_per_chunk=128, transform="dct"),
    Sync(selection="group", topk_per_chunk=128, transform="hadamard"),
    Sync(method="sign-muon", fragments=4),
)


@dataclass(frozen=True, slots=True)
class ContributionRow:
    """One method. Times in nanoseconds per parameter; `decode` is for all peers together."""

    selection: str
    """How `demo-sign` selects, or the name of another method."""
    transform: str
    kept: int
    """Votes for 4096 parameters, on average over rounds."""
    payload_bytes: int
    """Bytes of a contribution, overhead included."""
    bits_per_vote: float
    times_below_dense: float
    """Bytes of the gradient in float32, divided by the contribution's."""
    encode: float
    decode: float
    baseline_encode: float
    """Time of the float DeMo with `topk_per_chunk` coefficients, measured between the repeats of this row."""
    baseline_decode: float

    @property
    def times_faster(self) -> float:
        return (self.baseline_encode + self.baseline_decode) / (self.encode + self.decode)


@dataclass(frozen=True, slots=True)
class ContributionReport:
    parameters: int
    peers: int
    overhead_bytes: int
    repeats: int
    rows: tuple[ContributionRow, ...]


def bench(
    parameters: int = 1_000_000, overhead_bytes: int = 0, repeats: int = 9, device: torch.device = CPU
) -> ContributionReport:
    """Measure all `CASES` on a model of about `parameters` parameters.

    `overhead_bytes`: bytes that envelope and headers add to each payload.
    """
    layout = layout_of(model_shapes(parameters))
    with _one_thread():
        rows = tuple(_measure(layout, sync, overhead_bytes, repeats, device) for sync in CASES)
    return ContributionReport(layout.parameters, PEERS, overhead_bytes, repeats, rows)


def render(report: ContributionReport) -> str:
    lines = [
        f"{report.parameters:,} parameters, {report.peers} peers, {report.overhead_bytes} bytes of envelope "
        f"and headers per contribution, medians of {report.repeats} on one thread",
        "",
        f"{'selection':<10}{'transform':<10}{'kept':>5}{'bytes':>9}{'bits/vote':>10}{'fp32/this':>10}"
        f"{'encode':>8}{'decode':>8}{'float DeMo':>16}{'faster':>8}",
        f"{'':<10}{'':<10}{'/4096':>5}{'':>9}{'':>10}{'':>10}{'ns/par':>8}{'ns/par':>8}"
        f"{'enc + dec ns/par':>17}{'times':>7}",
    ]
    for row in report.rows:
        baseline = f"{row.baseline_encode:.1f} + {row.baseline_decode:.1f}"
        lines.append(
            f"{row.selection:<10}{row.transform:<10}{row.kept:>5}{row.payload_bytes:>9,}"
            f"{row.bits_per_vote:>10.2f}{row.times_below_dense:>10.1f}{row.encode:>8.2f}{row.decode:>8.2f}"
            f"{baseline:>16}{row.times_faster:>8.1f}"
        )
    return "\n".join(lines)


def model_shapes(parameters: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a Llama-like model with just enough layers for `parameters` parameters."""
    shape = ModelShape()
    width, wide, heads = (
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_attention_heads * shape.head_dim,
    )
    shared = shape.num_key_value_heads * shape.head_dim
    layer = {
        "input_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (heads, width),
        "self_attn.k_proj.weight": (shared, width),
        "self_attn.v_proj.weight": (shared, width),
        "self_attn.o_proj.weight": (width, heads),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (wide, width),
        "mlp.up_proj.weight": (wide, width),
        "mlp.down_proj.weight": (width, wide),
    }
    per_layer = width * (2 * heads + 2 * shared + 3 * wide + 2)
    ends = 2 * shape.vocab_size * width
    layers = max(1, ceil((parameters - ends) / per_layer))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, width)}
    for index in range(layers):
        shapes |= {f"model.layers.{index}.{name}": size for name, size in layer.items()}
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (shape.vocab_size, width)}


class FloatDemo:
    """Straightforward DeMo on one matrix of whole 64 x 64 chunks.

    The steps are: transform by einsum, torch.topk, decode and subtract the own selection, average over the
    senders by scatter_reduce, and take the sign.
    """

    def __init__(self, *, chunks: int, kept: int, decay: float, device: torch.device = CPU) -> None:
        self._kept = kept
        self._decay = decay
        self._basis = torch.tensor(
            [
                [sqrt((2 if i else 1) / 64) * cos(pi * (2 * j + 1) * i / 128) for i in range(64)]
                for j in range(64)
            ],
            device=device,
        )
        self.residual = torch.zeros(64 * BANDS, 64 * -(-chunks // BANDS), device=device)

    def encode(self, gradient: Tensor, learning_rate: float) -> tuple[Tensor, Tensor]:
        """Encode a gradient with the residual's shape to indices and values, [chunks, kept] each.

        The encoded values are subtracted from the residual.
        """
        self.residual.mul_(self._decay).add_(gradient, alpha=learning_rate)
        blocks = self.residual.view(BANDS, 64, -1, 64)
        coefficients = torch.einsum("yixj,ik,jl->yxkl", blocks, self._basis, self._basis).reshape(-1, CHUNK)
        indices = coefficients.abs().topk(self._kept, dim=1, sorted=False).indices
        values = coefficients.gather(1, indices)
        self.residual.sub_(self._inverse(torch.zeros_like(coefficients).scatter_(1, indices, values)))
        return indices, values

    def decode(self, contributions: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the sign of the mean over senders, with the residual's shape."""
        indices = torch.cat([indices for indices, _ in contributions], dim=1)
        values = torch.cat([values for _, values in contributions], dim=1)
        mean = values.new_zeros(indices.shape[0], CHUNK)
        mean.scatter_reduce_(1, indices, values, reduce="mean", include_self=False)
        return self._inverse(mean).sign_()

    def _inverse(self, coefficients: Tensor) -> Tensor:
        blocks = coefficients.view(BANDS, -1, 64, 64)
        values = torch.einsum("yxkl,ik,jl->yixj", blocks, self._basis, self._basis)
        return values.reshape(self.residual.shape)


def _measure(
    layout: Layout, sync: Sync, overhead_bytes: int, repeats: int, device: torch.device
) -> ContributionRow:
    """Measure bytes and time of a contribution, and the time of a float implementation of DeMo. Times are
    medians in nanoseconds per parameter."""
    manifest = replace(Manifest("bench", PeerId("bench")), sync=sync)
    method = method_of(manifest, layout, device)
    baseline = FloatDemo(
        chunks=-(-layout.parameters // CHUNK), kept=sync.topk_per_chunk, decay=sync.momentum, device=device
    )
    generator = torch.Generator(device).manual_seed(0)
    gradient = torch.randn(layout.size, generator=generator, device=device)
    matrix = torch.randn(baseline.residual.shape, generator=generator, device=device)
    payloads = [method.contribute(gradient, 1, 0, PeerId(f"peer {index}")) for index in range(PEERS)]
    values = [baseline.encode(matrix, sync.learning_rate) for _ in range(PEERS)]
    times: list[tuple[float, ...]] = []
    for repeat in range(repeats + 1):
        gradient.normal_(generator=generator)
        for start, stop in layout.padding:
            gradient[start:stop] = 0
        matrix.normal_(generator=generator)
        times.append(
            (
                _seconds(device, lambda: method.contribute(gradient, 1, repeat, PeerId("peer"))),  # noqa: B023
                _seconds(device, lambda: _decode(method, payloads)),
                _seconds(device, lambda: baseline.encode(matrix, sync.learning_rate)),
                _seconds(device, lambda: baseline.decode(values)),
            )
        )
    # The first repeat warms caches and allocators up.
    sizes = (layout.parameters, layout.parameters, matrix.numel(), matrix.numel())
    medians = [
        statistics.median(column) / size * 1e9
        for column, size in zip(zip(*times[1:], strict=True), sizes, strict=True)
    ]
    total = method.payload_bytes + overhead_bytes
    kind: tuple[str, str, int] = sync.selection, sync.transform, sync.topk_per_chunk
    if sync.method == "sign-muon":
        kind = sync.method, "polar", CHUNK // sync.fragments
    return ContributionRow(
        *kind,
        total,
        8 * total / method.votes,
        4 * layout.parameters / total,
        *medians,
    )


def _decode(method: Method, payloads: list[bytes]) -> Step:
    tally = method.tally(0)
    for index, payload in enumerate(payloads):
        tally.add(PeerId(f"peer {index}"), payload)
    return tally.step()


def _seconds(device: torch.device, task: Callable[[], object]) -> float:
    wait_for(device)
    start = perf_counter()
    task()
    wait_for(device)
    return perf_counter() - start


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
