"""Scalar ALU instructions.

Source: AMD CDNA3 and CDNA4 ISA documents, "SOP2", "SOPK", "SOP1" and "SOPC instructions". Each entry takes integers
(signed where the kind says so) and returns the result; entries that set SCC return it as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megamoe_rocm.aot.disassembly import Instruction
from megamoe_rocm.isa.operands import Operand, Step, allow_modifiers, fetch_scalar, parse, unsupported
from megamoe_rocm.isa.wave import ALL_LANES, Wave

M32, M64 = 0xFFFFFFFF, ALL_LANES


@dataclass(frozen=True)
class ScalarOp:
    """Semantics of one scalar instruction.

    Args:
        result: width of the destination: 32, 64, or 0 for comparisons, which only set SCC.
        sources: kinds of the operands: `u32`, `i32`, `u64`, `i64`.
        function: operands -> result, or (result, scc) where `sets_scc`; for comparisons -> scc.
        sets_scc: whether SCC changes.
        reads_scc: whether SCC is the first argument.
        in_place: whether the destination is also the first operand (SOPK).
    """

    result: int
    sources: tuple[str, ...]
    function: Callable[..., Any]
    sets_scc: bool = False
    reads_scc: bool = False
    in_place: bool = False


def logic(function: Callable[..., int], width: int, count: int = 2) -> ScalarOp:
    """A bitwise operation: SCC says whether the result is not zero."""
    mask = M32 if width == 32 else M64

    def run(*values: int) -> tuple[int, bool]:
        result = function(*values) & mask
        return result, result != 0

    return ScalarOp(width, (f"u{width}",) * count, run, sets_scc=True)


def shift(function: Callable[[int, int], int], width: int, kind: str) -> ScalarOp:
    """A shift by the low five or six bits; SCC says whether the result is not zero."""
    mask = M32 if width == 32 else M64

    def run(value: int, amount: int) -> tuple[int, bool]:
        result = function(value, amount & (width - 1)) & mask
        return result, result != 0

    return ScalarOp(width, (f"{kind}{width}", "u32"), run, sets_scc=True)


def signed_sum(function: Callable[[int, int], int]) -> ScalarOp:
    """A signed sum or difference: SCC is overflow."""

    def run(a: int, b: int) -> tuple[int, bool]:
        result = function(a, b)
        return result & M32, not -(1 << 31) <= result < 1 << 31

    return ScalarOp(32, ("i32", "i32"), run, sets_scc=True)


def shift_add(amount: int) -> ScalarOp:
    """(a << amount) + b; SCC is carry out of 32 bits."""

    def run(a: int, b: int) -> tuple[int, bool]:
        result = (a << amount) + b
        return result & M32, result > M32

    return ScalarOp(32, ("u32", "u32"), run, sets_scc=True)


def field(width: int, signed: bool) -> ScalarOp:
    """Bit field extract: offset in bits [5:0] or [4:0] of the second operand, width in [22:16]."""

    def run(value: int, spec: int) -> tuple[int, bool]:
        offset, count = spec & (width - 1), (spec >> 16) & 0x7F
        result = (value >> offset) & ((1 << count) - 1)
        if signed and count and offset + count <= width and result >> (count - 1):
            result -= 1 << count
        elif signed and count and offset + count > width and value >> (width - 1):
            result = (value >> offset) - (1 << (width - offset))
        result &= (1 << width) - 1
        return result, result != 0

    return ScalarOp(width, (f"u{width}", "u32"), run, sets_scc=True)


def compare(function: Callable[[int, int], bool], kind: str) -> ScalarOp:
    """A comparison."""
    return ScalarOp(0, (kind, kind), function, sets_scc=True)


def pick(function: Callable[[int, int], bool], kind: str) -> ScalarOp:
    """Minimum or maximum: SCC says whether the first operand was taken."""

    def run(a: int, b: int) -> tuple[int, bool]:
        first = function(a, b)
        return (a if first else b) & M32, first

    return ScalarOp(32, (kind, kind), run, sets_scc=True)


def plain(result: int, sources: str, function: Callable[..., int]) -> ScalarOp:
    """An operation that leaves SCC alone."""
    return ScalarOp(result, tuple(sources.split()), function)


def scc_result(
    result: int, sources: str, function: Callable[..., tuple[int, bool]], *, reads: bool = False
) -> ScalarOp:
    """An operation that computes SCC itself."""
    return ScalarOp(result, tuple(sources.split()), function, sets_scc=True, reads_scc=reads)


def in_place(function: Callable[[int, int], int], *, sets_scc: bool = False) -> ScalarOp:
    """An SOPK operation on its destination and a signed 16-bit immediate."""

    def run(a: int, b: int) -> Any:
        result = function(a, b)
        return (result & M32, not -(1 << 31) <= result < 1 << 31) if sets_scc else result & M32

    return ScalarOp(32, ("i32", "i32"), run, sets_scc=sets_scc, in_place=True)


def first_set(value: int) -> int:
    """Position of the lowest set bit, or -1."""
    return (value & -value).bit_length() - 1


def leading_zeros(value: int, width: int) -> int:
    """Zeros above the highest set bit, or -1 if there is none."""
    return width - value.bit_length() if value else -1


def leading_signs(value: int) -> int:
    """Bits from the top until one that differs from the sign bit, or -1."""
    flipped = value ^ M32 if value >> 31 else value
    return 32 - flipped.bit_length() if flipped else -1


def reverse(value: int, width: int) -> int:
    """Bits in reverse order."""
    return int(f"{value:0{width}b}"[::-1], 2)


def with_carry(total: int) -> tuple[int, bool]:
    """A 32-bit sum and its carry."""
    return total & M32, total > M32


def with_borrow(total: int) -> tuple[int, bool]:
    """A 32-bit difference and its borrow."""
    return total & M32, total < 0


def absolute(value: int) -> tuple[int, bool]:
    """Magnitude, modulo 2^32."""
    return abs(value) & M32, value != 0


COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
}  # fmt: skip

TABLE: dict[str, ScalarOp] = {
    "s_add_u32": scc_result(32, "u32 u32", lambda a, b: with_carry(a + b)),
    "s_addc_u32": scc_result(32, "u32 u32", lambda scc, a, b: with_carry(a + b + scc), reads=True),
    "s_sub_u32": scc_result(32, "u32 u32", lambda a, b: with_borrow(a - b)),
    "s_subb_u32": scc_result(32, "u32 u32", lambda scc, a, b: with_borrow(a - b - scc), reads=True),
    "s_add_i32": signed_sum(lambda a, b: a + b),
    "s_sub_i32": signed_sum(lambda a, b: a - b),
    "s_mul_i32": plain(32, "u32 u32", lambda a, b: a * b & M32),
    "s_mul_hi_u32": plain(32, "u32 u32", lambda a, b: a * b >> 32),
    "s_mul_hi_i32": plain(32, "i32 i32", lambda a, b: (a * b >> 32) & M32),
    "s_lshl1_add_u32": shift_add(1),
    "s_lshl2_add_u32": shift_add(2),
    "s_lshl3_add_u32": shift_add(3),
    "s_lshl4_add_u32": shift_add(4),
    "s_min_i32": pick(lambda a, b: a < b, "i32"),
    "s_max_i32": pick(lambda a, b: a > b, "i32"),
    "s_min_u32": pick(lambda a, b: a < b, "u32"),
    "s_max_u32": pick(lambda a, b: a > b, "u32"),
    "s_abs_i32": scc_result(32, "i32", absolute),
    "s_absdiff_i32": scc_result(32, "i32 i32", lambda a, b: absolute(a - b)),
    "s_bfe_u32": field(32, False),
    "s_bfe_i32": field(32, True),
    "s_bfe_u64": field(64, False),
    "s_bfe_i64": field(64, True),
    "s_bfm_b32": plain(32, "u32 u32", lambda a, b: (((1 << (a & 31)) - 1) << (b & 31)) & M32),
    "s_bfm_b64": plain(64, "u32 u32", lambda a, b: (((1 << (a & 63)) - 1) << (b & 63)) & M64),
    "s_pack_ll_b32_b16": plain(32, "u32 u32", lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16),
    "s_pack_lh_b32_b16": plain(32, "u32 u32", lambda a, b: a & 0xFFFF | b & 0xFFFF0000),
    "s_pack_hh_b32_b16": plain(32, "u32 u32", lambda a, b: a >> 16 | b & 0xFFFF0000),
    "s_mov_b32": plain(32, "u32", lambda a: a),
    "s_mov_b64": plain(64, "u64", lambda a: a),
    "s_movk_i32": plain(32, "i32", lambda a: a & M32),
    "s_brev_b32": plain(32, "u32", lambda a: reverse(a, 32)),
    "s_brev_b64": plain(64, "u64", lambda a: reverse(a, 64)),
    "s_sext_i32_i8": plain(32, "u32", lambda a: ((a & 0xFF) ^ 0x80) - 0x80 & M32),
    "s_sext_i32_i16": plain(32, "u32", lambda a: ((a & 0xFFFF) ^ 0x8000) - 0x8000 & M32),
    "s_ff1_i32_b32": plain(32, "u32", lambda a: first_set(a) & M32),
    "s_ff1_i32_b64": plain(32, "u64", lambda a: first_set(a) & M32),
    "s_flbit_i32_b32": plain(32, "u32", lambda a: leading_zeros(a, 32) & M32),
    "s_flbit_i32_b64": plain(32, "u64", lambda a: leading_zeros(a, 64) & M32),
    "s_flbit_i32": plain(32, "u32", lambda a: leading_signs(a) & M32),
    "s_bcnt1_i32_b32": scc_result(32, "u32", lambda a: (a.bit_count(), a != 0)),
    "s_bcnt1_i32_b64": scc_result(32, "u64", lambda a: (a.bit_count(), a != 0)),
    "s_bcnt0_i32_b64": scc_result(32, "u64", lambda a: (64 - a.bit_count(), a != M64)),
    "s_cselect_b32": ScalarOp(32, ("u32", "u32"), lambda scc, a, b: a if scc else b, reads_scc=True),
    "s_cselect_b64": ScalarOp(64, ("u64", "u64"), lambda scc, a, b: a if scc else b, reads_scc=True),
    "s_bitcmp0_b32": ScalarOp(0, ("u32", "u32"), lambda a, b: not a >> (b & 31) & 1, sets_scc=True),
    "s_bitcmp1_b32": ScalarOp(0, ("u32", "u32"), lambda a, b: bool(a >> (b & 31) & 1), sets_scc=True),
    "s_bitcmp1_b64": ScalarOp(0, ("u64", "u32"), lambda a, b: bool(a >> (b & 63) & 1), sets_scc=True),
    "s_addk_i32": in_place(lambda a, b: a + b, sets_scc=True),
    "s_mulk_i32": in_place(lambda a, b: a * b),
}
for _width in (32, 64):
    _b = f"_b{_width}"
    TABLE |= {
        f"s_and{_b}": logic(lambda a, b: a & b, _width),
        f"s_or{_b}": logic(lambda a, b: a | b, _width),
        f"s_xor{_b}": logic(lambda a, b: a ^ b, _width),
        f"s_andn2{_b}": logic(lambda a, b: a & ~b, _width),
        f"s_orn2{_b}": logic(lambda a, b: a | ~b, _width),
        f"s_nand{_b}": logic(lambda a, b: ~(a & b), _width),
        f"s_nor{_b}": logic(lambda a, b: ~(a | b), _width),
        f"s_xnor{_b}": logic(lambda a, b: ~(a ^ b), _width),
        f"s_not{_b}": logic(lambda a: ~a, _width, 1),
        f"s_lshl{_b}": shift(lambda a, n: a << n, _width, "u"),
        f"s_lshr{_b}": shift(lambda a, n: a >> n, _width, "u"),
        f"s_ashr_i{_width}": shift(lambda a, n: a >> n, _width, "i"),
    }
for _name, _function in COMPARISONS.items():
    for _kind in ("i32", "u32"):
        TABLE[f"s_cmp_{_name}_{_kind}"] = compare(_function, _kind)
        TABLE[f"s_cmpk_{_name}_{_kind}"] = compare(_function, _kind)
    if _name in ("eq", "lg"):
        TABLE[f"s_cmp_{_name}_u64"] = compare(_function, "u64")

# New EXEC from (old EXEC, source); the destination gets the old EXEC. SCC: whether the new one is not zero.
SAVE_EXEC: dict[str, Callable[[int, int], int]] = {
    "s_and_saveexec_b64": lambda old, source: source & old,
    "s_or_saveexec_b64": lambda old, source: source | old,
    "s_xor_saveexec_b64": lambda old, source: source ^ old,
    "s_andn2_saveexec_b64": lambda old, source: source & ~old,
    "s_andn1_saveexec_b64": lambda old, source: ~source & old,
    "s_orn2_saveexec_b64": lambda old, source: source | ~old,
    "s_nand_saveexec_b64": lambda old, source: ~(source & old),
    "s_nor_saveexec_b64": lambda old, source: ~(source | old),
    "s_xnor_saveexec_b64": lambda old, source: ~(source ^ old),
}
CONDITIONAL_MOVES = {"s_cmov_b32": 32, "s_cmov_b64": 64}
BIT_SETS = {"s_bitset0_b32": 0, "s_bitset1_b32": 1}
SIGNED_IMMEDIATE = ("s_movk", "s_addk", "s_mulk", "s_cmpk")
MNEMONICS = frozenset((*TABLE, *SAVE_EXEC, *CONDITIONAL_MOVES, *BIT_SETS))


def decode(item: Instruction) -> Step:
    """The function that executes a scalar instruction."""
    allow_modifiers(item)
    if item.mnemonic in SAVE_EXEC:
        return _save_exec(item)
    if item.mnemonic in CONDITIONAL_MOVES:
        return _conditional_move(item, CONDITIONAL_MOVES[item.mnemonic])
    if item.mnemonic in BIT_SETS:
        return _bit_set(item, BIT_SETS[item.mnemonic])
    op = TABLE[item.mnemonic]
    texts = item.operands if op.result == 0 or op.in_place else item.operands[1:]
    if len(texts) != len(op.sources):
        raise unsupported(item, f"expected {len(op.sources)} operands")
    operands = [parse(text) for text in texts]
    if item.mnemonic.startswith(SIGNED_IMMEDIATE) and item.mnemonic.endswith("i32"):
        operands[-1] = _sign_extended(item, operands[-1])
    fetches = [
        fetch_scalar(operand, int(kind[1:]), signed=kind[0] == "i") for operand, kind in zip(operands, op.sources)
    ]
    target = parse(item.operands[0]).index
    return _step(op, fetches, target)


def _sign_extended(item: Instruction, operand: Operand) -> Operand:
    """The 16-bit immediate of an SOPK instruction, which is printed as a pattern."""
    if operand.file != "c" or isinstance(operand.value, float):
        raise unsupported(item, "expected an immediate")
    return Operand(file="c", value=((operand.value & 0xFFFF) ^ 0x8000) - 0x8000)


def _step(op: ScalarOp, fetches: list[Callable[[Wave], int]], target: int) -> Step:
    function = op.function

    def step(wave: Wave) -> None:
        values = [fetch(wave) for fetch in fetches]
        result = function(wave.scc, *values) if op.reads_scc else function(*values)
        if op.result == 0:
            wave.scc = int(result)
            return
        if op.sets_scc:
            result, scc = result
            wave.scc = int(scc)
        if op.result == 32:
            wave.write32(target, result)
        else:
            wave.write64(target, result)

    return step


def _save_exec(item: Instruction) -> Step:
    target, source = parse(item.operands[0]).index, fetch_scalar(parse(item.operands[1]), 64)
    function = SAVE_EXEC[item.mnemonic]

    def step(wave: Wave) -> None:
        old, value = wave.exec_mask, source(wave)
        new = function(old, value) & M64
        wave.write64(target, old)
        wave.set_exec(new)
        wave.scc = int(new != 0)

    return step


def _conditional_move(item: Instruction, width: int) -> Step:
    target, source = parse(item.operands[0]).index, fetch_scalar(parse(item.operands[1]), width)

    def step(wave: Wave) -> None:
        if wave.scc:
            (wave.write32 if width == 32 else wave.write64)(target, source(wave))

    return step


def _bit_set(item: Instruction, bit: int) -> Step:
    target, source = parse(item.operands[0]).index, fetch_scalar(parse(item.operands[1]), 32)

    def step(wave: Wave) -> None:
        mask = 1 << (source(wave) & 31)
        old = wave.read32(target)
        wave.write32(target, old | mask if bit else old & ~mask)

    return step
