"""Branches, waits, barriers and mode changes."""

from __future__ import annotations

import pytest
from isa_harness import instruction, lone_group, lone_wave, run

from megamoe_rocm.isa.errors import ExecutionFault, UnsupportedInstructionError
from megamoe_rocm.isa.instructions import decode
from megamoe_rocm.isa.wave import VCC

POSITIONS = {0x100: 0, 0x104: 1, 0x108: 2, 0x10C: 3}


def step(wave, text: str, simm16: int = 0) -> int | None:
    """Execute an instruction at 0x104, index 1."""
    return decode(instruction(text, address=0x104, words=(0xBF800000 | simm16,)), POSITIONS)(wave)


@pytest.mark.parametrize(
    "mnemonic, taken, not_taken",
    [
        ("s_cbranch_scc1", {"scc": 1}, {"scc": 0}),
        ("s_cbranch_scc0", {"scc": 0}, {"scc": 1}),
        ("s_cbranch_vccz", {"vcc": 0}, {"vcc": 1 << 40}),
        ("s_cbranch_vccnz", {"vcc": 1 << 40}, {"vcc": 0}),
        ("s_cbranch_execz", {"exec": 0}, {"exec": 1 << 63}),
        ("s_cbranch_execnz", {"exec": 1 << 63}, {"exec": 0}),
    ],
)
def test_conditions(mnemonic: str, taken: dict[str, int], not_taken: dict[str, int]) -> None:
    for state, target in ((taken, 3), (not_taken, None)):
        wave = lone_wave()
        wave.scc = state.get("scc", 0)
        wave.write64(VCC, state.get("vcc", 0))
        wave.set_exec(state.get("exec", 1))
        assert step(wave, f"{mnemonic} 1", 1) == target


def test_branches_count_words_from_the_next_instruction() -> None:
    assert step(lone_wave(), "s_branch 1", 1) == 3
    assert step(lone_wave(), "s_branch 65534", 0xFFFE) == 0
    with pytest.raises(UnsupportedInstructionError, match="out of the kernel"):
        step(lone_wave(), "s_branch 9", 9)


def test_barrier_end_and_hints() -> None:
    wave = lone_wave()
    assert step(wave, "s_barrier") == ~2
    assert wave.state == "barrier"
    for text in ("s_nop 0", "s_setprio 1"):
        assert step(wave, text) is None
    for text in ("s_sleep 1", "buffer_inv sc0 sc1"):
        assert step(wave, text) == ~2  # others get a turn
    step(wave, "s_endpgm")
    assert wave.state == "done"


def test_a_barrier_waits_for_all_waves_that_have_not_ended() -> None:
    group = lone_group(waves=3)
    group.waves[0].state = "barrier"
    assert not group.release_barrier()
    group.waves[1].state = "done"
    assert not group.release_barrier()
    group.waves[2].state = "barrier"
    assert group.release_barrier()
    assert [wave.state for wave in group.waves] == ["running", "done", "running"]


def test_traps_fault() -> None:
    with pytest.raises(ExecutionFault, match="trapped"):
        step(lone_wave(), "s_trap 2")


def test_only_the_fp8_overflow_mode_can_be_set() -> None:
    wave = lone_wave()
    run(wave, "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1")
    assert wave.fp16_overflow_clamps
    run(wave, "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 0")
    assert not wave.fp16_overflow_clamps
    with pytest.raises(UnsupportedInstructionError):
        run(wave, "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0")


def test_a_wait_without_a_counter_is_not_guessed() -> None:
    with pytest.raises(UnsupportedInstructionError, match="unknown counter"):
        step(lone_wave(), "s_waitcnt depctr(0)")
