// E8M0 block scales of the fp8_blockwise_1x32 transport: byte b stands for 2^(b - 127), 255 for NaN (OCP MX v1.0).
#pragma once

#include "megamoe/ptx/types.cuh"

namespace megamoe {

constexpr uint32_t kMxBlock = 32;  // OCP MX v1.0
constexpr uint32_t kE8m0Nan = 255;

// The smallest power of two >= amax / 448, from amax's bits; 255 for NaN and Inf. 448 is 1.75 * 2^8, so the exponent is
// amax's less 8, and one more when the significand exceeds 1.75.
__device__ __forceinline__ uint32_t e8m0_round_up(uint32_t amax_bits) {
    const uint32_t exponent = amax_bits >> 23;
    if (exponent == 255) return kE8m0Nan;
    const int32_t byte = static_cast<int32_t>(exponent) - 8 + ((amax_bits & 0x7fffffu) > 0x600000u ? 1 : 0);
    return static_cast<uint32_t>(max(byte, 0));
}

// 2^(127 - byte): multiplying by it divides by the scale, exactly. NaN for 255.
__device__ __forceinline__ float e8m0_reciprocal(uint32_t byte) {
    return __uint_as_float(byte == kE8m0Nan ? 0x7fc00000u : (254u - byte) << 23);
}

__device__ __forceinline__ float e8m0_decode(uint32_t byte) {
    const uint32_t bits = byte == 0 ? 0x00400000u : byte << 23;
    return __uint_as_float(byte == kE8m0Nan ? 0x7fc00000u : bits);
}

}  // namespace megamoe
