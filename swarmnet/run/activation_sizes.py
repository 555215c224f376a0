"""Compute how many bytes a microbatch takes when it is sent from one pipeline stage to the next.

They are encoded hidden states (`model/activation_codec.py`) and labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Literal

Codec = Literal["bf16", "int8", "fp32", "int4-tiles", "int6-tiles"]
Rounding = Literal["nearest", "stochastic"]
BLOCK = 64
"""Number of values that share an int8 scale. 4 bytes per 64 cost 6 %, and outliers hurt few neighbours."""
TILE = 32
"""Number of values that share a minimum and a step (4 bytes), as in TAH-Quant (arXiv:2506.01352)."""
TILE_BITS: Mapping[Codec, int] = {"int4-tiles": 4, "int6-tiles": 6}
"""Bits per value, without the 4 bytes."""
LABEL_BYTES = 4
"""A label is an int32. Labels go down with the hidden states, and none come up."""


def encoded_bytes(shape: tuple[int, ...], codec: Codec) -> int:
    """Return the number of bytes that `codec` needs for hidden states of `shape`, or for their gradient. It
    includes the scales of int8 blocks, and the minimum and step of each tile."""
    values = prod(shape)
    if codec == "int8":
        return values + 4 * -(-values // BLOCK)
    if codec in TILE_BITS:
        return 4 * -(-values // TILE) + -(-values * TILE_BITS[codec] // 8)
    return values * (4 if codec == "fp32" else 2)


def token_bytes(vocabulary: int) -> int:
    """Return the whole bytes that a token number takes: one for bytes, two up to 65,536 tokens."""
    return max(1, ((vocabulary - 1).bit_length() + 7) // 8)
