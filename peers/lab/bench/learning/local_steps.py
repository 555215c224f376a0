"""Local steps: each peer goes its own way for H steps, and then the peers exchange what they moved.

Every peer has live weights and an inner optimizer of its own; all have the settled weights, which an exchange
moves. What a peer moved since the settled weights is its *delta*; what of it an exchange did not carry is its
*residual*. With a live residual (live = settled + own residual) what was not sent works on while it waits.

Shape suffixes: P numbers of the flat vector, N of the part that is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from peers.lab.bench.learning.ground import Ground, Parameter
from peers.lab.bench.learning.learner import FLOAT_BYTES, Inner, InnerName, Rate
from swarmnet.model.flat_layout import CHUNK

EXPONENT_BITS = 5
"""Of a power of two: 2**-31 to 1 reaches from the grid of the weights to any step."""
SIGN_BITS = 1
SEED_STRIDE = 1_000_003
"""Between the cycles of one seed and of the next: more cycles than any trial has."""


class Outer(Protocol):
    """What an exchange does to the settled weights, given what all peers moved."""

    def moved(self, mean_N: Tensor, part_N: Tensor) -> Tensor:
        """float32 [N]: what the settled weights of this part move by (int64 [N]: its places)."""


class Quantizer(Protocol):
    """How the delta of a part travels."""

    def carried(self, delta_N: Tensor) -> Tensor:
        """float32 [N]: what the receivers make of it."""

    def bytes(self, numbers: int) -> int:
        """That so many numbers take."""


@dataclass(frozen=True, slots=True)
class Floats:
    """As they are."""

    def carried(self, delta_N: Tensor) -> Tensor:
        return delta_N.clone()

    def bytes(self, numbers: int) -> int:
        return FLOAT_BYTES * numbers


@dataclass(frozen=True, slots=True)
class Signs:
    """One bit each, and one power of two for each CHUNK numbers: the one nearest to their mean magnitude."""

    def carried(self, delta_N: Tensor) -> Tensor:
        chunks_CN = _chunks(delta_N)
        counts_C1 = torch.full((len(chunks_CN), 1), float(CHUNK))
        counts_C1[-1] -= chunks_CN.numel() - len(delta_N)
        size_C1 = _power_of_two(chunks_CN.abs().sum(1, keepdim=True) / counts_C1)
        return (torch.sign(chunks_CN) * size_C1).flatten()[: len(delta_N)]

    def bytes(self, numbers: int) -> int:
        return _packed(numbers, SIGN_BITS)


@dataclass(frozen=True, slots=True)
class Powers:
    """A sign and a power of two each, E3M0: seven powers below the largest of each CHUNK, and nothing."""

    bits: int = 4

    def carried(self, delta_N: Tensor) -> Tensor:
        chunks_CN = _chunks(delta_N)
        largest_C1 = _power_of_two(chunks_CN.abs().amax(1, keepdim=True))
        powers_CN = _power_of_two(chunks_CN.abs())
        smallest_C1 = largest_C1 * 2.0 ** -(2 ** (self.bits - 1) - 2)
        kept_CN = torch.where(powers_CN >= smallest_C1, torch.sign(chunks_CN) * powers_CN, 0.0)
        return kept_CN.flatten()[: len(delta_N)]

    def bytes(self, numbers: int) -> int:
        return _packed(numbers, self.bits)


@dataclass(frozen=True, slots=True)
class TwoMagnitudes:
    """Two bits each, a sign and one of two magnitudes for each chunk: SparseLoCo's (arXiv:2508.15706), with
    the mean of those above the mean and the mean of those below it."""

    chunk: int

    def carried(self, delta_N: Tensor) -> Tensor:
        sizes_CN = delta_N.view(-1, self.chunk).abs()
        above_CN = sizes_CN > sizes_CN.mean(1, keepdim=True)
        high_C1 = (sizes_CN * above_CN).sum(1, keepdim=True) / above_CN.sum(1, keepdim=True).clamp_min(1)
        low_C1 = (sizes_CN * ~above_CN).sum(1, keepdim=True) / (~above_CN).sum(1, keepdim=True).clamp_min(1)
        return torch.sign(delta_N) * torch.where(above_CN, high_C1, low_C1).flatten()

    def bytes(self, numbers: int) -> int:
        return ceil(numbers * 2 / 8) + numbers // self.chunk * 2 * FLOAT_BYTES


@dataclass(frozen=True, slots=True)
class Levels:
    """Whole multiples of a power of two, as many as the bits tell apart, the outermost at some 2.5
    deviations; of three, the two at about 1.2, as suits a normal distribution (Max 1960, table I)."""

    bits: int

    def carried(self, delta_N: Tensor) -> Tensor:
        chunks_CN, most = _chunks(delta_N), 2 ** (self.bits - 1) - 1
        step_C1 = _power_of_two(min(1.2, 2.5 / most) * chunks_CN.square().mean(1, keepdim=True).sqrt())
        levels_CN = torch.round(chunks_CN / step_C1.clamp_min(2.0**-40)).clamp(-most, most)
        return (levels_CN * step_C1).flatten()[: len(delta_N)]

    def bytes(self, numbers: int) -> int:
        return _packed(numbers, self.bits)


class Mean:
    """The settled weights go where the mean of the peers went."""

    def moved(self, mean_N: Tensor, part_N: Tensor) -> Tensor:
        return mean_N


class Nesterov:
    """DiLoCo's outer step (arXiv:2311.08105, algorithm 1: learning rate 0.7, momentum 0.9)."""

    def __init__(self, size: int, rate: float = 0.7, momentum: float = 0.9) -> None:
        self._rate, self._momentum = rate, momentum
        self._velocity_P = torch.zeros(size)

    def moved(self, mean_N: Tensor, part_N: Tensor) -> Tensor:
        velocity_N = self._velocity_P[part_N] * self._momentum + mean_N
        self._velocity_P[part_N] = velocity_N
        return (mean_N + velocity_N * self._momentum) * self._rate


@dataclass(frozen=True, slots=True)
class Exchange:
    """What is exchanged, and how."""

    every: int
    """H: inner steps between exchanges."""
    parts: int = 1
    """Every exchange carries one of so many parts of the weights, each part once in so many exchanges ..."""
    by_layer: bool = False
    """... cut between parameters, as Streaming DiLoCo's fragments are (arXiv:2501.18512), or drawn anew for
    each cycle from a seed."""
    kept: int = CHUNK
    """Of each CHUNK numbers the largest so many (top-k); CHUNK: all."""
    quantizer: Quantizer = Floats()
    residual: Literal["live", "feedback", "none"] = "live"
    """What becomes of what was not sent: it stays in the live weights, it waits outside of them and is added
    to what is moved next (error feedback), or it is lost."""
    result: Quantizer = Floats()
    """How the mean comes back from those who made it, where not everybody hears everybody."""
    feedback_decay: float = 1.0
    """Share of what waits that is kept from exchange to exchange."""


class LocalSteps:
    """Peers with inner optimizers of their own, and an exchange every H steps."""

    def __init__(
        self, ground: Ground, peers: int, inner: InnerName, rate: Rate, exchange: Exchange,
        outer: Outer | None = None,
    ) -> None:  # fmt: skip
        self._ground, self._rate, self._exchange = ground, rate, exchange
        self._outer = outer or Mean()
        self._settled_P = ground.initial_weights()
        self._live = [self._settled_P.clone() for _ in range(peers)]
        self._waiting = [torch.zeros_like(self._settled_P) for _ in range(peers)]
        """With error feedback: what of each peer was not sent."""
        self._inner = [Inner(inner, live_P, ground.parameters) for live_P in self._live]
        self._numbers_P = _numbers_of(ground.parameters)
        self.sent_bytes = 0

    def step(self, number: int) -> float:
        losses = []
        for peer, (live_P, inner) in enumerate(zip(self._live, self._inner, strict=True)):
            found = self._ground.gradient(live_P.clone(), peer, number)
            inner.step(found.summed / found.tokens, self._rate(number))
            losses.append(found.loss)
        if (number + 1) % self._exchange.every == 0:
            self._meet((number + 1) // self._exchange.every - 1)
        return sum(losses) / len(losses)

    def weights(self) -> Tensor:
        return self._settled_P.clone()

    def _meet(self, number: int) -> None:
        """The exchange: every peer sends of its delta what this one carries, and the settled weights move."""
        part_N = self._part(number)
        deltas = [
            (live_P - self._settled_P + waiting_P)[part_N]
            for live_P, waiting_P in zip(self._live, self._waiting, strict=True)
        ]
        carried = [self._carried(delta_N) for delta_N in deltas]
        mean_N = self._exchange.result.carried(torch.stack(carried).mean(0))
        moved_N = self._outer.moved(mean_N, part_N)
        settled_N = self._settled_P[part_N] + moved_N
        for live_P, waiting_P, delta_N, carried_N in zip(
            self._live, self._waiting, deltas, carried, strict=True
        ):
            rest_N = delta_N - carried_N
            live_P[part_N] = settled_N + rest_N if self._exchange.residual == "live" else settled_N
            if self._exchange.residual == "feedback":
                waiting_P[part_N] = rest_N * self._exchange.feedback_decay
        self._settled_P[part_N] = settled_N
        self.sent_bytes += self._bytes(len(part_N))

    def _part(self, number: int) -> Tensor:
        """int64 [N]: which numbers are exchanged."""
        parts = self._exchange.parts
        if parts == 1:
            return self._numbers_P
        cycle, index = divmod(number, parts)
        if self._exchange.by_layer:
            return _numbers_of(self._ground.parameters[index::parts])
        generator = torch.Generator().manual_seed(self._ground.seed * SEED_STRIDE + cycle)
        order = torch.randperm(len(self._numbers_P), generator=generator)
        return self._numbers_P[torch.tensor_split(order, parts)[index].sort().values]

    def _carried(self, delta_N: Tensor) -> Tensor:
        kept = self._exchange.kept
        if kept == CHUNK:
            return self._exchange.quantizer.carried(delta_N)
        chunks_CN = _chunks(delta_N)
        indices_CK = chunks_CN.abs().topk(kept, dim=1).indices
        values_CK = chunks_CN.gather(1, indices_CK)
        sent_CK = self._exchange.quantizer.carried(values_CK.flatten()).view(values_CK.shape)
        return torch.zeros_like(chunks_CN).scatter_(1, indices_CK, sent_CK).flatten()[: len(delta_N)]

    def _bytes(self, numbers: int) -> int:
        kept = self._exchange.kept
        if kept == CHUNK:
            return self._exchange.quantizer.bytes(numbers)
        chunks = ceil(numbers / CHUNK)
        indices = ceil(chunks * kept * (log2(CHUNK / kept) + 2) / 8)  # Elias-Fano: two bits over the entropy.
        return indices + self._exchange.quantizer.bytes(chunks * kept)


def _numbers_of(parameters: Sequence[Parameter]) -> Tensor:
    """int64: where these lie in the flat vector."""
    return torch.cat([torch.arange(each.offset, each.offset + each.size) for each in parameters])


def _chunks(delta_N: Tensor) -> Tensor:
    """float32 [C, CHUNK]: zeros at the end of the last one."""
    return functional.pad(delta_N, (0, -len(delta_N) % CHUNK)).view(-1, CHUNK)


def _packed(numbers: int, bits: int) -> int:
    """Bytes of so many numbers of so many bits, with an exponent for each chunk."""
    return ceil((numbers * bits + ceil(numbers / CHUNK) * EXPONENT_BITS) / 8)


def _power_of_two(values: Tensor) -> Tensor:
    """The nearest power of two of each value (in the logarithm); 0 for 0."""
    return torch.where(values > 0, torch.exp2(torch.round(torch.log2(values.clamp_min(2.0**-40)))), 0.0)
