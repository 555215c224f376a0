"""How many bytes a microbatch takes from stage to stage: hidden states in a codec
(model/activation_codec.py), and labels."""

from __future__ import annotations

from math import prod
from typing import Literal

Codec = Literal["bf16", "int8", "fp32", "int4-tiles"]
BLOCK = 64
"""Values that share an int8 scale: 4 bytes per 64 cost 6%, and one outlier spoils few neighbours."""
TILE = 32
"""Values that share a least and a step of 4 bits, as in TAH-Quant (arXiv:2506.01352): 4 bytes per 32."""
LABEL_BYTES = 4
"""A label is an int32; labels go down with the hidden states, nothing of them comes up."""


def encoded_bytes(shape: tuple[int, ...], codec: Codec) -> int:
    """Length of hidden states of `shape`, or of their gradient, in bytes."""
    values = prod(shape)
    if codec == "int8":
        return values + 4 * -(-values // BLOCK)
    if codec == "int4-tiles":
        return 4 * -(-values // TILE) + -(-values // 2)
    return values * (4 if codec == "fp32" else 2)


def token_bytes(vocabulary: int) -> int:
    """Whole bytes that the number of any token takes: one for bytes, two up to 65,536 tokens."""
    return max(1, ((vocabulary - 1).bit_length() + 7) // 8)
