"""Delta codec of SparseLoCo (arXiv:2508.15706): only the largest numbers of each chunk, with two bits each.

The bits are a sign, and which of two sizes of the chunk applies. The sizes are the mean of the magnitudes
above their mean and of those below it, four bytes each.

Shapes: C chunks, M numbers of a chunk that a round covers, K of them that are sent, B bits of a chunk's code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarmnet.model.fixed_point import UNIT
from swarmnet.model.flat_layout import CHUNK
from swarmnet.optimizer.delta_codecs.delta_codec import LARGEST, CodecSeed
from swarmnet.optimizer.index_code import ContributionError, pack, unpack
from swarmnet.optimizer.sparsify import TopK

SIZE_BYTES = 4
SIZES = 2
HEAD = SIZES * SIZE_BYTES


@dataclass(frozen=True, slots=True)
class EncodedTopK:
    """A sparse delta."""

    width: int
    indices: Tensor
    """int64 [C, K], ascending."""
    negative: Tensor
    """bool [C, K]."""
    is_large: Tensor
    """bool [C, K]."""
    sizes: Tensor
    """int32 [C, 2]: the small and the large size, in units."""

    def max_abs(self) -> Tensor:
        return self.sizes[:, 1:]

    def units(self) -> Tensor:
        sizes_CK = torch.where(self.is_large, self.sizes[:, 1:], self.sizes[:, :1])
        units_CM = self.sizes.new_zeros(len(self.sizes), self.width)
        return units_CM.scatter_(1, self.indices, torch.where(self.negative, -sizes_CK, sizes_CK))

    def rows(self, rows: slice) -> EncodedTopK:
        return EncodedTopK(
            self.width, self.indices[rows], self.negative[rows], self.is_large[rows], self.sizes[rows]
        )

    def written(self) -> bytes:
        selection = TopK(self.width, self.indices.shape[1])
        two_bits = [bits.cpu().numpy().view(np.uint8) for bits in (self.negative, self.is_large)]
        return self.sizes.cpu().numpy().astype("<u4").tobytes() + pack(
            np.concatenate([selection.write(self.indices), *two_bits], axis=1)
        )


@dataclass(frozen=True, slots=True)
class TopKCodec:
    """The sparse codec."""

    kept_of_4096: int
    head: int = field(default=HEAD, init=False)

    def selection(self, width: int) -> TopK:
        return TopK(width, max(1, self.kept_of_4096 * width // CHUNK))

    def bits(self, width: int) -> int:
        selection = self.selection(width)
        return selection.index_bits + 2 * selection.kept

    def encode(self, delta_CM: Tensor, draw: CodecSeed) -> EncodedTopK:
        indices_CK = self.selection(delta_CM.shape[1]).choose(delta_CM.contiguous())
        values_CK = delta_CM.gather(1, indices_CK) / UNIT
        sizes_CK = values_CK.abs()
        large_CK = sizes_CK > sizes_CK.mean(dim=1, keepdim=True)
        small_C = _mean_of(sizes_CK, ~large_CK)
        # If all have one size, none is above the mean; that size is then also the large one.
        large_C = torch.where(large_CK.any(dim=1), _mean_of(sizes_CK, large_CK), small_C)
        sizes_C2 = torch.stack([small_C, large_C.maximum(small_C)], dim=1).round().clamp(max=LARGEST)
        return EncodedTopK(delta_CM.shape[1], indices_CK, values_CK < 0, large_CK, sizes_C2.to(torch.int32))

    def decode(self, data: memoryview, chunks: int, width: int, device: torch.device) -> EncodedTopK:
        selection, sizes_C2 = self.selection(width), self._sizes(data, chunks)
        kept, index_bits = selection.kept, selection.index_bits
        bits_CB = unpack(data[HEAD * chunks :], chunks, self.bits(width))
        negative, large = (
            torch.from_numpy(bits_CB[:, start : start + kept].astype(np.bool_)).to(device)
            for start in (index_bits, index_bits + kept)
        )
        indices = selection.read(bits_CB[:, :index_bits]).to(device)
        return EncodedTopK(width, indices, negative, large, torch.from_numpy(sizes_C2).to(device))

    def check(self, data: memoryview, chunks: int, width: int) -> None:
        self.decode(data, chunks, width, torch.device("cpu"))

    def _sizes(self, data: memoryview, chunks: int) -> NDArray[np.int32]:
        sizes_C2 = np.frombuffer(data, "<u4", SIZES * chunks).reshape(chunks, SIZES)
        if np.any(sizes_C2 > LARGEST) or np.any(sizes_C2[:, 0] > sizes_C2[:, 1]):
            raise ContributionError(f"a size above {LARGEST}, or a small one above the large one")
        return sizes_C2.astype(np.int32)


def _mean_of(sizes_CK: Tensor, which_CK: Tensor) -> Tensor:
    """Return [C]: the mean of the selected sizes of each chunk; 0 if there are none."""
    return (sizes_CK * which_CK).sum(dim=1) / which_CK.sum(dim=1).clamp(min=1)
