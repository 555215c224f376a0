"""Compute how many bytes a microbatch takes when it is sent from one pipeline stage to the next.

Hidden states (`model/activation_codec.py`) and labels are sent. The int8 codec has a scale for each block of
64 values. The tile codecs have a minimum and a step for each tile of 32.
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
    includes 4 bytes for the scale of each int8 block, or for the minimum and step of each tile."""
    values = prod(shape)
    if codec == "int8":
        blocks = -(-values // BLOCK)
        return values + 4 * blocks
    if codec in TILE_BITS:
        tiles = -(-values // TILE)
        return -(-values * TILE_BITS[codec] // 8) + 4 * tiles
    return values * (4 if codec == "fp32" else 2)


def token_bytes(vocabulary: int) -> int:
    """Return the whole bytes that a token number takes: one up to 256 tokens, two up to 65,536."""
    return max(1, ((vocabulary - 1).bit_length() + 7) // 8)
