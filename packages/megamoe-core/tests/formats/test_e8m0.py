"""E8M0 scales: every byte, and every rounding rule against its definition in exact rational arithmetic."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamoe.errors import FormatError
from megamoe.formats import E8M0Rounding, e2m1, e4m3, e8m0

ALL_BYTES = torch.arange(256, dtype=torch.uint8)
FLT_MAX = torch.finfo(torch.float32).max
FLT_MIN_SUBNORMAL = 2.0**-149
ELEMENTS = [e4m3.ELEMENT, e2m1.ELEMENT]

positive_fp32 = st.floats(min_value=FLT_MIN_SUBNORMAL, max_value=FLT_MAX, width=32, allow_subnormal=True)
elements = st.sampled_from(ELEMENTS)
roundings = st.sampled_from(E8M0Rounding)


def encode_one(amax: float, element: e8m0.Element, rounding: E8M0Rounding) -> int:
    return int(e8m0.encode(torch.tensor(amax), element=element, rounding=rounding))


def floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def exponent_by_definition(amax: Fraction, element: e8m0.Element, rounding: E8M0Rounding) -> int:
    """The scale's exponent before it saturates, from the sentence that defines each rule."""
    emax = floor_log2(Fraction(element.max_pos))
    exponent = floor_log2(amax)
    if rounding is E8M0Rounding.UP:
        quotient = amax / Fraction(element.max_pos)
        return floor_log2(quotient) + (Fraction(2) ** floor_log2(quotient) < quotient)
    if rounding is E8M0Rounding.FLOOR:
        return exponent - emax
    if rounding is E8M0Rounding.CEIL:
        return exponent + (Fraction(2) ** exponent < amax) - emax
    step = Fraction(2) ** (exponent - element.mantissa_bits)
    if rounding is E8M0Rounding.EVEN:
        return floor_log2(round(amax / step) * step) - emax  # Python rounds halves to even
    assert rounding is E8M0Rounding.RTN_1_5
    return exponent + (amax >= Fraction(3, 2) * Fraction(2) ** exponent) - emax


def test_decode_every_byte_like_ml_dtypes() -> None:
    expected = ALL_BYTES.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(e8m0.decode(ALL_BYTES).numpy(), expected)


def test_decode_every_byte_like_torch() -> None:
    expected = ALL_BYTES.view(torch.float8_e8m0fnu).float()
    torch.testing.assert_close(e8m0.decode(ALL_BYTES), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("byte, value", [(0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (128, 2.0), (254, 2.0**127)])
def test_decode_by_hand(byte: int, value: float) -> None:
    assert e8m0.decode(torch.tensor([byte], dtype=torch.uint8)).item() == value


def test_byte_255_is_nan() -> None:
    assert e8m0.decode(ALL_BYTES).isnan().nonzero().tolist() == [[255]]


def test_bytes_are_unsigned() -> None:
    """A signed byte ≥ 0x80 would decode below 2^-127 or spill into the sign bit."""
    decoded = e8m0.decode(ALL_BYTES[:255])
    assert (decoded > 0).all()
    assert (decoded[1:] == 2 * decoded[:-1]).all()


def test_uint8_and_float8_e8m0fnu_mean_the_same() -> None:
    as_float8 = ALL_BYTES.view(torch.float8_e8m0fnu)
    assert torch.equal(e8m0.as_bytes(as_float8), ALL_BYTES)
    assert torch.equal(e8m0.decode(as_float8).view(torch.int32), e8m0.decode(ALL_BYTES).view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.int32, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(FormatError, match="E8M0 scales have the wrong dtype"):
        e8m0.decode(torch.zeros(4, dtype=dtype))


def test_reciprocal_of_every_byte() -> None:
    product = e8m0.decode(ALL_BYTES) * e8m0.decode_reciprocal(ALL_BYTES)
    assert (product[:255] == 1).all()
    assert product[255].isnan()


@pytest.mark.parametrize(
    "amax, element, rounding, exponent",
    [
        # 448 = 1.75 · 2^8 fits scale 1 exactly; the next number doesn't.
        (448.0, e4m3.ELEMENT, E8M0Rounding.UP, 0),
        (math.nextafter(448.0, math.inf) + 2**-15, e4m3.ELEMENT, E8M0Rounding.UP, 1),
        (6.0, e2m1.ELEMENT, E8M0Rounding.UP, 0),
        (6.5, e2m1.ELEMENT, E8M0Rounding.UP, 1),
        (3.0, e2m1.ELEMENT, E8M0Rounding.UP, -1),
        (1.0, e2m1.ELEMENT, E8M0Rounding.UP, -2),
        (1.0, e4m3.ELEMENT, E8M0Rounding.UP, -8),
        (7.9, e2m1.ELEMENT, E8M0Rounding.FLOOR, 0),
        (8.0, e2m1.ELEMENT, E8M0Rounding.FLOOR, 1),
        (4.0, e2m1.ELEMENT, E8M0Rounding.CEIL, 0),
        (4.5, e2m1.ELEMENT, E8M0Rounding.CEIL, 1),
        (6.9, e2m1.ELEMENT, E8M0Rounding.EVEN, 0),  # below 7 = 1.75 · 2^2: rounds to 6
        (7.0, e2m1.ELEMENT, E8M0Rounding.EVEN, 1),  # the tie between 6 and 8 goes to 8
        (495.0, e4m3.ELEMENT, E8M0Rounding.EVEN, 0),
        (496.0, e4m3.ELEMENT, E8M0Rounding.EVEN, 1),  # the tie between 480 and 512
        (5.9, e2m1.ELEMENT, E8M0Rounding.RTN_1_5, 0),
        (6.0, e2m1.ELEMENT, E8M0Rounding.RTN_1_5, 1),
        (384.0, e4m3.ELEMENT, E8M0Rounding.RTN_1_5, 1),
    ],
)
def test_encode_by_hand(amax: float, element: e8m0.Element, rounding: E8M0Rounding, exponent: int) -> None:
    assert encode_one(amax, element, rounding) == exponent + 127


@given(amax=positive_fp32, element=elements, rounding=roundings)
def test_encode_follows_the_definition(amax: float, element: e8m0.Element, rounding: E8M0Rounding) -> None:
    exponent = exponent_by_definition(Fraction(amax), element, rounding)
    assert encode_one(amax, element, rounding) == min(max(exponent, -127), 127) + 127


@pytest.mark.parametrize("rounding", E8M0Rounding)
@pytest.mark.parametrize("element", ELEMENTS, ids=lambda element: element.name)
def test_encode_around_every_threshold(element: e8m0.Element, rounding: E8M0Rounding) -> None:
    """Each significand at which some rule switches, and its two FP32 neighbours, in every binade."""
    switches = np.array([1.0, 1.5, 1.75, 1.875, 1.9375], dtype=np.float32)
    near = np.concatenate([switches, np.nextafter(switches, np.float32(2)), np.nextafter(switches, np.float32(0))])
    amax = np.ldexp(near[:, None], np.arange(-126, 128, 9)).astype(np.float32).ravel()
    got = e8m0.encode(torch.from_numpy(amax), element=element, rounding=rounding).tolist()
    exponents = [exponent_by_definition(Fraction(float(value)), element, rounding) for value in amax]
    assert got == [min(max(exponent, -127), 127) + 127 for exponent in exponents]


@given(amax=st.floats(min_value=2.0**-110, max_value=FLT_MAX, width=32), element=elements)
def test_up_equals_fp32_division_rounded_up(amax: float, element: e8m0.Element) -> None:
    """What a kernel may do: one IEEE division, then round up to a power of two. Holds for normal quotients."""
    quotient = np.float32(amax) / np.float32(element.max_pos)
    fraction, exponent = np.frexp(quotient)
    assert encode_one(amax, element, E8M0Rounding.UP) == exponent - (fraction == 0.5) + 127


@given(low=positive_fp32, high=positive_fp32, element=elements, rounding=roundings)
def test_encode_is_monotonic(low: float, high: float, element: e8m0.Element, rounding: E8M0Rounding) -> None:
    low, high = sorted((low, high))
    assert encode_one(low, element, rounding) <= encode_one(high, element, rounding)


@pytest.mark.parametrize("rounding", E8M0Rounding)
@pytest.mark.parametrize("element", ELEMENTS, ids=lambda element: element.name)
def test_encode_special_values(element: e8m0.Element, rounding: E8M0Rounding) -> None:
    amax = torch.tensor([0.0, FLT_MIN_SUBNORMAL, 2.0**-126, 2.0**-127 * element.max_pos, math.inf, math.nan])
    got = e8m0.encode(amax, element=element, rounding=rounding)
    assert got[[0, 1, 2, 4, 5]].tolist() == [0, 0, 0, 255, 255]
    assert got[3] <= 1


@pytest.mark.parametrize("element, byte", [(e4m3.ELEMENT, 127 + 120), (e2m1.ELEMENT, 127 + 126)])
def test_encode_flt_max(element: e8m0.Element, byte: int) -> None:
    """FLT_MAX = (2 − 2^-23) · 2^127 needs the doubled scale under UP."""
    assert encode_one(FLT_MAX, element, E8M0Rounding.UP) == byte
    assert encode_one(FLT_MAX, element, E8M0Rounding.FLOOR) == byte - 1
