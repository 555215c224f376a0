"""A stub stage that needs no compute, and whose weights identify the contributions that they contain.

A payload names its contributor, the round and its number of microbatches. A round's step is the sum of a hash
of each payload, in wrapping 32-bit integers. Settled weights are therefore a fingerprint of "every settled
contribution exactly once", and event logs can be checked against it (lab/faults/invariants.py).

In a run with reducers a payload is cut into slices that name their shard. A result is the concatenation of
its slices, which shows what is counted of each contribution.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peers.compute.stage_part import CPU, StagePart
from peers.lab.world.world_events import Payload, Returned, Summed
from peers.telemetry import log_events
from swarmnet.identifiers import PeerId
from swarmnet.model.computing.gradient_sum import Used
from swarmnet.model.experts.load import Routed
from swarmnet.model.flat_layout import Layout, layout_of
from swarmnet.model.stage_compute import LastStageResult, Tiles, Uncounted
from swarmnet.optimizer.index_code import ContributionError
from swarmnet.optimizer.step import ContributionTally
from swarmnet.optimizer.tiling import Tile
from swarmnet.rounds.result_table import (
    MAX_CONTRIBUTORS,
    Contributor,
    Draw,
    Table,
    counting,
    draw_of,
    head_of,
    longest_head,
    read_head,
    read_result,
)
from swarmnet.run.manifest import Manifest
from swarmnet.run.rates import WHOLE

SIZE = 64
"""Number of weights of a stage: the smallest chunk of a layout."""
_PAYLOAD = struct.Struct(">8sIIQ")
"""Layout of a payload: contributor, round, serial number, microbatches."""
SLICE_BYTES = _PAYLOAD.size + 1


def payload_of(peer: PeerId, round: int, serial: int, microbatches: int) -> bytes:
    return _PAYLOAD.pack(hashlib.sha256(peer.encode()).digest()[:8], round, serial, microbatches)


def slice_of(payload: bytes, shard: int) -> bytes:
    return payload + bytes([shard])


def microbatches_in(payload: bytes) -> int:
    return int(_PAYLOAD.unpack(payload)[3])


def fingerprint(payload: bytes) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return what a payload adds to the weights: int32 [SIZE]."""
    return np.frombuffer(hashlib.shake_256(payload).digest(4 * SIZE), "<i4").astype(np.int32)


def first_units() -> Tensor:
    return torch.arange(SIZE, dtype=torch.int32)


class StubReduced:
    """Stub of `Reduced`: a result is the concatenation of its slices."""

    def __init__(self, draw: Draw, note: log_events.LogEvent = lambda event: None) -> None:
        self.draw = draw
        self._record = note
        self.slice_bytes = [SLICE_BYTES] * draw.shards
        self.longest_result = longest_head(draw.shards) + MAX_CONTRIBUTORS * draw.shards * SLICE_BYTES

    def slices(self, payload: bytes) -> list[bytes]:
        return [slice_of(payload, shard) for shard in range(self.draw.shards)]

    def check_slice(self, shard: int, data: bytes) -> None:
        if len(data) != SLICE_BYTES or data[-1] != shard:
            raise ContributionError(f"a slice of {len(data)} bytes for shard {shard}")

    def reduce(self, slices: Mapping[int, Mapping[Contributor, bytes]]) -> bytes:
        table = Table({shard: frozenset(given) for shard, given in slices.items()})
        sums = b"".join(_in_order(slices[shard]) for shard in sorted(slices))
        result = head_of(table, sums) + sums
        self._record(Summed(_PAYLOAD.unpack_from(sums)[1], result))
        return result

    def follows(self, result: bytes, shard: int, slices: Mapping[Contributor, bytes]) -> bool:
        shards = self.table(result).shards
        end = len(result) - SLICE_BYTES * sum(len(held) for other, held in shards.items() if other > shard)
        return result[end - SLICE_BYTES * len(shards[shard]) : end] == _in_order(slices)

    def head(self, result: bytes) -> tuple[Table, int]:
        return read_head(result, self.draw.shards)

    def table(self, result: bytes) -> Table:
        table, sums = read_result(result, self.draw.shards)
        if len(sums) != SLICE_BYTES * sum(map(len, table.shards.values())):
            raise ContributionError("a result that its table does not fit")
        return table

    def counting(self, results: Mapping[PeerId, bytes], round: int) -> list[bytes]:
        """Return the slices of a round's results that count."""
        tables = {peer: self.table(result) for peer, result in results.items()}
        counted = counting(tables, self.draw, round)
        found = []
        for peer, result in results.items():
            start = len(result) - SLICE_BYTES * sum(map(len, tables[peer].shards.values()))
            for shard, contributors in sorted(tables[peer].shards.items()):
                bodies = [result[start + SLICE_BYTES * n :][:SLICE_BYTES] for n in range(len(contributors))]
                start += SLICE_BYTES * len(bodies)
                found += bodies if peer in counted[shard] else []
        return found


def _in_order(slices: Mapping[Contributor, bytes]) -> bytes:
    return b"".join(slices[one] for one in sorted(slices))


class StubTally(ContributionTally[bytes]):
    """Stub of `Tally`: its step identifies the payloads in it."""

    def __init__(self, reduced: StubReduced | None = None, round: int = 0) -> None:
        super().__init__(round)
        self._reduced = reduced

    def _checked(self, peer: PeerId, payload: bytes) -> bytes:
        return payload

    def step(self, factor: int = WHOLE) -> StubStep:
        step = np.zeros(SIZE, np.int32)
        counted: Iterable[bytes] = self._kept.values()
        if self._reduced is not None:
            counted = self._reduced.counting(self._kept, self._round)
        for payload in counted:
            step += fingerprint(payload)
        return StubStep(torch.from_numpy(step if factor == WHOLE else step * np.int32(factor)))


@dataclass(frozen=True, slots=True)
class StubStep:
    """A step of the stub weights: int32 [SIZE]."""

    moves: Tensor

    def add_to(self, units_CN: Tensor, tile: Tile, momentum_CN: Tensor | None = None) -> None:
        units_CN += tile.of(self.moves)


class StubMethod:
    """Stub of `Method`: a contribution is a count of microbatches."""

    held = None
    reduced: StubReduced | None = None

    payload_bytes = _PAYLOAD.size
    lookahead_accuracy = 0.0
    own = None
    gradient_norm = momentum_norm = None

    def __init__(self, note: log_events.LogEvent, serial: int, reduced: StubReduced | None = None) -> None:
        """`note`: the peer's event log. `serial`: first serial number; distinguishes processes of a peer."""
        self.reduced = reduced
        self._record = note
        self._serial = serial
        self._owed = 0
        """Microbatches of returned contributions, to contribute again."""

    @property
    def state(self) -> Layout:
        return layout_of({"weight": (SIZE,)})

    def contribute(self, gradient: Tensor, tokens: int, round: int, peer: PeerId) -> bytes:
        microbatches = int(gradient[0]) + self._owed
        self._owed = 0
        self._serial += 1
        payload = payload_of(peer, round, self._serial, microbatches)
        self._record(Payload(round, payload))
        return payload

    def give_back(self, payload: bytes, round: int, peer: PeerId, shards: tuple[int, ...] = ()) -> None:
        if not shards:
            self._owed += microbatches_in(payload)
        self._record(Returned(round, payload, shards))

    def check(self, payload: bytes) -> None:
        if self.reduced is not None:
            self.reduced.table(payload)
        elif len(payload) != _PAYLOAD.size:
            raise ContributionError(f"a payload of {len(payload)} bytes")

    def tally(self, round: int) -> StubTally:
        return StubTally(self.reduced, round)

    def lookahead(self, round: int, factor: int = WHOLE, contributors: int = 1) -> None:
        """Do nothing: counts predict no step."""


class StubCompute:
    """Stub of `Computes`: counts microbatches; hidden states are zeros of the manifest's shape."""

    def __init__(self, manifest: Manifest) -> None:
        self._hidden = torch.zeros(manifest.hidden_shape)
        self._tokens = manifest.microbatch_tokens
        self._open: set[Hashable] = set()
        self._gathered = 0
        self.routed: Routed = {}
        self.device = CPU

    def freeze(self, units: Tensor) -> None:
        """Do nothing: no weights are frozen."""

    @property
    def open(self) -> int:
        return len(self._open)

    def publish(self, tiles: Tiles) -> None:
        """Do nothing: the stub computes without weights."""

    def warm_up(self, sequences: int, tokens: int) -> None:
        """Do nothing: there is no code to compile."""

    def forward(
        self, key: Hashable, inputs: Tensor, branch_scale: float = 1.0, tokens_BT: Tensor | None = None
    ) -> Tensor:
        self._open.add(key)
        return self._hidden

    def finish(
        self, key: Hashable, inputs: Tensor, labels_BT: Tensor, tokens_BT: Tensor | None = None
    ) -> LastStageResult:
        self._gathered += not isinstance(key, Uncounted)
        return LastStageResult(float(self._tokens), self._tokens, self._hidden)

    def backward(self, key: Hashable, hidden_gradient: Tensor) -> Tensor | None:
        self._open.remove(key)
        self._gathered += not isinstance(key, Uncounted)
        return self._hidden

    def drop(self, key: Hashable) -> None:
        self._open.discard(key)

    def train(self, layout: Layout) -> None:
        """Do nothing: the gradient is a count."""

    def use_gradient(self, use: Callable[[Tensor], Used]) -> Used:
        gathered = torch.zeros(SIZE)
        gathered[0] = float(self._gathered)
        self._gathered = 0
        return use(gathered)


def stub_part(manifest: Manifest, note: log_events.LogEvent, serial: int) -> StagePart:
    reduced = StubReduced(draw_of(manifest), note) if manifest.sync.topology == "sharded-reduce" else None
    method = StubMethod(note, serial, reduced)
    return StagePart(method.state, StubCompute(manifest), method, first_units)
