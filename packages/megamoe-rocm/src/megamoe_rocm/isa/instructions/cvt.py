"""Conversions to and from FP16, BF16, FP8 and FP4.

Source: AMD CDNA3 ISA document, "VOP1" and "VOP3 instructions" (V_CVT_PK_FP8_F32 and relatives); CDNA4 ISA,
V_CVT_SCALEF32_* and V_CVT_PK_BF16_F32. Of a scale only the exponent field counts (LLVM, `cvt.scalef32` intrinsics): a
conversion to a small format divides by 2^(exponent − 127), one from it multiplies.

MODE.FP16_OVFL decides what an overflow to FP8 becomes: the largest finite value if set, NaN otherwise. Where the
documents are silent, this is assumed: an infinite source counts as an overflow; NaN becomes FP4's largest value.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megamoe_rocm.aot.disassembly import Instruction
from megamoe_rocm.isa.instructions import lanes
from megamoe_rocm.isa.numbers import (
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    exponent_of_scale,
    from_bf16,
    to_bf16,
    to_e2m1,
    to_e4m3,
    to_e5m2,
)
from megamoe_rocm.isa.operands import Fetch, Step, allow_modifiers, fetch_vector, modifier_list, parse
from megamoe_rocm.isa.wave import Array, Wave

U32, F32, F64 = np.uint32, np.float32, np.float64


def _fp4(values: Array, clamp: bool) -> Array:
    return to_e2m1(values)


def _fp8(values: Array, clamp: bool) -> Array:
    return to_e4m3(values, clamp=clamp)


def _bf8(values: Array, clamp: bool) -> Array:
    return to_e5m2(values, clamp=clamp)


# Small format: encoder, bits of a code, values of all codes.
FORMATS: dict[str, tuple[Callable[[Array, bool], Array], int, Array]] = {
    "fp4": (_fp4, 4, E2M1),
    "fp8": (_fp8, 8, E4M3),
    "bf8": (_bf8, 8, E5M2),
}


def _pair_of(item: Instruction, kind: str) -> tuple[Callable[[Wave], tuple[Array, Array]], int]:
    """A function for two values to convert, and how many operands they take: two FP32, or one packed pair."""
    if kind == "f32":
        a, b = (fetch_vector(parse(text), "f32") for text in item.operands[1:3])
        return (lambda wave: (a(wave), b(wave))), 2
    packed = fetch_vector(parse(item.operands[1]), "u32")
    if kind == "bf16":
        return (lambda wave: (from_bf16(packed(wave) & 0xFFFF), from_bf16(packed(wave) >> 16))), 1
    return (lambda wave: _halves_f16(packed(wave))), 1


def _halves_f16(bits: Array) -> tuple[Array, Array]:
    low, high = (bits & 0xFFFF).astype(np.uint16), (bits >> 16).astype(np.uint16)
    return low.view(np.float16).astype(F32), high.view(np.float16).astype(F32)


def _down(fmt: str, kind: str, *, scaled: bool) -> Callable[[Instruction], Step]:
    """Two values to two adjacent codes; op_sel names which byte or word of the destination they fill."""
    encode, bits, _ = FORMATS[fmt]

    def build(item: Instruction) -> Step:
        allow_modifiers(item, "op_sel")
        target = parse(item.operands[0]).index
        pair, used = _pair_of(item, kind)
        scale = fetch_vector(parse(item.operands[1 + used]), "f32") if scaled else None
        select = modifier_list(item, "op_sel", "[0,0,0,0]")
        # For FP4 the last two bits are a byte number, low bit first; for FP8 the last is a word number.
        part = select[-2] + 2 * select[-1] if bits == 4 else select[-1]
        shift = U32(part * 2 * bits)
        keep = ~(U32((1 << 2 * bits) - 1) << shift)

        def step(wave: Wave) -> None:
            first, second = pair(wave)
            factor = 1.0 / E8M0[exponent_of_scale(scale(wave))] if scale is not None else np.float64(1)
            clamp = wave.fp16_overflow_clamps
            codes = encode(first.astype(F64) * factor, clamp) | encode(second.astype(F64) * factor, clamp) << U32(bits)
            wave.write_vector(target, (wave.v[target] & keep) | (codes.astype(U32) << shift))

        return step

    return build


def _up(fmt: str, *, scaled: bool) -> Callable[[Instruction], Step]:
    """Two adjacent codes to two FP32; op_sel or SDWA names which byte or word of the source they are in."""
    _, bits, values = FORMATS[fmt]

    def build(item: Instruction) -> Step:
        allow_modifiers(item, *(("op_sel",) if scaled else ("op_sel", "src0_sel")))
        target, source = parse(item.operands[0]).index, fetch_vector(parse(item.operands[1]), "u32")
        scale = fetch_vector(parse(item.operands[2]), "f32") if scaled else None
        select = modifier_list(item, "op_sel", "[0,0,0]")
        shift = U32((select[0] + 2 * select[1] if bits == 4 else select[0]) * 2 * bits)
        if "src0_sel" in item.modifiers:
            shift = U32(lanes.selection(item.modifiers["src0_sel"])[0])
        mask = (1 << bits) - 1

        def step(wave: Wave) -> None:
            codes = source(wave) >> shift
            factor = E8M0[exponent_of_scale(scale(wave))] if scale is not None else np.float64(1)
            low, high = (values[codes >> U32(at) & mask] * factor for at in (0, bits))
            wave.write_vector(target, low.astype(F32))
            wave.write_vector(target + 1, high.astype(F32))

        return step

    return build


def _byte(fmt: str) -> Callable[[Instruction], Step]:
    """One FP8 code to FP32; SDWA names the byte."""

    def build(item: Instruction) -> Step:
        allow_modifiers(item, "src0_sel")
        target, source = parse(item.operands[0]).index, fetch_vector(parse(item.operands[1]), "u32")
        shift, values = U32(lanes.selection(item.modifiers.get("src0_sel", "BYTE_0"))[0]), FORMATS[fmt][2]
        return lambda wave: wave.write_vector(target, values[source(wave) >> shift & 0xFF].astype(F32))

    return build


def _simple(kind: str, function: Callable[[Array], Array]) -> Callable[[Instruction], Step]:
    def build(item: Instruction) -> Step:
        allow_modifiers(item, "op_sel")
        select = modifier_list(item, "op_sel", "[0,0]")
        target = parse(item.operands[0]).index
        source: Fetch = fetch_vector(parse(item.operands[1]), kind, high=bool(select[0]))
        return lambda wave: wave.write_vector(target, function(source(wave)))

    return build


def _pack(function: Callable[[Array, Array], Array]) -> Callable[[Instruction], Step]:
    """Two FP32 to two 16-bit values in one register."""

    def build(item: Instruction) -> Step:
        allow_modifiers(item)
        target = parse(item.operands[0]).index
        a, b = (fetch_vector(parse(text), "f32") for text in item.operands[1:3])
        return lambda wave: wave.write_vector(target, function(a(wave), b(wave)))

    return build


def _f16_bits(values: Array) -> Array:
    return values.astype(np.float16).view(np.uint16).astype(U32)


TABLE: dict[str, Callable[[Instruction], Step]] = {
    "v_cvt_f32_f16": _simple("f16", lambda a: a.astype(F32)),
    "v_cvt_f16_f32": _simple("f32", _f16_bits),
    "v_cvt_f32_bf16": _simple("u16", from_bf16),
    "v_cvt_pk_bf16_f32": _pack(lambda a, b: to_bf16(a) | to_bf16(b) << U32(16)),
    "v_cvt_pk_f16_f32": _pack(lambda a, b: _f16_bits(a) | _f16_bits(b) << U32(16)),
    "v_cvt_pk_fp8_f32": _down("fp8", "f32", scaled=False),
    "v_cvt_pk_bf8_f32": _down("bf8", "f32", scaled=False),
    "v_cvt_pk_f32_fp8": _up("fp8", scaled=False),
    "v_cvt_pk_f32_bf8": _up("bf8", scaled=False),
    "v_cvt_f32_fp8": _byte("fp8"),
    "v_cvt_f32_bf8": _byte("bf8"),
}
for _fmt in FORMATS:
    for _kind in ("f32", "bf16", "f16"):
        TABLE[f"v_cvt_scalef32_pk_{_fmt}_{_kind}"] = _down(_fmt, _kind, scaled=True)
    TABLE[f"v_cvt_scalef32_pk_f32_{_fmt}"] = _up(_fmt, scaled=True)
MNEMONICS = frozenset(TABLE)


def decode(item: Instruction, name: str) -> Step:
    """The function that executes a conversion."""
    return TABLE[name](item)
