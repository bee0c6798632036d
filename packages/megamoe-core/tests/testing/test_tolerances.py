"""Measures of distance, against values worked out by hand."""

import math

import pytest
import torch

from megamoe.formats import MXFP4
from megamoe.problem import QuantMode
from megamoe.testing.tolerances import (
    ORACLE_GATES,
    STAGED_BOUNDS,
    calc_diff,
    code_distance,
    ordered_codes,
    rel_l2,
    row_rel_l2,
    same_bits,
    sampling_error,
)

NAN = float("nan")


def test_rel_l2() -> None:
    assert rel_l2(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])) == pytest.approx(4 / 3)
    assert rel_l2(torch.zeros(3), torch.zeros(3)) == 0
    assert rel_l2(torch.zeros(0), torch.zeros(0)) == 0
    assert rel_l2(torch.ones(3), torch.zeros(3)) == math.inf
    assert rel_l2(torch.tensor([NAN, 1.0]), torch.tensor([1.0, 1.0])) == math.inf


def test_one_wrong_row_does_not_drown() -> None:
    expected = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
    got = expected.clone()
    got[417] = 0
    assert rel_l2(got, expected) < 0.06
    rows = row_rel_l2(got, expected)
    assert rows.argmax() == 417
    assert rows[417] == pytest.approx(1)
    assert rows.sum() == pytest.approx(1)


def test_a_row_that_cancels_out_is_measured_against_its_terms() -> None:
    expected = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    expected[3] = 0
    got = expected + 0.01
    assert row_rel_l2(got, expected).max() < 0.05
    got[3] = NAN
    assert row_rel_l2(got, expected)[3] == math.inf


def test_rows_of_nothing() -> None:
    assert row_rel_l2(torch.zeros(0, 8), torch.zeros(0, 8)).shape == (0,)
    assert row_rel_l2(torch.zeros(2, 8), torch.zeros(2, 8)).tolist() == [0, 0]


def test_calc_diff() -> None:
    x = torch.tensor([1.0, 2.0])
    assert calc_diff(x, x) == 0
    assert calc_diff(x, -x) == 2
    assert calc_diff(torch.zeros(2), torch.zeros(2)) == 0
    assert calc_diff(1.1 * x, x) == pytest.approx(1 - 2 * 1.1 / (1 + 1.21))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_codes_are_in_the_order_of_their_values(dtype: torch.dtype) -> None:
    """Every finite value: sorted by code is sorted by value, and neighbours are one step apart."""
    if dtype is torch.bfloat16:
        values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    else:
        values = torch.arange(256).to(torch.uint8).view(dtype)
    values = values[values.float().isfinite()]
    distinct = values.float().unique()
    codes = ordered_codes(values)
    assert torch.equal(codes.unique(), torch.arange(codes.min(), codes.max() + 1).int())
    assert len(codes.unique()) == len(distinct)
    by_code = values.float()[codes.argsort()]
    assert (by_code.diff() >= 0).all()


def test_steps_of_e2m1() -> None:
    grid = torch.tensor([-6.0, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6, 6])
    payload = MXFP4.quantize(torch.cat((grid, grid)).unsqueeze(0)).payload
    codes = ordered_codes(payload).flatten()[:16]
    assert codes.tolist() == [*range(-7, 8), 7]
    assert code_distance(payload, payload.flip(-1)).max() == 14


def test_zeros_of_either_sign_are_no_step_apart() -> None:
    zeros = torch.tensor([0.0, -0.0])
    assert code_distance(zeros.bfloat16(), zeros.flip(0).bfloat16()).tolist() == [0, 0]
    with pytest.raises(TypeError, match="float32"):
        ordered_codes(zeros)


def test_same_bits() -> None:
    x = torch.tensor([1.0, NAN, 0.0]).bfloat16()
    assert same_bits(x, x.clone())
    assert not same_bits(x, torch.tensor([1.0, NAN, -0.0]).bfloat16())
    assert not same_bits(x, x.half())
    assert not same_bits(x, x[:2])
    assert same_bits(x.repeat(2)[::2], x.repeat(2)[::2].clone())


def test_few_rows_have_slack_and_many_have_none() -> None:
    bounds = STAGED_BOUNDS[QuantMode.A8W8]
    assert bounds.y_limit(2) > 0.026  # the worst of 4000 right results
    assert bounds.y_limit(11) < 0.021  # a scale per 64
    assert bounds.y_limit(1000) < 1.02 * bounds.y_rel_l2
    assert bounds.y_limit(0) == bounds.y_limit(1)


def test_the_bounds_tell_known_faults() -> None:
    """docs/numerics.md: a per-64 scale of A2 is about 0.021 off, a correct a4w4 about 0.226."""
    assert set(ORACLE_GATES) == set(STAGED_BOUNDS) == set(QuantMode)
    assert STAGED_BOUNDS[QuantMode.A8W8].y_rel_l2 < 0.021
    assert ORACLE_GATES[QuantMode.A4W4].rel_l2 > 0.226
    for mode in QuantMode:
        assert STAGED_BOUNDS[mode].y_rel_l2 < ORACLE_GATES[mode].rel_l2


def test_few_values_measure_noise_badly() -> None:
    assert sampling_error(2 * 256) == 0.25
    assert sampling_error(200 * 2048) < 0.01
    assert sampling_error(0) == 1
