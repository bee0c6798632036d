"""Global memory: addresses, widths, ranges, order, scopes, and loads straight into LDS."""

from __future__ import annotations

import numpy as np
import pytest
from isa_harness import LANE, lone_group, lone_wave, run, set_u32, touches_pending

from megamoe_rocm.isa import Buffer, LdsRaceFault, Machine, MemoryFault, PendingRegisterFault, UndefinedFault
from megamoe_rocm.isa.wave import M0, Wave

DONE = "s_waitcnt vmcnt(0)"


RELEASE = "buffer_wbl2 sc0 sc1"


class Late(Machine):
    """Memory operations take effect as late as they may."""

    def decide_early(self) -> bool:
        return False


def set_address(wave: Wave, register: int, buffer: Buffer, *, stride: int = 4, offset: int = 0) -> None:
    addresses = buffer.address + offset + LANE.astype(np.int64) * stride
    wave.v[register] = (addresses & 0xFFFFFFFF).astype(np.uint32)
    wave.v[register + 1] = (addresses >> 32).astype(np.uint32)


def set_resource(wave: Wave, register: int, buffer: Buffer, records: int | None = None) -> None:
    wave.write64(register, buffer.address)
    wave.s[register + 2] = buffer.num_bytes if records is None else records
    wave.s[register + 3] = 0x27000


def words(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint32) * 3 + 0x1000


def test_buffers_straddle_4_gib() -> None:
    buffer = Machine().buffer(1 << 16)
    assert buffer.address >> 32 != (buffer.address + buffer.num_bytes - 1) >> 32


@pytest.mark.parametrize("machine", [Machine, Late])
def test_global_loads_and_stores_of_every_width(machine: type[Machine]) -> None:
    wave = lone_wave(machine=machine())
    source, target = wave.group.machine.buffer(words(1024)), wave.group.machine.buffer(4096)
    set_address(wave, 2, source, stride=16)
    run(wave, "global_load_dwordx4 v[4:7], v[2:3], off", DONE)
    np.testing.assert_array_equal(wave.v[4:8].T, words(256).reshape(64, 4))
    wave.v[1] = LANE * 16
    wave.write64(8, target.address)
    run(wave, "global_store_dwordx4 v1, v[4:7], s[8:9]", RELEASE, DONE)
    np.testing.assert_array_equal(target.read(np.uint32)[:256], words(256))
    run(wave, "global_load_dwordx2 v[4:5], v1, s[8:9] offset:8", "global_load_dword v6, v1, s[8:9] offset:4", DONE)
    np.testing.assert_array_equal(wave.v[6], words(256)[1::4])
    np.testing.assert_array_equal(wave.v[4:6].T, words(256).reshape(64, 4)[:, 2:])
    set_u32(wave, 4, 0x8485F6F7)
    run(wave, "global_store_short v1, v4, s[8:9]", "global_store_byte v1, v4, s[8:9] offset:2")
    run(wave, "global_store_byte_d16_hi v1, v4, s[8:9] offset:3", RELEASE, DONE)
    assert target.read(np.uint32)[4] == 0x85F7F6F7
    run(wave, "global_load_ubyte v4, v1, s[8:9] offset:3", "global_load_sbyte v5, v1, s[8:9] offset:3", DONE)
    run(wave, "global_load_ushort v6, v1, s[8:9]", "global_load_sshort v7, v1, s[8:9]", DONE)
    assert [int(wave.v[at, 1]) for at in range(4, 8)] == [0x85, 0xFFFFFF85, 0xF6F7, 0xFFFFF6F7]
    run(wave, "global_load_short_d16_hi v4, v1, s[8:9]", DONE)
    assert wave.v[4, 1] == 0xF6F70085


def test_a_negative_offset_and_the_base_register() -> None:
    wave = lone_wave()
    buffer = wave.group.machine.buffer(words(128))
    wave.write64(4, buffer.address)
    wave.v[1] = LANE * 4 + 16
    run(wave, "global_load_dword v2, v1, s[4:5] offset:-16", DONE)
    np.testing.assert_array_equal(wave.v[2], words(64))


def test_one_lane_outside_of_all_buffers_faults_unless_it_is_off() -> None:
    wave = lone_wave()
    buffer = wave.group.machine.buffer(words(64), name="x")
    set_address(wave, 2, buffer, offset=4)
    with pytest.raises(MemoryFault, match="in no buffer; the buffer below is x of rank 0"):
        run(wave, "global_load_dword v4, v[2:3], off")
    wave.set_exec((1 << 63) - 1)
    run(wave, "global_load_dword v4, v[2:3], off", DONE)
    np.testing.assert_array_equal(wave.v[4, :63], words(64)[1:])


def test_a_lost_upper_half_of_an_address_faults() -> None:
    wave = lone_wave()
    buffer = wave.group.machine.buffer(words(64))
    set_address(wave, 2, buffer)
    set_u32(wave, 3, 0)
    with pytest.raises(MemoryFault):
        run(wave, "global_load_dword v4, v[2:3], off")


def test_lanes_may_use_different_buffers() -> None:
    wave = lone_wave()
    machine = wave.group.machine
    buffers = [machine.buffer(words(64) + at) for at in range(2)]
    addresses = np.where(LANE % 2, buffers[1].address, buffers[0].address) + LANE.astype(np.int64) * 4
    wave.v[2], wave.v[3] = (addresses & 0xFFFFFFFF).astype(np.uint32), (addresses >> 32).astype(np.uint32)
    run(wave, "global_load_dword v4, v[2:3], off", DONE)
    np.testing.assert_array_equal(wave.v[4], words(64) + LANE % 2)


def test_misaligned_words_fault() -> None:
    wave = lone_wave()
    buffer = wave.group.machine.buffer(words(128))
    set_address(wave, 2, buffer, offset=2)
    with pytest.raises(MemoryFault, match="aligned"):
        run(wave, "global_load_dword v4, v[2:3], off")


def test_peers_memory_is_mapped_or_faults() -> None:
    machine = Machine(num_ranks=2)
    wave = lone_wave(machine=machine)
    shared, private = machine.buffer(words(64), rank=1, peers=True), machine.buffer(words(64), rank=1)
    set_address(wave, 2, shared)
    run(wave, "global_load_dword v4, v[2:3], off sc0 sc1", DONE)
    set_address(wave, 2, private)
    with pytest.raises(MemoryFault, match="rank 0 has not mapped"):
        run(wave, "global_load_dword v4, v[2:3], off sc0 sc1")


def test_buffer_range_check_reads_zeros_and_drops_stores() -> None:
    wave = lone_wave()
    buffer = wave.group.machine.buffer(words(64))
    set_resource(wave, 8, buffer, records=32 * 4)
    wave.v[1] = LANE * 4
    wave.v[1, 5] = 0x80000000  # how compilers mask a lane off
    set_u32(wave, 2, 7)
    run(wave, "buffer_load_dword v2, v1, s[8:11], 0 offen", DONE)
    expected = np.where((LANE < 32) & (LANE != 5), words(64), 0)
    np.testing.assert_array_equal(wave.v[2], expected)
    set_u32(wave, 3, 0xFFFF)
    run(wave, "buffer_store_dword v3, v1, s[8:11], 0 offen", RELEASE, DONE)
    assert np.count_nonzero(buffer.read(np.uint32) == 0xFFFF) == 31


def test_buffer_offsets_add_up() -> None:
    wave = lone_wave()
    buffer = wave.group.machine.buffer(words(256))
    set_resource(wave, 8, buffer)
    wave.v[1], wave.s[4] = LANE * 4, 256
    run(
        wave,
        "buffer_load_dword v2, v1, s[8:11], s4 offen offset:16",
        "buffer_load_dword v3, off, s[8:11], s4 offset:8",
        DONE,
    )
    np.testing.assert_array_equal(wave.v[2], words(256)[68:132])
    assert set(wave.v[3].tolist()) == {int(words(256)[66])}


def test_within_num_records_but_outside_the_buffer_faults() -> None:
    wave = lone_wave()
    buffer = wave.group.machine.buffer(words(32))
    set_resource(wave, 8, buffer, records=0x7FFFFFFE)
    wave.v[1] = LANE * 4
    with pytest.raises(MemoryFault):
        run(wave, "buffer_load_dword v2, v1, s[8:11], 0 offen")


def test_resources_with_a_stride_are_not_modelled() -> None:
    wave = lone_wave()
    set_resource(wave, 8, wave.group.machine.buffer(words(64)))
    wave.s[9] |= 16 << 16
    with pytest.raises(UndefinedFault, match="stride"):
        run(wave, "buffer_load_dword v2, off, s[8:11], 0")


def test_loads_complete_in_order() -> None:
    wave = lone_wave(machine=Late())
    buffer = wave.group.machine.buffer(words(64))
    wave.write64(4, buffer.address)
    wave.v[1] = LANE * 4
    run(
        wave, "global_load_dword v2, v1, s[4:5]", "global_load_dword v3, v1, s[4:5]", "global_load_dword v8, v1, s[4:5]"
    )
    run(wave, "s_waitcnt vmcnt(2)")
    assert [touches_pending(wave, f"v_mov_b32_e32 v0, v{at}") for at in (2, 3, 8)] == [False, True, True]
    run(wave, "s_waitcnt vmcnt(1)")
    assert [touches_pending(wave, f"v_mov_b32_e32 v0, v{at}") for at in (2, 3, 8)] == [False, False, True]
    run(wave, "s_waitcnt lgkmcnt(0)")
    assert touches_pending(wave, "v_mov_b32_e32 v0, v8")


def test_address_registers_may_be_overwritten_at_once_but_not_results() -> None:
    wave = lone_wave(machine=Late())
    buffer = wave.group.machine.buffer(words(64))
    wave.write64(4, buffer.address)
    wave.v[1] = LANE * 4
    run(wave, "global_load_dword v2, v1, s[4:5]", "v_mov_b32_e32 v1, 0", DONE)
    np.testing.assert_array_equal(wave.v[2], words(64))
    run(wave, "global_load_dword v2, v1, s[4:5]")
    assert touches_pending(wave, "v_mov_b32_e32 v2, 0")


@pytest.mark.parametrize("machine", [Machine, Late])
def test_of_two_loads_into_a_register_the_later_wins_without_a_wait(machine: type[Machine]) -> None:
    wave = lone_wave(machine=machine())
    set_address(wave, 2, wave.group.machine.buffer(words(128)))
    first, second = "global_load_dword v8, v[2:3], off", "global_load_dword v8, v[2:3], off offset:256"
    run(wave, first)
    assert not touches_pending(wave, second)
    assert touches_pending(wave, "global_load_short_d16 v8, v[2:3], off")  # keeps half of the register
    run(wave, second, "s_waitcnt vmcnt(1)")
    assert touches_pending(wave, "v_mov_b32_e32 v0, v8")
    run(wave, DONE)
    np.testing.assert_array_equal(wave.v[8], words(128)[64:])


def test_a_load_into_a_register_to_which_lds_data_are_under_way_faults() -> None:
    wave = lone_wave()
    set_address(wave, 2, wave.group.machine.buffer(words(64)))
    run(wave, "ds_read_b32 v8, v1")
    with pytest.raises(PendingRegisterFault, match="LDS"):
        run(wave, "global_load_dword v8, v[2:3], off")


def test_a_late_load_sees_a_store_that_came_in_between() -> None:
    """Between issue and wait anything may happen to memory."""
    machine = Late()
    reader, writer = lone_wave(machine=machine), lone_wave(machine=machine)
    buffer = machine.buffer(words(64))
    for wave in (reader, writer):
        wave.write64(4, buffer.address)
        wave.v[1] = LANE * 4
    set_u32(writer, 2, 5)
    run(reader, "global_load_dword v3, v1, s[4:5]")
    run(writer, "global_store_dword v1, v2, s[4:5] sc1", DONE)
    run(reader, DONE)
    assert set(reader.v[3].tolist()) == {5}


def test_a_store_is_not_visible_before_its_own_waves_wait() -> None:
    """Neither to another workgroup nor by another wave's wait."""
    machine = Late()
    group, other = lone_group(waves=2, machine=machine), lone_wave(machine=machine)
    storing, raising = group.waves
    buffer = machine.buffer(words(64))
    for wave in (storing, raising, other):
        wave.write64(4, buffer.address)
        wave.v[1] = LANE * 4
    set_u32(storing, 2, 5)
    run(storing, "global_store_dword v1, v2, s[4:5] sc0 sc1")
    run(raising, DONE)
    run(other, "global_load_dword v3, v1, s[4:5] sc0 sc1", DONE)
    np.testing.assert_array_equal(other.v[3], words(64))
    run(storing, DONE)
    run(other, "global_load_dword v3, v1, s[4:5] sc0 sc1", DONE)
    assert set(other.v[3].tolist()) == {5}


def test_a_workgroup_sees_its_own_stores_in_order() -> None:
    group = lone_group(waves=2, machine=Late())
    first, second = group.waves
    buffer = group.machine.buffer(words(64))
    for wave in group.waves:
        wave.write64(4, buffer.address)
        wave.v[1] = LANE * 4
    set_u32(first, 2, 5)
    set_u32(second, 2, 6)
    run(first, "global_store_dword v1, v2, s[4:5]")
    run(second, "global_load_dword v3, v1, s[4:5]", DONE)
    assert set(second.v[3].tolist()) == {5}
    run(first, "global_store_dword v1, v2, s[4:5]")
    run(second, "global_store_dword v1, v2, s[4:5]", DONE)
    run(first, DONE)
    run(second, RELEASE, DONE)
    assert set(buffer.read(np.uint32).tolist()) == {6}


def test_atomics_return_old_values_lane_by_lane() -> None:
    wave = lone_wave()
    buffer = wave.group.machine.buffer(np.array([100, 0, 7, 0], np.uint32))
    wave.write64(4, buffer.address)
    set_u32(wave, 1, 0)
    set_u32(wave, 2, 2)
    wave.set_exec(0b111)
    run(wave, "global_atomic_add v3, v1, v2, s[4:5] sc0", DONE)
    assert wave.v[3, :4].tolist() == [100, 102, 104, 0]
    assert buffer.read(np.uint32)[0] == 106
    run(wave, "global_atomic_umax v1, v2, s[4:5] offset:8", "global_atomic_or v1, v2, s[4:5] offset:4", DONE)
    assert buffer.read(np.uint32).tolist() == [106, 2, 7, 0]


def test_compare_and_swap() -> None:
    wave = lone_wave()
    buffer = wave.group.machine.buffer(np.array([5, 0], np.uint32))
    wave.write64(4, buffer.address)
    wave.set_exec(1)
    set_u32(wave, 2, 9)  # new value
    set_u32(wave, 3, 4)  # compared with
    run(wave, "global_atomic_cmpswap v6, v1, v[2:3], s[4:5] sc0", DONE)
    assert (wave.v[6, 0], buffer.read(np.uint32)[0]) == (5, 5)
    set_u32(wave, 3, 5)
    run(wave, "global_atomic_cmpswap v6, v1, v[2:3], s[4:5] sc0", DONE)
    assert (wave.v[6, 0], buffer.read(np.uint32)[0]) == (5, 9)


def test_64_bit_and_float_atomics() -> None:
    wave = lone_wave()
    buffer = wave.group.machine.buffer(np.array([0xFFFFFFFF, 0], np.uint32))
    wave.write64(4, buffer.address)
    wave.set_exec(1)
    set_u32(wave, 2, 1)
    run(wave, "global_atomic_add_x2 v[6:7], v1, v[2:3], s[4:5] sc0", DONE)
    assert (wave.v[6, 0], buffer.read(np.uint64)[0]) == (0xFFFFFFFF, 1 << 32)
    buffer.write(np.array([1.5], np.float32))
    wave.vf[2] = 0.25
    run(wave, "global_atomic_add_f32 v1, v2, s[4:5]", DONE)
    assert buffer.read(np.float32)[0] == 1.75


def test_an_atomic_on_a_peers_memory_needs_system_scope() -> None:
    machine = Machine(num_ranks=2)
    wave = lone_wave(machine=machine)
    wave.write64(4, machine.buffer(16, rank=1, peers=True).address)
    wave.set_exec(1)
    run(wave, "global_atomic_add v1, v2, s[4:5] sc1", DONE)
    with pytest.raises(UndefinedFault, match="agent scope"):
        run(wave, "global_atomic_add v1, v2, s[4:5]")


def test_stored_bytes_are_counted_by_owner() -> None:
    machine = Machine(num_ranks=2)
    wave = lone_wave(machine=machine)
    for rank in range(2):
        set_address(wave, 2, machine.buffer(4096, rank=rank, peers=True), stride=16)
        wave.set_exec(0xF)
        run(wave, "global_store_dwordx4 v[2:3], v[4:7], off sc0 sc1")
    assert machine.stored_bytes == {(0, 0): 64, (0, 1): 64}


def test_scalar_loads() -> None:
    wave = lone_wave()
    buffer = wave.group.machine.buffer(words(64))
    wave.write64(2, buffer.address + 64)
    wave.s[4] = 8
    run(
        wave,
        "s_load_dwordx4 s[8:11], s[2:3], 0x10",
        "s_load_dword s12, s[2:3], -0x10",
        "s_load_dword s13, s[2:3], s4 offset:0x4",
    )
    assert touches_pending(wave, "s_mov_b32 s0, s10")
    run(wave, "s_waitcnt lgkmcnt(1)")  # out of order: nothing is certain but zero
    assert touches_pending(wave, "s_mov_b32 s0, s8")
    run(wave, "s_waitcnt lgkmcnt(0)")
    assert wave.s[8:14].tolist() == [int(words(64)[at]) for at in (20, 21, 22, 23, 12, 19)]
    wave.write64(2, 0)
    with pytest.raises(MemoryFault):
        run(wave, "s_load_dword s8, s[2:3], 0x0")


def test_scalar_and_lds_loads_share_a_counter() -> None:
    wave = lone_wave()
    wave.write64(2, wave.group.machine.buffer(words(64)).address)
    run(wave, "ds_read_b32 v4, v1", "s_load_dword s8, s[2:3], 0x0", "ds_read_b32 v5, v1")
    run(wave, "s_waitcnt lgkmcnt(1)")  # two of three are done: one LDS read at least, and that is the first
    assert not touches_pending(wave, "v_mov_b32_e32 v0, v4")
    assert touches_pending(wave, "v_mov_b32_e32 v0, v5")
    assert touches_pending(wave, "s_mov_b32 s0, s8")


@pytest.mark.parametrize("width, name", [(4, "dword"), (16, "dwordx4")])
def test_a_load_into_lds_lands_lane_after_lane(width: int, name: str) -> None:
    wave = lone_wave(machine=Late())
    buffer = wave.group.machine.buffer(words(512))
    set_resource(wave, 8, buffer, records=buffer.num_bytes)
    wave.v[1] = (63 - LANE) * width
    wave.v[1, 2] = 0x80000000
    wave.s[M0] = 1024
    run(wave, f"buffer_load_{name} v1, s[8:11], 0 offen offset:32 lds")
    set_u32(wave, 3, 1024 + 32)
    with pytest.raises(LdsRaceFault, match="a DMA is still filling"):
        run(wave, "ds_read_b32 v4, v3")
    run(wave, DONE)
    per_lane = width // 4
    landed = wave.group.lds.words[(1024 + 32) // 4 :][: 64 * per_lane].reshape(64, per_lane)
    expected = words(512)[8:][: 64 * per_lane].reshape(64, per_lane)[::-1].copy()
    expected[2] = 0  # out of range
    np.testing.assert_array_equal(landed, expected)


def test_a_load_into_lds_that_another_wave_reads() -> None:
    group = lone_group(waves=2, machine=Late())
    loading, reading = group.waves
    buffer = group.machine.buffer(words(64))
    set_resource(loading, 8, buffer)
    loading.v[1] = reading.v[1] = LANE * 4
    run(loading, "buffer_load_dword v1, s[8:11], 0 offen lds")
    for wave in group.waves:  # a barrier without a wait before it
        wave.state = "barrier"
    group.release_barrier()
    with pytest.raises(LdsRaceFault, match="without a wait"):
        run(reading, "ds_read_b32 v2, v1")
    run(loading, DONE)
    with pytest.raises(LdsRaceFault, match="wave 0 wrote, without a barrier"):
        run(reading, "ds_read_b32 v2, v1")
    for wave in group.waves:
        wave.state = "barrier"
    group.release_barrier()
    run(reading, "ds_read_b32 v2, v1", "s_waitcnt lgkmcnt(0)")
    np.testing.assert_array_equal(reading.v[2], words(64))
