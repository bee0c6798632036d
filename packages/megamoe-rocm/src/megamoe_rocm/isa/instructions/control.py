"""Branches, waits, barriers, mode changes and cache operations.

Source: AMD CDNA3 and CDNA4 ISA documents, "SOPP instructions", "SOPK" (S_SETREG) and "Memory scopes".

What `buffer_wbl2` and `buffer_inv` do is `megamoe_rocm.isa.caches`'s.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from megamoe_rocm.aot.disassembly import Instruction
from megamoe_rocm.aot.inspection import scope
from megamoe_rocm.isa.accesses import Access, issue, perform, wait_lgkm, wait_vm
from megamoe_rocm.isa.errors import ExecutionFault
from megamoe_rocm.isa.operands import Step, allow_modifiers, unsupported
from megamoe_rocm.isa.wave import VCC, Wave

COUNTERS = {"vmcnt": 63, "lgkmcnt": 15, "expcnt": 7}  # each with the value that waits for nothing
COUNTER = re.compile(r"(\w+)\((\d+)\)")
SETREG = re.compile(r"hwreg\((\w+), (\d+), (\d+)\)")
FP16_OVFL_BIT = 23

CONDITIONS: dict[str, Callable[[Wave], bool]] = {
    "s_branch": lambda wave: True,
    "s_cbranch_scc0": lambda wave: wave.scc == 0,
    "s_cbranch_scc1": lambda wave: wave.scc == 1,
    "s_cbranch_vccz": lambda wave: wave.read64(VCC) == 0,
    "s_cbranch_vccnz": lambda wave: wave.read64(VCC) != 0,
    "s_cbranch_execz": lambda wave: wave.exec_mask == 0,
    "s_cbranch_execnz": lambda wave: wave.exec_mask != 0,
}
# No effect on registers or memory: scheduling hints, instruction and scalar cache.
HINTS = frozenset(("s_nop", "s_setprio", "s_icache_inv", "s_dcache_inv", "s_dcache_wb", "s_set_gpr_idx_off"))
# These end the wave's turn, so that whoever spins lets others go on.
YIELDS = frozenset(("s_sleep", "buffer_inv"))
MNEMONICS = frozenset(
    (*CONDITIONS, *HINTS, *YIELDS, "s_waitcnt", "s_barrier", "s_endpgm", "s_trap", "s_setreg_imm32_b32", "buffer_wbl2")
)


def decode(item: Instruction, positions: dict[int, int]) -> Step:
    """The function that executes a control instruction.

    Args:
        item: the instruction.
        positions: address -> index of every instruction of the kernel.

    The function returns the index to go on at; `~index` ends the wave's turn as well.
    """
    name = item.mnemonic
    if name in CONDITIONS:
        return _branch(item, positions)
    if name == "s_waitcnt":
        return _waitcnt(item)
    if name == "s_setreg_imm32_b32":
        return _setreg(item)
    if name == "s_barrier":
        return _barrier(positions[item.address] + 1)
    if name == "s_endpgm":
        return _end
    if name == "s_trap":
        return _trap
    if name == "buffer_wbl2":
        return _write_back(item)
    if name in YIELDS:
        return _yield(item, ~(positions[item.address] + 1))
    return lambda wave: None


def _branch(item: Instruction, positions: dict[int, int]) -> Step:
    if item.branch_target not in positions:
        raise unsupported(item, "a branch out of the kernel")
    target, taken = positions[item.branch_target], CONDITIONS[item.mnemonic]
    if item.mnemonic == "s_branch":
        return lambda wave: target
    return lambda wave: target if taken(wave) else None


def _waitcnt(item: Instruction) -> Step:
    counts = dict(COUNTERS)
    for name, value in COUNTER.findall(item.text):
        if name not in counts:
            raise unsupported(item, f"an unknown counter {name}")
        counts[name] = int(value)
    vm, lgkm = counts["vmcnt"], counts["lgkmcnt"]

    def step(wave: Wave) -> None:
        if vm < COUNTERS["vmcnt"]:
            wait_vm(wave, vm)
        if lgkm < COUNTERS["lgkmcnt"]:
            wait_lgkm(wave, lgkm)

    return step


def _barrier(following: int) -> Step:
    def step(wave: Wave) -> int:
        wave.state = "barrier"
        return ~following

    return step


def _end(wave: Wave) -> int:
    wave.state = "done"
    return ~wave.pc


def _trap(wave: Wave) -> int:
    raise ExecutionFault("the kernel trapped (a failed device_assert, or unreachable code)")


def _write_back(item: Instruction) -> Step:
    """Counted by VMCNT; follows what the wave stored before."""
    allow_modifiers(item, "sc0", "sc1")
    at_scope = scope(item)

    def step(wave: Wave) -> None:
        earlier = list(wave.vm)

        def effect() -> None:
            for access in earlier:
                perform(wave, access)
            wave.group.cache.write_back(at_scope)

        issue(wave, Access(effect=effect))

    return step


def _yield(item: Instruction, following: int) -> Step:
    if item.mnemonic == "s_sleep":
        return lambda wave: following
    allow_modifiers(item, "sc0", "sc1")
    invalidates = scope(item) != "workgroup"

    def step(wave: Wave) -> int:
        if invalidates:
            wave.group.cache.invalidate()
        return following

    return step


def _setreg(item: Instruction) -> Step:
    match = SETREG.match(", ".join(item.operands))
    allow_modifiers(item)
    if match is None or (match[1], int(match[2]), int(match[3])) != ("HW_REG_MODE", FP16_OVFL_BIT, 1):
        raise unsupported(item, "only MODE.FP16_OVFL can be set")
    value = bool(int(item.operands[-1], 0) & 1)

    def step(wave: Wave) -> None:
        wave.fp16_overflow_clamps = value

    return step
