"""How many bytes a microbatch takes from stage to stage: hidden states in a codec
(model/activation_codec.py), and labels."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Literal

Codec = Literal["bf16", "int8", "fp32", "int4-tiles", "int6-tiles"]
Rounding = Literal["nearest", "stochastic"]
BLOCK = 64
"""Values that share an int8 scale: 4 bytes per 64 cost 6%, and one outlier spoils few neighbours."""
TILE = 32
"""Values that share a least and a step, as in TAH-Quant (arXiv:2506.01352): 4 bytes per 32."""
TILE_BITS: Mapping[Codec, int] = {"int4-tiles": 4, "int6-tiles": 6}
"""Of a value, besides."""
LABEL_BYTES = 4
"""A label is an int32; labels go down with the hidden states, nothing of them comes up."""


def encoded_bytes(shape: tuple[int, ...], codec: Codec) -> int:
    """Length of hidden states of `shape`, or of their gradient, in bytes."""
    values = prod(shape)
    if codec == "int8":
        return values + 4 * -(-values // BLOCK)
    if codec in TILE_BITS:
        return 4 * -(-values // TILE) + -(-values * TILE_BITS[codec] // 8)
    return values * (4 if codec == "fp32" else 2)


def token_bytes(vocabulary: int) -> int:
    """Whole bytes that the number of any token takes: one for bytes, two up to 65,536 tokens."""
    return max(1, ((vocabulary - 1).bit_length() + 7) // 8)
