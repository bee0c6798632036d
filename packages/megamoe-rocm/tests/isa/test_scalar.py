"""Scalar instructions against results worked out by hand: text, s1, s2 (64 bits each), SCC before; s0, SCC after."""

from __future__ import annotations

import pytest
from isa_harness import lone_wave, run

from megamoe_rocm.isa.errors import UnsupportedInstructionError
from megamoe_rocm.isa.wave import ALL_LANES

KEEP = None  # SCC stays as it was: checked with both values

# text, first operand s[2:3], second s[4:5], SCC before, result in s[0:1], SCC after
CASES = [
    ("s_add_u32 s0, s2, s4", 0xFFFFFFFF, 1, 0, 0, 1),
    ("s_add_u32 s0, s2, s4", 0x7FFFFFFF, 1, 1, 0x80000000, 0),
    ("s_addc_u32 s0, s2, s4", 0xFFFFFFFF, 0, 1, 0, 1),
    ("s_addc_u32 s0, s2, s4", 5, 6, 1, 12, 0),
    ("s_addc_u32 s0, s2, s4", 5, 6, 0, 11, 0),
    ("s_sub_u32 s0, s2, s4", 3, 5, 0, 0xFFFFFFFE, 1),
    ("s_subb_u32 s0, s2, s4", 5, 4, 1, 0, 0),
    ("s_subb_u32 s0, s2, s4", 4, 4, 1, 0xFFFFFFFF, 1),
    ("s_add_i32 s0, s2, s4", 0x7FFFFFFF, 1, 0, 0x80000000, 1),
    ("s_add_i32 s0, s2, s4", 0xFFFFFFFF, 1, 1, 0, 0),
    ("s_sub_i32 s0, s2, s4", 0x80000000, 1, 0, 0x7FFFFFFF, 1),
    ("s_add_i32 s0, s2, -8", 3, 0, 0, 0xFFFFFFFB, 0),
    ("s_mul_i32 s0, s2, s4", 0xFFFFFFFF, 7, KEEP, 0xFFFFFFF9, KEEP),
    ("s_mul_hi_u32 s0, s2, s4", 0xFFFFFFFF, 0xFFFFFFFF, KEEP, 0xFFFFFFFE, KEEP),
    ("s_mul_hi_i32 s0, s2, s4", 0xFFFFFFFF, 0xFFFFFFFF, KEEP, 0, KEEP),
    ("s_lshl2_add_u32 s0, s2, s4", 0x40000000, 9, 0, 9, 1),
    ("s_lshl3_add_u32 s0, s2, s4", 5, 2, 1, 42, 0),
    ("s_and_b32 s0, s2, s4", 0xF0, 0x0F, 1, 0, 0),
    ("s_and_b32 s0, s2, 0xffff", 0x12345678, 0, 0, 0x5678, 1),
    ("s_or_b64 s[0:1], s[2:3], s[4:5]", 1 << 40, 1, 0, 1 << 40 | 1, 1),
    ("s_xor_b64 s[0:1], s[2:3], s[4:5]", 5 << 33, 5 << 33, 1, 0, 0),
    ("s_andn2_b64 s[0:1], s[2:3], s[4:5]", ALL_LANES, 1, 0, ALL_LANES - 1, 1),
    ("s_orn2_b32 s0, s2, s4", 0, 0xFFFFFFFE, 0, 1, 1),
    ("s_nand_b32 s0, s2, s4", 0xFFFFFFFF, 0xFFFFFFFF, 1, 0, 0),
    ("s_xnor_b32 s0, s2, s4", 0xFF, 0xFF, 0, 0xFFFFFFFF, 1),
    ("s_not_b32 s0, s2", 0xFFFFFFFF, 0, 1, 0, 0),
    ("s_not_b64 s[0:1], s[2:3]", 0, 0, 0, ALL_LANES, 1),
    ("s_lshl_b32 s0, s2, s4", 1, 33, 0, 2, 1),  # only five bits of the amount count
    ("s_lshl_b64 s[0:1], s[2:3], s4", 3, 62, 0, 3 << 62 & ALL_LANES, 1),
    ("s_lshr_b32 s0, s2, 31", 0x80000000, 0, 0, 1, 1),
    ("s_lshr_b64 s[0:1], s[2:3], s4", 1 << 63, 63, 0, 1, 1),
    ("s_ashr_i32 s0, s2, 31", 0x80000000, 0, 0, 0xFFFFFFFF, 1),
    ("s_ashr_i64 s[0:1], s[2:3], s4", 1 << 63, 4, 0, 0xF8 << 56, 1),
    ("s_bfe_u32 s0, s2, 0x80004", 0x12345678, 0, 0, 0x67, 1),
    ("s_bfe_i32 s0, s2, 0x80000", 0x12345688, 0, 0, 0xFFFFFF88, 1),
    ("s_bfe_i32 s0, s2, 0x1001e", 0x40000000, 0, 0, 0xFFFFFFFF, 1),  # the sign trick of a division by 2^n
    ("s_bfe_u32 s0, s2, 0x20006", 0xC0, 0, 0, 3, 1),
    ("s_bfe_u64 s[0:1], s[2:3], 0x100020", 0x0000ABCD00000000, 0, 0, 0xABCD, 1),
    ("s_bfm_b32 s0, s2, s4", 4, 8, KEEP, 0xF00, KEEP),
    ("s_min_i32 s0, s2, s4", 0xFFFFFFFF, 1, 0, 0xFFFFFFFF, 1),
    ("s_max_i32 s0, s2, s4", 0xFFFFFFFF, 1, 1, 1, 0),
    ("s_min_u32 s0, s2, s4", 0xFFFFFFFF, 1, 1, 1, 0),
    ("s_max_u32 s0, s2, s4", 7, 7, 1, 7, 0),
    ("s_abs_i32 s0, s2", 0xFFFFFFFD, 0, 0, 3, 1),
    ("s_abs_i32 s0, s2", 0x80000000, 0, 0, 0x80000000, 1),
    ("s_mov_b32 s0, s2", 7, 0, KEEP, 7, KEEP),
    ("s_mov_b32 s0, 0.5", 0, 0, KEEP, 0x3F000000, KEEP),
    ("s_mov_b64 s[0:1], -1", 0, 0, KEEP, ALL_LANES, KEEP),
    ("s_movk_i32 s0, 0xff80", 0, 0, KEEP, 0xFFFFFF80, KEEP),
    ("s_brev_b32 s0, s2", 1, 0, KEEP, 0x80000000, KEEP),
    ("s_sext_i32_i8 s0, s2", 0x80, 0, KEEP, 0xFFFFFF80, KEEP),
    ("s_sext_i32_i16 s0, s2", 0x7FFF, 0, KEEP, 0x7FFF, KEEP),
    ("s_ff1_i32_b64 s0, s[2:3]", 1 << 40, 0, KEEP, 40, KEEP),
    ("s_ff1_i32_b32 s0, s2", 0, 0, KEEP, 0xFFFFFFFF, KEEP),
    ("s_flbit_i32_b32 s0, s2", 0x00010000, 0, KEEP, 15, KEEP),
    ("s_flbit_i32 s0, s2", 0xFFFF0000, 0, KEEP, 16, KEEP),
    ("s_bcnt1_i32_b64 s0, s[2:3]", 0xF0F, 0, 0, 8, 1),
    ("s_cselect_b32 s0, s2, s4", 7, 9, 1, 7, 1),
    ("s_cselect_b32 s0, s2, s4", 7, 9, 0, 9, 0),
    ("s_cselect_b64 s[0:1], -1, 0", 0, 0, 1, ALL_LANES, 1),
    ("s_pack_ll_b32_b16 s0, s2, s4", 0xAAAA1111, 0xBBBB2222, KEEP, 0x22221111, KEEP),
    ("s_absdiff_i32 s0, s2, s4", 3, 10, 0, 7, 1),
]


@pytest.mark.parametrize("text, first, second, before, result, after", CASES, ids=[case[0] for case in CASES])
def test_result_and_scc(text: str, first: int, second: int, before: int | None, result: int, after: int | None) -> None:
    for scc in (0, 1) if before is KEEP else (before,):
        wave = lone_wave()
        wave.write64(2, first)
        wave.write64(4, second)
        wave.scc = scc
        run(wave, text)
        assert (wave.read64(0) if "s[0:1]" in text else wave.read32(0)) == result
        assert wave.scc == (scc if after is KEEP else after)


@pytest.mark.parametrize(
    "text, first, second, scc",
    [
        ("s_cmp_eq_u32 s2, s4", 5, 5, 1),
        ("s_cmp_lg_u32 s2, s4", 5, 5, 0),
        ("s_cmp_lt_i32 s2, s4", 0xFFFFFFFF, 0, 1),
        ("s_cmp_gt_i32 s2, s4", 0xFFFFFFFF, 0, 0),
        ("s_cmp_ge_u32 s2, s4", 0xFFFFFFFF, 0, 1),
        ("s_cmp_le_u32 s2, s4", 0xFFFFFFFF, 0, 0),
        ("s_cmpk_gt_i32 s2, 0xff", 256, 0, 1),
        ("s_cmpk_lt_i32 s2, 0xfc00", 0xFFFFFBFF, 0, 1),  # −1025 < −1024: the immediate is printed as a pattern
        ("s_cmpk_lt_u32 s2, 0xfc00", 0xFFFFFBFF, 0, 0),
        ("s_cmp_eq_u64 s[2:3], s[4:5]", 1 << 32, 0, 0),
        ("s_bitcmp1_b32 s2, 3", 8, 0, 1),
        ("s_bitcmp0_b32 s2, 3", 8, 0, 0),
    ],
)
def test_comparisons_set_scc_alone(text: str, first: int, second: int, scc: int) -> None:
    wave = lone_wave()
    wave.write64(2, first)
    wave.write64(4, second)
    wave.scc = 1 - scc
    run(wave, text)
    assert wave.scc == scc


def test_sopk_arithmetic_works_in_place() -> None:
    wave = lone_wave()
    wave.write32(0, 0x7FFFFFFF)
    run(wave, "s_addk_i32 s0, 0x1")
    assert (wave.read32(0), wave.scc) == (0x80000000, 1)
    wave.write32(0, 5)
    run(wave, "s_mulk_i32 s0, 0xfffd")
    assert wave.read32(0) == (5 * -3) & 0xFFFFFFFF


def test_saveexec_keeps_the_old_mask_and_sets_scc() -> None:
    wave = lone_wave()
    wave.set_exec(0xFF)
    wave.write64(2, 0xF0F0)
    run(wave, "s_and_saveexec_b64 s[0:1], s[2:3]")
    assert (wave.read64(0), wave.exec_mask, wave.scc) == (0xFF, 0xF0, 1)
    run(wave, "s_xor_b64 s[0:1], exec, s[0:1]")
    assert wave.read64(0) == 0x0F
    run(wave, "s_or_b64 exec, exec, s[0:1]")
    assert wave.exec_mask == 0xFF
    assert wave.lanes.tolist() == [True] * 8 + [False] * 56


def test_the_destination_may_be_the_source_of_saveexec() -> None:
    wave = lone_wave()
    wave.write64(0, 3)
    run(wave, "s_and_saveexec_b64 s[0:1], s[0:1]")
    assert (wave.read64(0), wave.exec_mask) == (ALL_LANES, 3)


def test_conditional_move_and_bit_set() -> None:
    wave = lone_wave()
    wave.write32(2, 9)
    wave.scc = 0
    run(wave, "s_cmov_b32 s0, s2")
    assert wave.read32(0) == 0
    wave.scc = 1
    run(wave, "s_cmov_b32 s0, s2", "s_bitset1_b32 s0, 31", "s_bitset0_b32 s0, 0")
    assert wave.read32(0) == 0x80000008


def test_a_64_bit_address_is_built_from_halves() -> None:
    wave = lone_wave()
    wave.write64(2, 0x7EFF_FFFF_F000)
    run(wave, "s_add_u32 s0, s2, 0x2000", "s_addc_u32 s1, s3, 0")
    assert wave.read64(0) == 0x7F00_0000_1000


@pytest.mark.parametrize("text", ["s_add_u32 s0, v1, s2", "s_quadmask_b32 s0, s1", "s_add_u32 s0, s1"])
def test_what_has_no_semantics_is_refused_when_it_is_decoded(text: str) -> None:
    with pytest.raises(UnsupportedInstructionError):
        run(lone_wave(), text)
