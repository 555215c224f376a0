"""Each peer goes its own way by an optimizer of its own, and tells what it moved: `local-steps` and its like.

    weights of a peer = those of the group + what it told and nobody has applied yet + what it moved since

One frame: own steps, the part of the weights that a round is about, what is on its way, what comes back. What
tells one method from another are four things that a run can choose one by one (swarmnet/run/local_steps.py):

- `parts`: a round is about every n-th number of each chunk, for all peers the same, so no index is sent.
- `sent`: how the numbers are told (swarmnet/optimizer/delta_codecs/).
- `rest`: what becomes of what was moved and not told. It stays in the peer's own weights and works on there
  (live), or waits outside of them and is told with what comes next (error feedback, SparseLoCo's way), or is
  dropped, DiLoCo's way.
- the step outside: the mean, or a momentum of means (swarmnet/optimizer/delta_codecs/outer_optimizer.py).

A round's step is a function of its set and of what was settled before: integers, the same to the bit for all.

Shapes: C chunks of a plane, N numbers in a chunk, M = N / parts of them in a part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from swarmnet.identifiers import PeerId, RunId
from swarmnet.model.fixed_point import UNIT
from swarmnet.model.flat_layout import Layout, Plane
from swarmnet.model.state_layout import state_of
from swarmnet.optimizer.delta_codecs.delta_codec import CodecSeed, EncodedDelta, bytes_of, cut, joined, sum_of
from swarmnet.optimizer.delta_codecs.outer_optimizer import OuterOptimizer
from swarmnet.optimizer.delta_codecs.packed_sums import Sums, packed
from swarmnet.optimizer.delta_codecs.table import code_of
from swarmnet.optimizer.device_groups.device_group import DeviceGroup
from swarmnet.optimizer.index_code import ContributionError
from swarmnet.optimizer.local_steps.inner_optimizer import InnerOptimizer
from swarmnet.optimizer.mean_gradient import BlockClip
from swarmnet.optimizer.sparsify import seed_of
from swarmnet.optimizer.tiling import Tile, all_tiles, empty_padding, plane_of
from swarmnet.run.manifest import Manifest, learning_rate
from swarmnet.run.rates import WHOLE

ORDERS_KEPT = 64
"""Of the open rounds' cycles, for each size of chunk: they are looked up with every step."""


class LocalSteps:
    """One peer of one stage."""

    lookahead_accuracy = 0.0
    """A peer's own moves say little of the others'; they are in its weights already."""
    reduced = None
    held = None

    def __init__(self, manifest: Manifest, layout: Layout, device: torch.device) -> None:
        sync = manifest.sync
        assert sync.local_steps is not None, "of a method whose peers step by themselves"
        self.how = sync.local_steps
        self._sync, self._run_id = sync, manifest.run_id()
        self.layout, self.state, self.device = layout, state_of(layout, sync), device
        self.code, self.outer = code_of(self.how.delta_codec, sync), OuterOptimizer.of(self.how)
        self._clip = BlockClip(layout, sync.max_grad_norm, device)
        self._inner = InnerOptimizer(self.how.inner_optimizer, layout, sync.momentum)
        self._moved = torch.zeros(layout.size, device=device)
        """In the peer's own weights, and not told yet."""
        self._waiting = (
            torch.zeros(layout.size, device=device) if self.how.residual == "error-feedback" else None
        )
        """Outside of them. In float32, as what it is a rest of: it is added to each time."""
        self._sent: dict[int, dict[int, EncodedDelta | Tensor]] = {}
        """Of rounds that may not be applied yet, what the own weights hold meanwhile, by where a tile begins:
        what was told, where that is it, or float32 [C, M]."""
        self.tokens = sync.inner_batch_tokens or manifest.microbatch_tokens
        self.payload_bytes = self.bytes_of([plane.chunks for plane in layout.planes])
        self.votes = sum(plane.chunks * self.width(plane) for plane in layout.planes)
        self.sections = [(8 * self.code.head, self.code.bits(self.width(plane))) for plane in layout.planes]

    def use_device_group(self, company: DeviceGroup) -> None:
        self._clip.company = company
        self._inner.use_device_group(company)

    @property
    def gradient_norm(self) -> float | None:
        return self._clip.norm

    @property
    def momentum_norm(self) -> float | None:
        if self._waiting is None:
            return float(torch.linalg.vector_norm(self._moved))
        tiles = all_tiles(self.layout, self.device)
        waits = (tile.of(self._moved) + tile.of(self._waiting) for tile in tiles)
        norms = torch.stack([torch.linalg.vector_norm(waits_CN) for waits_CN in waits])
        return float(torch.linalg.vector_norm(norms))

    @property
    def own(self) -> LocalSteps:
        return self

    def offload_optimizer_state(self) -> None:
        self._inner.moments_lie_on = torch.device("cpu")

    def step(self, gradient: Tensor, tokens: int, round: int, factor: int = WHOLE) -> None:
        gains = self._clip.block_gains(gradient, tokens)
        rate = learning_rate(self._sync, round) * factor / WHOLE
        self._inner.step(self._moved, gradient, gains, rate)

    def contribute(self, gradient: Tensor, tokens: int, round: int, peer: PeerId) -> bytes:
        self.step(gradient, tokens, round)
        return self.encode_delta(round, peer)

    def encode_delta(self, round: int, peer: PeerId) -> bytes:
        seed = seed_of(self._run_id, round, peer)
        told: list[list[tuple[int, bytes]]] = [[] for _ in self.layout.planes]
        self._sent[round] = sent = {}
        for tile in all_tiles(self.layout, self.device):
            moves, held = self._take(tile, round, seed)
            told[tile.number].append((tile.chunks, moves.written()))
            sent[tile.start] = held
        return b"".join(joined(self.code, of_plane) for of_plane in told)

    def _take(self, tile: Tile, round: int, seed: bytes) -> tuple[EncodedDelta, EncodedDelta | Tensor]:
        """What is told of a tile, and what the own weights hold of it until it is applied."""
        columns = self.columns(tile.plane, round)
        delta_CM = offered_CM = tile.of(self._moved)[:, columns]
        if self._waiting is not None:
            waiting_CM = tile.of(self._waiting)[:, columns]
            offered_CM = delta_CM + self._sync.error_feedback_decay * waiting_CM
        moves = self.code.encode(offered_CM, CodecSeed(seed, tile.plane.chunk))
        said_CM = moves.units() * UNIT
        if self._waiting is not None:
            waiting_CM.copy_(offered_CM - said_CM)
        held: EncodedDelta | Tensor = moves
        if self.how.residual == "local":
            delta_CM -= said_CM
        else:
            held = delta_CM.clone()
            delta_CM.zero_()
        for flat in self._flats():  # A bit is never nothing: what was said of the padding is taken back.
            tile.empty_padding(tile.of(flat), self.layout)
        return moves, held

    def give_back(self, payload: bytes, round: int, peer: PeerId, shards: tuple[int, ...] = ()) -> None:
        self._sent.pop(round, None)
        for plane, moves in zip(self.layout.planes, self.moves_of(payload), strict=True):
            part_CM, units_CM = self.part(self._moved, plane, round), moves.units()
            for rows in self._rows(plane, shards):
                part_CM[rows].add_(units_CM[rows] * UNIT)
        empty_padding(self._moved, self.layout)

    def _flats(self) -> Iterator[Tensor]:
        yield self._moved
        if self._waiting is not None:
            yield self._waiting

    def check(self, payload: bytes, rows: Sequence[int] | None = None) -> None:
        """Of the whole, or of so many chunks of each plane."""
        for plane, chunks, data in self._cut(payload, rows):
            self.code.check(data, chunks, self.width(plane))

    def tally(self, round: int) -> MovesTally:
        return MovesTally(self, round)

    def lookahead(self, round: int, factor: int = WHOLE) -> None:
        """`add_to` says all that this peer knows of it."""

    def applied(self, round: int) -> None:
        for sent in [sent for sent in self._sent if sent <= round]:
            del self._sent[sent]

    def add_to(self, weights_CN: Tensor, tile: Tile) -> None:
        weights_CN += tile.of(self._moved)
        for round, sent in self._sent.items():
            held = sent[tile.start]
            sent_CM = held if isinstance(held, Tensor) else held.units() * UNIT
            weights_CN[:, self.columns(tile.plane, round)].add_(sent_CM)
        tile.empty_padding(weights_CN, self.layout)

    def moves_of(self, payload: bytes, rows: Sequence[int] | None = None) -> Iterator[EncodedDelta]:
        """Of each plane, or of so many of its chunks; ContributionError where the payload is not one of this
        method's."""
        for plane, chunks, data in self._cut(payload, rows):
            yield self.code.decode(data, chunks, self.width(plane), self.device)

    def planes_of(self, payload: bytes) -> list[memoryview]:
        """What it says of each plane. ContributionError where the length is wrong."""
        return [data for _, _, data in self._cut(payload, None)]

    def moves_in(self, tile: Tile, data: memoryview) -> EncodedDelta:
        """Of what is said of the tile's plane."""
        width = self.width(tile.plane)
        said = cut(self.code, data, tile.plane.chunks, width, tile.rows)
        return self.code.decode(said, tile.chunks, width, self.device)

    def moves_by_tile(self, payloads: Collection[bytes]) -> Iterator[tuple[Tile, list[EncodedDelta]]]:
        contributions = [self.planes_of(payload) for payload in payloads]
        for tile in all_tiles(self.layout, self.device):
            yield tile, [self.moves_in(tile, planes[tile.number]) for planes in contributions]

    def _cut(self, payload: bytes, rows: Sequence[int] | None) -> Iterator[tuple[Plane, int, memoryview]]:
        """Each plane, of how many of its chunks something is said, and what."""
        rows = [plane.chunks for plane in self.layout.planes] if rows is None else rows
        sizes = [self._bytes(plane, count) for plane, count in zip(self.layout.planes, rows, strict=True)]
        if len(payload) != sum(sizes):
            raise ContributionError(f"payload of {len(payload)} bytes where {sum(sizes)} belong")
        start = 0
        for plane, count, size in zip(self.layout.planes, rows, sizes, strict=True):
            yield plane, count, memoryview(payload)[start : start + size]
            start += size

    def part(self, flat: Tensor, plane: Plane, round: int) -> Tensor:
        """View [C, M]: what `round` speaks of, in a vector [layout.size]."""
        return plane_of(flat, plane)[:, self.columns(plane, round)]

    def columns(self, plane: Plane, round: int) -> slice:
        """Every `parts`-th number of each chunk; all in turn, in an order that is drawn for each cycle, or
        once for all (`is_steady`)."""
        parts = plane.chunk // self.width(plane)
        cycle, place = divmod(round, parts)
        order = _order(self._run_id, parts, 0 if self.how.is_steady else cycle)
        return slice(order[place], None, parts)

    def _rows(self, plane: Plane, shards: tuple[int, ...]) -> list[slice]:
        """Chunks of a plane that are in these shards; of no shards: all."""
        if not shards:
            return [slice(0, plane.chunks)]
        return [rows_of(plane, shard, self._sync.shards) for shard in shards]

    def width(self, plane: Plane) -> int:
        """M: of a small chunk there may be fewer parts, each of one number."""
        return max(1, plane.chunk // self.how.fragments)

    def bytes_of(self, rows: Sequence[int]) -> int:
        """Of what is said of so many chunks of each plane."""
        return sum(self._bytes(plane, count) for plane, count in zip(self.layout.planes, rows, strict=True))

    def _bytes(self, plane: Plane, chunks: int) -> int:
        return bytes_of(self.code, chunks, self.width(plane))


class Fragments(Protocol):
    """A method whose rounds are each about a part of the weights."""

    layout: Layout
    outer: OuterOptimizer

    def columns(self, plane: Plane, round: int) -> slice: ...

    def check(self, payload: bytes) -> None: ...

    def moves_by_tile(self, payloads: Collection[bytes]) -> Iterator[tuple[Tile, list[EncodedDelta]]]:
        """What checked contributions say of each tile, as far as they speak of it."""


@dataclass(frozen=True, slots=True)
class PartStep:
    """What a round does to its part of the weights."""

    method: Fragments
    round: int
    sums: Mapping[int, Sums]
    """By where a tile begins; a tile of which nobody said anything stays as it is."""

    def add_to(self, units_CN: Tensor, tile: Tile, momentum_CN: Tensor | None = None) -> None:
        sums = self.sums.get(tile.start)
        if sums is None:
            return
        columns = self.method.columns(tile.plane, self.round)
        momentum_CM = None if momentum_CN is None else momentum_CN[:, columns]
        units_CN[:, columns].add_(self.method.outer.step(sums.means(), momentum_CM))
        for changed_CN in (units_CN, momentum_CN):
            if changed_CN is not None:
                tile.empty_padding(changed_CN, self.method.layout)


class MovesTally:
    """One round's contributions as they came; they are summed when a step is asked for."""

    def __init__(self, method: Fragments, round: int) -> None:
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
        """The mean of those who speak of it; `factor` had its say when the peers stepped."""
        said = self._method.moves_by_tile(self._payloads.values())
        sums = {tile.start: packed(sum_of(moves), len(moves)) for tile, moves in said if moves}
        return PartStep(self._method, self._round, sums)

    def vote_agreement(self, me: PeerId) -> None:
        """Sizes are no votes."""


def rows_of(plane: Plane, shard: int, shards: int) -> slice:
    """The chunks of a plane that one of so many shards has; none of a small plane, maybe."""
    return slice(plane.chunks * shard // shards, plane.chunks * (shard + 1) // shards)


@lru_cache(ORDERS_KEPT)
def _order(run_id: RunId, parts: int, cycle: int) -> tuple[int, ...]:
    """In which the parts of a cycle have their turn."""
    draw = [hashlib.sha256(f"{run_id}\n{cycle}\n{part}".encode()).digest() for part in range(parts)]
    return tuple(sorted(range(parts), key=draw.__getitem__))
