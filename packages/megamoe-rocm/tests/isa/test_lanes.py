"""Moves between lanes and within registers, against permutations worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from isa_harness import LANE, instruction, lone_wave, run, set_u32

from megamoe_rocm.isa.errors import UndefinedFault
from megamoe_rocm.isa.instructions.lanes import dpp_lanes

MASKS = "row_mask:0xf bank_mask:0xf"


@pytest.mark.parametrize(
    "control, sources",
    [
        ("quad_perm:[1,0,3,2]", {0: 1, 1: 0, 2: 3, 3: 2, 62: 63}),
        ("quad_perm:[3,3,3,3]", {4: 7, 5: 7, 63: 63}),
        ("row_shl:1", {0: 1, 14: 15, 15: -1, 16: 17, 63: -1}),
        ("row_shr:3", {0: -1, 2: -1, 3: 0, 18: -1, 19: 16}),
        ("row_ror:4", {0: 12, 4: 0, 16: 28}),
        ("row_mirror", {0: 15, 15: 0, 16: 31}),
        ("row_half_mirror", {0: 7, 7: 0, 8: 15}),
        ("row_bcast:15", {0: -1, 15: -1, 16: 15, 31: 15, 32: 31, 48: 47}),
        ("row_bcast:31", {0: -1, 31: -1, 32: 31, 63: 31}),
        ("row_newbcast:5", {0: 5, 15: 5, 16: 21}),
        ("wave_shr:1", {0: -1, 1: 0, 32: 31}),
        ("wave_shl:1", {0: 1, 63: -1}),
    ],
)
def test_dpp_controls(control: str, sources: dict[int, int]) -> None:
    lanes = dpp_lanes(instruction(f"v_mov_b32_dpp v0, v1 {control} {MASKS}"))
    assert {lane: int(lanes[lane]) for lane in sources} == sources


def test_dpp_keeps_the_old_value_without_a_source() -> None:
    wave = lone_wave()
    wave.v[1] = LANE + 100
    set_u32(wave, 0, 7)
    run(wave, f"v_mov_b32_dpp v0, v1 row_shr:1 {MASKS}")
    assert wave.v[0, [0, 1, 15, 16, 17]].tolist() == [7, 100, 114, 7, 116]


def test_dpp_gives_zero_with_bound_ctrl() -> None:
    wave = lone_wave()
    wave.v[1] = LANE + 100
    set_u32(wave, 2, 1)
    set_u32(wave, 0, 7)
    run(wave, f"v_add_u32_dpp v0, v1, v2 row_shr:1 {MASKS} bound_ctrl:1")
    assert wave.v[0, [0, 1, 16]].tolist() == [1, 101, 1]


def test_dpp_row_and_bank_masks() -> None:
    wave = lone_wave()
    wave.v[1] = LANE
    set_u32(wave, 0, 99)
    run(wave, "v_mov_b32_dpp v0, v1 row_bcast:15 row_mask:0xa bank_mask:0xf")
    assert np.flatnonzero(wave.v[0] != 99).tolist() == [*range(16, 32), *range(48, 64)]
    set_u32(wave, 0, 99)
    run(wave, "v_mov_b32_dpp v0, v1 quad_perm:[0,1,2,3] row_mask:0x1 bank_mask:0x2")
    assert np.flatnonzero(wave.v[0] != 99).tolist() == [4, 5, 6, 7]


def test_dpp_from_an_inactive_lane() -> None:
    wave = lone_wave()
    wave.v[1] = LANE + 1
    set_u32(wave, 0, 99)
    wave.set_exec(0b1110)
    run(wave, f"v_mov_b32_dpp v0, v1 quad_perm:[1,0,0,0] {MASKS}")
    assert wave.v[0, :4].tolist() == [99, 99, 99, 99]
    run(wave, f"v_mov_b32_dpp v0, v1 quad_perm:[1,0,1,0] {MASKS} bound_ctrl:1")
    assert wave.v[0, :4].tolist() == [99, 0, 2, 0]


def test_sdwa_destination_parts() -> None:
    wave = lone_wave()
    set_u32(wave, 1, 0x12)
    set_u32(wave, 2, 0x01)
    set_u32(wave, 0, 0xAABBCCDD)
    rest = "src0_sel:DWORD src1_sel:DWORD"
    run(wave, f"v_add_u32_sdwa v0, v1, v2 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE {rest}")
    assert wave.v[0, 0] == 0xAABB13DD
    run(wave, f"v_or_b32_sdwa v0, v1, v2 dst_sel:WORD_1 dst_unused:UNUSED_PAD {rest}")
    assert wave.v[0, 0] == 0x00130000


def test_read_and_write_single_lanes() -> None:
    wave = lone_wave()
    wave.v[1] = LANE * 10
    wave.set_exec(0b11000)
    wave.s[3] = 63
    run(wave, "v_readfirstlane_b32 s0, v1", "v_readlane_b32 s1, v1, 7", "v_readlane_b32 s2, v1, s3")
    assert wave.s[:3].tolist() == [30, 70, 630]
    run(wave, "v_writelane_b32 v2, s3, 9")
    assert (wave.v[2, 9], np.count_nonzero(wave.v[2])) == (63, 1)
    wave.set_exec(0)
    run(wave, "v_readfirstlane_b32 s0, v1")
    assert wave.s[0] == 0


def test_lane_swaps() -> None:
    wave = lone_wave()
    wave.v[1], wave.v[2] = LANE, LANE + 100
    run(wave, "v_permlane32_swap_b32_e32 v1, v2")
    assert wave.v[1].tolist() == [*range(32), *range(100, 132)]
    assert wave.v[2].tolist() == [*range(32, 64), *range(132, 164)]
    wave.v[1], wave.v[2] = LANE, LANE + 100
    run(wave, "v_permlane16_swap_b32_e32 v1, v2")
    assert wave.v[1].tolist() == [*range(16), *range(100, 116), *range(32, 48), *range(132, 148)]
    assert wave.v[2].tolist() == [*range(16, 32), *range(116, 132), *range(48, 64), *range(148, 164)]


def test_lane_swaps_with_lanes_off_are_not_modelled() -> None:
    wave = lone_wave()
    wave.set_exec(1)
    with pytest.raises(UndefinedFault, match="EXEC"):
        run(wave, "v_permlane32_swap_b32_e32 v1, v2")
