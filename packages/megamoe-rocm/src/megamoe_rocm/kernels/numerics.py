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
    """FP32 to the bits of BF16, uint16: nearest, ties to even; NaN becomes 0x7FC0."""
    bits = float_bits(x)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.uint16)


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
    return tl.where(amax_bits >= 0x7F800000, SCALE_NAN, tl.maximum(byte, 0))


@triton.jit
def scale_value(byte):
    """2^(byte - 127) in FP32, NaN for 255; `byte` is int32, 0 to 255."""
    bits = byte << 23
    bits = tl.where(byte == 0, 0x00400000, bits)
    return tl.where(byte == SCALE_NAN, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def scale_reciprocal(byte):
    """2^(127 - byte) in FP32, exact, NaN for 255; `byte` is what `scale_byte` gives: at most 253, or 255."""
    bits = tl.where(byte == SCALE_NAN, 0x7FC00000, (254 - byte) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_magnitude(
    magnitude, SHIFT: tl.constexpr, BIAS: tl.constexpr, FIRST_NORMAL: tl.constexpr, ADDEND: tl.constexpr
):
    """Code without sign of FP32 magnitudes that the element can hold: nearest, ties to even.

    Args:
        SHIFT: mantissa bits that FP32 has more.
        BIAS: 127 minus the element's exponent bias, above its mantissa bits.
        FIRST_NORMAL: FP32 bits of its smallest normal number. From there on the mantissa is cut, with rounding.
        ADDEND: the power of two whose ulp is the element's smallest step. Below, adding it makes the FP32 adder round.
    """
    bits = float_bits(magnitude)
    normal = ((bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT) - BIAS
    subnormal = float_bits(magnitude + ADDEND) & 0x7FFFFF
    return tl.where(bits >= FIRST_NORMAL, normal, subnormal)


@triton.jit
def encode_e2m1(x):
    """FP32 to e2m1 codes 0 to 15, int32: nearest even, saturating at 6, NaN becomes 7."""
    bits = float_bits(x)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x40C00000).to(tl.float32, bitcast=True)  # 6
    code = round_magnitude(magnitude, 22, 252, 0x3F800000, 4194304.0) | ((bits >> 28) & 8)
    return tl.where(is_nan, 7, code)


@triton.jit
def encode_e4m3(x):
    """FP32 to e4m3fn codes 0 to 255, int32: nearest even, saturating at 448, NaN becomes 0x7F."""
    bits = float_bits(x)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000).to(tl.float32, bitcast=True)  # 448
    code = round_magnitude(magnitude, 20, 960, 0x3C800000, 16384.0) | ((bits >> 24) & 0x80)
    return tl.where(is_nan, 0x7F, code)


@triton.jit
def decode_e4m3(code):
    """e4m3fn codes 0 to 255, int32, to FP32."""
    normal = (((code & 0x7F) << 20) + 0x3C000000).to(tl.float32, bitcast=True)  # exponent bias 127 - 7
    subnormal = (code & 7).to(tl.float32) * 0.001953125  # 2^-9
    magnitude = tl.where((code & 0x78) == 0, subnormal, normal)
    value = tl.where((code & 0x80) != 0, -magnitude, magnitude)
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def quantize_blocks(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FP4: tl.constexpr):
    """Quantise FP32 `[ROWS, COLUMNS]` per 1x32, scales rounded up.

    Returns:
        uint8 `[ROWS, COLUMNS / 2]` (FP4, the even column in the low nibble) or `[ROWS, COLUMNS]` (FP8), and uint8
        scales `[ROWS, COLUMNS / 32]`.
    """
    blocks = tl.reshape(x, [ROWS, COLUMNS // MX_BLOCK, MX_BLOCK])
    # As integers, magnitudes keep their order, and NaN is above all: no rule about NaN in max is needed.
    byte = scale_byte(tl.max(float_bits(blocks) & 0x7FFFFFFF, axis=2), FP4)
    scaled = blocks * tl.expand_dims(scale_reciprocal(byte), 2)
    if FP4:
        codes = tl.reshape(encode_e2m1(scaled), [ROWS, COLUMNS // 2, 2])
        low, high = tl.split(codes)
        payload = low | (high << 4)
    else:
        payload = tl.reshape(encode_e4m3(scaled), [ROWS, COLUMNS])
    return payload.to(tl.uint8), byte.to(tl.uint8)
