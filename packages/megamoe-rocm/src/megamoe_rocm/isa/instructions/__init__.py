"""Semantics of gfx950 instructions, one module a family, each with a table from mnemonic to function."""

from __future__ import annotations

from collections.abc import Callable

from megamoe_rocm.aot.disassembly import Instruction
from megamoe_rocm.isa.instructions import control, cvt, lanes, lds, memory, mfma, scalar, vector
from megamoe_rocm.isa.operands import NAMED, REGISTER, Step, parse, unsupported
from megamoe_rocm.isa.wave import M0, SGPR_BIT, VCC

# Every mnemonic that has semantics, without encoding suffixes.
MNEMONICS = frozenset().union(
    *(module.MNEMONICS for module in (control, cvt, lanes, lds, memory, mfma, scalar, vector))
)
FAMILIES: tuple[tuple[frozenset[str], Callable[[Instruction, str], Step]], ...] = (
    (lanes.MNEMONICS, lanes.decode),
    (cvt.MNEMONICS, cvt.decode),
    (mfma.MNEMONICS, mfma.decode),
    (lds.MNEMONICS, lds.decode),
    (memory.MNEMONICS, memory.decode),
)
VCC_BITS = 3 << (VCC + SGPR_BIT)
IMPLICIT_VCC = ("v_cndmask_b32_e32", "v_div_fmas_f32", "s_cbranch_vccz", "s_cbranch_vccnz")


def decode(item: Instruction, positions: dict[int, int]) -> Step:
    """The function that executes an instruction.

    Args:
        item: the instruction.
        positions: address -> index of every instruction of the kernel.

    Raises:
        UnsupportedInstructionError: there are no semantics for it.
    """
    name = vector.base_name(item.mnemonic)
    if item.mnemonic in control.MNEMONICS:
        return control.decode(item, positions)
    if item.mnemonic in scalar.MNEMONICS:
        return scalar.decode(item)
    for mnemonics, family in FAMILIES:
        if name in mnemonics:
            return family(item, name)
    if name in vector.MNEMONICS:
        return vector.decode(item)
    raise unsupported(item, "no semantics for this instruction")


def registers_touched(item: Instruction) -> int:
    """The set of registers whose outstanding loads must have been waited for, one bit each: those that it uses.

    What a vector memory load writes is not among them: see `accesses.overwrite`.
    """
    touched = 0
    for text in item.operands[memory.returns_in_order(item) :]:
        plain = text.strip("-|").removeprefix("sext(").rstrip(")")
        if REGISTER.match(plain) or plain in NAMED:
            touched |= parse(plain).registers
    if item.mnemonic in IMPLICIT_VCC or (item.mnemonic.endswith(("_sdwa", "_dpp")) and "cndmask" in item.mnemonic):
        touched |= VCC_BITS
    if "lds" in item.modifiers or "_lds_" in item.mnemonic:
        touched |= 1 << (M0 + SGPR_BIT)
    return touched


__all__ = ["MNEMONICS", "decode", "registers_touched"]
