"""Encode a power of two for each chunk in one byte.

Shapes: C chunks.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarmnet.optimizer.index_code import ContributionError


def written(exponents_C1: Tensor) -> bytes:
    return exponents_C1.to(torch.uint8).cpu().numpy().tobytes()


def read(data: memoryview, chunks: int, largest: int) -> NDArray[np.uint8]:
    """Return uint8 [C] from the start of `data`. Raises ContributionError for an exponent above `largest`."""
    exponents_C = np.frombuffer(data, np.uint8, chunks)
    if exponents_C.max(initial=0) > largest:
        raise ContributionError(f"an exponent of {exponents_C.max()}, above {largest}")
    return exponents_C


def tensor_of(exponents_C: NDArray[np.uint8], device: torch.device) -> Tensor:
    """Return int32 [C, 1]."""
    return torch.from_numpy(exponents_C.astype(np.int32))[:, None].to(device)
