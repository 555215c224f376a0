import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from swarmnet.identifiers import MicrobatchId, PeerId, RunId
from swarmnet.model.activation_codec import HiddenError, decode, encode, rounding_generator
from swarmnet.run.activation_sizes import BLOCK, TILE, TILE_BITS, Codec, encoded_bytes

CODECS: list[Codec] = ["fp32", "bf16", "int8", "int4-tiles", "int6-tiles"]
ROUNDED: list[Codec] = ["int8", "int4-tiles", "int6-tiles"]
SHAPES = arrays.array_shapes(min_dims=1, max_dims=3, max_side=70)
LARGE = float(np.float32(1e37))
TENSORS = arrays.arrays(np.float32, SHAPES, elements=st.floats(-LARGE, LARGE, width=32), fill=st.just(0)).map(
    torch.from_numpy
)


@given(TENSORS)
def test_fp32_is_exact(tensor: torch.Tensor) -> None:
    decoded = decode(encode(tensor, "fp32"), tuple(tensor.shape), "fp32")
    assert torch.equal(decoded.view(torch.int32), tensor.view(torch.int32))


@given(TENSORS)
def test_bf16_errs_by_at_most_its_rounding(tensor: torch.Tensor) -> None:
    decoded = decode(encode(tensor, "bf16"), tuple(tensor.shape), "bf16")
    assert ((decoded - tensor).abs() <= tensor.abs() * 2**-8 + 2.0**-126).all()


@given(TENSORS)
def test_int8_errs_by_at_most_half_a_step_of_its_block(tensor: torch.Tensor) -> None:
    decoded = decode(encode(tensor, "int8"), tuple(tensor.shape), "int8")
    error, values = (decoded - tensor).double().flatten(), tensor.double().flatten()
    for start in range(0, len(values), BLOCK):
        largest = values[start : start + BLOCK].abs().max()
        # Below the normal floats the scale itself is coarse: 2**-149 steps, 127 of them.
        assert error[start : start + BLOCK].abs().max() <= largest / 254 * (1 + 1e-4) + 127 * 2.0**-149


def assert_close_by_tiles(
    decoded: torch.Tensor, tensor: torch.Tensor, codec: Codec, of_a_step: float = 0.5
) -> None:
    error, values = (decoded - tensor).double().abs().flatten(), tensor.double().flatten()
    steps = (1 << TILE_BITS[codec]) - 1
    for start in range(0, len(values), TILE):
        tile = values[start : start + TILE]
        between, largest = tile.max() - tile.min(), tile.abs().max()
        most = of_a_step * between / steps + 2**-7 * largest + 2.0**-126
        assert error[start : start + TILE].max() <= most


@given(TENSORS, st.sampled_from(sorted(TILE_BITS)))
def test_tiles_err_by_at_most_half_a_step_and_the_rounding_of_their_ends(
    tensor: torch.Tensor, codec: Codec
) -> None:
    assert_close_by_tiles(decode(encode(tensor, codec), tuple(tensor.shape), codec), tensor, codec)


def by_chance(seed: int) -> torch.Generator:
    return rounding_generator(RunId("run"), MicrobatchId(PeerId("origin"), seed), 1)


@given(TENSORS, st.sampled_from(ROUNDED), st.integers(0, 1 << 40))
def test_rounded_by_chance_it_errs_by_at_most_a_step_and_again_gives_the_same_bytes(
    tensor: torch.Tensor, codec: Codec, seed: int
) -> None:
    data, shape = encode(tensor, codec, by_chance(seed)), tuple(tensor.shape)
    assert data == encode(tensor, codec, by_chance(seed))
    assert len(data) == encoded_bytes(shape, codec)
    decoded = decode(data, shape, codec)
    if codec != "int8":
        assert_close_by_tiles(decoded, tensor, codec, of_a_step=1.0 + 2**-7)  # A step may be longer in bf16.
        return
    error, values = (decoded - tensor).double().flatten(), tensor.double().flatten()
    for start in range(0, len(values), BLOCK):
        largest = values[start : start + BLOCK].abs().max()
        assert error[start : start + BLOCK].abs().max() <= largest / 127 * (1 + 1e-4) + 127 * 2.0**-149


@pytest.mark.parametrize("codec", ROUNDED)
@pytest.mark.parametrize("shift", [0.0, 3.0, -40.0])
def test_rounded_by_chance_a_value_is_itself_on_the_mean_and_to_the_nearest_it_is_not(
    codec: Codec, shift: float
) -> None:
    """Beside a value a hundred times as large, where rounding to the nearest loses the small ones."""
    tensor = torch.randn(2, 3 * TILE, generator=torch.Generator().manual_seed(1)) + shift
    tensor[:, ::TILE] *= 100
    shape, times = tuple(tensor.shape), 400
    mean = sum(decode(encode(tensor, codec, by_chance(seed)), shape, codec) for seed in range(times)) / times
    between = tensor.max() - tensor.min() if codec != "int8" else tensor.abs().max()
    step = between / ((1 << TILE_BITS.get(codec, 7)) - 1)
    bound = 5 * 0.5 * step / times**0.5  # Deviations of the mean: at most half a step for one value.
    assert (mean - tensor).abs().max() < bound
    nearest = decode(encode(tensor, codec), shape, codec)
    assert (nearest - tensor).abs().mean() > 2 * (mean - tensor).abs().mean()


@pytest.mark.parametrize(
    "other",
    [
        (RunId("other"), MicrobatchId(PeerId("origin"), 1), 1),
        (RunId("run"), MicrobatchId(PeerId("another"), 1), 1),
        (RunId("run"), MicrobatchId(PeerId("origin"), 2), 1),
        (RunId("run"), MicrobatchId(PeerId("origin"), 1), 2),
    ],
    ids=["run", "origin", "counter", "stage"],
)
def test_each_run_microbatch_and_stage_rounds_by_a_chance_of_its_own(
    other: tuple[RunId, MicrobatchId, int],
) -> None:
    tensor = torch.linspace(-1, 1, 500)
    assert encode(tensor, "int6-tiles", by_chance(1)) != encode(
        tensor, "int6-tiles", rounding_generator(*other)
    )


@given(TENSORS, st.sampled_from(CODECS))
def test_the_length_is_known_beforehand_and_encoding_again_changes_nothing(
    tensor: torch.Tensor, codec: Codec
) -> None:
    shape = tuple(tensor.shape)
    data = encode(tensor, codec)
    assert len(data) == encoded_bytes(shape, codec)
    decoded = decode(data, shape, codec)
    assert decoded.shape == tensor.shape
    again = decode(encode(decoded, codec), shape, codec)
    if codec == "int8":
        torch.testing.assert_close(again, decoded, rtol=1e-6, atol=127 * 2.0**-149)
    elif codec in TILE_BITS:
        assert_close_by_tiles(again, decoded, codec)  # Its least may be another than the one that was sent.
    else:
        assert torch.equal(again, decoded)


@given(st.binary(max_size=400), SHAPES, st.sampled_from(CODECS))
def test_any_bytes_decode_to_finite_values_or_are_refused(
    data: bytes, shape: tuple[int, ...], codec: Codec
) -> None:
    try:
        decoded = decode(data, shape, codec)
    except HiddenError:
        return
    assert tuple(decoded.shape) == shape
    assert decoded.isfinite().all()


@given(st.data(), st.sampled_from(CODECS))
def test_any_bytes_of_the_right_length_decode_to_finite_values_or_are_refused(
    drawn: st.DataObject, codec: Codec
) -> None:
    shape = (3, 30)
    length = encoded_bytes(shape, codec)
    data = drawn.draw(st.binary(min_size=length, max_size=length))
    try:
        decoded = decode(data, shape, codec)
    except HiddenError:
        return
    assert decoded.isfinite().all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_length_is_refused(codec: Codec, change: int) -> None:
    length = encoded_bytes((2, 65), codec)
    with pytest.raises(HiddenError, match=f"{length + change} bytes of {codec}"):
        decode(bytes(length + change), (2, 65), codec)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 3e38])
def test_an_int8_scale_that_is_not_finite_or_overflows_is_refused(scale: float) -> None:
    with pytest.raises(HiddenError, match="not finite"):
        decode(struct.pack("<f", scale) + bytes([127] * 8), (8,), "int8")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_not_sent(codec: Codec, value: float) -> None:
    with pytest.raises(HiddenError, match=f"not finite in {codec}"):
        encode(torch.tensor([1.0, value]), codec)


def test_a_float_beyond_bf16_is_not_sent_as_infinity() -> None:
    with pytest.raises(HiddenError, match="bf16"):
        encode(torch.tensor([torch.finfo(torch.float32).max]), "bf16")


@pytest.mark.parametrize("codec", CODECS)
def test_the_receiver_owns_what_it_decoded(codec: Codec) -> None:
    data = bytearray(encode(torch.ones(2, 64), codec))
    decoded = decode(memoryview(data), (2, 64), codec)
    data[:] = bytes(len(data))
    decoded += 1
    assert (decoded - 2).abs().max() < 1e-6


def test_the_wire_is_little_endian_with_the_scales_first() -> None:
    assert encode(torch.tensor([1.0]), "fp32") == b"\x00\x00\x80\x3f"
    assert encode(torch.tensor([1.0]), "bf16") == b"\x80\x3f"
    assert encode(torch.tensor([127.0, -127.0, 1.0]), "int8") == b"\x00\x00\x80\x3f" + bytes([127, 129, 1])
    tile = b"\x80\xbf" + b"\x00\x3f" + bytes([0x10, 0x0F | 2 << 4, 3])
    assert encode(torch.tensor([-1.0, -0.5, 6.5, 0.0, 0.5]), "int4-tiles") == tile
    tile = b"\x80\xbf" + b"\x00\x3f" + (1 << 6 | 63 << 12 | 2 << 18 | 3 << 24).to_bytes(4, "little")
    assert encode(torch.tensor([-1.0, -0.5, 30.5, 0.0, 0.5]), "int6-tiles") == tile


@pytest.mark.parametrize("codec", CODECS)
def test_hidden_states_may_lie_in_memory_in_any_order(codec: Codec) -> None:
    tensor = torch.arange(-64.0, 64.0).view(2, 64).t()
    assert encode(tensor, codec) == encode(tensor.contiguous(), codec)


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_is_neither_sent_nor_received(codec: Codec) -> None:
    with pytest.raises(HiddenError, match=r"\[2, 0\] holds no value"):
        encode(torch.empty(2, 0), codec)
    with pytest.raises(HiddenError, match="0 bytes"):
        decode(b"", (2, 0), codec)


def test_int8_keeps_its_sign_where_the_scale_can_hardly_be_written() -> None:
    tensor = torch.tensor([190, -190]) * 2.0**-149
    assert torch.equal(decode(encode(tensor, "int8"), (2,), "int8"), torch.tensor([127, -127]) * 2.0**-149)
