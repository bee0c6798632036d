"""What workgroups see of each other's stores: the caches at their worst, and what write-back and invalidate do."""

from __future__ import annotations

import numpy as np
import pytest
from isa_harness import LANE, lone_wave, run, set_u32

from megamoe_rocm.isa import Buffer, Machine
from megamoe_rocm.isa.wave import Wave

DONE = "s_waitcnt vmcnt(0)"
LOAD, LOAD_SC1 = "global_load_dword v3, v1, s[4:5]", "global_load_dword v3, v1, s[4:5] sc1"
STORE = "global_store_dword v1, v2, s[4:5]"


class Stale(Machine):
    """Every load that may be stale is, and every operation takes effect at its wait."""

    def decide_stale(self) -> bool:
        return True

    def decide_early(self) -> bool:
        return False


def waves_on(machine: Machine, buffer: Buffer, count: int) -> list[Wave]:
    """Lone waves that have just started, with the buffer's address and lane offsets set up."""
    waves = []
    for at in range(count):
        wave = lone_wave(machine=machine)
        wave.group.cache.invalidate()
        wave.write64(4, buffer.address)
        wave.v[1] = LANE * 4
        set_u32(wave, 2, at + 1)
        waves.append(wave)
    return waves


def seen(wave: Wave, load: str = LOAD) -> set[int]:
    run(wave, load, DONE)
    return set(wave.v[3].tolist())


def test_a_store_is_seen_by_others_after_a_write_back_and_an_invalidate() -> None:
    machine = Stale()
    writer, reader = waves_on(machine, buffer := machine.buffer(256), 2)
    run(writer, STORE, DONE)
    assert seen(reader, LOAD_SC1) == {0}
    run(writer, "buffer_wbl2 sc1", DONE)
    assert set(buffer.read(np.uint32).tolist()) == {1}
    assert seen(reader) == {0}  # its cache is stale
    assert seen(reader, LOAD_SC1) == {1}
    run(reader, "buffer_inv sc1")
    assert seen(reader) == {1}


def test_a_workgroup_sees_its_own_stores() -> None:
    machine = Stale()
    (writer,) = waves_on(machine, machine.buffer(256), 1)
    run(writer, STORE, DONE)
    assert seen(writer) == {1}


def test_words_beside_its_own_may_be_old() -> None:
    """An atomic or a store of one word does not bring the others of its buffer."""
    machine = Stale()
    other, reader = waves_on(machine, machine.buffer(256), 2)
    run(other, STORE + " sc0 sc1", DONE)
    reader.set_exec(1)
    run(reader, "global_atomic_add v1, v2, s[4:5]", "global_store_dword v1, v2, s[4:5] offset:4", DONE)
    reader.set_exec(2**64 - 1)
    run(reader, LOAD, DONE)
    assert reader.v[3].tolist() == [3, 2, *[0] * 62]


@pytest.mark.parametrize("text", ["buffer_inv sc0", "buffer_inv"])
def test_an_invalidate_of_the_workgroups_scope_is_not_enough(text: str) -> None:
    machine = Stale()
    writer, reader = waves_on(machine, machine.buffer(256), 2)
    run(writer, STORE + " sc1", DONE)
    run(reader, text)
    assert seen(reader) == {0}


def test_a_write_back_covers_what_its_wave_stored_before_it() -> None:
    machine = Stale()
    writer, reader = waves_on(machine, machine.buffer(256), 2)
    run(writer, STORE, "buffer_wbl2 sc1")
    assert seen(reader, LOAD_SC1) == {0}  # nobody has waited for it
    run(writer, DONE)
    assert seen(reader, LOAD_SC1) == {1}


def test_stores_through_the_cache_are_seen_at_once() -> None:
    machine = Stale()
    writer, reader = waves_on(machine, machine.buffer(256), 2)
    run(writer, STORE + " sc1", DONE)
    assert seen(reader, LOAD_SC1) == {1}


def test_a_peers_memory_takes_both_bits() -> None:
    machine = Stale(num_ranks=2)
    buffer = machine.buffer(256, rank=1, peers=True)
    (writer,) = waves_on(machine, buffer, 1)
    run(writer, STORE + " sc1", DONE, "buffer_wbl2 sc1", DONE)
    assert set(buffer.read(np.uint32).tolist()) == {0}
    run(writer, "buffer_wbl2 sc0 sc1", DONE)
    assert set(buffer.read(np.uint32).tolist()) == {1}
    set_u32(writer, 2, 9)
    run(writer, STORE + " sc0 sc1", DONE)
    assert set(buffer.read(np.uint32).tolist()) == {9}


def test_stores_to_the_same_bytes_keep_their_order_through_the_cache() -> None:
    machine = Stale()
    (writer,) = waves_on(machine, buffer := machine.buffer(256), 1)
    run(writer, STORE, DONE)
    set_u32(writer, 2, 7)
    run(writer, STORE + " sc1", DONE, "buffer_wbl2 sc1", DONE)
    assert set(buffer.read(np.uint32).tolist()) == {7}


def test_atomics_act_on_memory_and_after_own_stores() -> None:
    machine = Stale()
    first, second = waves_on(machine, buffer := machine.buffer(256), 2)
    run(first, STORE, DONE)
    for wave in (first, second):
        wave.set_exec(1)
        run(wave, "global_atomic_add v3, v1, v2, s[4:5] sc0", DONE)
    assert (first.v[3, 0], second.v[3, 0]) == (1, 2)
    assert buffer.read(np.uint32)[0] == 4


def test_scalar_loads_may_be_as_old_as_the_kernel() -> None:
    machine = Stale()
    buffer = machine.buffer(256)
    started = machine.memory.snapshot()
    (writer,) = waves_on(machine, buffer, 1)
    run(writer, STORE + " sc1", DONE)
    reader = lone_wave(machine=machine, started=started)
    reader.write64(4, buffer.address)
    run(reader, "buffer_inv sc1", "s_load_dword s8, s[4:5], 0x0", "s_waitcnt lgkmcnt(0)")
    assert reader.s[8] == 0


def test_a_snapshot_is_copied_only_if_the_buffer_changes() -> None:
    machine = Machine()
    buffer = machine.buffer(np.arange(4, dtype=np.uint32))
    moment = buffer.snapshot()
    assert moment.data is buffer.data
    assert buffer.snapshot() is moment
    buffer.write(np.array([9], np.uint32))
    assert moment.words.tolist() == [0, 1, 2, 3]
    assert buffer.snapshot().words.tolist() == [9, 1, 2, 3]
