"""The local SGD family: local steps, DiLoCo, Streaming DiLoCo, SparseLoCo and partial averaging.

Each peer runs an optimizer of its own and periodically sends the change of its weights, compressed.

    local weights = group weights + deltas sent but not yet applied + delta since the last send

The methods share this code. They differ in four options (`swarmnet/run/local_step_config.py`):

- `parts`: number of fragments of the weights, of which a round covers one. A fragment is every n-th number of
  each chunk, the same for all peers, so no index is sent.
- `sent`: the codec of the delta (`swarmnet/optimizer/delta_codecs/`).
- `rest`: what happens to the part of the delta that compression dropped. `local`: it stays in the peer's
  weights. `error-feedback`: it is kept outside of them and added to the next delta, as in SparseLoCo. `drop`:
  it is discarded, as in DiLoCo.
- the outer step: the mean of the deltas, or Nesterov momentum of such means
  (`swarmnet/optimizer/delta_codecs/outer_optimizer.py`).

A round's step is an integer function of its set of contributions and of the settled state, bit-identical on
all peers.

Shapes: C chunks of a plane, N numbers in a chunk, M = N / parts of them in a fragment.
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
from swarmnet.model.computing.shares import PlaneShare
from swarmnet.model.fixed_point import UNIT
from swarmnet.model.flat_layout import Layout, Plane
from swarmnet.model.state_layout import state_of
from swarmnet.optimizer.delta_codecs.codec_table import code_of
from swarmnet.optimizer.delta_codecs.delta_codec import (
    LOUDER,
    CodecSeed,
    EncodedDelta,
    bytes_of,
    cut,
    joined,
    sum_of,
)
from swarmnet.optimizer.delta_codecs.outer_optimizer import OuterOptimizer
from swarmnet.optimizer.delta_codecs.packed_sums import Sums, packed
from swarmnet.optimizer.device_groups.device_group import ALONE, DeviceGroup
from swarmnet.optimizer.index_code import ContributionError
from swarmnet.optimizer.local_steps.inner_optimizer import InnerOptimizer
from swarmnet.optimizer.mean_gradient import BlockClip
from swarmnet.optimizer.sparsify import seed_of
from swarmnet.optimizer.step import ContributionTally
from swarmnet.optimizer.tiling import Tile, all_tiles, empty_padding, plane_of, rows_of
from swarmnet.run.manifest import Manifest, learning_rate
from swarmnet.run.rates import WHOLE

TOKEN_BYTES = 4
"""Bytes of the tokens in front of a delta, where contributions are weighed by them."""
MAX_TOKENS = 256**TOKEN_BYTES - 1
FULL_WEIGHT = 256
"""Largest weight of a contribution. A thousand deltas of this weight add up within 38 bits, so their mean is
exact (`packed_sums.py`)."""
ORDERS_KEPT = 64
"""Cached orders of fragments. Every local step looks up those of the open rounds' cycles, for each size of
chunk."""


class LocalSteps:
    """A sync method with local steps, for one peer and one stage."""

    lookahead_accuracy = 0.0
    """Zero: a peer's own delta predicts little of the others', and it is in the peer's weights already."""
    reduced = None
    held = None

    def __init__(self, manifest: Manifest, layout: Layout, device: torch.device) -> None:
        sync = manifest.sync
        assert sync.local_steps is not None, "only for methods with local steps"
        self.how = sync.local_steps
        self._sync = sync
        self._run_id = manifest.run_id()
        self.layout = layout
        self.state = state_of(layout, sync)
        self.device = device
        self.codec_device = torch.device("cpu") if device.type == "meta" else device
        """Device of decoded deltas. A method without values of its own decodes those of others."""
        self._planes: Sequence[PlaneShare] = ALONE.planes(layout)
        self.code = code_of(self.how.delta_codec, sync)
        self.outer = OuterOptimizer.of(self.how)
        self._clip = BlockClip(layout, sync.max_grad_norm, device)
        self._inner = InnerOptimizer(self.how.inner_optimizer, layout, sync.momentum)
        self._delta = torch.zeros(layout.size, device=device)
        """Delta in the peer's own weights that is not sent yet, float32 [layout.size]."""
        self._residual = (
            torch.zeros(layout.size, device=device) if self.how.residual == "error-feedback" else None
        )
        """Residual (error feedback), which is not in the peer's own weights. It is float32, because it
        accumulates."""
        self._sent: dict[int, dict[int, EncodedDelta | Tensor]] = {}
        """Maps a round that may not be applied yet to the part of its delta that the peer's own weights
        include meanwhile. The inner key is the start of a tile. The value is the encoded delta, or float32
        [C, M] if it differs from it."""
        self.tokens = sync.inner_batch_tokens or manifest.microbatch_tokens
        self._weighs = self.how.weighs_by_tokens
        self._tokens_since = 0
        """Tokens of the steps since the last send."""
        head = TOKEN_BYTES if self._weighs else 0
        self.payload_bytes = head + self.bytes_of([plane.chunks for plane in layout.planes])
        self.sections = [(8 * self.code.head, self.code.bits(self.width(plane))) for plane in layout.planes]

    def use_device_group(self, company: DeviceGroup) -> None:
        """Use collectives of several devices for norms and matrices."""
        self._clip.device_group = company
        self._inner.use_device_group(company)
        self._planes = company.planes(self.layout)

    @property
    def gradient_norm(self) -> float | None:
        return self._clip.norm

    @property
    def momentum_norm(self) -> float | None:
        if self._residual is None:
            return float(torch.linalg.vector_norm(self._delta))
        tiles = all_tiles(self.layout, self.device)
        unsent = (tile.of(self._delta) + tile.of(self._residual) for tile in tiles)
        norms = torch.stack([torch.linalg.vector_norm(unsent_CN) for unsent_CN in unsent])
        return float(torch.linalg.vector_norm(norms))

    @property
    def own(self) -> LocalSteps:
        return self

    def offload_optimizer_state(self) -> None:
        self._inner.moments_lie_on = torch.device("cpu")

    def step(self, gradient: Tensor, tokens: int, round: int, factor: int = WHOLE) -> None:
        gains = self._clip.block_gains(gradient, tokens)
        rate = learning_rate(self._sync, round) * factor / WHOLE
        self._inner.step(self._delta, gradient, gains, rate)
        self._tokens_since += tokens if factor else 0

    def contribute(self, gradient: Tensor, tokens: int, round: int, peer: PeerId) -> bytes:
        self.step(gradient, tokens, round)
        return self.encode_delta(round, peer)

    def encode_delta(self, round: int, peer: PeerId) -> bytes:
        seed = seed_of(self._run_id, round, peer)
        encoded: list[list[tuple[int, bytes]]] = [[] for _ in self.layout.planes]
        self._sent[round] = {}
        sent = self._sent[round]
        for tile in all_tiles(self.layout, self.device):
            moves, held = self._encode_tile(tile, round, seed)
            encoded[tile.number].append((tile.chunks, moves.written()))
            sent[tile.start] = held
        head = b""
        if self._weighs:
            head = min(self._tokens_since, MAX_TOKENS).to_bytes(TOKEN_BYTES, "little")
        self._tokens_since = 0
        return head + b"".join(joined(self.code, of_plane) for of_plane in encoded)

    def _encode_tile(self, tile: Tile, round: int, seed: bytes) -> tuple[EncodedDelta, EncodedDelta | Tensor]:
        """Encode a tile's delta. Returns it, and what the own weights include until the round is applied."""
        columns = self.columns(tile.plane, round)
        delta_CM = offered_CM = tile.of(self._delta)[:, columns]
        if self._residual is not None:
            residual_CM = tile.of(self._residual)[:, columns]
            offered_CM = delta_CM + self._sync.error_feedback_decay * residual_CM
        moves = self.code.encode(offered_CM, CodecSeed(seed, tile.plane.chunk))
        encoded_CM = moves.units() * UNIT
        if self._residual is not None:
            residual_CM.copy_(offered_CM - encoded_CM)
        held: EncodedDelta | Tensor = moves
        if self.how.residual == "local":
            delta_CM -= encoded_CM
        else:
            held = delta_CM.clone()
            delta_CM.zero_()
        for flat in self._flats():  # The sign codec cannot encode zero, so the padding is cleared again.
            tile.empty_padding(tile.of(flat), self.layout)
        return moves, held

    def give_back(self, payload: bytes, round: int, peer: PeerId, shards: tuple[int, ...] = ()) -> None:
        self._sent.pop(round, None)
        if self.how.residual == "drop":
            return  # What the group did not take is dropped as what compression lost.
        here = [share for share in self._planes if share.number is not None]
        for plane, share, moves in zip(self.layout.planes, here, self.moves_of(payload), strict=True):
            part_CM, units_CM = self.part(self._delta, plane, round), moves.units()
            for rows in self._rows(share, shards):
                part_CM[rows].add_(units_CM[rows] * UNIT)
        empty_padding(self._delta, self.layout)

    def _flats(self) -> Iterator[Tensor]:
        """Yield the delta and, with error feedback, the residual."""
        yield self._delta
        if self._residual is not None:
            yield self._residual

    def check(self, payload: bytes, rows: Sequence[int] | None = None) -> None:
        """Raise ContributionError unless this encodes all chunks, or `rows` chunks of each plane."""
        for plane, chunks, data in self._cut(payload, rows):
            self.code.check(data, chunks, self.width(plane))

    def tally(self, round: int) -> DeltaTally:
        return DeltaTally(self, round)

    def lookahead(self, round: int, factor: int = WHOLE, contributors: int = 1) -> None:
        """Return None: `add_to` adds all that this peer can predict."""

    def applied(self, round: int) -> None:
        for sent in [sent for sent in self._sent if sent <= round]:
            del self._sent[sent]

    def add_to(self, weights_CN: Tensor, tile: Tile) -> None:
        weights_CN += tile.of(self._delta)
        for round, sent in self._sent.items():
            held = sent[tile.start]
            sent_CM = held if isinstance(held, Tensor) else held.units() * UNIT
            weights_CN[:, self.columns(tile.plane, round)].add_(sent_CM)
        tile.empty_padding(weights_CN, self.layout)

    def moves_of(self, payload: bytes, rows: Sequence[int] | None = None) -> Iterator[EncodedDelta]:
        """Yield the decoded delta of each plane, or of `rows` of its chunks. Raises ContributionError if no
        honest peer can have sent `payload`."""
        for plane, chunks, data in self._cut(payload, rows):
            yield self.code.decode(data, chunks, self.width(plane), self.codec_device)

    def planes_of(self, payload: bytes) -> list[memoryview]:
        """Return the encoded bytes of each plane. Raises ContributionError if they have another length."""
        return [data for _, _, data in self._cut(payload, None)]

    def moves_in(self, tile: Tile, data: memoryview) -> EncodedDelta:
        """Decode the delta of one tile from the encoded bytes of its plane."""
        width = self.width(tile.plane)
        encoded = cut(self.code, data, tile.plane.chunks, width, tile.rows)
        return self.code.decode(encoded, tile.chunks, width, self.device)

    def weights_of(self, payloads: Collection[bytes]) -> list[int] | None:
        """Return the weight of each contribution, 1 to `FULL_WEIGHT`; None if all are equal. It follows from
        its tokens, of which at most twice the median count, because no peer can check what others claim."""
        if not self._weighs or not payloads:
            return None
        tokens = [tokens_of(payload) for payload in payloads]
        most = LOUDER * sorted(tokens)[(len(tokens) - 1) // 2]
        bounded = [min(count, most) for count in tokens]
        return [max(1, count * FULL_WEIGHT // max(bounded)) for count in bounded]

    def moves_by_tile(self, payloads: Collection[bytes]) -> Iterator[tuple[Tile, list[EncodedDelta]]]:
        """Yield each tile with the decoded deltas of all contributions."""
        contributions = [self.planes_of(payload) for payload in payloads]
        for tile in all_tiles(self.layout, self.device):
            yield tile, [self.moves_in(tile, planes[tile.number]) for planes in contributions]

    def _cut(self, payload: bytes, rows: Sequence[int] | None) -> Iterator[tuple[Plane, int, memoryview]]:
        """Yield each plane, the number of its chunks that are encoded, and their bytes. Raises
        ContributionError."""
        if self._weighs:
            if not tokens_of(payload):
                raise ContributionError("a contribution of no tokens has no weight")
            payload = payload[TOKEN_BYTES:]
        rows = [plane.chunks for plane in self.layout.planes] if rows is None else rows
        sizes = [self._bytes(plane, count) for plane, count in zip(self.layout.planes, rows, strict=True)]
        if len(payload) != sum(sizes):
            raise ContributionError(f"payload of {len(payload)} bytes where {sum(sizes)} belong")
        start = 0
        for plane, count, size in zip(self.layout.planes, rows, sizes, strict=True):
            yield plane, count, memoryview(payload)[start : start + size]
            start += size

    def part(self, flat: Tensor, plane: Plane, round: int) -> Tensor:
        """Return a view [C, M] of a flat vector [layout.size]: `round`'s fragment of `plane`."""
        return plane_of(flat, plane)[:, self.columns(plane, round)]

    def columns(self, plane: Plane, round: int) -> slice:
        """Return the columns of a chunk that `round` covers: every `parts`-th number.

        All fragments have their turn in each cycle. Their order is drawn for each cycle, or once if
        `is_steady`.
        """
        parts = plane.chunk // self.width(plane)
        cycle, place = divmod(round, parts)
        order = _order(self._run_id, parts, 0 if self.how.is_steady else cycle)
        return slice(order[place], None, parts)

    def _rows(self, share: PlaneShare, shards: tuple[int, ...]) -> list[slice]:
        """Return this device's chunks of a plane that are in these shards; all if `shards` is empty."""
        in_shards = [rows_of(share.whole, shard, self._sync.shards) for shard in shards]
        rows = in_shards or [slice(0, share.whole.chunks)]
        return [here for each in rows for _, here in share.within(each)]

    def width(self, plane: Plane) -> int:
        """Return M for a plane. Small chunks may have fewer fragments, of one number each."""
        return max(1, plane.chunk // self.how.fragments)

    def bytes_of(self, rows: Sequence[int]) -> int:
        """Return the encoded bytes of `rows` chunks of each plane."""
        return sum(self._bytes(plane, count) for plane, count in zip(self.layout.planes, rows, strict=True))

    def _bytes(self, plane: Plane, chunks: int) -> int:
        return bytes_of(self.code, chunks, self.width(plane))


class Fragments(Protocol):
    """A method in which each round covers one fragment of the weights."""

    layout: Layout
    outer: OuterOptimizer

    def columns(self, plane: Plane, round: int) -> slice: ...

    def check(self, payload: bytes) -> None: ...

    def weights_of(self, payloads: Collection[bytes]) -> list[int] | None: ...

    def moves_by_tile(self, payloads: Collection[bytes]) -> Iterator[tuple[Tile, list[EncodedDelta]]]:
        """Yield each tile with the decoded deltas of those checked contributions that cover it."""


@dataclass(frozen=True, slots=True)
class FragmentStep:
    """The step of a round, which changes one fragment of the weights."""

    method: Fragments
    round: int
    sums: Mapping[int, Sums]
    """Maps the start of a tile to the sums of its deltas. Those without contributions are missing."""

    def add_to(self, units_CN: Tensor, tile: Tile, momentum_CN: Tensor | None = None) -> None:
        """Add the step to a tile of the weights, int [C, N], and update its momentum in place."""
        sums = self.sums.get(tile.start)
        if sums is None:
            return
        columns = self.method.columns(tile.plane, self.round)
        momentum_CM = None if momentum_CN is None else momentum_CN[:, columns]
        units_CN[:, columns].add_(self.method.outer.step(sums.means(), momentum_CM))
        for changed_CN in (units_CN, momentum_CN):
            if changed_CN is not None:
                tile.empty_padding(changed_CN, self.method.layout)


class DeltaTally(ContributionTally[bytes]):
    """The contributions of one round. They are summed when a step is requested."""

    def __init__(self, method: Fragments, round: int) -> None:
        super().__init__(round)
        self._method = method

    def _checked(self, peer: PeerId, payload: bytes) -> bytes:
        self._method.check(payload)
        return payload

    def step(self, factor: int = WHOLE) -> FragmentStep:
        """Return the step by the mean delta. `factor` is not used: it scaled the local steps."""
        by_tile = self._method.moves_by_tile(self._kept.values())
        weights = self._method.weights_of(self._kept.values())
        sums = {
            tile.start: packed(sum_of(moves, weights), len(moves) if weights is None else sum(weights))
            for tile, moves in by_tile
            if moves
        }
        return FragmentStep(self._method, self._round, sums)


def tokens_of(payload: bytes) -> int:
    """Return the tokens that a contribution claims, which are in front of its delta."""
    return int.from_bytes(payload[:TOKEN_BYTES], "little")


@lru_cache(ORDERS_KEPT)
def _order(run_id: RunId, parts: int, cycle: int) -> tuple[int, ...]:
    """Return the order of the fragments in a cycle, drawn from the run id."""
    draw = [hashlib.sha256(f"{run_id}\n{cycle}\n{part}".encode()).digest() for part in range(parts)]
    return tuple(sorted(range(parts), key=draw.__getitem__))
