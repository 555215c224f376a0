"""Sync method `local-steps`: each peer goes its own way by an optimizer of its own, and tells what it moved.

    weights of a peer = those of the group + what it sent and nobody has applied yet + what it did not send
    yet

What was not sent stays in the peer's own weights and works on there (a live residual, where DeMo's and
SparseLoCo's error feedback waits outside of them). A contribution speaks of one of `parts` parts of the
weights, the same for all peers, all in turn: so no index is sent. It is one bit a number, and for each chunk
the power of two that is nearest to the mean size of what was moved there. A round's step is the mean of its
set: integers, so it is the same to the bit for all who hold the set.

One peer cannot be louder than the others let it: an exponent counts at most twice the median of the set's.

Shapes: C chunks of a plane, N numbers in a chunk, M = N / parts of them in a part, S contributions of a set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarmnet.identifiers import PeerId, RunId
from swarmnet.model.fixed_point import UNIT
from swarmnet.model.flat_layout import Layout, Plane
from swarmnet.optimizer.index_code import ContributionError, pack, packed_bytes, unpack
from swarmnet.optimizer.inner_step import InnerStep
from swarmnet.optimizer.mean_gradient import BlockClip
from swarmnet.optimizer.sparsify import coin_flips, seed_of
from swarmnet.optimizer.step import Sums, Term, added
from swarmnet.optimizer.tiling import Tile, all_tiles, empty_padding, plane_of
from swarmnet.run.manifest import Manifest, learning_rate
from swarmnet.run.rates import WHOLE

LARGEST_EXPONENT = 20
"""Of a power of two, in units of 2**-22: a quarter, more than any weight moves in a round; and a thousand of
them add up within 31 bits."""
ORDERS_KEPT = 64
"""Of the open rounds' cycles, for each size of chunk: they are looked up with every step."""
LOUDER = 1
"""So much above the median of a set's exponents one counts at most."""


class LocalSteps:
    """One peer of one stage."""

    foresight = 0.0
    """A peer's own moves say little of the others'; they are in its weights already."""
    reduced = None

    def __init__(self, manifest: Manifest, layout: Layout, device: torch.device) -> None:
        sync = manifest.sync
        self._sync, self._run_id = sync, manifest.run_id()
        self.layout, self.device = layout, device
        self._clip = BlockClip(layout, sync.clip, device)
        self._inner = InnerStep(sync.inner, layout, sync.momentum)
        self._unsent = torch.zeros(layout.size, device=device)
        self._sent: dict[int, list[Moves]] = {}
        """Of rounds that may not be applied yet: of each plane."""
        self.tokens = sync.step_tokens or manifest.microbatch_tokens
        self.payload_bytes = self.bytes_of([plane.chunks for plane in layout.planes])
        self.votes = sum(plane.chunks * self.width(plane) for plane in layout.planes)

    @property
    def gradient_norm(self) -> float | None:
        return self._clip.norm

    @property
    def momentum_norm(self) -> float | None:
        return float(torch.linalg.vector_norm(self._unsent))

    @property
    def own(self) -> LocalSteps:
        return self

    def keep_moments_on_the_host(self) -> None:
        self._inner.moments_lie_on = torch.device("cpu")

    def step(self, gradient: Tensor, tokens: int, round: int, factor: int = WHOLE) -> None:
        gains = self._clip.block_gains(gradient, tokens)
        rate = learning_rate(self._sync, round) * factor / WHOLE
        self._inner.step(self._unsent, gradient, gains, rate)

    def contribute(self, gradient: Tensor, tokens: int, round: int, peer: PeerId) -> bytes:
        self.step(gradient, tokens, round)
        return self.tell(round, peer)

    def tell(self, round: int, peer: PeerId) -> bytes:
        seed, told = seed_of(self._run_id, round, peer), []
        for plane in self.layout.planes:
            told.append(Moves.empty(plane.chunks, self.width(plane), self.device))
        for tile in all_tiles(self.layout):
            plane, unsent_CN = tile.plane, tile.of(self._unsent)
            part_CM = unsent_CN[:, self.columns(plane, round)]
            negative_CM, zero_CM = part_CM < 0, part_CM == 0
            if zero_CM.any():
                flips_M = coin_flips(seed, plane.chunk, part_CM.shape[1])
                negative_CM = torch.where(zero_CM, torch.from_numpy(flips_M).to(self.device), negative_CM)
            moves = told[tile.number].rows(tile.rows)
            moves.negative.copy_(negative_CM)
            moves.exponents.copy_(_exponents(part_CM))
            part_CM -= moves.units() * UNIT
            # A bit is never nothing: what was said of the padding is taken back.
            tile.empty_padding(unsent_CN, self.layout)
        self._sent[round] = told
        return b"".join(moves.written() for moves in told)

    def give_back(self, payload: bytes, round: int, peer: PeerId, shards: tuple[int, ...] = ()) -> None:
        self._sent.pop(round, None)
        for plane, moved in zip(self.layout.planes, self.moves_of(payload), strict=True):
            part_CM, units_CM = self.part(self._unsent, plane, round), moved.units()
            for rows in self._rows(plane, shards):
                part_CM[rows].add_(units_CM[rows] * UNIT)
        empty_padding(self._unsent, self.layout)

    def check(self, payload: bytes, rows: Sequence[int] | None = None) -> None:
        """Of the whole, or of so many chunks of each plane. Without unpacking: it may be megabytes."""
        for plane, told in self._read(payload, rows):
            spare = len(told.raw_exponents) * self.width(plane) % 8
            if spare and told.packed[-1] >> spare:
                raise ContributionError("the spare bits at the end of a plane are not zero")

    def tally(self, round: int) -> MovesTally:
        return MovesTally(self, round)

    def lookahead(self, round: int, factor: int = WHOLE) -> None:
        """`add_to` says all that this peer knows of it."""

    def applied(self, round: int) -> None:
        for sent in [sent for sent in self._sent if sent <= round]:
            del self._sent[sent]

    def add_to(self, weights_CN: Tensor, tile: Tile) -> None:
        weights_CN += tile.of(self._unsent)
        for round, sent in self._sent.items():
            moves = sent[tile.number].rows(tile.rows)
            weights_CN[:, self.columns(tile.plane, round)].add_(moves.units() * UNIT)
        tile.empty_padding(weights_CN, self.layout)

    def moves_of(self, payload: bytes, rows: Sequence[int] | None = None) -> Iterator[Moves]:
        """Of each plane, or of so many of its chunks; ContributionError where the payload is not one of this
        method's."""
        for _, told in self._read(payload, rows):
            yield Moves(told.negative(slice(0, len(told.raw_exponents))), told.exponents())

    def told_of(self, payload: bytes) -> list[Told]:
        """The same, of each plane, not unpacked yet."""
        return [told for _, told in self._read(payload, None)]

    def _read(self, payload: bytes, rows: Sequence[int] | None) -> Iterator[tuple[Plane, Told]]:
        rows = [plane.chunks for plane in self.layout.planes] if rows is None else rows
        sizes = [self._bytes(plane, count) for plane, count in zip(self.layout.planes, rows, strict=True)]
        if len(payload) != sum(sizes):
            raise ContributionError(f"payload of {len(payload)} bytes where {sum(sizes)} belong")
        start = 0
        for plane, count, size in zip(self.layout.planes, rows, sizes, strict=True):
            exponents_C = np.frombuffer(payload, np.uint8, count, start)
            if exponents_C.max(initial=0) > LARGEST_EXPONENT:
                raise ContributionError(f"an exponent of {exponents_C.max()}, above {LARGEST_EXPONENT}")
            packed = memoryview(payload)[start + count : start + size]
            yield plane, Told(exponents_C, packed, self.width(plane), self.device)
            start += size

    def part(self, flat: Tensor, plane: Plane, round: int) -> Tensor:
        """View [C, M]: what `round` speaks of, in a vector [layout.size]."""
        return plane_of(flat, plane)[:, self.columns(plane, round)]

    def columns(self, plane: Plane, round: int) -> slice:
        """Every `parts`-th number of each chunk; all in turn, in an order that is drawn for each cycle."""
        parts = plane.chunk // self.width(plane)
        cycle, place = divmod(round, parts)
        return slice(_order(self._run_id, parts, cycle)[place], None, parts)

    def _rows(self, plane: Plane, shards: tuple[int, ...]) -> list[slice]:
        """Chunks of a plane that are in these shards; of no shards: all."""
        if not shards:
            return [slice(0, plane.chunks)]
        return [rows_of(plane, shard, self._sync.shards) for shard in shards]

    def width(self, plane: Plane) -> int:
        """M: of a small chunk there may be fewer parts, each of one number."""
        return max(1, plane.chunk // self._sync.parts)

    def bytes_of(self, rows: Sequence[int]) -> int:
        """Of what is said of so many chunks of each plane."""
        return sum(self._bytes(plane, count) for plane, count in zip(self.layout.planes, rows, strict=True))

    def _bytes(self, plane: Plane, chunks: int) -> int:
        return chunks + packed_bytes(chunks, self.width(plane))


@dataclass(frozen=True, slots=True)
class Moves:
    """What one contribution says of one plane."""

    negative: Tensor
    """bool [C, M]."""
    exponents: Tensor
    """int32 [C, 1]: of 2, in units."""

    @classmethod
    def empty(cls, chunks: int, width: int, device: torch.device) -> Moves:
        """To be written to."""
        return cls(
            torch.empty(chunks, width, dtype=torch.bool, device=device),
            torch.empty(chunks, 1, dtype=torch.int32, device=device),
        )

    def units(self) -> Tensor:
        """int32 [C, M]."""
        sizes_C1 = torch.ones_like(self.exponents) << self.exponents
        return torch.where(self.negative, -sizes_C1, sizes_C1)

    def rows(self, rows: slice) -> Moves:
        return Moves(self.negative[rows], self.exponents[rows])

    def written(self) -> bytes:
        exponents = self.exponents.to(torch.uint8).cpu().numpy().tobytes()
        return exponents + pack(self.negative.cpu().numpy().view(np.uint8))


@dataclass(frozen=True, slots=True)
class Told:
    """The same of one contribution, as it came."""

    raw_exponents: NDArray[np.uint8]
    """[C]."""
    packed: memoryview
    """A bit each: 1 is negative."""
    width: int
    """M."""
    device: torch.device

    def exponents(self) -> Tensor:
        """int32 [C, 1]."""
        return torch.from_numpy(self.raw_exponents.astype(np.int32))[:, None].to(self.device)

    def negative(self, rows: slice) -> Tensor:
        """bool [C, M], of chunks whose first bit begins a byte."""
        first, last = rows.start * self.width // 8, -(-rows.stop * self.width // 8)
        bits_CM = unpack(self.packed[first:last], rows.stop - rows.start, self.width)
        return torch.from_numpy(bits_CM.view(np.bool_)).to(self.device)

    def signs(self, rows: slice) -> Tensor:
        """int8 [C, M]: 1 and -1."""
        return 1 - 2 * self.negative(rows).view(torch.int8)


@dataclass(frozen=True, slots=True)
class PartStep:
    """What a round does to its part of the weights."""

    method: LocalSteps
    round: int
    sums: tuple[Sums, ...]
    """Of each plane; none: it does nothing."""

    def add_to(self, units_CN: Tensor, tile: Tile) -> None:
        if self.sums:
            means_CM = self.sums[tile.number].means(tile.rows)
            units_CN[:, self.method.columns(tile.plane, self.round)].add_(means_CM)
            tile.empty_padding(units_CN, self.method.layout)


class MovesTally:
    """One round's contributions as they came; they are summed when a step is asked for."""

    def __init__(self, method: LocalSteps, round: int) -> None:
        self._method, self._round = method, round
        self._payloads: dict[PeerId, bytes] = {}

    def add(self, peer: PeerId, payload: bytes) -> None:
        if peer in self._payloads:
            raise ValueError(f"{peer} is in the tally of round {self._round} already: remove it first")
        self._method.check(payload)
        self._payloads[peer] = payload

    def remove(self, peer: PeerId) -> None:
        del self._payloads[peer]

    def rest(self) -> None:
        """Nothing is kept but the set."""

    def step(self, factor: int = WHOLE) -> PartStep:
        """The mean; `factor` had its say when the peers stepped."""
        method = self._method
        contributions = [method.told_of(payload) for payload in self._payloads.values()]
        sums = []
        for number, plane in enumerate(method.layout.planes if contributions else ()):
            told = [of[number] for of in contributions]
            exponents_SC1 = not_too_loud(torch.stack([one.exponents() for one in told]))
            terms = [
                Term(slice(0, plane.chunks), exponents_C1, one.signs, largest=1)
                for one, exponents_C1 in zip(told, exponents_SC1, strict=True)
            ]
            sums.append(added(terms, plane.chunks, method.width(plane), method.device))
        return PartStep(method, self._round, tuple(sums))

    def concord(self, me: PeerId) -> None:
        """Sizes are no votes."""


def rows_of(plane: Plane, shard: int, shards: int) -> slice:
    """The chunks of a plane that one of so many shards has; none of a small plane, maybe."""
    return slice(plane.chunks * shard // shards, plane.chunks * (shard + 1) // shards)


@lru_cache(ORDERS_KEPT)
def _order(run_id: RunId, parts: int, cycle: int) -> tuple[int, ...]:
    """In which the parts of a cycle have their turn."""
    draw = [hashlib.sha256(f"{run_id}\n{cycle}\n{part}".encode()).digest() for part in range(parts)]
    return tuple(sorted(range(parts), key=draw.__getitem__))


def _exponents(part_CM: Tensor) -> Tensor:
    """int32 [C, 1]: of the power of two nearest, in the logarithm, to the mean size, in units."""
    sizes_C1 = part_CM.abs().mean(dim=1, keepdim=True) / UNIT
    return sizes_C1.clamp(min=1.0).log2().round().to(torch.int32).clamp(max=LARGEST_EXPONENT)


def not_too_loud(exponents_SC1: Tensor) -> Tensor:
    """The same, none louder than twice their median."""
    most_C1 = exponents_SC1.sort(dim=0).values[(len(exponents_SC1) - 1) // 2] + LOUDER
    return torch.minimum(exponents_SC1, most_C1)


def sum_of(contributions: list[Moves]) -> Tensor:
    """int32 [C, M]: the sum of moves none of which is too loud."""
    exponents_SC1 = not_too_loud(torch.stack([moves.exponents for moves in contributions]))
    sum_CM = torch.zeros_like(contributions[0].negative, dtype=torch.int32)
    for moves, exponents_C1 in zip(contributions, exponents_SC1, strict=True):
        sum_CM += Moves(moves.negative, exponents_C1).units()
    return sum_CM
