"""MXFP8, MXFP4 and FP8 blocks against numpy with ml_dtypes, by hand, and against the mistakes made elsewhere."""

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megamoe.errors import FormatError
from megamoe.formats import (
    BF16,
    FP8_1X128,
    FP8_128X128,
    MXFP4,
    MXFP8,
    ActivationFormat,
    BlockFormat,
    E8M0Rounding,
    Quantized,
)

FLT_MAX = torch.finfo(torch.float32).max
ROW_FORMATS = [BF16, FP8_1X128, MXFP8, MXFP4]
SCALED_ROW_FORMATS = [FP8_1X128, MXFP8, MXFP4]
MX_FORMATS = [MXFP8, MXFP4]
ALL_FORMATS = [*ROW_FORMATS, FP8_128X128]

seeds = st.integers(0, 2**32 - 1)


def by_name(fmt: object) -> str:
    assert isinstance(fmt, BlockFormat)
    return fmt.name


def heavy_tailed(seed: int, *shape: int) -> Tensor:
    """Magnitudes over some twelve binades, so that rounding meets normals, subnormals and zeros of the payload."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp2(4 * torch.randn(shape, generator=generator))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def same_bits(a: Quantized, b: Quantized) -> bool:
    if a.scales is None or b.scales is None:
        return a.scales is b.scales and torch.equal(bits(a.payload), bits(b.payload))
    return torch.equal(bits(a.payload), bits(b.payload)) and torch.equal(bits(a.scales), bits(b.scales))


def numpy_mx(x: np.ndarray, dtype: type, max_pos: float) -> tuple[np.ndarray, np.ndarray]:
    """Payload values and scales of MX blocks, in FP64 and ml_dtypes, block by block."""
    blocks = x.astype(np.float64).reshape(-1, 32)
    values, scales = np.empty_like(blocks), np.empty(len(blocks))
    for i, block in enumerate(blocks):
        scales[i] = 2.0 ** max(-127, math.ceil(math.log2(np.abs(block).max() / max_pos)))
        values[i] = (block / scales[i]).astype(np.float32).astype(dtype).astype(np.float64)
    return values, scales


@pytest.mark.parametrize(
    "fmt, dtype, max_pos", [(MXFP8, ml_dtypes.float8_e4m3fn, 448.0), (MXFP4, ml_dtypes.float4_e2m1fn, 6.0)]
)
def test_mx_matches_numpy(fmt: ActivationFormat, dtype: type, max_pos: float) -> None:
    x = heavy_tailed(1, 64, 256)
    values, scales = numpy_mx(x.numpy(), dtype, max_pos)
    quantized = fmt.quantize(x)
    assert quantized.scales is not None
    np.testing.assert_array_equal(np.exp2(quantized.scales.numpy().astype(float).ravel() - 127), scales)
    np.testing.assert_array_equal(quantized.dequantize().numpy().reshape(-1, 32), values * scales[:, None])


def test_fp8_1x128_matches_numpy() -> None:
    x = heavy_tailed(2, 64, 512)
    blocks = x.numpy().reshape(64, 4, 128)
    scales = np.maximum(np.abs(blocks).max(-1), np.float32(1e-10)) / np.float32(448)
    codes = (blocks / scales[..., None]).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    quantized = FP8_1X128.quantize(x)
    assert quantized.scales is not None
    np.testing.assert_array_equal(quantized.scales.numpy(), scales)
    np.testing.assert_array_equal(bits(quantized.payload).numpy(), codes.reshape(64, 512).view(np.uint8))
    values = codes.astype(np.float32) * scales[..., None]
    np.testing.assert_array_equal(quantized.dequantize().numpy(), values.reshape(64, 512))


def test_fp8_128x128_matches_numpy() -> None:
    x = heavy_tailed(3, 2, 256, 384)
    blocks = x.numpy().reshape(2, 2, 128, 3, 128)
    scales = np.abs(blocks).max((2, 4)) / np.float32(448)
    codes = (blocks / scales[:, :, None, :, None]).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    quantized = FP8_128X128.quantize(x)
    assert quantized.scales is not None
    np.testing.assert_array_equal(quantized.scales.numpy(), scales)
    np.testing.assert_array_equal(bits(quantized.payload).numpy(), codes.reshape(2, 256, 384).view(np.uint8))
    values = codes.astype(np.float32) * scales[:, :, None, :, None]
    np.testing.assert_array_equal(quantized.dequantize().numpy(), values.reshape(2, 256, 384))


def test_fp8_scale_is_a_division_not_a_reciprocal_multiply() -> None:
    amax = torch.arange(1, 2001, dtype=torch.float32)
    x = torch.zeros(2000, 128)
    x[:, 5] = amax
    scales = FP8_1X128.quantize(x).scales
    assert scales is not None
    divided = amax.numpy() / np.float32(448)
    multiplied = amax.numpy() * (np.float32(1) / np.float32(448))
    assert (divided != multiplied).sum() > 100
    np.testing.assert_array_equal(scales.ravel().numpy(), divided)


def test_mxfp4_by_hand() -> None:
    x = torch.zeros(1, 64)
    x[0, :4] = torch.tensor([6.0, 0.5, -1.5, 0.25])
    x[0, 32:35] = torch.tensor([-0.75, 0.5, 0.0625])
    quantized = MXFP4.quantize(x)
    assert quantized.scales is not None
    assert quantized.scales.tolist() == [[127, 124]]
    assert quantized.payload.shape == (1, 32)
    assert quantized.payload[0, :2].tolist() == [0x17, 0x0B]  # 6, 0.5; −1.5, 0
    assert quantized.payload[0, 16:18].tolist() == [0x6F, 0x01]  # −6, 4; 0.5, 0, all times 2^-3
    assert quantized.dequantize()[0, 32:35].tolist() == [-0.75, 0.5, 0.0625]


def test_mxfp8_by_hand() -> None:
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([896.0, -34.0, 38.0])  # scale 2: 448, −17 and 19 are ties or exact
    quantized = MXFP8.quantize(x)
    assert quantized.scales is not None
    assert quantized.scales.tolist() == [[128]]
    assert quantized.payload[0, :3].float().tolist() == [448.0, -16.0, 20.0]
    assert quantized.dequantize()[0, :3].tolist() == [896.0, -32.0, 40.0]


def test_fp8_1x128_by_hand() -> None:
    x = torch.zeros(1, 128)
    x[0, :3] = torch.tensor([-224.0, 8.5, 9.5])  # scale 0.5
    quantized = FP8_1X128.quantize(x)
    assert quantized.scales is not None
    assert quantized.scales.tolist() == [[0.5]]
    assert quantized.dequantize()[0, :3].tolist() == [-224.0, 8.0, 10.0]


@pytest.mark.parametrize("fmt", SCALED_ROW_FORMATS, ids=by_name)
def test_one_scale_covers_exactly_one_block(fmt: ActivationFormat) -> None:
    """An outlier anywhere in a block sets that block's scale, to its last channel, and no other's."""
    for channel in (0, fmt.block // 2 - 1, fmt.block // 2, fmt.block - 1):
        x = torch.ones(1, 3 * fmt.block)
        x[0, fmt.block + channel] = 1024.0
        scales = fmt.quantize(x).scales
        assert scales is not None
        assert scales.shape == (1, 3)
        assert scales[0, 0] == scales[0, 2] < scales[0, 1]


def test_one_weight_scale_covers_128_rows_and_columns() -> None:
    for row, column in ((0, 0), (63, 64), (64, 63), (127, 127)):
        w = torch.ones(1, 384, 256)
        w[0, 128 + row, 128 + column] = 1024.0
        scales = FP8_128X128.quantize(w).scales
        assert scales is not None
        assert scales.shape == (1, 3, 2)
        assert (scales > 1).nonzero().tolist() == [[0, 1, 1]]


def half_step(fmt: ActivationFormat, scaled: Tensor) -> Tensor:
    """Half the distance of the payload's neighbours around each FP64 `scaled`, from the format's parameters."""
    mantissa_bits, min_exponent = (1, 0) if fmt is MXFP4 else (3, -6)
    exponent = torch.frexp(scaled.abs())[1] - 1
    return torch.exp2((exponent.clamp(min=min_exponent) - mantissa_bits - 1).double())


@given(seed=seeds, fmt=st.sampled_from(SCALED_ROW_FORMATS), log2_magnitude=st.integers(-60, 60))
def test_error_is_at_most_half_a_step(seed: int, fmt: ActivationFormat, log2_magnitude: int) -> None:
    x = heavy_tailed(seed, 3, 256) * 2.0**log2_magnitude
    x[1] = x[1].abs().max() * torch.linspace(-1, 1, 256)
    quantized = fmt.quantize(x)
    assert quantized.scales is not None
    scales = quantized.scales.double()
    if fmt is not FP8_1X128:
        scales = torch.exp2(scales - 127)
    scales = scales.repeat_interleave(fmt.block, dim=-1)
    error = (quantized.dequantize().double() - x.double()).abs()
    # 1x128 rounds in FP32 twice more: x / s before the code is chosen, and the product on the way back.
    slack = 1 + 2.0**-18 if fmt is FP8_1X128 else 1
    assert (error <= half_step(fmt, x.double() / scales) * scales * slack).all()


@given(seed=seeds, fmt=st.sampled_from(MX_FORMATS))
def test_mx_round_trips_its_own_values(seed: int, fmt: ActivationFormat) -> None:
    values = fmt.quantize(heavy_tailed(seed, 4, 128)).dequantize()
    assert torch.equal(fmt.quantize(values).dequantize(), values)


@given(seed=seeds, fmt=st.sampled_from(SCALED_ROW_FORMATS), shift=st.integers(-15, 60))
def test_a_power_of_two_changes_the_scale_only(seed: int, fmt: ActivationFormat, shift: int) -> None:
    x = heavy_tailed(seed, 2, 128)
    plain, shifted = fmt.quantize(x), fmt.quantize(x * 2.0**shift)
    assert plain.scales is not None
    assert shifted.scales is not None
    assert torch.equal(bits(plain.payload), bits(shifted.payload))
    expected = plain.scales * 2.0**shift if fmt is FP8_1X128 else plain.scales + shift
    assert torch.equal(shifted.scales, expected)


@given(seed=seeds, fmt=st.sampled_from(SCALED_ROW_FORMATS))
def test_negation_changes_signs_only(seed: int, fmt: ActivationFormat) -> None:
    x = heavy_tailed(seed, 2, 128)
    assert torch.equal(fmt.quantize(-x).dequantize(), -fmt.quantize(x).dequantize())


@given(seed=seeds, fmt=st.sampled_from(SCALED_ROW_FORMATS))
def test_order_is_kept_within_a_block(seed: int, fmt: ActivationFormat) -> None:
    x = heavy_tailed(seed, 8, fmt.block).sort(dim=-1).values
    assert (fmt.quantize(x).dequantize().diff(dim=-1) >= 0).all()


@given(seed=seeds, fmt=st.sampled_from(ROW_FORMATS), row=st.integers(0, 7))
def test_a_row_does_not_see_its_neighbours(seed: int, fmt: ActivationFormat, row: int) -> None:
    x = heavy_tailed(seed, 8, 256)
    assert torch.equal(fmt.quantize(x[row]).dequantize(), fmt.quantize(x).dequantize()[row])


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=by_name)
def test_zero_blocks_decode_to_exact_zeros(fmt: BlockFormat) -> None:
    quantized = fmt.quantize(torch.zeros(128, 256))
    assert (quantized.dequantize() == 0).all()
    if fmt in MX_FORMATS:
        assert quantized.scales is not None
        assert (quantized.scales == 0).all()
    x = heavy_tailed(4, 128, 384)
    x[:, 128:256] = 0
    assert (fmt.quantize(x).dequantize()[:, 128:256] == 0).all()


@pytest.mark.parametrize("fmt", SCALED_ROW_FORMATS, ids=by_name)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nan_or_inf_makes_its_block_nan_and_no_other(fmt: ActivationFormat, poison: float) -> None:
    x = heavy_tailed(5, 4, 3 * fmt.block)
    clean = fmt.quantize(x)
    x[2, fmt.block + 7] = poison
    dirty = fmt.quantize(x)
    block = slice(fmt.block, 2 * fmt.block)
    assert dirty.dequantize()[2, block].isnan().all()
    if fmt in MX_FORMATS:
        assert dirty.scales is not None
        assert dirty.scales[2, 1] == 255
    clean_values, dirty_values = clean.dequantize(), dirty.dequantize()
    clean_values[2, block] = dirty_values[2, block] = 0
    assert torch.equal(clean_values, dirty_values)


def test_nan_block_of_mxfp8_has_nan_codes_too() -> None:
    x = torch.ones(1, 32)
    x[0, 3] = math.inf
    assert (bits(MXFP8.quantize(x).payload) == 0x7F).all()


@pytest.mark.parametrize("fmt", SCALED_ROW_FORMATS, ids=by_name)
def test_subnormal_blocks(fmt: ActivationFormat) -> None:
    """Too small for the scale's range: they decode to zeros or to what the smallest scale can say, never to NaN."""
    x = torch.full((1, fmt.block), 2.0**-149)
    x[0, 0] = 2.0**-127
    got = fmt.quantize(x).dequantize()
    assert torch.equal(got[0, 1:], torch.zeros(fmt.block - 1))
    assert got[0, 0] == (0 if fmt is FP8_1X128 else 2.0**-127)


@pytest.mark.parametrize("fmt", SCALED_ROW_FORMATS, ids=by_name)
def test_largest_numbers(fmt: ActivationFormat) -> None:
    x = torch.zeros(1, fmt.block)
    x[0, 0] = FLT_MAX / 2
    exact = 2.0**126 * 1.75 if fmt is FP8_1X128 else 2.0**127
    got = fmt.quantize(x).dequantize()
    assert got[0, 0] == pytest.approx(exact, rel=0.15)
    assert (got[0, 1:] == 0).all()


@pytest.mark.parametrize("fmt", MX_FORMATS, ids=by_name)
def test_flt_max_rounds_to_infinity_and_leaves_the_rest(fmt: ActivationFormat) -> None:
    """Nearest to FLT_MAX among multiples of the step is 2^128, as in a conversion to BF16."""
    x = torch.zeros(1, fmt.block)
    x[0, :2] = torch.tensor([FLT_MAX, 2.0**126])
    quantized = fmt.quantize(x)
    assert quantized.dequantize()[0, :3].tolist() == [math.inf, 2.0**126, 0.0]
    assert BF16.quantize(x).dequantize()[0, 0] == math.inf


def test_fp8_amax_floor() -> None:
    x = torch.full((1, 128), 1e-12)
    quantized = FP8_1X128.quantize(x)
    assert quantized.scales is not None
    assert quantized.scales.item() == np.float32(1e-10) / np.float32(448)
    assert quantized.payload[0, 0].float() == 4.5  # 4.48 · 2^0, rounded to a multiple of 1/2


@pytest.mark.parametrize("fmt", MX_FORMATS, ids=by_name)
def test_rounding_is_a_parameter(fmt: ActivationFormat) -> None:
    x = torch.zeros(1, 32)
    x[0, 0] = 511.0
    up, floor = fmt, dataclasses.replace(fmt, rounding=E8M0Rounding.FLOOR)  # type: ignore[type-var]
    assert up.quantize(x).dequantize()[0, 0] == 512.0
    saturated = 448.0 if fmt is MXFP8 else 384.0
    assert floor.quantize(x).dequantize()[0, 0] == saturated
    assert up != floor


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=by_name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_input_is_converted_exactly(fmt: BlockFormat, dtype: torch.dtype) -> None:
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(6)).to(dtype)
    assert same_bits(fmt.quantize(x), fmt.quantize(x.float()))


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=by_name)
def test_strides_do_not_matter(fmt: BlockFormat) -> None:
    x = heavy_tailed(7, 256, 256)
    for view in (x.T, x[::2], x[:, :128]):
        assert not view.is_contiguous()
        assert same_bits(fmt.quantize(view), fmt.quantize(view.contiguous()))


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=by_name)
@pytest.mark.parametrize("shape", [(0, 256), (3, 0, 256), (0, 128, 256)])
def test_no_rows(fmt: BlockFormat, shape: tuple[int, ...]) -> None:
    quantized = fmt.quantize(torch.empty(shape))
    assert quantized.shape == shape
    assert quantized.dequantize().shape == shape
    if quantized.scales is not None:
        assert tuple(quantized.scales.shape) == fmt.scale_shape(shape)


@pytest.mark.parametrize("fmt", ROW_FORMATS, ids=by_name)
@pytest.mark.parametrize("shape", [(256,), (3, 256), (2, 3, 256)])
def test_leading_dimensions(fmt: ActivationFormat, shape: tuple[int, ...]) -> None:
    x = heavy_tailed(8, *shape)
    got = fmt.quantize(x).dequantize()
    assert got.shape == shape
    assert got.dtype == torch.float32
    assert torch.equal(got.view(-1, 256), fmt.quantize(x.view(-1, 256)).dequantize())


@pytest.mark.parametrize("fmt", [FP8_1X128, MXFP8, MXFP4, FP8_128X128], ids=by_name)
def test_ragged_shapes_are_refused(fmt: BlockFormat) -> None:
    with pytest.raises(FormatError, match="whole blocks"):
        fmt.quantize(torch.zeros(128, 256 + 16))
    with pytest.raises(FormatError, match="too few dimensions"):
        fmt.quantize(torch.tensor(1.0))


def test_ragged_weight_rows_are_refused() -> None:
    with pytest.raises(FormatError, match="whole blocks"):
        FP8_128X128.quantize(torch.zeros(192, 128))
    with pytest.raises(FormatError, match="too few dimensions"):
        FP8_128X128.quantize(torch.zeros(128))


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=by_name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_other_input_dtypes_are_refused(fmt: BlockFormat, dtype: torch.dtype) -> None:
    with pytest.raises(FormatError, match=f"{fmt.name} can't quantise this dtype"):
        fmt.quantize(torch.zeros(128, 128, dtype=dtype))


@pytest.mark.parametrize("fmt", MX_FORMATS, ids=by_name)
def test_float8_e8m0fnu_scales_are_the_same_scales(fmt: ActivationFormat) -> None:
    quantized = fmt.quantize(heavy_tailed(9, 4, 128))
    assert quantized.scales is not None
    assert quantized.scales.dtype == torch.uint8
    again = Quantized(payload=quantized.payload, scales=quantized.scales.view(torch.float8_e8m0fnu), fmt=fmt)
    assert again.scales is not None
    assert again.scales.dtype == torch.uint8
    assert torch.equal(again.dequantize(), quantized.dequantize())


def test_e4m3fnuz_is_refused_not_reinterpreted() -> None:
    payload = torch.zeros(1, 128).to(torch.float8_e4m3fnuz)
    with pytest.raises(FormatError, match="gfx942"):
        FP8_1X128.dequantize(payload, torch.ones(1, 1))


@pytest.mark.parametrize(
    "scales, message",
    [
        (None, "needs scales"),
        (torch.ones(2, 2, dtype=torch.float64), "the scales are not"),
        (torch.ones(2, 4), "do not match"),  # one per 64
        (torch.ones(2), "do not match"),
        (torch.ones(2, 2, device="meta"), "different devices"),
    ],
)
def test_scales_of_another_kind_are_refused(scales: Tensor | None, message: str) -> None:
    payload = torch.zeros(2, 256).to(torch.float8_e4m3fn)
    with pytest.raises(FormatError, match=message):
        Quantized(payload=payload, scales=scales, fmt=FP8_1X128)


def test_scales_where_there_are_none_are_refused() -> None:
    with pytest.raises(FormatError, match="has no scales"):
        BF16.dequantize(torch.zeros(2, 4, dtype=torch.bfloat16), torch.ones(2, 4))


def test_payload_without_a_dimension_is_refused() -> None:
    with pytest.raises(FormatError, match="too few dimensions"):
        BF16.dequantize(torch.tensor(0, dtype=torch.bfloat16), None)


@pytest.mark.parametrize(
    "fmt, payload_bytes, scale_bytes", [(BF16, 512, 0), (FP8_1X128, 256, 8), (MXFP8, 256, 8), (MXFP4, 128, 8)]
)
def test_bytes_of_a_row(fmt: ActivationFormat, payload_bytes: int, scale_bytes: int) -> None:
    assert (fmt.payload_bytes(256), fmt.scale_bytes(256)) == (payload_bytes, scale_bytes)
    quantized = fmt.quantize(torch.zeros(1, 256))
    assert quantized.payload.nbytes == payload_bytes
    assert (0 if quantized.scales is None else quantized.scales.nbytes) == scale_bytes


@pytest.mark.parametrize("fmt", SCALED_ROW_FORMATS, ids=by_name)
def test_bytes_of_a_ragged_row_are_refused(fmt: ActivationFormat) -> None:
    for num_bytes in (fmt.payload_bytes, fmt.scale_bytes):
        with pytest.raises(FormatError, match="whole blocks"):
            num_bytes(fmt.block + 8)


def test_bf16_is_the_identity_on_bf16() -> None:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    quantized = BF16.quantize(x)
    assert quantized.payload.data_ptr() == x.data_ptr()
    assert torch.equal(bits(quantized.payload), bits(x))
    assert torch.equal(bits(quantized.dequantize()), bits(x.float()))


def test_bf16_rounds_fp32_to_nearest_even() -> None:
    x = heavy_tailed(10, 64, 64)
    expected = x.numpy().astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(bits(BF16.quantize(x).payload).numpy(), expected.view(np.uint8))


def test_formats_are_values() -> None:
    assert len({BF16, FP8_1X128, FP8_128X128, MXFP8, MXFP4}) == 5
    assert dataclasses.replace(MXFP4) == MXFP4
    with pytest.raises(dataclasses.FrozenInstanceError):
        MXFP4.rounding = E8M0Rounding.FLOOR  # type: ignore[misc]


@pytest.mark.parametrize("columns", [32, 160, 2880])
def test_a_row_of_1x128_blocks_may_end_with_a_shorter_one(columns: int) -> None:
    """As if it went on with zeros."""
    x = heavy_tailed(6, 5, columns)
    whole = FP8_1X128.quantize(torch.nn.functional.pad(x, (0, -columns % 128)))
    quantized = FP8_1X128.quantize(x)
    assert whole.scales is not None
    assert quantized.scales is not None
    assert torch.equal(quantized.scales, whole.scales)
    assert torch.equal(quantized.payload.view(torch.uint8), whole.payload[:, :columns].contiguous().view(torch.uint8))
    assert torch.equal(quantized.dequantize(), whole.dequantize()[:, :columns])
    assert FP8_1X128.scale_bytes(columns) == 4 * whole.scales.shape[1]
    with pytest.raises(FormatError, match="whole blocks"):
        FP8_1X128.quantize(x[:, : columns - 16])
