"""Vector ALU instructions on integers and FP32.

Source: AMD CDNA3 and CDNA4 ISA documents, "VOP1", "VOP2", "VOP3" and "VOP3P instructions"; V_BITOP3_B32,
V_PERMLANE16_SWAP_B32, V_PERMLANE32_SWAP_B32, V_MINIMUM3_F32 and V_MAXIMUM3_F32 are CDNA4's.

FP32 denormals are kept and rounding is to nearest even: a kernel whose descriptor says otherwise is refused.
Transcendental instructions are accurate to an ULP on the device; here they are rounded correctly, from FP64. They flush
denormal inputs and results, as the device does. Signalling NaNs are taken as quiet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megamoe_rocm.aot.disassembly import Instruction
from megamoe_rocm.isa.instructions import lanes
from megamoe_rocm.isa.numbers import fma32
from megamoe_rocm.isa.operands import (
    Fetch,
    Operand,
    Step,
    allow_modifiers,
    fetch_vector,
    modifier_list,
    parse,
    unsupported,
    write64,
)
from megamoe_rocm.isa.wave import ALL_LANES, LANES, VCC, Array, Wave, lanes_of, mask_of

U32, I32, U64, I64, F32, F64 = np.uint32, np.int32, np.uint64, np.int64, np.float32, np.float64
SMALLEST_NORMAL = np.float32(2.0**-126)


@dataclass(frozen=True)
class VectorOp:
    """Semantics of one vector instruction: elementwise, on arrays of 64 or of 1.

    Args:
        result: kind of the destination: `u32`, `i32`, `f32`, `u64`, `i64` or `u16` (upper half cleared).
        sources: kinds of the operands.
        function: arrays -> array.
        accumulates: whether the destination is the last operand as well.
    """

    result: str
    sources: tuple[str, ...]
    function: Callable[..., Array]
    accumulates: bool = False


def op(result: str, sources: str, function: Callable[..., Any], *, accumulates: bool = False) -> VectorOp:
    """Shorthand for the table."""
    return VectorOp(result, tuple(sources.split()), function, accumulates)


def minimum(a: Array, b: Array) -> Array:
    """The lesser; of a number and NaN the number; −0 is below +0."""
    return np.where(a == b, (a.view(U32) | b.view(U32)).view(F32), np.fmin(a, b))


def maximum(a: Array, b: Array) -> Array:
    """The greater; of a number and NaN the number; +0 is above −0."""
    return np.where(a == b, (a.view(U32) & b.view(U32)).view(F32), np.fmax(a, b))


def median(a: Array, b: Array, c: Array) -> Array:
    """The middle one; with a NaN, the least of the three."""
    middle = maximum(minimum(a, b), minimum(maximum(a, b), c))
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), minimum(minimum(a, b), c), middle)


def integer_median(a: Array, b: Array, c: Array) -> Array:
    """The middle one."""
    middle: Array = np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))
    return middle


def nan_if_any(function: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """IEEE 754-2019 minimum and maximum of three: NaN if any is."""

    def run(a: Array, b: Array, c: Array) -> Array:
        nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
        return np.where(nan, F32(np.nan), function(function(a, b), c))

    return run


def flushed(values: Array) -> Array:
    """Denormals as zeros of their sign."""
    return np.where(np.abs(values) < SMALLEST_NORMAL, np.copysign(F32(0), values), values)


def transcendental(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A function evaluated in FP64 and rounded, with denormals flushed before and after."""
    return lambda a: flushed(function(flushed(a).astype(F64)).astype(F32))


def ldexp32(value: Array, exponent: Array) -> Array:
    """value * 2^exponent, rounded once."""
    result: Array = np.ldexp(value.astype(F64), exponent.clip(-500, 500)).astype(F32)
    return result


def wide_product(a: Array, b: Array) -> Array:
    """64-bit product of 32-bit factors."""
    form = I64 if a.dtype == I32 else U64
    return a.astype(form) * b.astype(form)


def low24(a: Array) -> Array:
    """The low 24 bits, sign-extended if signed."""
    return (a << 8) >> 8


def extract(value: Array, offset: Array, width: Array) -> Array:
    """Bit field, zero- or sign-extended by dtype."""
    shift, count = (offset & 31).astype(U32), (width & 31).astype(U32)
    moved = value.view(U32) >> shift
    field = moved & ((U32(1) << count) - U32(1))
    if value.dtype == U32:
        return field
    over = shift + count > 32
    sign = np.where(over, (value >> 31).astype(U32) & 1, (field >> (np.maximum(count, 1) - 1).astype(U32)) & 1)
    fill = np.where(over, U32(32) - shift, count)
    extended = field | np.where(sign == 1, ~((U32(1) << (fill & 31)) - U32(1)), U32(0))
    return np.where(count == 0, U32(0), extended).astype(U32).view(I32)


def permute_bytes(high: Array, low: Array, selector: Array) -> Array:
    """Bytes of {high, low} by four selectors; 8 to 11 replicate a sign, 12 is 0x00, above is 0xFF."""
    if selector.size == 1:
        return _permute_bytes_alike(high, low, int(selector[0]))
    both = low.astype(U64) | high.astype(U64) << 32
    result = np.zeros(np.broadcast_shapes(both.shape, selector.shape), U32)
    for at in range(0, 32, 8):
        pick = (selector >> at) & 0xFF
        byte = (both >> ((pick & 7) * 8).astype(U64)).astype(U32) & 0xFF
        signs = (both >> (((pick & 3) * 16 + 15) & 63).astype(U64)).astype(U32) & 1
        byte = np.where(pick >= 8, signs * U32(0xFF), byte)
        byte = np.where(pick == 12, U32(0), np.where(pick > 12, U32(0xFF), byte))
        result |= byte.astype(U32) << U32(at)
    return result


def _permute_bytes_alike(high: Array, low: Array, selector: int) -> Array:
    """The same with one selector for all lanes, as it nearly always is."""
    result = np.zeros(np.broadcast_shapes(high.shape, low.shape), U32)
    for at in range(0, 32, 8):
        pick = selector >> at & 0xFF
        if pick < 8:
            result |= ((high if pick & 4 else low) >> U32(8 * (pick & 3)) & 0xFF) << U32(at)
        elif pick < 12:
            result |= ((high if pick & 2 else low) >> U32(16 * (pick & 1) + 15) & 1) * U32(0xFF << at)
        elif pick > 12:
            result |= U32(0xFF << at)
    return result


def bit_count(a: Array) -> Array:
    """Number of ones."""
    return np.bitwise_count(a).astype(U32)


def below(values: Array, first_lane: int) -> Array:
    """For each lane, how many lower lanes among 32 from `first_lane` on have their bit set."""
    lane = np.arange(LANES)
    count = (lane - first_lane).clip(0, 32).astype(U64)
    mask = ((U64(1) << count) - U64(1)).astype(U32)
    return bit_count(values & mask)


def reverse_bits(a: Array) -> Array:
    """Bits in reverse order."""
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        a = (a >> shift) & mask | (a & mask) << shift
    return a


def find_high(a: Array) -> Array:
    """Zeros above the highest set bit; all ones if there is none."""
    return np.where(a == 0, U32(0xFFFFFFFF), 31 - np.floor(np.log2(np.maximum(a, 1).astype(F64))).astype(I64)).astype(
        U32
    )


def find_low(a: Array) -> Array:
    """Position of the lowest set bit; all ones if there is none."""
    return np.where(a == 0, U32(0xFFFFFFFF), bit_count((a & (~a + U32(1))) - U32(1)))


def to_integer(form: type[np.integer[Any]], rounding: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Conversion that saturates and makes NaN zero."""
    info = np.iinfo(form)
    return lambda a: np.nan_to_num(rounding(a.astype(F64)), nan=0.0).clip(info.min, info.max).astype(form)


def exponent_field(a: Array) -> Array:
    """The biased exponent of FP32."""
    return ((a.view(U32) >> 23) & 0xFF).astype(I32)


def frexp_exponent(a: Array) -> Array:
    """Exponent with a mantissa in [0.5, 1); 0 for zero, infinity and NaN."""
    return np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(I32)


def frexp_mantissa(a: Array) -> Array:
    """Mantissa in [0.5, 1); infinity and NaN as they are."""
    return np.where(np.isfinite(a), np.frexp(a)[0], a)


def div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """The special cases of a division whose quotient has been approximated.

    By the documents' formulas the sequence around it gives NaN for a quotient beyond FP32's range; so it does here.
    """
    negative = np.signbit(denominator) ^ np.signbit(numerator)
    sign = np.where(negative, F32(-1), F32(1))
    apart = exponent_field(numerator) - exponent_field(denominator)
    result = np.abs(quotient) * sign
    result = np.where(exponent_field(denominator) == 255, np.abs(F32(np.inf)) * sign, result)
    result = np.where(apart < -150, F32(0) * sign, result)
    result = np.where(np.isinf(denominator) | (numerator == 0), F32(0) * sign, result)
    result = np.where((denominator == 0) | np.isinf(numerator), F32(np.inf) * sign, result)
    undefined = (denominator == 0) & (numerator == 0) | np.isinf(denominator) & np.isinf(numerator)
    result = np.where(undefined | np.isnan(denominator) | np.isnan(numerator), F32(np.nan), result)
    return result.astype(F32)


TABLE: dict[str, VectorOp] = {
    # moves and bits
    "v_mov_b32": op("u32", "u32", lambda a: a),
    "v_mov_b64": op("u64", "u64", lambda a: a),
    "v_accvgpr_read_b32": op("u32", "u32", lambda a: a),
    "v_accvgpr_write_b32": op("u32", "u32", lambda a: a),
    "v_accvgpr_mov_b32": op("u32", "u32", lambda a: a),
    "v_not_b32": op("u32", "u32", np.invert),
    "v_and_b32": op("u32", "u32 u32", np.bitwise_and),
    "v_or_b32": op("u32", "u32 u32", np.bitwise_or),
    "v_xor_b32": op("u32", "u32 u32", np.bitwise_xor),
    "v_xnor_b32": op("u32", "u32 u32", lambda a, b: ~(a ^ b)),
    "v_or3_b32": op("u32", "u32 u32 u32", lambda a, b, c: a | b | c),
    "v_and_or_b32": op("u32", "u32 u32 u32", lambda a, b, c: a & b | c),
    "v_bfi_b32": op("u32", "u32 u32 u32", lambda mask, a, b: mask & a | ~mask & b),
    "v_bfe_u32": op("u32", "u32 u32 u32", extract),
    "v_bfe_i32": op("i32", "i32 u32 u32", extract),
    "v_bfm_b32": op("u32", "u32 u32", lambda a, b: ((U32(1) << (a & 31)) - U32(1)) << (b & 31)),
    "v_bfrev_b32": op("u32", "u32", reverse_bits),
    "v_bcnt_u32_b32": op("u32", "u32 u32", lambda a, b: bit_count(a) + b),
    "v_mbcnt_lo_u32_b32": op("u32", "u32 u32", lambda a, b: below(a, 0) + b),
    "v_mbcnt_hi_u32_b32": op("u32", "u32 u32", lambda a, b: below(a, 32) + b),
    "v_ffbh_u32": op("u32", "u32", find_high),
    "v_ffbl_b32": op("u32", "u32", find_low),
    "v_perm_b32": op("u32", "u32 u32 u32", permute_bytes),
    "v_alignbit_b32": op(
        "u32", "u32 u32 u32",
        lambda a, b, c: ((b.astype(U64) | a.astype(U64) << 32) >> (c & 31).astype(U64)).astype(U32),
    ),
    "v_alignbyte_b32": op(
        "u32", "u32 u32 u32",
        lambda a, b, c: ((b.astype(U64) | a.astype(U64) << 32) >> ((c & 3) * 8).astype(U64)).astype(U32),
    ),
    # shifts; `rev` takes the amount first
    "v_lshlrev_b32": op("u32", "u32 u32", lambda n, a: a << (n & 31)),
    "v_lshrrev_b32": op("u32", "u32 u32", lambda n, a: a >> (n & 31)),
    "v_ashrrev_i32": op("i32", "u32 i32", lambda n, a: a >> (n & 31).view(I32)),
    "v_lshlrev_b64": op("u64", "u32 u64", lambda n, a: a << (n & 63).astype(U64)),
    "v_lshrrev_b64": op("u64", "u32 u64", lambda n, a: a >> (n & 63).astype(U64)),
    "v_ashrrev_i64": op("i64", "u32 i64", lambda n, a: a >> (n & 63).astype(I64)),
    # 32-bit integers
    "v_add_u32": op("u32", "u32 u32", np.add),
    "v_sub_u32": op("u32", "u32 u32", np.subtract),
    "v_subrev_u32": op("u32", "u32 u32", lambda a, b: b - a),
    "v_add_i32": op("u32", "u32 u32", np.add),
    "v_sub_i32": op("u32", "u32 u32", np.subtract),
    "v_add3_u32": op("u32", "u32 u32 u32", lambda a, b, c: a + b + c),
    "v_lshl_add_u32": op("u32", "u32 u32 u32", lambda a, n, b: (a << (n & 31)) + b),
    "v_add_lshl_u32": op("u32", "u32 u32 u32", lambda a, b, n: (a + b) << (n & 31)),
    "v_lshl_or_b32": op("u32", "u32 u32 u32", lambda a, n, b: (a << (n & 31)) | b),
    "v_xad_u32": op("u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    "v_mul_lo_u32": op("u32", "u32 u32", np.multiply),
    "v_mul_hi_u32": op("u32", "u32 u32", lambda a, b: (wide_product(a, b) >> 32).astype(U32)),
    "v_mul_hi_i32": op("i32", "i32 i32", lambda a, b: (wide_product(a, b) >> 32).astype(I32)),
    "v_mul_u32_u24": op("u32", "u32 u32", lambda a, b: low24(a) * low24(b)),
    "v_mul_i32_i24": op("i32", "i32 i32", lambda a, b: low24(a) * low24(b)),
    "v_mul_hi_u32_u24": op("u32", "u32 u32", lambda a, b: (wide_product(low24(a), low24(b)) >> 32).astype(U32)),
    "v_mad_u32_u24": op("u32", "u32 u32 u32", lambda a, b, c: low24(a) * low24(b) + c),
    "v_mad_i32_i24": op("i32", "i32 i32 i32", lambda a, b, c: low24(a) * low24(b) + c),
    "v_min_u32": op("u32", "u32 u32", np.minimum),
    "v_max_u32": op("u32", "u32 u32", np.maximum),
    "v_min_i32": op("i32", "i32 i32", np.minimum),
    "v_max_i32": op("i32", "i32 i32", np.maximum),
    "v_min3_u32": op("u32", "u32 u32 u32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_u32": op("u32", "u32 u32 u32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_min3_i32": op("i32", "i32 i32 i32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i32": op("i32", "i32 i32 i32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_i32": op("i32", "i32 i32 i32", integer_median),
    "v_med3_u32": op("u32", "u32 u32 u32", integer_median),
    "v_lshl_add_u64": op("u64", "u64 u32 u64", lambda a, n, b: (a << (n & 7).astype(U64)) + b),
    # 16-bit integers
    "v_add_u16": op("u16", "u16 u16", np.add),
    "v_sub_u16": op("u16", "u16 u16", np.subtract),
    "v_subrev_u16": op("u16", "u16 u16", lambda a, b: b - a),
    "v_mul_lo_u16": op("u16", "u16 u16", np.multiply),
    "v_min_u16": op("u16", "u16 u16", np.minimum),
    "v_max_u16": op("u16", "u16 u16", np.maximum),
    "v_min_i16": op("u16", "i16 i16", np.minimum),
    "v_max_i16": op("u16", "i16 i16", np.maximum),
    "v_lshlrev_b16": op("u16", "u16 u16", lambda n, a: a << (n & 15)),
    "v_lshrrev_b16": op("u16", "u16 u16", lambda n, a: a >> (n & 15)),
    "v_ashrrev_i16": op("u16", "u16 i16", lambda n, a: a >> (n & 15).view(np.int16)),
    # FP32
    "v_add_f32": op("f32", "f32 f32", np.add),
    "v_sub_f32": op("f32", "f32 f32", np.subtract),
    "v_subrev_f32": op("f32", "f32 f32", lambda a, b: b - a),
    "v_mul_f32": op("f32", "f32 f32", np.multiply),
    "v_fma_f32": op("f32", "f32 f32 f32", fma32),
    "v_fmac_f32": op("f32", "f32 f32", fma32, accumulates=True),
    "v_fmamk_f32": op("f32", "f32 f32 f32", lambda a, k, c: fma32(a, k, c)),
    "v_fmaak_f32": op("f32", "f32 f32 f32", fma32),
    "v_min_f32": op("f32", "f32 f32", minimum),
    "v_max_f32": op("f32", "f32 f32", maximum),
    "v_min3_f32": op("f32", "f32 f32 f32", lambda a, b, c: minimum(minimum(a, b), c)),
    "v_max3_f32": op("f32", "f32 f32 f32", lambda a, b, c: maximum(maximum(a, b), c)),
    "v_minimum3_f32": op("f32", "f32 f32 f32", nan_if_any(minimum)),
    "v_maximum3_f32": op("f32", "f32 f32 f32", nan_if_any(maximum)),
    "v_med3_f32": op("f32", "f32 f32 f32", median),
    "v_ldexp_f32": op("f32", "f32 i32", ldexp32),
    "v_rcp_f32": op("f32", "f32", transcendental(lambda a: 1.0 / a)),
    "v_rcp_iflag_f32": op("f32", "f32", transcendental(lambda a: 1.0 / a)),
    "v_rsq_f32": op("f32", "f32", transcendental(lambda a: 1.0 / np.sqrt(a))),
    "v_sqrt_f32": op("f32", "f32", transcendental(np.sqrt)),
    "v_exp_f32": op("f32", "f32", transcendental(np.exp2)),
    "v_log_f32": op("f32", "f32", transcendental(np.log2)),
    "v_floor_f32": op("f32", "f32", np.floor),
    "v_ceil_f32": op("f32", "f32", np.ceil),
    "v_trunc_f32": op("f32", "f32", np.trunc),
    "v_rndne_f32": op("f32", "f32", np.rint),
    "v_fract_f32": op("f32", "f32", lambda a: np.minimum(a - np.floor(a), F32(1 - 2.0**-24))),
    "v_frexp_exp_i32_f32": op("i32", "f32", frexp_exponent),
    "v_frexp_mant_f32": op("f32", "f32", frexp_mantissa),
    "v_div_fixup_f32": op("f32", "f32 f32 f32", div_fixup),
    # conversions between integers and FP32
    "v_cvt_f32_u32": op("f32", "u32", lambda a: a.astype(F32)),
    "v_cvt_f32_i32": op("f32", "i32", lambda a: a.astype(F32)),
    "v_cvt_u32_f32": op("u32", "f32", to_integer(U32, np.trunc)),
    "v_cvt_i32_f32": op("i32", "f32", to_integer(I32, np.trunc)),
    "v_cvt_rpi_i32_f32": op("i32", "f32", to_integer(I32, lambda a: np.floor(a + 0.5))),
    "v_cvt_flr_i32_f32": op("i32", "f32", to_integer(I32, np.floor)),
    "v_cvt_f32_ubyte0": op("f32", "u32", lambda a: (a & 0xFF).astype(F32)),
    "v_cvt_f32_ubyte1": op("f32", "u32", lambda a: (a >> 8 & 0xFF).astype(F32)),
    "v_cvt_f32_ubyte2": op("f32", "u32", lambda a: (a >> 16 & 0xFF).astype(F32)),
    "v_cvt_f32_ubyte3": op("f32", "u32", lambda a: (a >> 24).astype(F32)),
}  # fmt: skip

# Packed FP32: two independent operations on register pairs; op_sel picks the low result's halves, op_sel_hi the high's.
PACKED: dict[str, Callable[..., Array]] = {
    "v_pk_add_f32": np.add,
    "v_pk_mul_f32": np.multiply,
    "v_pk_fma_f32": fma32,
}

# Sums with carries: (a, b, carry in) as int64 -> unclipped sum; carry or borrow is what leaves 32 bits.
CARRIES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "v_add_co_u32": lambda a, b, c: a + b,
    "v_sub_co_u32": lambda a, b, c: a - b,
    "v_subrev_co_u32": lambda a, b, c: b - a,
    "v_addc_co_u32": lambda a, b, c: a + b + c,
    "v_subb_co_u32": lambda a, b, c: a - b - c,
    "v_subbrev_co_u32": lambda a, b, c: b - a - c,
}

ORDERED: dict[str, Callable[[Array, Array], Array]] = {
    "f": lambda a, b: np.zeros(1, bool), "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "t": lambda a, b: np.ones(1, bool),
}  # fmt: skip
FLOAT_ONLY: dict[str, Callable[[Array, Array], Array]] = {
    "lg": lambda a, b: (a < b) | (a > b), "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b), "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b), "nle": lambda a, b: ~(a <= b), "neq": lambda a, b: a != b,
    "nlt": lambda a, b: ~(a < b), "tru": lambda a, b: np.ones(1, bool),
}  # fmt: skip
INTEGER_ONLY: dict[str, Callable[[Array, Array], Array]] = {"ne": np.not_equal}
COMPARES: dict[str, tuple[str, Callable[[Array, Array], Array]]] = {
    f"v_cmp_{name}_{kind}": (kind, function)
    for kind in ("f32", "f16", "i32", "u32", "i64", "u64", "i16", "u16")
    for name, function in {**ORDERED, **(FLOAT_ONLY if kind[0] == "f" else INTEGER_ONLY)}.items()
}

WIDE_MADS = {"v_mad_u64_u32": ("u32", "u64"), "v_mad_i64_i32": ("i32", "i64")}
SPECIAL = frozenset(
    (
        "v_cndmask_b32",
        "v_div_scale_f32",
        "v_div_fmas_f32",
        "v_cmp_class_f32",
        "v_bitop3_b32",
        "v_bitop3_b16",
        "v_pk_mov_b32",
    )
)
MNEMONICS = frozenset(
    (
        *TABLE,
        *PACKED,
        *CARRIES,
        *COMPARES,
        *(name.replace("v_cmp", "v_cmpx") for name in COMPARES),
        *WIDE_MADS,
        *SPECIAL,
    )
)
SUFFIXES = ("_e64_dpp", "_e32", "_e64", "_dpp", "_sdwa")


def base_name(mnemonic: str) -> str:
    """The mnemonic without its encoding."""
    for suffix in SUFFIXES:
        if mnemonic.endswith(suffix):
            return mnemonic.removesuffix(suffix)
    return mnemonic


def decode(item: Instruction) -> Step:
    """The function that executes a vector instruction."""
    name = base_name(item.mnemonic)
    if name in TABLE:
        return _elementwise(item, TABLE[name])
    if name in PACKED:
        return _packed(item, PACKED[name])
    if name in CARRIES:
        return _carry(item, CARRIES[name], carry_in="c_co" in name or "bb" in name)
    if name in WIDE_MADS:
        return _wide_mad(item, *WIDE_MADS[name])
    if name in SPECIAL:
        return SPECIAL_DECODERS[name](item)
    return _compare(item, *COMPARES[name.replace("v_cmpx", "v_cmp")], sets_exec=name.startswith("v_cmpx"))


def _sources(item: Instruction, texts: tuple[str, ...], kinds: tuple[str, ...]) -> list[Fetch]:
    """Functions for the operands, with SDWA selections and DPP lane moves applied."""
    if len(texts) != len(kinds):
        raise unsupported(item, f"expected {len(kinds)} source operands")
    halves = modifier_list(item, "op_sel", "[0,0,0,0]")
    fetches = []
    for at, (text, kind) in enumerate(zip(texts, kinds)):
        operand = parse(text)
        if f"src{at}_sel" in item.modifiers:
            fetches.append(lanes.fetch_selected(item, at, operand, kind))
        else:
            fetches.append(fetch_vector(operand, kind, high=kind.endswith("16") and bool(halves[at])))
    if lanes.is_dpp(item):
        fetches[0] = lanes.fetch_moved(item, fetches[0])
    return fetches


SATURATING: dict[str, Callable[[Array, Array], Array]] = {
    "v_add_u32": lambda a, b: np.minimum(a.astype(U64) + b, 0xFFFFFFFF).astype(U32),
    "v_sub_u32": lambda a, b: np.where(a > b, a - b, U32(0)),
    "v_subrev_u32": lambda a, b: np.where(b > a, b - a, U32(0)),
}  # what `clamp` makes of these


def _writer(item: Instruction, kind: str, operand: Operand) -> Callable[[Wave, Array], None]:
    index = operand.index
    if "dst_sel" in item.modifiers:
        return lanes.write_selected(item, index)
    if kind.endswith("64"):
        return lambda wave, value: write64(wave, index, value)
    if kind == "u16":
        return lambda wave, value: wave.write_vector(index, value.view(np.uint16).astype(U32))
    if "clamp" in item.modifiers:
        if base_name(item.mnemonic) in SATURATING:
            return lambda wave, value: wave.write_vector(index, value)
        if kind != "f32":
            raise unsupported(item, "no semantics for clamp on integers")
        return lambda wave, value: wave.write_vector(index, np.nan_to_num(value, nan=0.0).clip(F32(0), F32(1)))
    return lambda wave, value: wave.write_vector(index, value)


def _elementwise(item: Instruction, semantics: VectorOp) -> Step:
    halves = ("op_sel",) if any(kind.endswith("16") for kind in semantics.sources) else ()
    allow_modifiers(item, "clamp", *halves, *lanes.SDWA_MODIFIERS, *lanes.DPP_MODIFIERS)
    if len(modifier_list(item, "op_sel", "[0]")) > len(semantics.sources) and modifier_list(item, "op_sel", "[0]")[-1]:
        raise unsupported(item, "no semantics for a result in the upper half")
    target = parse(item.operands[0])
    texts = (*item.operands[1:], item.operands[0]) if semantics.accumulates else item.operands[1:]
    kinds = (*semantics.sources, semantics.result) if semantics.accumulates else semantics.sources
    fetches, write, function = _sources(item, texts, kinds), _writer(item, semantics.result, target), semantics.function
    if "clamp" in item.modifiers:
        function = SATURATING.get(base_name(item.mnemonic), function)
    step = _arity(fetches, write, function)
    return lanes.with_dpp_mask(item, step) if lanes.is_dpp(item) else step


def _arity(fetches: list[Fetch], write: Callable[[Wave, Array], None], function: Callable[..., Array]) -> Step:
    # Spelled out by arity: this is the inner loop, and unpacking a list costs as much as a small numpy call.
    if len(fetches) == 1:
        (a,) = fetches
        return lambda wave: write(wave, function(a(wave)))
    if len(fetches) == 2:
        a, b = fetches
        return lambda wave: write(wave, function(a(wave), b(wave)))
    a, b, c = fetches
    return lambda wave: write(wave, function(a(wave), b(wave), c(wave)))


def _packed(item: Instruction, function: Callable[..., Array]) -> Step:
    allow_modifiers(item, "op_sel", "op_sel_hi", "neg_lo", "neg_hi")
    operands = [parse(text) for text in item.operands[1:]]
    count, target = len(operands), parse(item.operands[0]).index
    zeros, ones = "[" + ",".join("0" * count) + "]", "[" + ",".join("1" * count) + "]"
    rows = []
    for select, negate, default in (("op_sel", "neg_lo", zeros), ("op_sel_hi", "neg_hi", ones)):
        halves, signs = modifier_list(item, select, default), modifier_list(item, negate, zeros)
        rows.append([_half(item, operand, half, sign) for operand, half, sign in zip(operands, halves, signs)])
    low, high = rows

    def step(wave: Wave) -> None:
        first = function(*(fetch(wave) for fetch in low))
        second = function(*(fetch(wave) for fetch in high))
        wave.write_vector(target, first)
        wave.write_vector(target + 1, second)

    return step


def _half(item: Instruction, operand: Operand, half: int, negate: int) -> Fetch:
    if operand.file == "c":
        # An inline constant fills the low half only.
        if half:
            raise unsupported(item, "no semantics for the upper half of a constant")
        fetch = fetch_vector(operand, "f32")
    else:
        part = Operand(file=operand.file, index=operand.index + half, negate=operand.negate, absolute=operand.absolute)
        fetch = fetch_vector(part, "f32")
    return (lambda wave: -fetch(wave)) if negate else fetch


def _pk_mov(item: Instruction) -> Step:
    """V_PK_MOV_B32: op_sel[i] picks the half of source i; source 0 gives the low result, source 1 the high one."""
    allow_modifiers(item, "op_sel", "op_sel_hi")
    target, halves = parse(item.operands[0]).index, modifier_list(item, "op_sel", "[0,0]")
    first, second = (_half(item, parse(text), half, 0) for text, half in zip(item.operands[1:], halves))

    def step(wave: Wave) -> None:
        low, high = first(wave).copy(), second(wave)
        wave.write_vector(target + 1, high)
        wave.write_vector(target, low)

    return step


def _mask_writer(operand: Operand) -> Callable[[Wave, Array], None]:
    index = operand.index

    def write(wave: Wave, values: Array) -> None:
        lanes_set = values if values.size == LANES else np.broadcast_to(values, (LANES,))
        wave.write64(index, mask_of(lanes_set) & wave.exec_mask)

    return write


def _mask_reader(operand: Operand) -> Fetch:
    if operand.file == "c":
        value = lanes_of(operand.bits(64, signed=True))
        return lambda wave: value
    index = operand.index
    return lambda wave: lanes_of(wave.read64(index))


def _carry(item: Instruction, function: Callable[[Array, Array, Array], Array], *, carry_in: bool) -> Step:
    allow_modifiers(item)
    target, write_mask = parse(item.operands[0]).index, _mask_writer(parse(item.operands[1]))
    a, b = _sources(item, item.operands[2:4], ("u32", "u32"))
    read_mask = _mask_reader(parse(item.operands[4])) if carry_in else (lambda wave: np.zeros(1, bool))

    def step(wave: Wave) -> None:
        total = function(a(wave).astype(I64), b(wave).astype(I64), read_mask(wave).astype(I64))
        wave.write_vector(target, (total & 0xFFFFFFFF).astype(U32))
        write_mask(wave, (total >> 32) != 0)

    return step


def _wide_mad(item: Instruction, factor: str, addend: str) -> Step:
    allow_modifiers(item)
    target, write_mask = parse(item.operands[0]).index, _mask_writer(parse(item.operands[1]))
    a, b, c = _sources(item, item.operands[2:], (factor, factor, addend))

    def step(wave: Wave) -> None:
        product, addition = wide_product(a(wave), b(wave)), c(wave)
        total = product + addition
        overflow = total < product if factor == "u32" else ((total ^ product) & (total ^ addition)) < 0
        write64(wave, target, total)
        write_mask(wave, overflow)

    return step


def _compare(item: Instruction, kind: str, function: Callable[[Array, Array], Array], *, sets_exec: bool) -> Step:
    allow_modifiers(item, *lanes.SDWA_MODIFIERS)
    a, b = _sources(item, item.operands[1:], (kind, kind))
    write = _mask_writer(parse(item.operands[0]))
    target = parse(item.operands[0]).index

    def step(wave: Wave) -> None:
        write(wave, function(a(wave), b(wave)))
        if sets_exec:
            wave.set_exec(wave.read64(target) & ALL_LANES)

    return step


def _cndmask(item: Instruction) -> Step:
    """V_CNDMASK_B32: the second source where the mask's bit is set."""
    allow_modifiers(item, *lanes.SDWA_MODIFIERS, *lanes.DPP_MODIFIERS)
    texts = item.operands if len(item.operands) == 4 else (*item.operands, "vcc")
    kind = "f32" if any(text.startswith("|") or "|" in text or parse(text).negate for text in texts[1:3]) else "u32"
    a, b = _sources(item, texts[1:3], (kind, kind))
    mask, write = _mask_reader(parse(texts[3])), _writer(item, kind, parse(texts[0]))

    def step(wave: Wave) -> None:
        write(wave, np.where(mask(wave), b(wave), a(wave)))

    return lanes.with_dpp_mask(item, step) if lanes.is_dpp(item) else step


def _div_scale(item: Instruction) -> Step:
    """V_DIV_SCALE_F32: scale the operand of a division that source 0 names, and say whether to undo it afterwards."""
    allow_modifiers(item)
    target, write_mask = parse(item.operands[0]).index, _mask_writer(parse(item.operands[1]))
    value, denominator, numerator = _sources(item, item.operands[2:], ("f32", "f32", "f32"))

    def step(wave: Wave) -> None:
        scaled, undo = div_scale(value(wave), denominator(wave), numerator(wave))
        wave.write_vector(target, scaled)
        write_mask(wave, undo)

    return step


def div_scale(value: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """Scaled value and whether V_DIV_FMAS must scale back; the cases in the order of the ISA document."""
    is_denominator, is_numerator = value == denominator, value == numerator
    up, down = ldexp32(value, np.array([64])), ldexp32(value, np.array([-64]))
    apart = exponent_field(numerator) - exponent_field(denominator)
    with np.errstate(all="ignore"):
        inverse = 1.0 / denominator.astype(F64)
        quotient = numerator.astype(F64) / denominator
    small_inverse = (np.abs(inverse) < 2.0**-126) & (inverse != 0)
    small_quotient = (np.abs(quotient) < 2.0**-126) & (quotient != 0)
    small_denominator = (exponent_field(denominator) == 0) & (denominator != 0)
    cases = [
        ((numerator == 0) | (denominator == 0), F32(np.nan), False),
        (apart >= 96, np.where(is_denominator, up, value), True),
        (small_denominator, up, False),
        (small_inverse & small_quotient, np.where(is_denominator, up, value), True),
        (small_inverse, down, False),
        (small_quotient, np.where(is_numerator, up, value), True),
        (exponent_field(numerator) <= 23, up, False),
    ]
    scaled, undo = value, np.zeros(1, bool)
    for condition, result, flag in reversed(cases):
        scaled = np.where(condition, result, scaled)
        undo = np.where(condition, flag, undo)
    return scaled.astype(F32), undo


def _div_fmas(item: Instruction) -> Step:
    """V_DIV_FMAS_F32: fused multiply-add, scaled back by 2^±64 where VCC says so."""
    allow_modifiers(item)
    target = parse(item.operands[0]).index
    a, b, c = _sources(item, item.operands[1:], ("f32", "f32", "f32"))

    def step(wave: Wave) -> None:
        addend = c(wave)
        plain = fma32(a(wave), b(wave), addend)
        undo = lanes_of(wave.read64(VCC))
        if undo.any():
            exact = plain.astype(F64) * np.where(exponent_field(addend) > 127, 2.0**64, 2.0**-64)
            plain = np.where(undo, exact.astype(F32), plain)
        wave.write_vector(target, plain)

    return step


def _class(item: Instruction) -> Step:
    """V_CMP_CLASS_F32: whether the value is of one of the ten classes that the second source's bits name."""
    allow_modifiers(item)
    a, b = _sources(item, item.operands[1:], ("f32", "u32"))
    write = _mask_writer(parse(item.operands[0]))
    return lambda wave: write(wave, (class_of(a(wave)) & b(wave)) != 0)


def class_of(values: Array) -> Array:
    """One bit: signalling NaN, quiet NaN, −inf, −normal, −denormal, −0, +0, +denormal, +normal, +inf."""
    bits = values.view(U32)
    exponent, mantissa, negative = exponent_field(values), bits & 0x7FFFFF, bits >> 31
    size = np.where(exponent == 255, 0, np.where(exponent > 0, 1, np.where(mantissa != 0, 2, 3)))
    bit = np.where(negative == 1, 2 + size, 9 - size)
    bit = np.where((exponent == 255) & (mantissa != 0), np.where(mantissa >> 22, 1, 0), bit)
    return U32(1) << bit.astype(U32)


def _bitop3(item: Instruction) -> Step:
    """V_BITOP3_B32: any bitwise function; bit 4a+2b+c of the table is its value for source bits a, b, c.

    V_BITOP3_B16 does the same with the lower halves, and keeps the destination's upper half.
    """
    allow_modifiers(item, "bitop3")
    keep = U32(0xFFFF0000 if item.mnemonic.startswith("v_bitop3_b16") else 0)
    table = int(item.modifiers.get("bitop3", "0"), 0)
    target = parse(item.operands[0]).index
    a, b, c = _sources(item, item.operands[1:], ("u32", "u32", "u32"))

    def step(wave: Wave) -> None:
        result = bitop3(a(wave), b(wave), c(wave), table)
        wave.write_vector(target, (result & ~keep) | (wave.v[target] & keep) if keep else result)

    return step


def bitop3(a: Array, b: Array, c: Array, table: int) -> Array:
    """The function with this truth table, as a sum of its shorter half of products."""
    positive = table.bit_count() <= 4
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), U32)
    for row in range(8):
        if bool(table >> row & 1) == positive:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result if positive else ~result


SPECIAL_DECODERS: dict[str, Callable[[Instruction], Step]] = {
    "v_cndmask_b32": _cndmask,
    "v_div_scale_f32": _div_scale,
    "v_div_fmas_f32": _div_fmas,
    "v_cmp_class_f32": _class,
    "v_bitop3_b32": _bitop3,
    "v_bitop3_b16": _bitop3,
    "v_pk_mov_b32": _pk_mov,
}
