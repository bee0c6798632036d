"""Matrix instructions: where each operand element and each result element is, and what the scales do.

Layouts are probed one element at a time: a single one in A and a single one in B give a single one in the result, whose
place is known from the layout rules. Values are checked with sums that are exact in any order.
"""

from __future__ import annotations

import numpy as np
import pytest
from isa_harness import lone_wave, run, set_u32

from megamoe_rocm.isa.errors import UnsupportedInstructionError
from megamoe_rocm.isa.numbers import E2M1, E4M3
from megamoe_rocm.isa.wave import Wave

FP4_ONE, FP8_ONE, SCALE_ONE = 2, 0x38, 127
A, B, SCALE_A, SCALE_B = 16, 32, 48, 49  # registers


def put_fp4(wave: Wave, register: int, row: int, k: int, code: int, rows: int) -> None:
    """By the rule: lane group g = k // 32 holds k = 32 g + j, low nibble first."""
    lane, j = (k // 32) * rows + row, k % 32
    wave.v[register + j // 8, lane] |= code << 4 * (j % 8)


def put_fp8(wave: Wave, register: int, row: int, k: int, code: int, rows: int) -> None:
    """By the rule: chunk c, lane group g and byte j hold k = half c + 16 g + j, half = 64 for 16 rows and 32 for 32."""
    half = 64 if rows == 16 else 32
    chunk, group, j = k // half, k % half // 16, k % 16
    wave.v[register + 4 * chunk + j // 4, group * rows + row] |= code << 8 * (j % 4)


def result_at(wave: Wave, row: int, column: int, size: int) -> float:
    """By the rule for the result's registers."""
    if size == 16:
        return float(wave.vf[row % 4, (row // 4) * 16 + column])
    return float(wave.vf[4 * (row // 8) + row % 4, (row % 8 // 4) * 32 + column])


FORMATS = {"fp4": (4, put_fp4, FP4_ONE, 4), "fp8": (8, put_fp8, FP8_ONE, 0)}


def multiply(
    wave: Wave, size: int, a_format: str, b_format: str, accumulator: str | None = None, more: str = ""
) -> None:
    depth, count = (128, 4) if size == 16 else (64, 16)
    result = f"v[0:{count - 1}]"
    a, b = f"v[{A}:{A + FORMATS[a_format][0] - 1}]", f"v[{B}:{B + FORMATS[b_format][0] - 1}]"
    formats = f"cbsz:{FORMATS[a_format][3]} blgp:{FORMATS[b_format][3]}"
    run(
        wave,
        f"v_mfma_scale_f32_{size}x{size}x{depth}_f8f6f4 {result}, {a}, {b}, {accumulator or result}, "
        f"v{SCALE_A}, v{SCALE_B} {more} {formats}",
    )


def one_scales(wave: Wave) -> None:
    set_u32(wave, SCALE_A, SCALE_ONE)
    set_u32(wave, SCALE_B, SCALE_ONE)


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("a_format, b_format", [("fp4", "fp4"), ("fp8", "fp4"), ("fp4", "fp8"), ("fp8", "fp8")])
def test_every_element_is_where_the_layout_rules_say(size: int, a_format: str, b_format: str) -> None:
    rng = np.random.default_rng(size)
    depth = 128 if size == 16 else 64
    for k in (0, 1, 15, 16, 31, 32, 47, 63, *((64, 100, 127) if size == 16 else ())):
        row, column = (int(value) for value in rng.integers(0, size, 2))
        wave = lone_wave()
        one_scales(wave)
        FORMATS[a_format][1](wave, A, row, k, FORMATS[a_format][2], size)
        FORMATS[b_format][1](wave, B, column, k, FORMATS[b_format][2], size)
        FORMATS[b_format][1](wave, B, column, (k + 1) % depth, FORMATS[b_format][2], size)  # meets a zero of A
        multiply(wave, size, a_format, b_format)
        assert result_at(wave, row, column, size) == 1.0
        assert np.count_nonzero(wave.vf[: size * size // 64]) == 1


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("a_format, b_format", [("fp4", "fp4"), ("fp8", "fp4")])
def test_random_operands_with_scales_add_up(size: int, a_format: str, b_format: str) -> None:
    rng = np.random.default_rng(7)
    depth, wave = (128 if size == 16 else 64), lone_wave()
    tables = {"fp4": E2M1, "fp8": E4M3}
    values, scales = {}, {}
    for register, fmt, scale in ((A, a_format, SCALE_A), (B, b_format, SCALE_B)):
        # Small codes: every partial sum is exact, so that the order of summation can't matter.
        codes = rng.integers(0, 16, (size, depth)) if fmt == "fp4" else rng.integers(0x30, 0x48, (size, depth))
        for row in range(size):
            for k in range(depth):
                FORMATS[fmt][1](wave, register, row, k, int(codes[row, k]), size)
        exponents = rng.integers(125, 130, (size, depth // 32))
        wave.v[scale] = 0x11111100 | exponents.T.reshape(-1).astype(np.uint32)  # lane group g scales block g
        values[register], scales[register] = tables[fmt][codes], 2.0 ** (exponents - 127.0)
    set_accumulator = rng.integers(-8, 8, (size, size)).astype(np.float64)
    for row in range(size):
        for column in range(size):
            register = row % 4 if size == 16 else 4 * (row // 8) + row % 4
            lane = (row // 4) * 16 + column if size == 16 else (row % 8 // 4) * 32 + column
            wave.vf[register, lane] = set_accumulator[row, column]
    multiply(wave, size, a_format, b_format)
    left = values[A] * np.repeat(scales[A], 32, axis=1)
    right = values[B] * np.repeat(scales[B], 32, axis=1)
    expected = left @ right.T + set_accumulator
    got = [[result_at(wave, row, column, size) for column in range(size)] for row in range(size)]
    np.testing.assert_array_equal(got, expected.astype(np.float32))


@pytest.mark.parametrize("part", range(4))
def test_op_sel_picks_the_scale_byte(part: int) -> None:
    wave = lone_wave()
    put_fp4(wave, A, 3, 40, FP4_ONE, 16)
    put_fp4(wave, B, 5, 40, FP4_ONE, 16)
    set_u32(wave, SCALE_A, sum((127 + 3 * at) << 8 * at for at in range(4)))
    set_u32(wave, SCALE_B, sum((127 - at) << 8 * at for at in range(4)))
    low, high = part & 1, part >> 1
    multiply(wave, 16, "fp4", "fp4", more=f"op_sel:[{low},0,0] op_sel_hi:[{high},0,0]")
    assert result_at(wave, 3, 5, 16) == 8.0**part
    wave.v[:4] = 0
    multiply(wave, 16, "fp4", "fp4", more=f"op_sel:[0,{low},0] op_sel_hi:[0,{high},0]")
    assert result_at(wave, 3, 5, 16) == 0.5**part


def test_the_nan_scale_reaches_its_row_only() -> None:
    wave = lone_wave()
    one_scales(wave)
    wave.v[SCALE_A, 16 + 2] = 255  # row 2, second block of k
    multiply(wave, 16, "fp4", "fp4", accumulator="0")
    bad = [row for row in range(16) for column in range(16) if np.isnan(result_at(wave, row, column, 16))]
    assert bad == [2] * 16


def test_a_constant_accumulator_and_inactive_lanes() -> None:
    wave = lone_wave()
    one_scales(wave)
    wave.vf[:4] = 99.0
    wave.set_exec(1)  # EXEC is ignored
    multiply(wave, 16, "fp4", "fp4", accumulator="1.0")
    assert np.unique(wave.vf[:4]).tolist() == [1.0]


def test_the_sum_is_rounded_once() -> None:
    """2^24 + 1 + 1: rounding after each addition to FP32 would stay at 2^24."""
    wave = lone_wave()
    one_scales(wave)
    wave.vf[:4] = 2.0**24
    for k in (0, 33):
        put_fp4(wave, A, 0, k, FP4_ONE, 16)
        put_fp4(wave, B, 0, k, FP4_ONE, 16)
    multiply(wave, 16, "fp4", "fp4")
    assert result_at(wave, 0, 0, 16) == 2.0**24 + 2


@pytest.mark.parametrize("form, one", [("bf16", 0x3F80), ("f16", 0x3C00)])
def test_half_precision_operands(form: str, one: int) -> None:
    for row, column, k in ((0, 0, 0), (3, 7, 9), (15, 4, 31)):
        wave = lone_wave()
        for register, where in ((A, row), (B, column)):
            lane, j = (k // 8) * 16 + where, k % 8
            wave.v[register + j // 2, lane] |= one << 16 * (j % 2)
        run(wave, f"v_mfma_f32_16x16x32_{form} v[0:3], v[{A}:{A + 3}], v[{B}:{B + 3}], 0")
        assert result_at(wave, row, column, 16) == 1.0
        assert np.count_nonzero(wave.vf[:4]) == 1


def test_accumulation_registers_hold_results() -> None:
    wave = lone_wave()
    put_fp8(wave, A, 1, 2, FP8_ONE, 16)
    put_fp8(wave, B, 6, 2, FP8_ONE, 16)
    wave.v[256:260] = 0
    run(wave, f"v_mfma_f32_16x16x128_f8f6f4 a[0:3], v[{A}:{A + 7}], v[{B}:{B + 7}], a[0:3]")
    assert wave.vf[256 + 1, 6] == 1.0


@pytest.mark.parametrize("text", [
    f"v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[{A}:{A + 5}], v[{B}:{B + 3}], v[0:3], v48, v49 cbsz:2 blgp:4",
    f"v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[{A}:{A + 3}], v[{B}:{B + 3}], v[0:3], s4, v49 cbsz:4 blgp:4",
])  # fmt: skip
def test_six_bit_operands_and_scalar_scales_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedInstructionError):
        run(lone_wave(), text)
