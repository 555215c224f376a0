"""DeMo as in the paper (arXiv:2411.19870): peers send values, and the group takes the mean over each
coefficient's senders.

This is the baseline for `demo-sign`. It is bit-equal on all peers as well. Values are added in the order of
peer ids. The mean is rounded to 20 bits below the largest of its chunk, and inverted exactly in integers.
Only the sign of the result is the step.

In the paper all senders have equally many tokens. Here a gradient enters the momentum weighted by its share
of the round's tokens, so that the result is the mean over tokens. No payload needs a token count, about which
a peer could lie. Values stay within the clip, which is the limit for a whole round of tokens.

Shapes: C chunks of a plane, N coefficients in a chunk, K kept of them, B bits of a chunk's index code.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from swarmnet.identifiers import PeerId
from swarmnet.model.flat_layout import Layout, Plane
from swarmnet.optimizer.index_code import ContributionError, pack, packed_bytes, unpack
from swarmnet.optimizer.momentum import CoefficientMethod
from swarmnet.optimizer.step import ContributionTally, SignStep
from swarmnet.optimizer.tiling import TILE_CHUNKS, plane_of
from swarmnet.run.manifest import Manifest
from swarmnet.run.rates import WHOLE

MEAN_BITS = 20
"""The mean is rounded to 2**-20 of the chunk's largest. This is finer than the integer DCT's own basis, and
4096 * 2**20 times the DCT's growth (at most 2**14) stays below 2**53."""
ROOM = 1 + 2.0**-10
"""Largest growth of a value by float32 rounding in a transform (at most 4096 terms of relative error
2**-24)."""
VALUE_BYTES = 4
"""A float32, as in DeMo's paper."""


class FloatMethod(CoefficientMethod):
    """Sync method `demo` for one peer of one stage. A value is a little-endian float32, as in the paper."""

    lookahead_accuracy = 0.99
    """Only the exact inverse rounds, at `MEAN_BITS`."""

    def __init__(self, manifest: Manifest, layout: Layout, device: torch.device) -> None:
        super().__init__(manifest, layout, device)
        self._sync = manifest.sync
        self._target_tokens = manifest.rounds.global_batch_tokens
        self.sections = [(each.index_bits, 8 * VALUE_BYTES * each.kept) for each in self._selections]
        self.payload_bytes = sum(
            packed_bytes(plane.chunks, each.index_bits) + VALUE_BYTES * plane.chunks * each.kept
            for plane, each in zip(self._layout.planes, self._selections, strict=True)
        )

    def contribute(self, gradient: Tensor, tokens: int, round: int, peer: PeerId) -> bytes:
        # Twice the tokens count twice, in this round and in what is sent later.
        self._momentum.accumulate(self._cut.chunked(gradient), tokens, tokens / self._target_tokens)
        taken = self._momentum.take(self._selections, round)
        parts = []
        for selection, sent in zip(self._selections, taken, strict=True):
            parts.append(pack(selection.write(sent.indices)))
            parts.append(sent.values.cpu().numpy().astype("<f4", copy=False).tobytes())
        return b"".join(parts)

    def give_back(self, payload: bytes, round: int, peer: PeerId, shards: tuple[int, ...] = ()) -> None:
        planes = list(self.values_of(payload))
        for index, (indices_CK, values_CK) in enumerate(planes):
            self._momentum.put(index, indices_CK.to(self._device), values_CK.to(self._device))

    def check(self, payload: bytes) -> None:
        for _ in self.values_of(payload):
            pass

    def tally(self, round: int) -> FloatTally:
        return FloatTally(method=self, layout=self._layout, device=self._device, round=round)

    def values_of(self, payload: bytes) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield indices, int64 [C, K], and values, float32 [C, K], of each plane. Raises ContributionError if
        either is invalid.

        No honest value exceeds the clip: a block's gradient has at most that norm, the transform keeps norms,
        and the momentum is an average. A larger one would outweigh all others.
        """
        if len(payload) != self.payload_bytes:
            raise ContributionError(f"payload of {len(payload)} bytes where {self.payload_bytes} belong")
        start = 0
        for plane, selection in zip(self._layout.planes, self._selections, strict=True):
            middle = start + packed_bytes(plane.chunks, selection.index_bits)
            stop = middle + VALUE_BYTES * plane.chunks * selection.kept
            bits_CB = unpack(memoryview(payload)[start:middle], plane.chunks, selection.index_bits)
            values_K = np.frombuffer(payload[middle:stop], "<f4").astype(np.float32)
            values_CK = values_K.reshape(plane.chunks, selection.kept)
            if not np.all(np.abs(values_CK) <= self._sync.max_grad_norm * ROOM):
                raise ContributionError(
                    f"a value is not a number, or larger than the clip {self._sync.max_grad_norm}"
                )
            yield selection.read(bits_CB), torch.from_numpy(values_CK)
            start = stop

    def signs_of(self, plane: int, sums_CN: Tensor, senders_CN: Tensor) -> Tensor:
        """Return the signs, int8 [C, N], of the inverse transform of the mean over coefficients' senders."""
        mean_CN = sums_CN / senders_CN.clamp(min=1)
        largest_C1 = mean_CN.abs().amax(dim=1, keepdim=True)
        scale_C1 = torch.where(largest_C1 > 0, 2.0**MEAN_BITS / largest_C1, torch.zeros_like(largest_C1))
        rounded_CN = torch.round(mean_CN * scale_C1).to(torch.int64)
        inverse_CN = self._transforms[plane].exact_inverse(rounded_CN, rounded_CN.shape[1] * 2**MEAN_BITS)
        return torch.sign(inverse_CN).to(torch.int8)


class FloatTally(ContributionTally[list[tuple[Tensor, Tensor]]]):
    """The decoded contributions of one round. They are summed when a step is requested."""

    def __init__(self, *, method: FloatMethod, layout: Layout, device: torch.device, round: int) -> None:
        super().__init__(round)
        self._method = method
        self._layout = layout
        self._device = device

    def _checked(self, peer: PeerId, payload: bytes) -> list[tuple[Tensor, Tensor]]:
        return [
            (indices_CK.to(self._device), values_CK.to(self._device))
            for indices_CK, values_CK in self._method.values_of(payload)
        ]

    def step(self, factor: int = WHOLE) -> SignStep:
        signs = torch.empty(self._layout.size, dtype=torch.int8, device=self._device)
        for index, plane in enumerate(self._layout.planes):
            signs_CN = plane_of(signs, plane)
            for start in range(0, plane.chunks, TILE_CHUNKS):
                tile = slice(start, start + TILE_CHUNKS)
                sums_CN, senders_CN = self._sums(index, plane, tile)
                signs_CN[tile] = self._method.signs_of(index, sums_CN, senders_CN)
        return self._method.step_of(signs, self._round, factor)

    def _sums(self, index: int, plane: Plane, tile: slice) -> tuple[Tensor, Tensor]:
        """Return float64 sums and counts [C, N] of a plane's chunks in `tile`, in the order of peer ids."""
        chunks = len(range(plane.chunks)[tile])
        sums_CN = torch.zeros(chunks, plane.chunk, dtype=torch.float64, device=self._device)
        senders_CN = torch.zeros_like(sums_CN)
        for peer in sorted(self._kept):
            indices_CK, values_CK = (part[tile] for part in self._kept[peer][index])
            values_CK = values_CK.to(torch.float64)
            # Indices are distinct within a peer's chunk, so each element takes one addition per peer.
            sums_CN.scatter_add_(1, indices_CK, values_CK)
            senders_CN.scatter_add_(1, indices_CK, torch.ones_like(values_CK))
        return sums_CN, senders_CN
