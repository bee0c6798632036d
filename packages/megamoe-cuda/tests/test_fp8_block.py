"""The quotients of numerics/fp8_block.cuh: what the kernel quantises has the codes of an IEEE division."""

from __future__ import annotations

import numpy as np
import pytest

CODE_POINTS = np.arange(16, 32, dtype=np.float32) / np.float32(16)  # of a binade, where e4m3 codes change
# A corrected quotient can only miss where a point's remainder is nearly half a unit: at scales near multiples of 2^20.
DELICATE = (np.arange(8)[:, None] * 2**20 + np.arange(-512, 512)).ravel() % 2**23
RANDOM = np.random.default_rng(0).integers(0, 2**23, 8192)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of FP32 values, rounded once: products are exact in FP64, sums rounded to odd on their way."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    rest = (product - (total - c)) + (c - (total - (total - c)))
    is_even = total.view(np.int64) % 2 == 0
    return np.where((rest != 0) & is_even, np.nextafter(total, np.copysign(np.inf, rest)), total).astype(np.float32)


def divided(x: np.ndarray, scale: np.ndarray, corrections: int = 1) -> np.ndarray:
    """`BlockScale::divided`."""
    reciprocal = (1 / scale.astype(np.float64)).astype(np.float32)
    q = x * reciprocal
    for _ in range(corrections):
        q = fma(fma(-q, scale, x), reciprocal, q)
    return q


def quotients_near_code_points(mantissas: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Dividends within four units of the last place of each point, their divisors, and the points."""
    scale, point, units = np.meshgrid((1 + mantissas / 2**23).astype(np.float32), CODE_POINTS, np.arange(-4, 5))
    x = ((scale * point).view(np.int32) + units.astype(np.int32)).view(np.float32)
    return x, scale, point


@pytest.mark.parametrize("mantissas", [DELICATE, RANDOM], ids=["delicate", "random"])
def test_codes_are_those_of_the_ieee_quotient(mantissas: np.ndarray) -> None:
    x, scale, point = quotients_near_code_points(mantissas)
    exact, found = x / scale, divided(x, scale)
    np.testing.assert_array_equal(np.sign(found - point), np.sign(exact - point))


def test_without_the_correction_codes_differ() -> None:
    x, scale, point = quotients_near_code_points(DELICATE)
    assert (np.sign(divided(x, scale, corrections=0) - point) != np.sign(x / scale - point)).any()
