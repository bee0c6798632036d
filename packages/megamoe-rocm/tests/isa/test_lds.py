"""LDS instructions: addresses, widths, what a missing barrier or wait does."""

from __future__ import annotations

import numpy as np
import pytest
from isa_harness import LANE, instruction, lone_group, lone_wave, run, set_u32, touches_pending

from megamoe_rocm.isa import LdsRaceFault, MemoryFault
from megamoe_rocm.isa.instructions import decode
from megamoe_rocm.isa.workgroup import Workgroup

DONE = "s_waitcnt lgkmcnt(0)"


def barrier(group: Workgroup) -> None:
    for wave in group.waves:
        wave.state = "barrier"
    assert group.release_barrier()


def test_writes_and_reads_of_every_width() -> None:
    wave = lone_wave(granule=1)
    wave.v[1] = LANE * 16
    for register in range(4):
        wave.v[4 + register] = 0x10203040 * (register + 1) + LANE
    run(wave, "ds_write_b128 v1, v[4:7] offset:32", "ds_read_b128 v[8:11], v1 offset:32", DONE)
    np.testing.assert_array_equal(wave.v[8:12], wave.v[4:8])
    run(
        wave,
        "ds_read_b96 v[8:10], v1 offset:32",
        "ds_read_b64 v[12:13], v1 offset:40",
        "ds_read_b32 v14, v1 offset:44",
        DONE,
    )
    np.testing.assert_array_equal(wave.v[8:11], wave.v[4:7])
    np.testing.assert_array_equal(wave.v[12:14], wave.v[6:8])
    np.testing.assert_array_equal(wave.v[14], wave.v[7])
    set_u32(wave, 4, 0x0000F1F2)
    run(wave, "ds_write_b16 v1, v4", "ds_write_b8 v1, v4 offset:3", DONE)
    run(
        wave,
        "ds_read_u16 v8, v1",
        "ds_read_i16 v9, v1",
        "ds_read_u8 v10, v1 offset:3",
        "ds_read_i8 v11, v1 offset:3",
        DONE,
    )
    assert [int(wave.v[at, 7]) for at in range(8, 12)] == [0xF1F2, 0xFFFFF1F2, 0xF2, 0xFFFFFFF2]


def test_reads_into_half_a_register_keep_the_other_half() -> None:
    wave = lone_wave(granule=1)
    wave.v[1] = LANE * 4
    set_u32(wave, 2, 0xABCD1234)
    set_u32(wave, 3, 0x55556666)
    run(wave, "ds_write_b32 v1, v2", DONE, "ds_read_u16_d16_hi v3, v1 offset:2", DONE)
    assert wave.v[3, 5] == 0xABCD6666
    run(wave, "ds_read_u8_d16 v3, v1", DONE, "ds_write_b8_d16_hi v1, v2", DONE, "ds_read_u8 v4, v1", DONE)
    assert (wave.v[3, 5], wave.v[4, 5]) == (0xABCD0034, 0xCD)


def test_pairs_of_accesses() -> None:
    wave = lone_wave()
    wave.v[1] = LANE * 8
    wave.v[2], wave.v[3] = LANE + 100, LANE + 200
    run(wave, "ds_write2_b32 v1, v2, v3 offset0:4 offset1:5", "ds_read2_b32 v[4:5], v1 offset0:5 offset1:4", DONE)
    np.testing.assert_array_equal(wave.v[4], wave.v[3])
    np.testing.assert_array_equal(wave.v[5], wave.v[2])
    run(wave, "ds_write2st64_b32 v1, v2, v3 offset0:4 offset1:8", "ds_read_b32 v6, v1 offset:2048", DONE)
    np.testing.assert_array_equal(wave.v[6], wave.v[3])
    run(
        wave,
        "ds_write2_b64 v1, v[2:3], v[2:3] offset0:1 offset1:70",
        "ds_read2_b64 v[4:7], v1 offset0:1 offset1:70",
        DONE,
    )
    assert [int(wave.v[at, 63]) for at in range(4, 8)] == [163, 263, 163, 263]


def test_a_pair_may_be_read_over_its_own_address() -> None:
    wave = lone_wave()
    wave.v[1] = LANE * 8
    wave.v[2], wave.v[3] = LANE + 100, LANE + 200
    run(wave, "ds_write2_b32 v1, v2, v3 offset0:0 offset1:1", "ds_read2_b32 v[1:2], v1 offset0:0 offset1:1", DONE)
    np.testing.assert_array_equal(wave.v[1], LANE + 100)
    np.testing.assert_array_equal(wave.v[2], LANE + 200)


def test_only_active_lanes_read_and_write() -> None:
    wave = lone_wave()
    wave.v[1] = LANE * 4
    set_u32(wave, 2, 5)
    wave.set_exec(0b110)
    run(wave, "ds_write_b32 v1, v2", DONE)
    assert np.flatnonzero(wave.group.lds.words).tolist() == [1, 2]
    set_u32(wave, 3, 9)
    run(wave, "ds_read_b32 v3, v1", DONE)
    assert wave.v[3, :4].tolist() == [9, 5, 5, 9]


def test_an_inactive_lanes_address_may_be_anywhere() -> None:
    wave = lone_wave()
    wave.v[1] = 0xFFFFFFF0
    wave.v[1, 0] = 8
    wave.set_exec(1)
    run(wave, "ds_read_b32 v3, v1", DONE)


def test_bytes_beyond_the_end_fault() -> None:
    wave = lone_wave(lds_bytes=1024)
    wave.v[1] = LANE * 16
    run(wave, "ds_read_b128 v[4:7], v1")
    with pytest.raises(MemoryFault, match="1040 of 1024"):
        run(wave, "ds_read_b128 v[4:7], v1 offset:16")


def test_a_result_is_pending_until_it_is_waited_for() -> None:
    wave = lone_wave()
    run(wave, "ds_read_b64 v[4:5], v1", "ds_write_b32 v1, v2", "ds_read_b32 v6, v1")
    assert touches_pending(wave, "v_add_u32_e32 v0, v5, v1")
    run(wave, "s_waitcnt lgkmcnt(2)")  # the oldest of three is done
    assert not touches_pending(wave, "v_add_u32_e32 v0, v5, v1")
    assert touches_pending(wave, "v_mov_b32_e32 v6, 0")
    run(wave, DONE)
    assert not wave.pending


def test_atomics_on_lds() -> None:
    wave = lone_wave()
    set_u32(wave, 1, 64)  # all lanes on one word
    set_u32(wave, 2, 3)
    run(wave, "ds_add_rtn_u32 v4, v1, v2", DONE)
    assert wave.v[4].tolist() == [3 * lane for lane in range(64)]
    wave.v[2] = LANE
    run(wave, "ds_max_u32 v1, v2", "ds_min_rtn_i32 v5, v1, v2 offset:4", DONE)
    assert wave.group.lds.words[16] == 192  # the sum; no lane was above it
    assert wave.group.lds.words[17] == 0


def test_moves_through_the_crossbar() -> None:
    wave = lone_wave()
    wave.v[1], wave.v[2] = (LANE ^ 1) * 4, LANE + 100
    run(wave, "ds_bpermute_b32 v3, v1, v2", DONE)
    assert wave.v[3].tolist() == [(lane ^ 1) + 100 for lane in range(64)]
    wave.v[1] = (LANE + 1) * 4
    run(wave, "ds_permute_b32 v3, v1, v2", DONE)
    assert wave.v[3, [0, 1, 63]].tolist() == [163, 100, 162]
    wave.set_exec(0b01)
    wave.v[1] = 4
    run(wave, "ds_bpermute_b32 v3, v1, v2", DONE)
    assert wave.v[3, 0] == 0  # the source lane is off


@pytest.mark.parametrize(
    "pattern, sources",
    [
        (0x8000 | 0b10_11_00_01, {0: 1, 1: 0, 2: 3, 3: 2, 63: 62}),  # quad_perm 1,0,3,2
        (0x10 << 10 | 0x1F, {0: 16, 16: 0, 32: 48}),  # swap 16: xor 16
        (0x01 << 10 | 0x1E, {0: 1, 1: 1, 5: 5}),  # and 0x1e, xor 1
    ],
)
def test_swizzle(pattern: int, sources: dict[int, int]) -> None:
    wave = lone_wave()
    wave.v[1] = LANE
    decode(instruction("ds_swizzle_b32 v0, v1", words=(0xD87A0000 | pattern, 0)), {0: 0})(wave)
    run(wave, DONE)
    assert {lane: int(wave.v[0, lane]) for lane in sources} == sources


def test_reading_what_another_wave_wrote_needs_a_barrier() -> None:
    group = lone_group(waves=2)
    first, second = group.waves
    first.v[1] = second.v[1] = LANE * 4
    run(first, "ds_write_b32 v1, v2", DONE)
    run(first, "ds_read_b32 v3, v1", DONE)  # its own bytes
    with pytest.raises(LdsRaceFault, match="wave 0 wrote, without a barrier"):
        run(second, "ds_read_b32 v3, v1")
    barrier(group)
    run(second, "ds_read_b32 v3, v1", DONE)


def test_overwriting_what_others_read_needs_a_barrier() -> None:
    group = lone_group(waves=3)
    for wave in group.waves:
        wave.v[1] = LANE * 4
    run(group.waves[0], "ds_read_b32 v3, v1", DONE)
    run(group.waves[1], "ds_read_b32 v3, v1", DONE)
    with pytest.raises(LdsRaceFault, match="several waves read"):
        run(group.waves[2], "ds_write_b32 v1, v2")
    with pytest.raises(LdsRaceFault, match="several waves read"):
        run(group.waves[0], "ds_write_b32 v1, v2")
    barrier(group)
    run(group.waves[2], "ds_write_b32 v1, v2", DONE)


def test_waves_may_write_the_same_values() -> None:
    group = lone_group(waves=2)
    first, second = group.waves
    for wave in group.waves:
        wave.v[1] = LANE * 4
        set_u32(wave, 2, 7)
    run(first, "ds_write_b32 v1, v2", DONE)
    run(second, "ds_write_b32 v1, v2", DONE)
    set_u32(second, 2, 8)
    with pytest.raises(LdsRaceFault, match="several waves wrote"):
        run(second, "ds_write_b32 v1, v2")


def test_waves_may_use_different_bytes() -> None:
    group = lone_group(waves=2, granule=1)
    first, second = group.waves
    first.v[1], second.v[1] = LANE * 2, LANE * 2 + 1
    run(first, "ds_write_b8 v1, v2", DONE)
    run(second, "ds_write_b8 v1, v2", "ds_read_u8 v3, v1", DONE)


def test_a_read_that_is_not_waited_for_reaches_beyond_the_barrier() -> None:
    group = lone_group(waves=2)
    first, second = group.waves
    first.v[1] = second.v[1] = LANE * 4
    run(first, "ds_read_b32 v3, v1")
    barrier(group)
    with pytest.raises(LdsRaceFault, match="wave 0 read"):
        run(second, "ds_write_b32 v1, v2")


def test_a_write_that_is_not_waited_for_reaches_beyond_the_barrier() -> None:
    group = lone_group(waves=2)
    first, second = group.waves
    first.v[1] = second.v[1] = LANE * 4
    run(first, "ds_write_b32 v1, v2")
    barrier(group)
    with pytest.raises(LdsRaceFault, match="wave 0 wrote"):
        run(second, "ds_read_b32 v3, v1")
