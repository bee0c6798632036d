// FP8 with one FP32 scale per 128 elements: s = max(amax, 1e-10) / 448 by IEEE division, q = e4m3fn(x / s).
//
// Magnitudes are compared as bits: |x| as an integer orders all floats and puts NaN on top, so a NaN in a block is
// never lost, as it would be in fmaxf.
#pragma once

#include "megamoe/ptx/convert.cuh"
#include "megamoe/ptx/types.cuh"

namespace megamoe {

constexpr uint32_t kScaleBlock = 128;  // DeepSeek-V3 technical report, section 3.3.2
constexpr float kE4m3Max = 448.f;
constexpr float kAmaxFloor = 1e-10f;  // keeps the scale of a zero block away from 0

__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Largest of `bits` over the lanes that differ in the lowest log2(kLanes) bits of their number.
template <uint32_t kLanes>
__device__ __forceinline__ uint32_t max_over_lanes(uint32_t bits) {
#pragma unroll
    for (uint32_t step = 1; step < kLanes; step *= 2) bits = max(bits, __shfl_xor_sync(kFullMask, bits, step));
    return bits;
}

struct BlockScale {
    float scale;
    float reciprocal;  // rounded; see `divided`

    __device__ __forceinline__ explicit BlockScale(uint32_t amax_bits)
        : scale(__fdiv_rn(__uint_as_float(max(amax_bits, __float_as_uint(kAmaxFloor))), kE4m3Max)),
          reciprocal(__frcp_rn(scale)) {}

    // x / scale, close enough that its e4m3 code is that of the IEEE quotient. A division per element is a divergent subroutine
    // (25 us a tile on an H200). The rounded reciprocal and one FMA correction (Markstein) miss some last bits, but none at the
    // 16 points of a binade where a code may change: tried for every mantissa of a scale, on both sides of each point.
    __device__ __forceinline__ float divided(float x) const {
        const float q = __fmul_rn(x, reciprocal);
        return __fmaf_rn(__fmaf_rn(-q, scale, x), reciprocal, q);
    }
    __device__ __forceinline__ uint32_t quantized_x2(float low, float high) const {
        return ptx::pack_e4m3x2(divided(low), divided(high));
    }
};

}  // namespace megamoe
