"""Conversions against codes worked out by hand from the formats' definitions."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from isa_harness import LANE, lone_wave, run, set_f32, set_u32

from megamoe_rocm.isa.numbers import E2M1, E4M3, E5M2, E8M0, to_e2m1, to_e4m3

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "value, code",
    [
        (0.0, 0), (0.25, 0), (0.26, 1), (0.5, 1), (0.75, 2), (1.25, 2), (1.5, 3), (1.75, 4), (2.5, 4), (2.6, 5),
        (3.5, 6), (5.0, 6), (5.1, 7), (6.0, 7), (100.0, 7), (-0.25, 8), (-1.0, 10), (-INF, 15), (INF, 7),
    ],
)  # fmt: skip
def test_fp4_rounds_ties_to_even_and_saturates(value: float, code: int) -> None:
    wave = lone_wave()
    set_f32(wave, 1, value)
    set_f32(wave, 3, 1.0)
    run(wave, "v_cvt_scalef32_pk_fp4_f32 v0, v1, v2, v3")
    assert wave.v[0, 0] & 0xFF == code  # v2 is zero: its code is the upper nibble


def test_fp4_fills_one_byte_by_op_sel_and_keeps_the_others() -> None:
    wave = lone_wave()
    set_u32(wave, 0, 0x11223344)
    set_f32(wave, 1, 1.0)
    set_f32(wave, 2, -6.0)
    set_f32(wave, 3, 1.0)
    for select, result in (
        ("[0,0,0,0]", 0x112233F2),
        ("[0,0,1,0]", 0x1122F2F2),
        ("[0,0,0,1]", 0x11F2F2F2),
        ("[0,0,1,1]", 0xF2F2F2F2),
    ):
        run(wave, f"v_cvt_scalef32_pk_fp4_f32 v0, v1, v2, v3 op_sel:{select}")
        assert wave.v[0, 5] == result


def test_a_conversion_divides_by_the_scales_exponent_alone() -> None:
    wave = lone_wave()
    set_f32(wave, 1, 12.0)
    set_f32(wave, 2, 4.0)
    set_f32(wave, 3, 7.9)  # counts as 4
    run(wave, "v_cvt_scalef32_pk_fp4_f32 v0, v1, v2, v3")
    assert wave.v[0, 0] == 0x25  # 12 / 4 = 3, 4 / 4 = 1
    set_f32(wave, 3, 4.0)
    run(wave, "v_cvt_scalef32_pk_f32_fp4 v[4:5], v0, v3")
    assert (wave.vf[4, 0], wave.vf[5, 0]) == (12.0, 4.0)
    run(wave, "v_cvt_scalef32_pk_fp8_f32 v6, v1, v2, v3", "v_cvt_scalef32_pk_f32_fp8 v[4:5], v6, v3")
    assert wave.v[6, 0] == 0x3844  # 3 = 0x44, 1 = 0x38
    assert (wave.vf[4, 0], wave.vf[5, 0]) == (12.0, 4.0)


def test_fp4_from_packed_bf16() -> None:
    wave = lone_wave()
    set_u32(wave, 1, 0xBF803FC0)  # 1.5 below, −1 above
    set_f32(wave, 2, 1.0)
    run(wave, "v_cvt_scalef32_pk_fp4_bf16 v0, v1, v2 op_sel:[0,0,0,1]")
    assert wave.v[0, 0] == 0x00A30000


@pytest.mark.parametrize(
    "value, code, clamped",
    [
        (1.0, 0x38, 0x38), (448.0, 0x7E, 0x7E), (464.0, 0x7E, 0x7E), (465.0, 0x7F, 0x7E), (-1e9, 0xFF, 0xFE),
        (2.0**-9, 0x01, 0x01), (2.0**-10, 0x00, 0x00), (1.5 * 2.0**-9, 0x02, 0x02), (1.0625, 0x38, 0x38),
        (1.1875, 0x3A, 0x3A),
        (NAN, 0x7F, 0x7F), (-0.0, 0x80, 0x80),
    ],
)  # fmt: skip
def test_fp8_rounding_overflow_and_the_clamp_mode(value: float, code: int, clamped: int) -> None:
    wave = lone_wave()
    set_f32(wave, 1, value)
    run(wave, "v_cvt_pk_fp8_f32 v0, v1, v1")
    assert wave.v[0, 0] & 0xFF == code
    run(wave, "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1", "v_cvt_pk_fp8_f32 v0, v1, v1 op_sel:[0,0,1]")
    assert wave.v[0, 0] >> 24 == clamped
    assert wave.v[0, 0] & 0xFF == code  # the lower word is kept


def test_fp8_to_fp32_by_byte_and_word() -> None:
    wave = lone_wave()
    set_u32(wave, 1, 0x7E38C001)
    run(wave, "v_cvt_f32_fp8_sdwa v2, v1 src0_sel:BYTE_1", "v_cvt_f32_fp8_e32 v3, v1")
    assert (wave.vf[2, 0], wave.vf[3, 0]) == (-2.0, 2.0**-9)
    run(wave, "v_cvt_pk_f32_fp8_sdwa v[4:5], v1 src0_sel:WORD_1", "v_cvt_pk_f32_fp8_e32 v[6:7], v1")
    assert (wave.vf[4, 0], wave.vf[5, 0]) == (1.0, 448.0)
    assert (wave.vf[6, 0], wave.vf[7, 0]) == (2.0**-9, -2.0)


def test_half_precision() -> None:
    wave = lone_wave()
    set_f32(wave, 1, 1.0 + 2.0**-8)  # a tie for BF16
    set_f32(wave, 2, -3.0)
    run(wave, "v_cvt_pk_bf16_f32 v0, v1, v2", "v_cvt_f16_f32_e32 v3, v2", "v_cvt_f32_f16_e32 v4, v3")
    assert wave.v[0, 0] == 0xC0403F80
    assert (wave.v[3, 0], wave.vf[4, 0]) == (0xC200, -3.0)
    set_f32(wave, 1, NAN)
    run(wave, "v_cvt_pk_bf16_f32 v0, v1, v1")
    assert wave.v[0, 0] & 0x7FFF == 0x7FC0


def test_inactive_lanes_keep_their_codes() -> None:
    wave = lone_wave()
    set_u32(wave, 0, 0x55)
    wave.vf[1] = LANE
    set_f32(wave, 3, 1.0)
    wave.set_exec(0b100)
    run(wave, "v_cvt_scalef32_pk_fp4_f32 v0, v1, v1, v3")
    assert wave.v[0, :4].tolist() == [0x55, 0x55, 0x44, 0x55]


@pytest.mark.parametrize(
    "table, reference",
    [(E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2)],
)
def test_all_eight_bit_values(table: np.ndarray, reference: type) -> None:
    expected = np.arange(256, dtype=np.uint8).view(reference).astype(np.float64)
    np.testing.assert_array_equal(table, expected)


def test_all_four_bit_values_and_scales() -> None:
    assert E2M1.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert (E8M0[0], E8M0[127], E8M0[254]) == (2.0**-127, 1.0, 2.0**127)
    assert np.isnan(E8M0[255])


def test_rounding_agrees_with_ml_dtypes_on_many_values() -> None:
    rng = np.random.default_rng(3)
    values = np.concatenate([rng.standard_normal(5000) * 2.0 ** rng.integers(-12, 9, 5000), np.linspace(-7, 7, 2001)])
    values = values.astype(np.float32)
    small = values[np.abs(values) <= 448]
    np.testing.assert_array_equal(to_e4m3(small, clamp=False), small.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    fp4 = values.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(to_e2m1(values), fp4 & 0xF)
