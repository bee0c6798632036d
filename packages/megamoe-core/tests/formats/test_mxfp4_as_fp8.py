"""MXFP4 weights as FP8 operands: the same values to the last bit, or a refusal that says where."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megamoe.errors import FormatError
from megamoe.formats import FP8_1X128, MXFP4, MXFP8, Quantized, mxfp4_to_fp8_1x128

ALL_CODES = torch.arange(256, dtype=torch.uint8)


def mxfp4(scales: Tensor, payload: Tensor | None = None) -> Quantized:
    """MXFP4 of uint8 `scales` `[..., K / 32]`; by default every block holds each of the 16 codes twice."""
    if payload is None:
        codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
        payload = codes.repeat(*scales.shape[:-1], 2 * scales.shape[-1])
    return Quantized(payload=payload, scales=scales, fmt=MXFP4)


def same_values(a: Quantized, b: Quantized) -> bool:
    """Bitwise, so that −0 counts; NaNs count as equal."""
    x, y = a.dequantize(), b.dequantize()
    return bool(((x.view(torch.int32) == y.view(torch.int32)) | (x.isnan() & y.isnan())).all())


@given(
    lowest=st.integers(0, 239),
    offsets=st.lists(st.integers(0, 14), min_size=8, max_size=8),
    seed=st.integers(0, 2**32 - 1),
)
def test_exact_while_scales_differ_by_at_most_2_to_the_14(lowest: int, offsets: list[int], seed: int) -> None:
    scales = (torch.tensor(offsets) + lowest).to(torch.uint8).view(1, 1, 8)
    payload = torch.randint(0, 256, (1, 1, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    weights = mxfp4(scales, payload)
    converted = mxfp4_to_fp8_1x128(weights)
    assert converted.fmt is FP8_1X128
    assert converted.scales is not None
    assert converted.scales.shape == (1, 1, 2)
    assert (converted.scales >= 2.0**-126).all()  # no subnormal that a kernel could flush
    assert same_values(converted, weights)


@pytest.mark.parametrize("order", [[14, 0, 7, 3], [0, 14, 14, 0], [14, 14, 14, 0]])
def test_exact_at_the_widest_spread(order: list[int]) -> None:
    weights = mxfp4(torch.tensor([[[100 + offset for offset in order]]], dtype=torch.uint8))
    converted = mxfp4_to_fp8_1x128(weights)
    assert same_values(converted, weights)
    magnitudes = converted.payload.float().abs()
    assert magnitudes.max() == 6 * 2**6
    assert magnitudes[magnitudes > 0].min() == 2.0**-9
    assert converted.scales is not None
    assert converted.scales.item() == 2.0 ** (114 - 6 - 127)


def test_too_wide_is_refused_with_its_place() -> None:
    scales = torch.full((5, 32, 32), 120, dtype=torch.uint8)
    scales[3, 17, 21] = 135
    scales[4, 0, 0] = 90
    with pytest.raises(FormatError, match="expert 3, row 17, block 5") as raised:
        mxfp4_to_fp8_1x128(mxfp4(scales))
    assert "2^15" in str(raised.value.got)
    assert "2 such blocks" in str(raised.value.got)
    assert "2^14" in str(raised.value.expected)


def test_too_wide_without_an_expert_dimension() -> None:
    scales = torch.tensor([[120, 120, 120, 120], [120, 120, 120, 100]], dtype=torch.uint8)
    with pytest.raises(FormatError, match="of row 1, block 0"):
        mxfp4_to_fp8_1x128(mxfp4(scales))


def test_spread_across_a_block_border_is_fine() -> None:
    weights = mxfp4(torch.tensor([[10, 10, 10, 10, 200, 200, 200, 200]], dtype=torch.uint8))
    assert same_values(mxfp4_to_fp8_1x128(weights), weights)


def test_zero_blocks_constrain_nothing() -> None:
    """MXFP4.quantize gives a zero block byte 0, far from its neighbours' scales."""
    w = torch.randn(2, 4, 256, generator=torch.Generator().manual_seed(1))
    w[0, 1, 32:64] = 0
    w[1, 3, 128:] = 0
    w[1, 2, 64:96] = -0.0
    weights = MXFP4.quantize(w)
    assert weights.scales is not None
    assert weights.scales[0, 1, 1] == 0
    assert same_values(mxfp4_to_fp8_1x128(weights), weights)


def test_one_nonzero_code_makes_a_block_count() -> None:
    scales = torch.tensor([[120, 0, 120, 120]], dtype=torch.uint8)
    payload = torch.zeros(1, 64, dtype=torch.uint8)
    payload[0, 0] = 0x01
    payload[0, 20] = 0x88  # two negative zeros
    weights = mxfp4(scales, payload)
    assert same_values(mxfp4_to_fp8_1x128(weights), weights)
    for byte in (0x10, 0x01):  # either nibble
        payload[0, 20] = byte
        with pytest.raises(FormatError, match="row 0, block 0"):
            mxfp4_to_fp8_1x128(weights)


def test_nan_blocks_stay_nan() -> None:
    weights = mxfp4(torch.tensor([[120, 255, 121, 255], [255, 255, 255, 255]], dtype=torch.uint8))
    converted = mxfp4_to_fp8_1x128(weights)
    assert same_values(converted, weights)
    assert converted.scales is not None
    assert converted.scales.isfinite().all()
    assert converted.dequantize().isnan().sum() == 6 * 32


def test_every_scale_byte() -> None:
    weights = mxfp4(ALL_CODES.view(256, 1).repeat(1, 4))
    assert same_values(mxfp4_to_fp8_1x128(weights), weights)


def test_no_experts() -> None:
    assert mxfp4_to_fp8_1x128(MXFP4.quantize(torch.empty(0, 4, 128))).shape == (0, 4, 128)


def test_other_inputs_are_refused() -> None:
    with pytest.raises(FormatError, match="only MXFP4"):
        mxfp4_to_fp8_1x128(MXFP8.quantize(torch.zeros(1, 128)))
    with pytest.raises(FormatError, match="whole blocks of 128"):
        mxfp4_to_fp8_1x128(MXFP4.quantize(torch.zeros(1, 160)))


def test_gaussian_weights_pass() -> None:
    """Real weights are far from the limit: block amax of Gaussian rows differs by a factor of two or so."""
    w = 0.02 * torch.randn(2, 64, 512, generator=torch.Generator().manual_seed(2))
    weights = MXFP4.quantize(w)
    converted = mxfp4_to_fp8_1x128(weights)
    assert same_values(converted, weights)
    assert not math.isnan(converted.dequantize().sum().item())
