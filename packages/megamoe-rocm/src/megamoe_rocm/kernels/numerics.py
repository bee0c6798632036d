"""Number formats on the device: MXFP4 and MXFP8 blocks, E8M0 scales. `megamoe.formats` is the definition.

Conversions are done on the bits, so they are the same on every target and in Triton's interpreter, whose own ones round
ties upwards (FP8, BF16) and flush BF16's subnormals.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

MX_BLOCK = tl.constexpr(32)  # OCP MX v1.0, section 5.1
SCALE_BIAS = tl.constexpr(127)
SCALE_NAN = tl.constexpr(255)


@triton.jit
def float_bits(x):
    """Bits of FP32 values as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def bf16_to_float(x):
    """BF16 to FP32, exact."""
    return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits(x):
    """FP32 to the bits of BF16, uint16: nearest, ties to even. NaN stays NaN if it is quiet, as arithmetic makes it."""
    bits = float_bits(x)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x7FC00000)
    rounded = (magnitude + (0x7FFF + ((magnitude >> 16) & 1))) >> 16
    return (rounded | ((bits >> 16) & 0x8000)).to(tl.uint16)


@triton.jit
def scale_byte(amax_bits, FP4: tl.constexpr):
    """E8M0 byte, "round up", of blocks whose largest magnitude has these FP32 bits; 255 for Inf and NaN.

    The smallest power of two >= amax / max_pos. max_pos is 1.5 * 2^2 (e2m1) or 1.75 * 2^8 (e4m3): adding what lies
    between its mantissa and the next power of two carries into the exponent exactly where amax has a larger mantissa.
    """
    if FP4:
        byte = ((amax_bits + 0x3FFFFF) >> 23) - 2
    else:
        byte = ((amax_bits + 0x1FFFFF) >> 23) - 8
    is_nan = tl.minimum(tl.maximum(amax_bits - 0x7F7FFFFF, 0), 1)  # also Inf
    return tl.maximum(byte, 0) | (is_nan * 255)


@triton.jit
def scale_value(byte):
    """2^(byte - 127) in FP32, NaN for 255; `byte` is int32, 0 to 255."""
    bits = byte << 23
    bits = tl.where(byte == 0, 0x00400000, bits)
    return tl.where(byte == SCALE_NAN, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def scale_reciprocal(byte):
    """2^(127 - byte) in FP32, exact; `byte` is what `scale_byte` gives, at most 253, or 255: then it means nothing."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode_element(x, MAX: tl.constexpr, MIN_NORMAL: tl.constexpr, SHIFT: tl.constexpr, SCALE: tl.constexpr):
    """Finite FP32 to the element's code and sign-free bits, int32: nearest even, saturating.

    Adding a power of two whose ulp is the element's step at this magnitude makes the FP32 adder round. Multiplied by
    2^(its bias - 127), the rounded value has the element's exponent and mantissa as its top bits, subnormal ones too.
    No comparison is made, here and in what follows: each would hold a mask in scalar registers, and they run out.

    Args:
        MAX, MIN_NORMAL: FP32 bits of the element's largest value and smallest normal one.
        SHIFT: mantissa bits that FP32 has more.
        SCALE: 2^(bias - 127).
    """
    bits = tl.minimum(float_bits(x) & 0x7FFFFFFF, MAX)
    step = (tl.maximum(bits & 0x7F800000, MIN_NORMAL) + (SHIFT << 23)).to(tl.float32, bitcast=True)
    rounded = (bits.to(tl.float32, bitcast=True) + step) - step
    return float_bits(rounded * SCALE) >> SHIFT


@triton.jit
def encode_e2m1(x):
    """Finite FP32 to e2m1 codes 0 to 15, int32."""
    code = encode_element(x, 0x40C00000, 0x3F800000, 22, 1.1754943508222875e-38)  # 6, 1; 2^-126
    return code | ((float_bits(x) >> 28) & 8)


@triton.jit
def encode_e4m3(x):
    """Finite FP32 to e4m3fn codes 0 to 255, int32."""
    code = encode_element(x, 0x43E00000, 0x3C800000, 20, 7.52316384526264e-37)  # 448, 2^-6; 2^-120
    return code | ((float_bits(x) >> 24) & 0x80)


@triton.jit
def decode_e4m3(code):
    """e4m3fn codes 0 to 255, int32, to FP32."""
    normal = (((code & 0x7F) << 20) + 0x3C000000).to(tl.float32, bitcast=True)  # exponent bias 127 - 7
    subnormal = (code & 7).to(tl.float32) * 0.001953125  # 2^-9
    magnitude = tl.where((code & 0x78) == 0, subnormal, normal)
    value = tl.where((code & 0x80) != 0, -magnitude, magnitude)
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def join_columns(codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """`[ROWS, COLUMNS / 2]` of int32 codes `[ROWS, COLUMNS]` of `BITS` bits: the even column in the low half."""
    low, high = tl.split(tl.reshape(codes, [ROWS, COLUMNS // 2, 2]))
    return low | (high << BITS)


@triton.jit
def quantize_blocks(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FP4: tl.constexpr):
    """Quantise FP32 `[ROWS, COLUMNS]` per 1x32, scales rounded up.

    Returns:
        the payload as int32 words, `[ROWS, COLUMNS / 8]` (FP4) or `[ROWS, COLUMNS / 4]` (FP8), lower columns in lower
        bits, and uint8 scales `[ROWS, COLUMNS / 32]`. Words, because bytes would be stored one by one.
    """
    blocks = tl.reshape(x, [ROWS, COLUMNS // MX_BLOCK, MX_BLOCK])
    # As integers, magnitudes keep their order, and NaN is above all: no rule about NaN in max is needed.
    byte = scale_byte(tl.max(float_bits(blocks) & 0x7FFFFFFF, axis=2), FP4)
    is_nan = tl.expand_dims((byte + 1) >> 8, 2)
    scaled = blocks * tl.expand_dims(scale_reciprocal(byte), 2)
    if FP4:
        codes = (encode_e2m1(scaled) | (is_nan * 7)) & (15 >> is_nan)  # +6 throughout a NaN block
        codes = join_columns(tl.reshape(codes, [ROWS, COLUMNS]), ROWS, COLUMNS, 4)
        codes = join_columns(codes, ROWS, COLUMNS // 2, 8)
        words = join_columns(codes, ROWS, COLUMNS // 4, 16)
    else:
        codes = (encode_e4m3(scaled) | (is_nan * 0x7F)) & (255 >> is_nan)  # NaN throughout a NaN block
        codes = join_columns(tl.reshape(codes, [ROWS, COLUMNS]), ROWS, COLUMNS, 8)
        words = join_columns(codes, ROWS, COLUMNS // 2, 16)
    return words, byte.to(tl.uint8)
