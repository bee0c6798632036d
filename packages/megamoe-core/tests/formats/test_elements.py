"""e4m3fn and e2m1: every code, every tie, and ml_dtypes' implementation as the second opinion."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamoe.errors import FormatError
from megamoe.formats import e2m1, e4m3

ALL_BYTES = torch.arange(256, dtype=torch.uint8)
E2M1_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

fp32 = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)


def fp32_near_ties(magnitudes: np.ndarray) -> np.ndarray:
    """Every value, every midpoint, and the FP32 neighbours of both, with both signs."""
    points = np.concatenate([magnitudes, (magnitudes[1:] + magnitudes[:-1]) / 2]).astype(np.float32)
    near = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))])
    return np.concatenate([near, -near])


def test_e4m3_decodes_every_code_like_ml_dtypes() -> None:
    expected = ALL_BYTES.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes = ALL_BYTES.view(torch.float8_e4m3fn)
    np.testing.assert_array_equal(e4m3.decode(codes).numpy(), expected)
    assert torch.equal(e4m3.decode(codes.view(16, 16).t()[:5]), e4m3.decode(codes).view(16, 16).t()[:5])


def test_e4m3_round_trips_every_code() -> None:
    codes = e4m3.encode(e4m3.decode(ALL_BYTES.view(torch.float8_e4m3fn))).view(torch.uint8)
    expected = ALL_BYTES.clone()
    expected[0xFF] = e4m3.NAN_CODE
    assert torch.equal(codes, expected)


def test_e4m3_rounds_every_tie_like_ml_dtypes() -> None:
    magnitudes = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = fp32_near_ties(magnitudes)
    expected = values.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(e4m3.encode(torch.from_numpy(values)).view(torch.uint8).numpy(), expected)


@pytest.mark.parametrize(
    "value, rounded",
    [
        (17.0, 16.0),  # ties in [16, 32), where the step is 2
        (19.0, 20.0),
        (2.0**-10, 0.0),  # half of the smallest subnormal
        (3 * 2.0**-10, 2.0**-8),
        (448.0, 448.0),
        (463.0, 448.0),
        (465.0, 448.0),  # torch's own cast made NaN of this before 2.13
        (-1e9, -448.0),
        (math.inf, 448.0),
        (-math.inf, -448.0),
    ],
)
def test_e4m3_by_hand(value: float, rounded: float) -> None:
    assert e4m3.encode(torch.tensor([value])).float().item() == rounded


def test_e4m3_has_one_nan() -> None:
    nans = torch.tensor([0x7FC00000, -0x400000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert nans.isnan().all()
    assert e4m3.encode(nans).view(torch.uint8).tolist() == [0x7F] * 3


def test_e2m1_decodes_every_code() -> None:
    expected = E2M1_MAGNITUDES + [-magnitude for magnitude in E2M1_MAGNITUDES]
    decoded = e2m1.decode(torch.arange(16, dtype=torch.uint8))
    assert decoded.tolist() == expected
    assert decoded[8].signbit()
    np.testing.assert_array_equal(
        decoded.numpy(), np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    )


def test_e2m1_round_trips_every_code() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(e2m1.encode(e2m1.decode(codes)), codes)


def test_e2m1_rounds_every_tie_like_ml_dtypes() -> None:
    values = fp32_near_ties(np.array(E2M1_MAGNITUDES, dtype=np.float32))
    expected = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(e2m1.encode(torch.from_numpy(values)).numpy(), expected)


@given(value=fp32)
def test_e2m1_rounds_like_ml_dtypes(value: float) -> None:
    expected = np.float32(value).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    got = e2m1.decode(e2m1.encode(torch.tensor([value])))
    assert got.item() == expected
    assert got.signbit().item() == (math.copysign(1, value) < 0)


@pytest.mark.parametrize(
    "value, rounded",
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4), (5.01, 6), (7.0, 6), (math.inf, 6)],
)
def test_e2m1_by_hand(value: float, rounded: float) -> None:
    assert e2m1.decode(e2m1.encode(torch.tensor([value, -value]))).tolist() == [rounded, -rounded]


def test_e2m1_nan_is_plus_6() -> None:
    assert e2m1.encode(torch.tensor([math.nan, -math.nan])).tolist() == [7, 7]


@given(low=fp32, high=fp32)
def test_both_are_monotonic(low: float, high: float) -> None:
    pair = torch.tensor(sorted((low, high)))
    for rounded in (e4m3.encode(pair).float(), e2m1.decode(e2m1.encode(pair))):
        assert rounded[0] <= rounded[1]


def test_even_element_is_the_low_nibble() -> None:
    packed = e2m1.pack(torch.tensor([0x1, 0x7, 0xF, 0x0], dtype=torch.uint8))
    assert packed.tolist() == [0x71, 0x0F]
    assert e2m1.decode_packed(packed).tolist() == [0.5, 6.0, -6.0, 0.0]


def test_pack_is_the_inverse_of_unpack_for_every_byte() -> None:
    codes = e2m1.unpack(ALL_BYTES)
    assert codes.shape == (512,)
    assert codes.max() == 15
    assert torch.equal(e2m1.pack(codes), ALL_BYTES)


def test_decode_packed_is_decode_of_unpack_for_every_byte() -> None:
    payload = ALL_BYTES.view(2, 4, 32)
    decoded = e2m1.decode_packed(payload)
    assert decoded.shape == (2, 4, 64)
    assert torch.equal(decoded.view(torch.int32), e2m1.decode(e2m1.unpack(payload)).view(torch.int32))


def test_odd_number_of_codes_is_refused() -> None:
    with pytest.raises(FormatError, match="odd number"):
        e2m1.pack(torch.zeros(2, 3, dtype=torch.uint8))
