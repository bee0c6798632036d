"""Vector instructions against results worked out by hand: v1, v2 and v3 are the sources, v0 is the result."""

from __future__ import annotations

import math

import numpy as np
import pytest
from isa_harness import LANE, f32, lone_wave, run, set_f32, set_u32

from megamoe_rocm.isa.errors import UnsupportedInstructionError
from megamoe_rocm.isa.instructions.vector import div_fixup, div_scale, permute_bytes
from megamoe_rocm.isa.numbers import fma32
from megamoe_rocm.isa.wave import VCC

NAN, INF = math.nan, math.inf
WHOLE = "dst_sel:DWORD dst_unused:UNUSED_PAD"

INTEGER_CASES = [
    ("v_mov_b32_e32 v0, -1", (), 0xFFFFFFFF),
    ("v_mov_b32_e32 v0, 1.0", (), 0x3F800000),
    ("v_mov_b32_e32 v0, 0.15915494", (), 0x3E22F983),
    ("v_not_b32_e32 v0, v1", (0x0F0F0F0F,), 0xF0F0F0F0),
    ("v_and_b32_e32 v0, 0x3ff, v1", (0xFFFF1234,), 0x234),
    ("v_xor_b32_e32 v0, v1, v2", (0xFF, 0x0F), 0xF0),
    ("v_xnor_b32_e32 v0, v1, v2", (0xFF, 0x0F), 0xFFFFFF0F),
    ("v_or3_b32 v0, v1, v2, v3", (1, 2, 4), 7),
    ("v_and_or_b32 v0, v1, 63, v3", (0x47, 0, 0xC0), 0xC7),
    ("v_bfi_b32 v0, v1, v2, v3", (0xFF00, 0xAAAA, 0x5555), 0xAA55),
    ("v_bfe_u32 v0, v1, 4, 8", (0x12345678,), 0x67),
    ("v_bfe_u32 v0, v1, 4, 0", (0x12345678,), 0),
    ("v_bfe_i32 v0, v1, 0, 8", (0x12345688,), 0xFFFFFF88),
    ("v_bfe_i32 v0, v1, 24, 16", (0x80000000,), 0xFFFFFF80),
    ("v_bfm_b32 v0, v1, v2", (4, 8), 0xF00),
    ("v_bfrev_b32_e32 v0, v1", (1,), 0x80000000),
    ("v_bfrev_b32_e32 v0, v1", (0x0000A000,), 0x00050000),
    ("v_bcnt_u32_b32 v0, v1, v2", (0xF0F, 10), 18),
    ("v_ffbh_u32_e32 v0, v1", (0x00010000,), 15),
    ("v_ffbh_u32_e32 v0, v1", (0,), 0xFFFFFFFF),
    ("v_ffbl_b32_e32 v0, v1", (0x00A00000,), 21),
    ("v_perm_b32 v0, v1, v2, v3", (0x07060504, 0x03020100, 0x07050301), 0x07050301),
    ("v_perm_b32 v0, v1, v2, v3", (0xF7060504, 0x03028100, 0x0C0D0B08), 0x00FFFFFF),
    ("v_alignbit_b32 v0, v1, v2, 8", (0x11223344, 0x55667788), 0x44556677),
    ("v_alignbyte_b32 v0, v1, v2, 3", (0x11223344, 0x55667788), 0x22334455),
    ("v_lshlrev_b32_e32 v0, 33, v1", (3,), 6),
    ("v_lshrrev_b32_e32 v0, 4, v1", (0xF0000000,), 0x0F000000),
    ("v_ashrrev_i32_e32 v0, 4, v1", (0xF0000000,), 0xFF000000),
    ("v_ashrrev_i32_e32 v0, v1, v2", (36, 0x80000000), 0xF8000000),
    ("v_add_u32_e32 v0, v1, v2", (0xFFFFFFFF, 2), 1),
    ("v_add_u32_e32 v0, 0x400, v1", (1,), 0x401),
    ("v_sub_u32_e32 v0, v1, v2", (1, 2), 0xFFFFFFFF),
    ("v_subrev_u32_e32 v0, v1, v2", (1, 2), 1),
    ("v_add3_u32 v0, v1, v2, v3", (0xFFFFFFFF, 1, 5), 5),
    ("v_lshl_add_u32 v0, v1, 5, v3", (3, 0, 7), 103),
    ("v_add_lshl_u32 v0, v1, v2, 2", (3, 4), 28),
    ("v_lshl_or_b32 v0, v1, 6, v3", (3, 0, 0x3F), 0xFF),
    ("v_xad_u32 v0, v1, -1, v3", (5, 0, 1), 0xFFFFFFFB),
    ("v_mul_lo_u32 v0, v1, v2", (0xFFFFFFFF, 5), 0xFFFFFFFB),
    ("v_mul_hi_u32 v0, v1, v2", (0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFE),
    ("v_mul_hi_i32 v0, v1, v2", (0xFFFFFFFF, 0xFFFFFFFF), 0),
    ("v_mul_u32_u24_e32 v0, v1, v2", (0xFF000003, 5), 15),
    ("v_mul_i32_i24_e32 v0, v1, v2", (0x00FFFFFF, 5), 0xFFFFFFFB),
    ("v_mad_u32_u24 v0, v1, v2, v3", (3, 5, 1), 16),
    ("v_min_i32_e32 v0, v1, v2", (0xFFFFFFFF, 1), 0xFFFFFFFF),
    ("v_max_i32_e32 v0, 0, v1", (0xFFFFFFFF,), 0),
    ("v_max_u32_e32 v0, 1, v1", (0xFFFFFFFF,), 0xFFFFFFFF),
    ("v_max3_i32 v0, v1, v2, v3", (0xFFFFFFFF, 1, 7), 7),
    ("v_min3_u32 v0, v1, v2, v3", (0xFFFFFFFF, 9, 7), 7),
    ("v_med3_i32 v0, v1, v2, v3", (0xFFFFFFFF, 9, 7), 7),
    ("v_add_u16_e32 v0, v1, v2", (0xAAAAFFFF, 0xBBBB0002), 1),
    ("v_add_u16_e32 v0, -2, v1", (0xAAAA0001,), 0xFFFF),
    ("v_lshrrev_b16_e32 v0, 8, v1", (0xAAAA1234,), 0x12),
    ("v_lshlrev_b16_e32 v0, 8, v1", (0xAAAA1234,), 0x3400),
    ("v_ashrrev_i16_e32 v0, 4, v1", (0xAAAAF000,), 0xFF00),
    ("v_max_i16_e32 v0, v1, v2", (0xFFFF, 1), 1),
    ("v_min_u16_e32 v0, v1, v2", (0xFFFF, 1), 1),
    ("v_mul_lo_u16_e32 v0, v1, v2", (0x1234, 0x10), 0x2340),
    ("v_sub_u16_e32 v0, v1, v2", (1, 2), 0xFFFF),
    # a & b | c, a ^ (b & c), and their complements, from the constants 0xf0, 0xcc, 0xaa for a, b, c
    ("v_bitop3_b32 v0, v1, v2, v3 bitop3:0xea", (0b1100, 0b1010, 0b0001), 0b1001),
    ("v_bitop3_b32 v0, v1, v2, v3 bitop3:0x78", (0b1100, 0b1010, 0b0110), 0b1110),
    ("v_bitop3_b32 v0, v1, v2, v3 bitop3:0x15", (0b1100, 0b1010, 0b0001), 0xFFFFFFF6),
    ("v_bitop3_b32 v0, v1, v2, v3 bitop3:0x36", (0b1100, 0b1010, 0b0110), 0b0100),
    ("v_bitop3_b32 v0, v1, v2, v3", (1, 2, 3), 0),
    ("v_sub_u32_e64 v0, v1, 1 clamp", (0,), 0),
    ("v_sub_u32_e64 v0, v1, 1 clamp", (5,), 4),
    ("v_add_u32_e64 v0, v1, v2 clamp", (0xFFFFFFFF, 2), 0xFFFFFFFF),
    ("v_cvt_f32_u32_e32 v0, v1", (0x80000000,), 0x4F000000),
    ("v_cvt_f32_i32_e32 v0, v1", (0xFFFFFFFF,), 0xBF800000),
    ("v_cvt_f32_ubyte2_e32 v0, v1", (0x00050000,), 0x40A00000),
    (f"v_add_u32_sdwa v0, v1, v2 {WHOLE} src0_sel:BYTE_1 src1_sel:WORD_1", (0x1200, 0x30000), 0x15),
    (f"v_add_u32_sdwa v0, v1, sext(v2) {WHOLE} src0_sel:DWORD src1_sel:BYTE_0", (1, 0xFF), 0),
]  # fmt: skip


@pytest.mark.parametrize("text, sources, result", INTEGER_CASES)
def test_integers_and_bits(text: str, sources: tuple[int, ...], result: int) -> None:
    wave = lone_wave()
    for at, value in enumerate(sources):
        set_u32(wave, at + 1, value)
    run(wave, text)
    assert set(wave.v[0].tolist()) == {result}


FLOAT_CASES = [
    ("v_add_f32_e32 v0, v1, v2", (1.5, 2.25), 3.75),
    ("v_add_f32_e64 v0, -v1, |v2|", (1.5, -2.25), 0.75),
    ("v_add_f32_e64 v0, v1, -|v2|", (1.5, -2.25), -0.75),
    ("v_sub_f32_e32 v0, v1, v2", (1.0, 2.0), -1.0),
    ("v_subrev_f32_e32 v0, v1, v2", (1.0, 2.0), 1.0),
    ("v_mul_f32_e32 v0, 0x40490fdb, v1", (2.0,), 6.2831855),
    ("v_add_f32_e64 v0, v1, v2 clamp", (0.75, 0.5), 1.0),
    ("v_add_f32_e64 v0, v1, v2 clamp", (0.75, -1.0), 0.0),
    ("v_fma_f32 v0, v1, v2, v3", (1 + 2**-12, 1 - 2**-12, -1.0), -(2.0**-24)),
    ("v_fma_f32 v0, -v1, v2, 1.0", (3.0, 2.0), -5.0),
    ("v_fmaak_f32 v0, v1, v2, 0x42280000", (2.0, 4.0), 50.0),
    ("v_fmamk_f32 v0, v1, 0x42280000, v2", (2.0, 4.0), 88.0),
    ("v_min_f32_e32 v0, v1, v2", (1.0, NAN), 1.0),
    ("v_max_f32_e32 v0, v1, v2", (NAN, 1.0), 1.0),
    ("v_max_f32_e32 v0, v1, v2", (-0.0, 0.0), 0.0),
    ("v_min_f32_e32 v0, v1, v2", (0.0, -0.0), -0.0),
    ("v_max_f32_e64 v0, |v1|, |v1|", (-3.0,), 3.0),
    ("v_max3_f32 v0, v1, |v2|, v3", (1.0, -7.0, 3.0), 7.0),
    ("v_maximum3_f32 v0, v1, v2, v3", (1.0, NAN, 3.0), NAN),
    ("v_minimum3_f32 v0, v1, v2, v3", (1.0, -2.0, 3.0), -2.0),
    ("v_med3_f32 v0, v1, v2, v3", (500.0, -448.0, 448.0), 448.0),
    ("v_med3_f32 v0, v1, v2, v3", (NAN, -448.0, 448.0), -448.0),
    ("v_ldexp_f32 v0, v1, -3", (12.0,), 1.5),
    ("v_ldexp_f32 v0, 1.0, v1", (0.0,), 1.0),
    ("v_rcp_f32_e32 v0, v1", (4.0,), 0.25),
    ("v_rcp_f32_e32 v0, v1", (-0.0,), -INF),
    ("v_rcp_f32_e32 v0, v1", (2.0**127,), 0.0),  # the result would be denormal
    ("v_rsq_f32_e32 v0, v1", (16.0,), 0.25),
    ("v_sqrt_f32_e32 v0, v1", (2.25,), 1.5),
    ("v_exp_f32_e32 v0, v1", (-3.0,), 0.125),
    ("v_exp_f32_e32 v0, v1", (200.0,), INF),
    ("v_log_f32_e32 v0, v1", (0.125,), -3.0),
    ("v_floor_f32_e32 v0, v1", (-1.5,), -2.0),
    ("v_ceil_f32_e32 v0, v1", (-1.5,), -1.0),
    ("v_trunc_f32_e32 v0, v1", (-1.5,), -1.0),
    ("v_rndne_f32_e32 v0, v1", (2.5,), 2.0),
    ("v_fract_f32_e32 v0, v1", (-1.25,), 0.75),
    ("v_frexp_mant_f32_e32 v0, v1", (12.0,), 0.75),
    ("v_div_fixup_f32 v0, v1, v2, v3", (7.0, 0.0, 1.0), INF),
    ("v_div_fixup_f32 v0, v1, v2, v3", (7.0, 2.0, -14.0), -7.0),
    ("v_cvt_f32_i32_e32 v0, v1", (0.0,), 0.0),
]


@pytest.mark.parametrize("text, sources, result", FLOAT_CASES)
def test_floats(text: str, sources: tuple[float, ...], result: float) -> None:
    wave = lone_wave()
    for at, value in enumerate(sources):
        set_f32(wave, at + 1, value)
    run(wave, text)
    expected = f32(result)
    if math.isnan(result):
        assert np.isnan(wave.vf[0]).all()
    else:
        assert set(wave.v[0].tolist()) == set(expected.tolist())  # bits, so that the sign of zero counts


def test_fmac_accumulates_into_its_destination() -> None:
    wave = lone_wave()
    set_f32(wave, 0, 10.0)
    set_f32(wave, 1, 3.0)
    set_f32(wave, 2, 4.0)
    run(wave, "v_fmac_f32_e32 v0, v1, v2")
    assert set(wave.vf[0].tolist()) == {22.0}


@pytest.mark.parametrize(
    "a, b, c, exact",
    [
        # (1 + 2^-23)^2 = 1 + 2^-22 + 2^-46, less 1: what separate rounding loses
        (1 + 2**-23, 1 + 2**-23, -1.0, 2.0**-22 + 2.0**-46),
        # 2^24 + 1 + tiny: FP64 alone would tie to even, the exact sum is above the tie
        (2.0**-60, 2.0**-60, 1 + 2**-24, 1.0),
        (1.0, 2.0**24 + 2, 1.0 - 2.0**-24, 2.0**24 + 2),
        (2.0**-75, 2.0**-75, 2.0**-149, 2.0**-148),  # 1.5 of the smallest denormal: a tie, to even
    ],
)
def test_fma_rounds_once(a: float, b: float, c: float, exact: float) -> None:
    x, y, z = (np.array([value], np.float32) for value in (a, b, c))
    assert fma32(x, y, z)[0] == np.float32(exact)


def test_fma_agrees_with_exact_rational_arithmetic() -> None:
    from fractions import Fraction

    rng = np.random.default_rng(5)
    bits = rng.integers(0, 1 << 32, (3, 2000), np.uint32)
    bits[:, :1000] = (bits[:, :1000] & 0x83FFFFFF) | 0x3C000000  # near 1, where cancellation is common
    a, b, c = bits.view(np.float32)
    with np.errstate(all="ignore"):
        got = fma32(a, b, c)
        c2 = (-(a.astype(np.float64) * b)).astype(np.float32)  # almost cancels
        cancelled = fma32(a, b, c2)
    for result, addend in ((got, c), (cancelled, c2)):
        for x, y, z, r in zip(a, b, addend, result):
            if not all(map(np.isfinite, (x, y, z, r))):
                continue
            exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
            neighbours = [np.nextafter(r, np.float32(-np.inf)), np.nextafter(r, np.float32(np.inf))]
            distance = abs(Fraction(float(r)) - exact)
            for other in neighbours:
                if np.isfinite(other):
                    far = abs(Fraction(float(other)) - exact)
                    assert distance < far or (distance == far and not int(r.view(np.uint32)) & 1)


def test_the_16_bit_form_keeps_the_upper_half() -> None:
    wave = lone_wave()
    for register, value in ((0, 0xABCD0000), (1, 0xFFFF000C), (2, 0xFFFF000A), (3, 1)):
        set_u32(wave, register, value)
    run(wave, "v_bitop3_b16 v0, v1, v2, v3 bitop3:0xea")
    assert wave.v[0, 0] == 0xABCD0009


def test_one_byte_selector_for_all_lanes_acts_as_one_a_lane() -> None:
    rng = np.random.default_rng(1)
    high, low = rng.integers(0, 1 << 32, (2, 64), np.uint32)
    for selector in (0x07050301, 0x0C0D0B08, 0x0A090B0E, 0x03020706, 0xFF000C04):
        alike = permute_bytes(high, low, np.array([selector], np.uint32))
        np.testing.assert_array_equal(alike, permute_bytes(high, low, np.full(64, selector, np.uint32)))


def test_only_active_lanes_are_written() -> None:
    wave = lone_wave()
    wave.set_exec(0x5)
    run(wave, "v_mov_b32_e32 v0, 7", "v_add_f32_e32 v1, 1.0, v1", "v_ashrrev_i32_e32 v2, 0, -1")
    assert np.flatnonzero(wave.v[0]).tolist() == [0, 2]
    assert np.flatnonzero(wave.v[1]).tolist() == [0, 2]
    assert np.flatnonzero(wave.v[2]).tolist() == [0, 2]


def test_64_bit_shifts_and_sums_carry_between_registers() -> None:
    wave = lone_wave()
    set_u32(wave, 2, 0xFFFFF000)
    set_u32(wave, 3, 0x7EFF)
    set_u32(wave, 4, 0x400)
    run(wave, "v_lshl_add_u64 v[0:1], v[4:5], 2, v[2:3]")
    assert (wave.v[0, 9], wave.v[1, 9]) == (0, 0x7F00)
    run(wave, "v_lshrrev_b64 v[6:7], 4, v[2:3]", "v_lshlrev_b64 v[8:9], 4, v[2:3]")
    assert (wave.v[6, 0], wave.v[7, 0]) == (0xFFFFFF00, 0x7EF)
    assert (wave.v[8, 0], wave.v[9, 0]) == (0xFFFF0000, 0x7EFFF)
    run(wave, "v_mov_b64_e32 v[10:11], -1", "v_ashrrev_i64 v[12:13], 8, v[10:11]")
    assert (wave.v[12, 0], wave.v[13, 0]) == (0xFFFFFFFF, 0xFFFFFFFF)


def test_wide_multiply_add_with_its_carry() -> None:
    wave = lone_wave()
    set_u32(wave, 1, 0xFFFFFFFF)
    set_u32(wave, 2, 5, 0xFFFFFFFF)
    set_u32(wave, 3, 0, 0xFFFFFFFF)
    wave.s[4] = 0xFFFFFFFF
    run(wave, "v_mad_u64_u32 v[6:7], s[0:1], v1, s4, v[2:3]")
    square = 0xFFFFFFFF**2
    assert int(wave.v[6, 0]) | int(wave.v[7, 0]) << 32 == square + 5
    total = (square + 0xFFFFFFFFFFFFFFFF) & 0xFFFFFFFFFFFFFFFF
    assert int(wave.v[6, 1]) | int(wave.v[7, 1]) << 32 == total
    assert wave.read64(0) == 0xFFFFFFFFFFFFFFFE  # carry in every lane but the first


def test_carry_chain() -> None:
    wave = lone_wave()
    set_u32(wave, 1, 0xFFFFFFFF, 1)
    set_u32(wave, 2, 1)
    run(wave, "v_add_co_u32_e32 v3, vcc, v1, v2", "v_addc_co_u32_e32 v4, vcc, 0, v5, vcc")
    assert (wave.v[3, 0], wave.v[3, 1]) == (0, 2)
    assert (wave.v[4, 0], wave.v[4, 1]) == (1, 0)
    assert wave.read64(VCC) == 0
    run(wave, "v_sub_co_u32_e64 v6, s[2:3], v5, v2", "v_subb_co_u32_e64 v7, s[2:3], v5, v5, s[2:3]")
    assert (wave.v[6, 0], wave.v[7, 0]) == (0xFFFFFFFF, 0xFFFFFFFF)
    assert wave.read64(2) == 0xFFFFFFFFFFFFFFFF
    run(wave, "v_subrev_co_u32_e32 v8, vcc, v2, v5")
    assert (wave.v[8, 0], wave.read64(VCC)) == (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)


@pytest.mark.parametrize(
    "text, lanes",
    [
        ("v_cmp_gt_i32_e32 vcc, 5, v1", 0b1011),
        ("v_cmp_lt_u32_e32 vcc, 5, v1", 0b1100),
        ("v_cmp_eq_u32_e32 vcc, 5, v1", 0b0000),
        ("v_cmp_ne_u32_e32 vcc, 1, v1", 0b1101),
        ("v_cmp_le_i32_e32 vcc, 7, v1", 0b0100),
    ],
)
def test_compares_write_one_bit_an_active_lane(text: str, lanes: int) -> None:
    wave = lone_wave()
    set_u32(wave, 1, 0, 1, 9, 0x80000000)
    wave.set_exec(0xF)
    wave.write64(VCC, 0xFFFFFFFFFFFFFFFF)
    run(wave, text)
    assert wave.read64(VCC) == lanes  # inactive lanes become 0


def test_float_compares_with_nan() -> None:
    wave = lone_wave()
    set_f32(wave, 1, NAN, 1.0, 3.0)
    set_f32(wave, 2, 2.0)
    wave.set_exec(0b111)
    results = {}
    for name in ("lt", "nlt", "lg", "neq", "o", "u", "nge", "t", "f"):
        run(wave, f"v_cmp_{name}_f32_e64 s[0:1], v1, v2")
        results[name] = wave.read64(0)
    assert results == {
        "lt": 0b010, "nlt": 0b101, "lg": 0b110, "neq": 0b111, "o": 0b110, "u": 0b001, "nge": 0b011, "t": 0b111, "f": 0,
    }  # fmt: skip


def test_cmpx_writes_exec() -> None:
    wave = lone_wave()
    wave.v[1] = LANE
    run(wave, "v_cmpx_gt_u32_e64 s[0:1], 3, v1")
    assert (wave.read64(0), wave.exec_mask) == (0b111, 0b111)


def test_compare_of_64_bit_integers() -> None:
    wave = lone_wave()
    set_u32(wave, 2, 0)
    set_u32(wave, 3, 1)
    wave.write64(4, 0xFFFFFFFF)
    run(wave, "v_cmp_lt_u64_e32 vcc, s[4:5], v[2:3]")
    assert wave.read64(VCC) == 0xFFFFFFFFFFFFFFFF


def test_cndmask_takes_the_second_source_where_the_bit_is_set() -> None:
    wave = lone_wave()
    set_u32(wave, 1, 10)
    set_u32(wave, 2, 20)
    wave.write64(VCC, 0b10)
    wave.write64(4, 0b01)
    run(
        wave,
        "v_cndmask_b32_e32 v0, v1, v2, vcc",
        "v_cndmask_b32_e64 v3, v1, v2, s[4:5]",
        "v_cndmask_b32_e64 v4, 0, -1, vcc",
    )
    assert wave.v[0, :3].tolist() == [10, 20, 10]
    assert wave.v[3, :3].tolist() == [20, 10, 10]
    assert wave.v[4, :2].tolist() == [0, 0xFFFFFFFF]


def test_packed_floats_pick_halves() -> None:
    wave = lone_wave()
    for register, value in ((2, 2.0), (3, 3.0), (4, 5.0), (5, 7.0), (6, 100.0), (7, 200.0)):
        set_f32(wave, register, value)
    wave.sf[10:12] = (10.0, 20.0)
    run(wave, "v_pk_mul_f32 v[0:1], v[2:3], v[4:5]")
    assert (wave.vf[0, 0], wave.vf[1, 0]) == (10.0, 21.0)
    run(wave, "v_pk_mul_f32 v[0:1], v[2:3], s[10:11] op_sel_hi:[1,0]")
    assert (wave.vf[0, 0], wave.vf[1, 0]) == (20.0, 30.0)
    run(wave, "v_pk_add_f32 v[0:1], v[2:3], 1.0 op_sel_hi:[1,0]")
    assert (wave.vf[0, 0], wave.vf[1, 0]) == (3.0, 4.0)
    run(wave, "v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7] op_sel:[1,0,0] op_sel_hi:[0,1,1] neg_lo:[1,0,0]")
    assert (wave.vf[0, 0], wave.vf[1, 0]) == (100.0 - 15.0, 200.0 + 14.0)
    run(wave, "v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[1,0]")
    assert (wave.vf[0, 0], wave.vf[1, 0]) == (3.0, 5.0)


def test_a_packed_result_may_overwrite_its_source() -> None:
    wave = lone_wave()
    set_f32(wave, 2, 2.0)
    set_f32(wave, 3, 3.0)
    run(wave, "v_pk_mul_f32 v[2:3], v[2:3], v[2:3] op_sel:[1,0] op_sel_hi:[0,1]")
    assert (wave.vf[2, 0], wave.vf[3, 0]) == (6.0, 6.0)


def test_mbcnt_counts_lower_lanes() -> None:
    wave = lone_wave()
    wave.write64(2, 0xF0000000F)
    run(wave, "v_mbcnt_lo_u32_b32 v0, s2, 0", "v_mbcnt_hi_u32_b32 v0, s3, v0")
    assert wave.v[0, [0, 1, 3, 4, 31, 32, 35, 36, 63]].tolist() == [0, 1, 3, 4, 4, 4, 7, 8, 8]


@pytest.mark.parametrize(
    "numerator, denominator",
    [(1.0, 3.0), (1e-38, 1e38), (3e-39, 7.0), (5.0, 2e-42), (1.5e38, 3.0), (-7.0, 11.0), (1e-44, 3e-40)],
)
def test_the_division_sequence_divides(numerator: float, denominator: float) -> None:
    """Newton's iteration as LLVM emits it: what matters is that the three helpers fit together."""
    wave = lone_wave()
    set_f32(wave, 1, numerator)
    set_f32(wave, 2, denominator)
    run(
        wave,
        "v_div_scale_f32 v3, s[0:1], v2, v2, v1",
        "v_rcp_f32_e32 v4, v3",
        "v_div_scale_f32 v5, vcc, v1, v2, v1",
        "v_fma_f32 v6, -v3, v4, 1.0",
        "v_fmac_f32_e32 v4, v6, v4",
        "v_mul_f32_e32 v6, v5, v4",
        "v_fma_f32 v7, -v3, v6, v5",
        "v_fmac_f32_e32 v6, v7, v4",
        "v_fma_f32 v3, -v3, v6, v5",
        "v_div_fmas_f32 v3, v3, v4, v6",
        "v_div_fixup_f32 v0, v3, v2, v1",
    )
    with np.errstate(all="ignore"):
        exact = np.float32(numerator) / np.float32(denominator)
    assert wave.v[0, 0] == exact.view(np.uint32)


def test_division_special_cases() -> None:
    one, zero, inf, nan = (np.array([value], np.float32) for value in (1.0, 0.0, INF, NAN))
    with np.errstate(all="ignore"):
        assert div_fixup(one, inf, one)[0] == 0.0
        assert np.isnan(div_fixup(one, zero, zero)[0])
        assert np.isnan(div_fixup(one, inf, inf)[0])
        assert np.isnan(div_fixup(one, nan, one)[0])
        scaled, undo = div_scale(np.array([2e-39], np.float32), np.array([2e-39], np.float32), one)
    assert scaled[0] > 1e-20
    assert undo.tolist() in ([False], [True])


def test_classes() -> None:
    wave = lone_wave()
    set_f32(wave, 1, NAN, -INF, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, INF)
    wave.set_exec(0x1FF)
    for bit, lane in ((1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 5), (7, 6), (8, 7), (9, 8)):
        run(wave, f"v_cmp_class_f32_e64 s[0:1], v1, {hex(1 << bit)}")
        assert wave.read64(0) == 1 << lane


@pytest.mark.parametrize(
    "value, signed, unsigned",
    [(1.9, 1, 1), (-1.9, 0xFFFFFFFF, 0), (3e9, 0x7FFFFFFF, 3000000000), (NAN, 0, 0),
     (-INF, 0x80000000, 0), (INF, 0x7FFFFFFF, 0xFFFFFFFF)],
)  # fmt: skip
def test_float_to_integer_saturates(value: float, signed: int, unsigned: int) -> None:
    wave = lone_wave()
    set_f32(wave, 1, value)
    run(wave, "v_cvt_i32_f32_e32 v0, v1", "v_cvt_u32_f32_e32 v2, v1")
    assert (wave.v[0, 0], wave.v[2, 0]) == (signed, unsigned)


def test_frexp_exponent() -> None:
    wave = lone_wave()
    set_f32(wave, 1, 12.0, INF)
    run(wave, "v_frexp_exp_i32_f32_e32 v0, v1")
    assert wave.v[0, :2].tolist() == [4, 0]


def test_accumulation_registers_are_separate() -> None:
    wave = lone_wave()
    set_u32(wave, 1, 5)
    run(wave, "v_accvgpr_write_b32 a1, v1", "v_mov_b32_e32 v1, 0", "v_accvgpr_read_b32 v2, a1")
    assert (wave.v[1, 0], wave.v[2, 0]) == (0, 5)


@pytest.mark.parametrize(
    "text",
    [
        "v_add_f32_e64 v0, v1, v2 mul:2",
        "v_mul_lo_u32 v0, v1, v2 clamp",
        "v_add_u32_e32 v0, -v1, v2",
        "v_no_such_thing v0",
    ],
)
def test_modifiers_without_semantics_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedInstructionError):
        run(lone_wave(), text)
