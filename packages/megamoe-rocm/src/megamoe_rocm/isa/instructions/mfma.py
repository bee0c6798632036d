"""Matrix instructions.

Source: AMD CDNA4 ISA document, "Matrix arithmetic instructions" and V_MFMA_SCALE_F32_*_F8F6F4. Operand facts:

- lane l holds row (or column) l % M of its operand, in lane group g = l // M;
- of a 4-bit operand, group g holds k = 32 g + j; of an 8-bit operand, two 16-byte chunks c at k = (K/2) c + 16 g + j;
- lane group g's scale byte, picked by op_sel + 2 op_sel_hi, scales k in [32 g, 32 g + 32);
- the 16x16 result has row 4 g + r in register r, column l % 16; the 32x32 result row 8 (r // 4) + 4 g + r % 4.

EXEC is ignored. Products are exact; they and the accumulator are summed in FP64 and rounded to FP32 once. The device
rounds inside, in an order that no document states: that is the one place where bits may differ from it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from megamoe_rocm.aot.disassembly import Instruction
from megamoe_rocm.isa.numbers import E2M1, E4M3, E5M2, E8M0, from_bf16
from megamoe_rocm.isa.operands import (
    Operand,
    Step,
    allow_modifiers,
    fetch_vector,
    integer_modifier,
    modifier_list,
    parse,
    unsupported,
)
from megamoe_rocm.isa.wave import Array, Wave

U32, F32, F64 = np.uint32, np.float32, np.float64
BLOCK = 32  # k that one scale covers
PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=1)  # byte -> two values, low nibble first
# cbsz and blgp -> registers an operand takes and its values by byte. The 6-bit formats are not modelled.
FP4 = 4
FORMATS: dict[int, tuple[int, Array]] = {0: (8, E4M3), 1: (8, E5M2), FP4: (4, PAIRS)}
SHAPES = {"16x16x128": (16, 128), "32x32x64": (32, 64)}

Unpack = Callable[[Wave], Array]


@lru_cache(maxsize=1024)
def unpacked(raw: bytes, scales: bytes, select: int, fmt: int, rows: int, depth: int) -> Array:
    """An operand as `[rows, depth]` FP64, times its scales.

    Cached by content: a tile's operand meets several others, in one wave after the other.

    Args:
        raw: the operand's registers, 64 lanes each.
        scales: the scales' register, or nothing.
        select: which byte of it.
        fmt: of the operand.
        rows: M or N.
        depth: K.
    """
    registers, values = FORMATS[fmt]
    groups = 64 // rows
    codes = np.frombuffer(raw, U32).reshape(registers, 64).T.copy().view(np.uint8)
    matrix: Array
    if fmt == FP4:
        matrix = values[codes].reshape(groups, rows, BLOCK).swapaxes(0, 1)
    else:
        matrix = values[codes].reshape(groups, rows, 2, 16).transpose(1, 2, 0, 3)
    matrix = matrix.reshape(rows, depth // BLOCK, BLOCK)
    if scales:
        exponents = np.frombuffer(scales, U32) >> U32(8 * select) & 0xFF
        matrix = matrix * E8M0[exponents].reshape(groups, rows).T[:, :, None]
    matrix = matrix.reshape(rows, depth)
    matrix.flags.writeable = False
    return matrix


def unpack_half(operand: Operand, form: str, rows: int, depth: int) -> Unpack:
    """BF16 or FP16 operands: group g holds k = 8 g + j."""
    first, groups = operand.index, 64 // rows

    def unpack(wave: Wave) -> Array:
        raw = wave.v[first : first + 4].T.copy().view(np.uint16)
        values = from_bf16(raw) if form == "bf16" else raw.view(np.float16)
        return values.astype(F64).reshape(groups, rows, 8).swapaxes(0, 1).reshape(rows, depth)

    return unpack


def result_rows(size: int) -> Array:
    """Row of the result in `[register, lane group]`."""
    groups = 64 // size
    register, group = np.arange(size * size // 64)[:, None], np.arange(groups)[None, :]
    return 4 * group + register if size == 16 else 8 * (register // 4) + 4 * group + register % 4


def _accumulate(item: Instruction, size: int) -> Callable[[Wave, Array], None]:
    """A function that adds a `[size, size]` FP64 product to the accumulator and writes the result."""
    target, count = parse(item.operands[0]).index, size * size // 64
    source, rows = parse(item.operands[3]), result_rows(size)
    if source.file == "c":
        constant = fetch_vector(source, "f32")

    def run(wave: Wave, product: Array) -> None:
        addend = constant(wave) if source.file == "c" else wave.vf[source.index : source.index + count]
        # Lane 16 g + c (or 32 g + c) of register r: row rows[r, g], column c.
        spread = product[rows].reshape(count, 64)
        wave.vf[target : target + count] = spread + addend

    return run


def _scaled(item: Instruction, size: int, depth: int) -> Step:
    allow_modifiers(item, "op_sel", "op_sel_hi", "cbsz", "blgp")
    scales = [parse(text) for text in item.operands[4:6]]
    if any(scale.file != "v" for scale in scales):
        # LLVM pull request 158117: the device takes bits [30:23] of other operands, and compilers avoid them.
        raise unsupported(item, "no semantics for scales outside of vector registers")
    low, high = modifier_list(item, "op_sel", "[0,0,0]"), modifier_list(item, "op_sel_hi", "[0,0,0]")
    fetches = []
    for at, name in enumerate(("cbsz", "blgp")):
        fmt = integer_modifier(item, name)
        if fmt not in FORMATS:
            raise unsupported(item, "no semantics for 6-bit operands")
        scale = scales[at].index if scales else None
        fetches.append(_operand(parse(item.operands[1 + at]).index, scale, low[at] + 2 * high[at], fmt, size, depth))
    a, b = fetches
    accumulate = _accumulate(item, size)
    return lambda wave: accumulate(wave, a(wave) @ b(wave).T)


def _operand(first: int, scale: int | None, select: int, fmt: int, rows: int, depth: int) -> Unpack:
    last = first + FORMATS[fmt][0]
    if scale is None:
        return lambda wave: unpacked(wave.v[first:last].tobytes(), b"", 0, fmt, rows, depth)
    return lambda wave: unpacked(wave.v[first:last].tobytes(), wave.v[scale].tobytes(), select, fmt, rows, depth)


def _half(item: Instruction, size: int, depth: int, form: str) -> Step:
    allow_modifiers(item)
    a = unpack_half(parse(item.operands[1]), form, size, depth)
    b = unpack_half(parse(item.operands[2]), form, size, depth)
    accumulate = _accumulate(item, size)
    return lambda wave: accumulate(wave, a(wave) @ b(wave).T)


TABLE: dict[str, Callable[[Instruction], Step]] = {
    "v_mfma_f32_16x16x32_bf16": lambda item: _half(item, 16, 32, "bf16"),
    "v_mfma_f32_16x16x32_f16": lambda item: _half(item, 16, 32, "f16"),
    "v_mfma_f32_32x32x16_bf16": lambda item: _half(item, 32, 16, "bf16"),
    "v_mfma_f32_32x32x16_f16": lambda item: _half(item, 32, 16, "f16"),
    "v_mfma_f32_16x16x128_f8f6f4": lambda item: _scaled(item, 16, 128),
    "v_mfma_f32_32x32x64_f8f6f4": lambda item: _scaled(item, 32, 64),
    "v_mfma_scale_f32_16x16x128_f8f6f4": lambda item: _scaled(item, 16, 128),
    "v_mfma_scale_f32_32x32x64_f8f6f4": lambda item: _scaled(item, 32, 64),
}
MNEMONICS = frozenset(TABLE)


def decode(item: Instruction, name: str) -> Step:
    """The function that executes a matrix instruction."""
    return TABLE[name](item)
