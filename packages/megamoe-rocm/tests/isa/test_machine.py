"""The machine and its scheduler: launches, faults that name their place, deadlocks, seeds, deletions."""

from __future__ import annotations

import numpy as np
import pytest
from isa_harness import program

from megamoe_rocm.isa import (
    DeadlockError,
    LaunchArgumentsError,
    Machine,
    MemoryFault,
    PendingRegisterFault,
)
from megamoe_rocm.isa.mutation import delete_each, sites

X = ("x", "*i32", 0)
LOAD_X = ("s_load_dwordx2 s[4:5], s[0:1], 0x0", "s_waitcnt lgkmcnt(0)")
# Every workgroup adds its id + 1 to x[0], once.
ADD_ID = program(
    *LOAD_X,
    "s_add_u32 s6, s2, 1",
    "v_mov_b32_e32 v1, 0",
    "v_mov_b32_e32 v2, s6",
    "s_mov_b64 exec, 1",
    "global_atomic_add v1, v2, s[4:5]",
    "s_endpgm",
    arguments=(X,),
)
# x[id] = x[id - 1] + 1 once x[id - 1] is not zero: each workgroup waits for the one before it.
CHAIN = program(
    *LOAD_X,
    "s_lshl_b32 s6, s2, 2",
    "v_mov_b32_e32 v1, s6",
    "s_mov_b64 exec, 1",
    "again:",
    "s_sleep 1",
    "global_load_dword v2, v1, s[4:5] sc1",
    "s_waitcnt vmcnt(0)",
    "v_cmp_eq_u32_e32 vcc, 0, v2",
    "s_cbranch_vccnz again",
    "v_add_u32_e32 v2, 1, v2",
    "global_store_dword v1, v2, s[4:5] offset:4 sc1",
    "s_endpgm",
    arguments=(X,),
)
# Two waves: the first writes LDS, both meet, the second copies it out.
THROUGH_LDS = program(
    *LOAD_X,
    "v_readfirstlane_b32 s6, v0",
    "v_and_b32_e32 v1, 63, v0",
    "v_lshlrev_b32_e32 v1, 2, v1",
    "s_cmp_lg_u32 s6, 0",
    "s_cbranch_scc1 meet",
    "global_load_dword v2, v1, s[4:5]",
    "s_waitcnt vmcnt(0)",
    "ds_write_b32 v1, v2",
    "s_waitcnt lgkmcnt(0)",
    "meet:",
    "s_barrier",
    "s_cmp_eq_u32 s6, 0",
    "s_cbranch_scc1 done",
    "ds_read_b32 v3, v1",
    "s_waitcnt lgkmcnt(0)",
    "global_store_dword v1, v3, s[4:5] offset:256",
    "done:",
    "s_endpgm",
    num_warps=2,
    lds_bytes=256,
    arguments=(X,),
)


def test_every_workgroup_runs_once() -> None:
    for seed in range(5):
        machine = Machine(seed=seed)
        x = machine.buffer(4)
        machine.launch(ADD_ID, grid=(5, 2, 1), arguments={"x": x})
        machine.run()
        assert x.read(np.uint32)[0] == 2 * (1 + 2 + 3 + 4 + 5)


def test_launches_of_one_rank_run_one_after_the_other() -> None:
    copy = program(
        *LOAD_X,
        "v_mov_b32_e32 v1, 0",
        "global_load_dword v2, v1, s[4:5]",
        "s_waitcnt vmcnt(0)",
        "global_store_dword v1, v2, s[4:5] offset:4",
        "s_endpgm",
        arguments=(X,),
    )
    for seed in range(5):
        machine = Machine(seed=seed)
        x = machine.buffer(8)
        machine.launch(ADD_ID, grid=4, arguments={"x": x})
        machine.launch(copy, grid=1, arguments={"x": x})
        machine.run()
        assert x.read(np.uint32).tolist() == [10, 10]


@pytest.mark.parametrize("resident", [1, 2, 4])
def test_a_chain_through_all_workgroups_ends(resident: int) -> None:
    machine = Machine(seed=resident)
    x = machine.buffer(np.array([1, 0, 0, 0, 0], np.uint32))
    machine.launch(CHAIN, grid=4, arguments={"x": x}, max_resident=resident)
    machine.run(max_steps=200_000)
    assert x.read(np.uint32).tolist() == [1, 2, 3, 4, 5]


def test_a_flag_that_is_stored_into_the_cache_may_never_be_seen() -> None:
    cached = program(
        *(item.text.removesuffix(" sc1") if "store" in item.text else item.text for item in CHAIN.instructions[:5]),
        "again:",
        *(item.text for item in CHAIN.instructions[5:9]),
        "s_cbranch_vccnz again",
        *(item.text.removesuffix(" sc1") for item in CHAIN.instructions[10:]),
        arguments=(X,),
    )
    machine = Machine()
    machine.launch(cached, grid=2, arguments={"x": machine.buffer(np.array([1, 0, 0], np.uint32))})
    with pytest.raises(DeadlockError):
        machine.run(max_steps=20_000)


def test_waiting_for_a_workgroup_that_has_no_place_is_a_deadlock() -> None:
    machine = Machine()
    x = machine.buffer(np.zeros(5, np.uint32))
    machine.launch(CHAIN, grid=2, arguments={"x": x}, max_resident=1)
    with pytest.raises(DeadlockError, match="not done after 3000 instructions") as caught:
        machine.run(max_steps=3000)
    assert len(caught.value.waves) == 1
    assert "rank 0 handmade workgroup (0, 0, 0) wave 0: running at 0x" in caught.value.waves[0]


def test_a_flag_that_no_rank_raises_is_reported_for_every_wave() -> None:
    machine = Machine(num_ranks=2)
    for rank in range(2):
        machine.launch(CHAIN, grid=2, rank=rank, arguments={"x": machine.buffer(32, rank=rank)})
    with pytest.raises(DeadlockError) as caught:
        machine.run(max_steps=5000)
    assert len(caught.value.waves) == 4


def test_a_wave_that_comes_twice_to_a_barrier_waits() -> None:
    """Wave 0 passes two barriers, wave 1 only one and then spins for ever on memory: nothing can go on but the spin."""
    lone = program(
        "v_readfirstlane_b32 s6, v0",
        "s_barrier",
        "s_cmp_eq_u32 s6, 0",
        "s_cbranch_scc1 second",
        "spin:",
        "s_branch spin",
        "second:",
        "s_barrier",
        "s_endpgm",
        num_warps=2,
    )
    machine = Machine()
    machine.launch(lone, grid=1, arguments={})
    with pytest.raises(DeadlockError) as caught:
        machine.run(max_steps=2000)
    assert any("wave 0: barrier at" in line for line in caught.value.waves)


def test_faults_name_rank_workgroup_wave_and_instruction() -> None:
    machine = Machine(num_ranks=2)
    machine.launch(ADD_ID, grid=1, rank=1, arguments={"x": machine.buffer(4, rank=0)})
    with pytest.raises(MemoryFault, match=r"rank 1 handmade workgroup \(0, 0, 0\) wave 0 at 0x18: global_atomic_add"):
        machine.run()


def test_a_missing_wait_is_found_at_the_first_use() -> None:
    hasty = program(LOAD_X[0], "s_mov_b32 s6, s4", "s_endpgm", arguments=(X,))
    machine = Machine()
    machine.launch(hasty, grid=1, arguments={"x": machine.buffer(4)})
    with pytest.raises(PendingRegisterFault, match="s_mov_b32 s6, s4"):
        machine.run()


def test_a_seed_is_a_schedule() -> None:
    def trace(seed: int) -> tuple[int, list[int]]:
        machine = Machine(seed=seed)
        x = machine.buffer(np.array([1, 0, 0, 0, 0], np.uint32))
        machine.launch(CHAIN, grid=4, arguments={"x": x})
        return machine.run(max_steps=200_000), machine._registers[0].tolist()

    assert trace(3) == trace(3)
    assert len({trace(seed)[0] for seed in range(6)}) > 1


def test_uninitialised_registers_differ_from_seed_to_seed() -> None:
    leak = program(*LOAD_X, "v_mov_b32_e32 v1, 0", "global_store_dword v1, v9, s[4:5]", "s_endpgm", arguments=(X,))
    results = set()
    for seed in range(3):
        machine = Machine(seed=seed)
        x = machine.buffer(4)
        machine.launch(leak, grid=1, arguments={"x": x})
        machine.run()
        results.add(int(x.read(np.uint32)[0]))
    assert len(results) == 3


@pytest.mark.parametrize("arguments", [{}, {"x": 1, "y": 2}])
def test_arguments_must_fit(arguments: dict[str, int]) -> None:
    with pytest.raises(LaunchArgumentsError, match=r"expected \['x'\]"):
        Machine().launch(ADD_ID, grid=1, arguments=arguments)


@pytest.mark.parametrize("kind, value", [("i32", 1 << 31), ("i32", 1.5), ("fp32", "x")])
def test_values_must_fit(kind: str, value: object) -> None:
    with pytest.raises(LaunchArgumentsError, match="a value for the argument x"):
        Machine().launch(program("s_endpgm", arguments=(("x", kind, 0),)), grid=1, arguments={"x": value})


def test_arguments_are_encoded_where_the_code_object_says() -> None:
    kernel = program("s_endpgm", arguments=(("a", "i32", 4), ("b", "fp32", 8), ("c", "i64", 16), ("d", "*u8", 24)))
    machine = Machine()
    buffer = machine.buffer(16)
    segment = kernel.kernarg({"a": -2, "b": 1.5, "c": -1, "d": buffer}, (1, 1, 1))
    assert segment[4:8].view(np.int32)[0] == -2
    assert segment[8:12].view(np.float32)[0] == 1.5
    assert segment[16:24].view(np.int64)[0] == -1
    assert segment[24:32].view(np.int64)[0] == buffer.address


def through_lds(kernel: object, seed: int) -> bool:
    machine = Machine(seed=seed)
    values = np.arange(64, dtype=np.uint32) + 7
    x = machine.buffer(np.concatenate([values, np.zeros(64, np.uint32)]))
    machine.launch(kernel, grid=1, arguments={"x": x})
    machine.run(max_steps=2000)
    return bool((x.read(np.uint32)[64:] == values).all())


def test_every_deletion_of_a_small_kernel_is_noticed() -> None:
    report = delete_each(THROUGH_LDS, through_lds, sites(THROUGH_LDS), seeds=(0, 1, 2))
    assert {outcome.kind for outcome in report.outcomes} == {"load", "lds", "wait", "barrier"}
    assert len(report.outcomes) == 9
    assert not report.survivors, report.table()
    assert report.share_noticed == 1.0
    how = {outcome.instruction.split(": ")[1]: outcome.how for outcome in report.outcomes}
    assert "needs" not in how["s_barrier"]
    assert how["s_barrier"].startswith(("fault: ", "wrong result"))


def test_survivors_are_listed_with_their_reason() -> None:
    redundant = program(*LOAD_X, "s_waitcnt vmcnt(0)", "s_endpgm", "s_barrier", "s_endpgm", arguments=(X,))

    def subject(kernel: object, seed: int) -> bool:
        machine = Machine(seed=seed)
        machine.launch(kernel, grid=1, arguments={"x": machine.buffer(4)})
        machine.run()
        return True

    report = delete_each(redundant, subject, sites(redundant), reasons={2: "nothing is outstanding"})
    by_index = {outcome.index: outcome.how for outcome in report.outcomes}
    assert by_index == {0: "survived", 1: "survived", 2: "survived", 4: "not executed"}
    assert [outcome.index for outcome in report.unexplained] == [0, 1]
    assert report.share_noticed == 0  # of the three that were executed
    assert "nothing is outstanding" in report.table()
    assert "1 not executed" in report.table()


def test_a_kernel_that_is_wrong_is_not_mutated() -> None:
    with pytest.raises(AssertionError, match="wrong before anything is deleted"):
        delete_each(THROUGH_LDS, lambda kernel, seed: False, [0])


def test_sites_can_be_sampled() -> None:
    assert len(sites(THROUGH_LDS, sample=4, seed=1)) == 4
    assert sites(THROUGH_LDS, sample=4, seed=1) == sites(THROUGH_LDS, sample=4, seed=1)
    assert [THROUGH_LDS.instructions[at].mnemonic for at in sites(THROUGH_LDS, kinds=("barrier",))] == ["s_barrier"]
