"""Hidden states and their gradients as bytes on the wire, in one of four codecs.

fp32  4 bytes a value, exact.
bf16  2 bytes a value, rounded to nearest: relative error at most 2**-8 (normal numbers).
int8  blocks of 64 values: one fp32 scale, largest magnitude / 127, then a signed byte per value. The
      error of a value is at most half a step, largest magnitude of its block / 254, plus rounding of
      the arithmetic (some 1e-7 of the largest). 8.5 bits a value.
int4-tiles  tiles of 32 values: bf16 of the least and of a step, then the number of steps above the least, 0
      to 15, two values a byte, the first in the low half. The error of a value is at most half a step, a
      thirtieth of what lies between least and largest, plus the rounding of both to bf16. 5 bits a value.

Numbers are little-endian, as on all machines torch is built for; int8 and int4-tiles send all scales, then
all values. Nothing is trusted: `decode` refuses a wrong length and what decodes to an infinity or a NaN.
"""

from __future__ import annotations

from math import isfinite, prod

import torch
from torch import Tensor
from torch.nn import functional

from swarmnet.run.activation_sizes import BLOCK, TILE, Codec, encoded_bytes

_STEPS = 127
_STEPS_OF_TILE = 15


class HiddenError(ValueError):
    """These bytes are no hidden states of the expected shape, or these values cannot be sent."""


def encode(tensor: Tensor, codec: Codec) -> bytes:
    """Bytes of a float tensor of any shape. Raises HiddenError if a value is not finite in the codec."""
    values = tensor.detach().to("cpu", torch.float32).contiguous().flatten()
    if not len(values):
        raise HiddenError(f"{list(tensor.shape)} holds no value")
    if codec == "bf16":
        values = values.to(torch.bfloat16)
    if not _is_finite(values):
        raise HiddenError(f"a value is not finite in {codec}")
    if codec == "fp32":
        return values.numpy().tobytes()
    if codec == "bf16":
        return values.view(torch.int16).numpy().tobytes()
    return _as_tiles(values) if codec == "int4-tiles" else _as_blocks(values)


def _as_blocks(values: Tensor) -> bytes:
    blocks = functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(dim=1, keepdim=True) / _STEPS
    if not _is_finite(scale * _STEPS):  # Rounded up beyond the largest number.
        raise HiddenError("a value is not finite in int8")
    steps = torch.round(blocks / scale.where(scale > 0, 1.0)).clamp_(-_STEPS, _STEPS)
    codes = steps.to(torch.int8).flatten()[: len(values)]
    return scale.numpy().tobytes() + codes.numpy().tobytes()


def decode(data: bytes | bytearray | memoryview, shape: tuple[int, ...], codec: Codec) -> Tensor:
    """float32 tensor of `shape`, in memory of its own. Raises HiddenError."""
    expected = encoded_bytes(shape, codec)
    if len(data) != expected or not expected:
        raise HiddenError(f"{len(data)} bytes of {codec} hidden states, {list(shape)} takes {expected}")
    # A copy that can be written to, which torch asks for; then one in torch's own, aligned memory, on
    # which the arithmetic libraries compute to the same bits as on any other of their tensors.
    raw = bytearray(data)
    if codec == "fp32":
        values = torch.frombuffer(raw, dtype=torch.float32).clone()
    elif codec == "bf16":
        values = torch.frombuffer(raw, dtype=torch.bfloat16).float()
    elif codec == "int4-tiles":
        values = _of_tiles(raw, prod(shape))
    else:
        blocks = -(-prod(shape) // BLOCK)
        scale = torch.frombuffer(raw, dtype=torch.float32, count=blocks)
        values = torch.frombuffer(raw, dtype=torch.int8, offset=4 * blocks).float()
        values *= scale.repeat_interleave(BLOCK)[: len(values)]
    if not _is_finite(values):
        raise HiddenError(f"{codec} hidden states hold a value that is not finite")
    return values.view(shape)


def _as_tiles(values: Tensor) -> bytes:
    # Filled up with the last value, which is in the tile already.
    tiles = torch.cat((values, values[-1:].expand(-len(values) % TILE))).view(-1, TILE)
    least = tiles.amin(dim=1, keepdim=True).to(torch.bfloat16)
    step = ((tiles.amax(dim=1, keepdim=True) - least.float()) / _STEPS_OF_TILE).to(torch.bfloat16)
    ends = torch.cat((least, step), dim=1)
    if not _is_finite(ends.float() * (_STEPS_OF_TILE + 1)):  # Rounded up beyond the largest number.
        raise HiddenError("a value is not finite in int4-tiles")
    steps = torch.round((tiles - least.float()) / step.float().where(step > 0, 1.0))
    codes = steps.clamp_(0, _STEPS_OF_TILE).to(torch.uint8).flatten()[: len(values)]
    pairs = functional.pad(codes, (0, len(codes) % 2)).view(-1, 2)
    packed = pairs[:, 0] | pairs[:, 1] << 4
    return ends.view(torch.int16).numpy().tobytes() + packed.numpy().tobytes()


def _of_tiles(raw: bytearray, count: int) -> Tensor:
    tiles = -(-count // TILE)
    ends = torch.frombuffer(raw, dtype=torch.bfloat16, count=2 * tiles).float().view(-1, 2)
    packed = torch.frombuffer(raw, dtype=torch.uint8, offset=4 * tiles)
    codes = torch.stack((packed & 15, packed >> 4), dim=1).flatten()[:count].float()
    least, step = (ends[:, end].repeat_interleave(TILE)[:count] for end in (0, 1))
    return codes.mul_(step).add_(least)


def _is_finite(values: Tensor) -> bool:
    # Both bounds are NaN if any value is; torch.isfinite of every value takes eight times as long.
    return all(isfinite(bound) for bound in torch.aminmax(values))
