"""Arithmetic that numpy does not have: fused multiply-add, small float formats.

Formats: OCP Microscaling v1.0 (e2m1, e4m3fn, e5m2, e2m3, e3m2, E8M0). gfx950's FP8 is OCP's, not the FNUZ of gfx942.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megamoe_rocm.isa.wave import Array


def fma32(a: Array, b: Array, c: Array) -> Array:
    """`a * b + c` in FP32, rounded once.

    The product of two FP32 is exact in FP64. The sum is made odd where it is inexact ("round to odd", Boldo and
    Melquiond 2008), so that rounding it to FP32 rounds once.
    """
    product = a.astype(np.float64) * b
    addend = c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    inexact = (error != 0) & np.isfinite(total)
    if inexact.any():
        bits = total.view(np.int64)
        step = np.where((error > 0) == (total > 0), 1, -1)
        # Truncate towards the exact value's side, then set the lowest bit.
        toward_zero = np.where(step < 0, bits - 1, bits)
        total = np.where(inexact, toward_zero | 1, bits).view(np.float64)
    result: Array = total.astype(np.float32)
    return result


def float_table(
    exponent_bits: int, mantissa_bits: int, *, nan_codes: tuple[int, ...] = (), inf: int | None = None
) -> Array:
    """Values of all codes of a small float format, FP64.

    Args:
        exponent_bits, mantissa_bits: of the format; one sign bit on top.
        nan_codes: magnitudes that are NaN.
        inf: the magnitude that is infinite.
    """
    width = exponent_bits + mantissa_bits
    bias = (1 << (exponent_bits - 1)) - 1
    magnitude = np.arange(1 << width)
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    values = np.ldexp(fraction, np.maximum(exponent, 1) - bias)
    values[list(nan_codes)] = np.nan
    if inf is not None:
        values[inf] = np.inf
    return np.concatenate([values, -values])


E2M1 = float_table(2, 1)
E2M3 = float_table(2, 3)
E3M2 = float_table(3, 2)
E4M3 = float_table(4, 3, nan_codes=(0x7F,))
E5M2 = float_table(5, 2, nan_codes=(0x7D, 0x7E, 0x7F), inf=0x7C)
E8M0 = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)  # byte 255 is NaN


def round_to_table(values: Array, table: Array) -> tuple[Array, Array]:
    """Codes of the nearest values of a format, ties to even codes; beyond the largest finite value, that value.

    Args:
        values: FP64, no NaN.
        table: all values of the format, as `float_table` gives them.

    Returns:
        codes (uint32), and where the rounded magnitude would lie beyond the largest finite one.
    """
    half = table[: len(table) // 2]
    finite = half[np.isfinite(half)]
    magnitude = np.abs(values)
    above = np.searchsorted(finite, magnitude).clip(1, len(finite) - 1)
    below = above - 1
    middle = (finite[below] + finite[above]) / 2
    code = np.where((magnitude > middle) | ((magnitude == middle) & (above % 2 == 0)), above, below)
    code = np.where(magnitude <= finite[0], 0, code)
    # As if there were one more value: it is overflow from half a step beyond the largest on.
    step = finite[-1] - finite[-2]
    overflow = (magnitude > finite[-1] + step / 2) | (
        (magnitude == finite[-1] + step / 2) & ((len(finite) - 1) % 2 == 1)
    )
    sign = np.signbit(values) * (len(table) // 2)
    return (code + sign).astype(np.uint32), overflow


def to_e4m3(values: Array, *, clamp: bool) -> Array:
    """e4m3fn codes, nearest even.

    Overflow and infinity give the largest finite value if `clamp` (MODE.FP16_OVFL), otherwise NaN; NaN stays NaN.
    """
    return _to_fp8(values, E4M3, nan=0x7F, largest=0x7E, overflow_code=0x7F, clamp=clamp)


def to_e5m2(values: Array, *, clamp: bool) -> Array:
    """e5m2 codes, nearest even; overflow gives infinity unless `clamp`."""
    return _to_fp8(values, E5M2, nan=0x7F, largest=0x7B, overflow_code=0x7C, clamp=clamp)


def _to_fp8(values: Array, table: Array, *, nan: int, largest: int, overflow_code: int, clamp: bool) -> Array:
    wide = values.astype(np.float64)
    bad = np.isnan(wide)
    codes, overflow = round_to_table(np.where(bad, 0.0, wide), table)
    sign = np.signbit(wide) * np.uint32(0x80)
    codes = np.where(overflow, (largest if clamp else overflow_code) | sign, codes)
    return np.where(bad, nan | sign, codes).astype(np.uint32)


def to_e2m1(values: Array) -> Array:
    """e2m1 codes, nearest even, saturating; NaN becomes the largest value, as the format has no NaN."""
    wide = values.astype(np.float64)
    codes, _ = round_to_table(np.where(np.isnan(wide), np.copysign(6.0, wide), wide), E2M1)
    return codes


def to_bf16(values: Array) -> Array:
    """BF16 patterns of FP32 values, nearest even; NaN stays a quiet NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint32)


def from_bf16(patterns: Array) -> Array:
    """FP32 values of BF16 patterns."""
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def exponent_of_scale(scale: Array) -> Any:
    """What `v_cvt_scalef32_*` use of an FP32 scale: its exponent field alone, as E8M0."""
    return (scale.view(np.uint32) >> 23) & 0xFF
