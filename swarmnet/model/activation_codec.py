"""Encode hidden states and their gradients as bytes for the wire, in one of five codecs.

- fp32: 4 bytes per value, exact.
- bf16: 2 bytes per value, rounded to nearest. The relative error is at most 2**-8 (normal numbers).
- int8: Blocks of 64 values. Each block has one fp32 scale, its maximum magnitude / 127, and a signed byte per
  value. The error of a value is at most half a step, the maximum magnitude / 254. Arithmetic rounding adds
  about 1e-7 of the maximum. 8.5 bits per value.
- int4-tiles: Tiles of 32 values. Each tile has its minimum and a step in bf16. A value is the number of steps
  above the minimum, 0 to 15. A byte holds two values, the first in the low half. The error is at most half a
  step (a thirtieth of the tile's range), plus the rounding to bf16. 5 bits per value.
- int6-tiles: The same with 0 to 63 steps, four values in three bytes, the first in the lowest bits. 7 bits.

Numbers are little-endian, as on all machines that torch is built for. int8 and tiles send all scales first,
then all values. Tensors on a GPU are encoded there, and bytes leave it; a division may differ in the last
bit. No input is trusted: `decode` refuses a wrong length and data that decodes to an infinity or a NaN.

With `chance`, int8 and tiles use stochastic rounding (arXiv:1502.02551, equation 1). A value goes to either
neighbouring step at random, such that its mean is the value. Values far below the maximum then add up over
microbatches instead of being rounded to zero. The error is at most a step. The decoder needs no information
about the kind of rounding.
"""

from __future__ import annotations

import hashlib
from math import inf, isfinite, prod

import torch
from torch import Tensor
from torch.nn import functional

from swarmnet.identifiers import MicrobatchId, RunId
from swarmnet.run.activation_sizes import BLOCK, TILE, TILE_BITS, Codec, encoded_bytes

LARGEST = 2.0**125
"""Finite in every codec. A tile may reach from the negative of this value to it, in steps rounded up."""
CPU = torch.device("cpu")
_STEPS = 127
_0_TO_3 = torch.arange(4, dtype=torch.int32)


class HiddenError(ValueError):
    """The bytes are no hidden states of the expected shape, or the values cannot be sent."""


def rounding_generator(run_id: RunId, microbatch: MicrobatchId, stage: int) -> torch.Generator:
    """Return the random generator for stochastic rounding of a microbatch's tensor that `stage` sends. Its
    seed is a hash of the three arguments, so that the rounding can be repeated."""
    name = f"{run_id}/{microbatch.origin}/{microbatch.counter}/{stage}/rounding"
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
    return torch.Generator().manual_seed(seed)


def encode(tensor: Tensor, codec: Codec, chance: torch.Generator | None = None) -> bytes:
    """Return the bytes of a float tensor of any shape. `chance` selects stochastic rounding. Raises
    HiddenError for an empty tensor and for a value that is not finite in this codec."""
    values = tensor.detach().to(torch.float32).contiguous().flatten()
    if not len(values):
        raise HiddenError(f"{list(tensor.shape)} holds no value")
    if codec == "bf16":
        values = values.to(torch.bfloat16)
    if not _is_finite(values):
        raise HiddenError(f"a value is not finite in {codec}")
    if codec == "fp32":
        return _to_bytes(values)
    if codec == "bf16":
        return _to_bytes(values.view(torch.int16))
    if codec in TILE_BITS:
        return _to_tiles(values, codec, chance)
    return _to_blocks(values, chance)


def _round_steps(steps: Tensor, chance: torch.Generator | None) -> Tensor:
    """Round to the nearest step, or stochastically with `chance`. Changes `steps` in place."""
    if chance is None:
        return torch.round(steps)
    if chance.device != steps.device:
        chance = torch.Generator(steps.device).manual_seed(chance.initial_seed())
    return steps.add_(torch.rand(steps.shape, generator=chance, device=steps.device)).floor_()


def _to_bytes(values: Tensor) -> bytes:
    return values.cpu().numpy().tobytes()


def _to_blocks(values: Tensor, chance: torch.Generator | None) -> bytes:
    """Encode float32 values [N] as int8: the scale of each block, then a signed byte per value. With `chance`
    the rounding is stochastic. Raises HiddenError if a scale is not finite."""
    blocks = functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(dim=1, keepdim=True) / _STEPS
    if not _is_finite(scale * _STEPS):  # The scale was rounded up beyond the largest float.
        raise HiddenError("a value is not finite in int8")
    steps = _round_steps(blocks / scale.where(scale > 0, 1.0), chance).clamp_(-_STEPS, _STEPS)
    codes = steps.to(torch.int8).flatten()[: len(values)]
    return _to_bytes(scale) + _to_bytes(codes)


def decode(
    data: bytes | bytearray | memoryview, shape: tuple[int, ...], codec: Codec, device: torch.device = CPU
) -> Tensor:
    """Return a new float32 tensor of `shape` on `device` from the bytes that `encode` returned. Raises
    HiddenError for a wrong length or a value that is not finite."""
    expected = encoded_bytes(shape, codec)
    if len(data) != expected or not expected:
        raise HiddenError(f"{len(data)} bytes of {codec} hidden states, {list(shape)} takes {expected}")
    # torch needs a writable copy. A clone in torch's own aligned memory makes the arithmetic libraries
    # compute the same bits as for any other tensor.
    raw = bytearray(data)
    if codec == "fp32":
        values = torch.frombuffer(raw, dtype=torch.float32).clone().to(device)
    elif codec == "bf16":
        values = torch.frombuffer(raw, dtype=torch.bfloat16).to(device).float()
    elif codec in TILE_BITS:
        values = _from_tiles(raw, prod(shape), TILE_BITS[codec], device)
    else:
        blocks = -(-prod(shape) // BLOCK)
        scale = torch.frombuffer(raw, dtype=torch.float32, count=blocks).to(device)
        values = torch.frombuffer(raw, dtype=torch.int8, offset=4 * blocks).to(device).float()
        values *= scale.repeat_interleave(BLOCK)[: len(values)]
    if not _is_finite(values):
        raise HiddenError(f"{codec} hidden states hold a value that is not finite")
    return values.view(shape)


def _to_tiles(values: Tensor, codec: Codec, chance: torch.Generator | None) -> bytes:
    """Encode float32 values [N] as int4-tiles or int6-tiles: minimum and step of each tile, then all values.
    With `chance` the rounding is stochastic. Raises HiddenError if a value is not finite."""
    bits = TILE_BITS[codec]
    max_code = (1 << bits) - 1
    # The padding repeats the last value, which is in the tile already.
    tiles = torch.cat((values, values[-1:].expand(-len(values) % TILE))).view(-1, TILE)
    lowest, largest = torch.aminmax(tiles, dim=1, keepdim=True)
    # Stochastic rounding keeps the mean only if the tile's range covers all its values: round it outwards.
    minimum = _in_bf16(lowest, -inf if chance else None)
    step = _in_bf16((largest - minimum.float()) / max_code, inf if chance else None)
    # Rounding to bf16 may have passed the largest float.
    if not _is_finite(torch.cat((minimum.float(), minimum.float() + max_code * step.float()))):
        raise HiddenError(f"a value is not finite in {codec}")
    divisor = step.float().where(step > 0, 1.0)  # A tile of equal values has step 0.
    steps = _round_steps((tiles - minimum.float()) / divisor, chance)
    codes = steps.clamp_(0, max_code).to(torch.int32).flatten()[: len(values)]
    # Four codes of `bits` bits each fill `bits` // 2 bytes: the low bytes of one int32.
    fours = functional.pad(codes, (0, -len(codes) % 4)).view(-1, 4)
    packed_fours = (fours << bits * _0_TO_3.to(codes.device)).sum(dim=1, dtype=torch.int32)
    packed = packed_fours.view(torch.uint8).view(-1, 4)[:, : bits // 2].flatten()
    minimum_and_step = torch.cat((minimum, step), dim=1).view(torch.int16)
    return _to_bytes(minimum_and_step) + _to_bytes(packed[: -(-len(codes) * bits // 8)])


def _in_bf16(values: Tensor, towards: float | None) -> Tensor:
    """Return `values` in bf16: rounded to nearest without `towards`, down if it is -inf, up if inf."""
    nearest = values.to(torch.bfloat16)
    if towards is None:
        return nearest
    is_wrong_way = nearest.float() > values if towards < 0 else nearest.float() < values
    next_one = torch.nextafter(nearest, torch.full_like(nearest, towards))
    return next_one.where(is_wrong_way, nearest)


def _from_tiles(raw: bytearray, count: int, bits: int, device: torch.device) -> Tensor:
    """Decode float32 values [count] from the bytes of int4-tiles or int6-tiles, with `bits` bits a value.
    Four codes are unpacked together: they fill `bits` // 2 bytes, lowest first."""
    tiles, indices = -(-count // TILE), _0_TO_3.to(device)
    tile_scales = torch.frombuffer(raw, dtype=torch.bfloat16, count=2 * tiles).to(device).float().view(-1, 2)
    packed = torch.frombuffer(raw, dtype=torch.uint8, offset=4 * tiles).to(device)
    missing_bytes = tiles * TILE * bits // 8 - len(packed)
    bytes_of_fours = functional.pad(packed, (0, missing_bytes)).view(-1, bits // 2).int()
    byte_shifts = 8 * indices[: bits // 2]
    packed_fours = (bytes_of_fours << byte_shifts).sum(dim=1, keepdim=True, dtype=torch.int32)
    codes = (packed_fours >> bits * indices) & ((1 << bits) - 1)
    minimum, step = tile_scales[:, :1], tile_scales[:, 1:]
    values = codes.float().view(-1, TILE).mul_(step).add_(minimum)
    return values.flatten()[:count]


def _is_finite(values: Tensor) -> bool:
    # Both bounds are NaN if any value is; torch.isfinite of every value takes eight times as long.
    return all(isfinite(bound) for bound in torch.stack(torch.aminmax(values)).tolist())
