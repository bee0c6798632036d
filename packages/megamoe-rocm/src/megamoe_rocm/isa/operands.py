"""Operands: from the disassembler's text to functions that fetch and store values.

Source: AMD CDNA4 ISA, "Scalar ALU operations" and "Vector ALU operations", sections on operands, SDWA and DPP.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from megamoe_rocm.aot.disassembly import Instruction
from megamoe_rocm.isa.errors import UnsupportedInstructionError
from megamoe_rocm.isa.wave import EXEC, FIRST_AGPR, M0, SGPR_BIT, VCC, Array, Wave

Fetch = Callable[[Wave], Array]
Step = Callable[[Wave], "int | None"]

REGISTER = re.compile(r"([vas])(?:(\d+)|\[(\d+):(\d+)\])$")
NAMED = {
    "vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1),
    "exec": (EXEC, 2), "exec_lo": (EXEC, 1), "exec_hi": (EXEC + 1, 1), "m0": (M0, 1),
    "flat_scratch": (102, 2), "flat_scratch_lo": (102, 1), "flat_scratch_hi": (103, 1),
    "xnack_mask": (104, 2), "xnack_mask_lo": (104, 1), "xnack_mask_hi": (105, 1),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One operand.

    Args:
        file: `v` for vector registers (accumulation registers from 256 on), `s` for scalar ones, `c` for a constant.
        index: the first register.
        count: how many.
        value: a constant's integer, or its float.
        negate, absolute, extend: input modifiers `-x`, `|x|`, `sext(x)`.
    """

    file: str
    index: int = 0
    count: int = 1
    value: int | float = 0
    negate: bool = False
    absolute: bool = False
    extend: bool = False

    @property
    def registers(self) -> int:
        """The set of registers, one bit each."""
        if self.file == "c":
            return 0
        first = self.index + (SGPR_BIT if self.file == "s" else 0)
        return ((1 << self.count) - 1) << first

    def bits(self, width: int, *, signed: bool = False) -> int:
        """A constant's bit pattern at a width of 16, 32 or 64."""
        if isinstance(self.value, float):
            return int.from_bytes(struct.pack({16: "<e", 32: "<f", 64: "<d"}[width], self.value), "little")
        # A literal that does not fit a signed 32-bit integer is printed as the pattern that it is.
        value = self.value - (1 << 32) if signed and width == 64 and self.value >= 1 << 31 else self.value
        return value & ((1 << width) - 1)


@cache
def parse(text: str) -> Operand:
    """Parse one operand.

    Raises:
        UnsupportedInstructionError: of an unknown form.
    """
    negate = text.startswith("-") and not text[1:2].isdigit()
    text = text[1:] if negate else text
    absolute = text.startswith("|")
    text = text.strip("|")
    extend = text.startswith("sext(")
    text = text[5:-1] if extend else text
    if match := REGISTER.match(text):
        first = int(match[2] or match[3])
        count = int(match[4]) - first + 1 if match[4] else 1
        file, first = ("v", first + FIRST_AGPR) if match[1] == "a" else (match[1], first)
        return Operand(file=file, index=first, count=count, negate=negate, absolute=absolute, extend=extend)
    if text in NAMED:
        index, count = NAMED[text]
        return Operand(file="s", index=index, count=count, negate=negate, absolute=absolute)
    try:
        value: int | float = float(text) if "." in text else int(text, 0)
    except ValueError:
        raise UnsupportedInstructionError("an operand of an unknown form", got=text) from None
    return Operand(file="c", value=value, negate=negate, absolute=absolute)


def unsupported(item: Instruction, why: str) -> UnsupportedInstructionError:
    """An error that names the instruction."""
    return UnsupportedInstructionError(f"{why}: {item}")


def allow_modifiers(item: Instruction, *allowed: str) -> None:
    """Refuse an instruction that has other modifiers than these."""
    extra = [name for name in item.modifiers if name not in allowed]
    if extra:
        raise unsupported(item, f"no semantics for {', '.join(extra)}")


def modifier_list(item: Instruction, name: str, default: str) -> tuple[int, ...]:
    """A bracketed modifier such as `op_sel:[0,1,0]`."""
    return tuple(int(word) for word in item.modifiers.get(name, default).strip("[]").split(","))


def integer_modifier(item: Instruction, name: str, default: int = 0) -> int:
    """A modifier with one integer value."""
    return int(item.modifiers[name], 0) if name in item.modifiers else default


def registers_of(*operands: Operand) -> int:
    """Union of register sets."""
    found = 0
    for operand in operands:
        found |= operand.registers
    return found


def fetch_scalar(operand: Operand, width: int, *, signed: bool = False) -> Callable[[Wave], int]:
    """A function that reads a scalar operand as a Python integer."""
    if operand.file == "c":
        value = operand.bits(width, signed=signed)
        if signed and value >> (width - 1):
            value -= 1 << width
        return lambda wave: value
    if operand.file != "s":
        raise UnsupportedInstructionError("a vector register where a scalar operand is read", got=operand)
    index = operand.index
    if width == 64:
        if signed:
            return lambda wave: (wave.read64(index) ^ (1 << 63)) - (1 << 63)
        return lambda wave: wave.read64(index)
    if signed:
        return lambda wave: int(wave.si[index])
    return lambda wave: int(wave.s[index])


DTYPES = {
    "u32": np.uint32, "i32": np.int32, "f32": np.float32, "u64": np.uint64, "i64": np.int64,
    "u16": np.uint16, "i16": np.int16, "f16": np.float16,
}  # fmt: skip


def fetch_vector(operand: Operand, kind: str, *, high: bool = False) -> Fetch:
    """A function that reads an operand of a vector instruction: 64 elements, or 1 for scalars and constants.

    Args:
        operand: what to read.
        kind: how to read it: `u32`, `i32`, `f32`, `u64`, `i64`, `u16`, `i16` or `f16`.
        high: the upper half of the register, for 16-bit kinds.
    """
    width = int(kind[1:])
    if operand.file == "c":
        plain = _constant(operand, kind, high)
    elif width == 16:
        plain = _fetch16(operand, kind, high)
    elif width == 64:
        plain = _fetch64(operand, kind)
    else:
        plain = _fetch32(operand, kind)
    return _modified(plain, operand, kind)


def _constant(operand: Operand, kind: str, high: bool) -> Fetch:
    if high:
        raise UnsupportedInstructionError("the upper half of a constant", got=operand)
    width = int(kind[1:])
    raw = operand.bits(width, signed=kind[0] == "i").to_bytes(width // 8, "little")
    value = np.frombuffer(raw, DTYPES[kind])
    return lambda wave: value


def _fetch32(operand: Operand, kind: str) -> Fetch:
    at = operand.index
    if operand.file == "v":
        if kind == "u32":
            return lambda wave: wave.v[at]
        if kind == "i32":
            return lambda wave: wave.vi[at]
        return lambda wave: wave.vf[at]
    if kind == "u32":
        return lambda wave: wave.s[at : at + 1]
    if kind == "i32":
        return lambda wave: wave.si[at : at + 1]
    return lambda wave: wave.sf[at : at + 1]


def _fetch16(operand: Operand, kind: str, high: bool) -> Fetch:
    at, half, form = operand.index, int(high), DTYPES[kind]
    if operand.file == "v":
        return lambda wave: wave.v16[at, half::2].view(form)
    return lambda wave: wave.s[at : at + 1].view(form)[half : half + 1]


def _fetch64(operand: Operand, kind: str) -> Fetch:
    at, form = operand.index, DTYPES[kind]
    if operand.file == "v":
        return lambda wave: (wave.v[at].astype(np.uint64) | wave.v[at + 1].astype(np.uint64) << 32).view(form)
    return lambda wave: np.array([wave.read64(at)], np.uint64).view(form)


def _modified(plain: Fetch, operand: Operand, kind: str) -> Fetch:
    if not (operand.negate or operand.absolute):
        return plain
    if kind[0] != "f":
        raise UnsupportedInstructionError("negation or magnitude of an integer operand", got=operand)
    if operand.negate and operand.absolute:
        return lambda wave: -np.abs(plain(wave))
    if operand.negate:
        return lambda wave: -plain(wave)
    return lambda wave: np.abs(plain(wave))


def write64(wave: Wave, index: int, value: Array) -> None:
    """Write two vector registers with 64-bit elements."""
    value = value.view(np.uint64)
    wave.write_vector(index, value.astype(np.uint32))
    wave.write_vector(index + 1, (value >> 32).astype(np.uint32))
