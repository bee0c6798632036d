// BF16 warpgroup MMA, 64 x 128 x 16 and 64 x 256 x 16, FP32 accumulators: operands, descriptors and accumulators as in
// wgmma.cuh.
#pragma once

#include "megamoe/ptx/wgmma.cuh"

namespace megamoe::ptx {

// d = a * b, or d += a * b when `accumulate` is not 0; a and b are low words of descriptors.
__device__ __forceinline__ void wgmma_m64n128k16(float (&d)[64], uint32_t a, uint32_t b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %66, 0;\n"
        "mov.b64 a, {%64, 0x40000040}; mov.b64 b, {%65, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_NAMES_64 "}, a, b, p, 1, 1, 0, 0; }"
        : WGMMA_SUMS_64(d, 0)
        : "r"(a), "r"(b), "r"(accumulate));
}

// The same with all 256 columns of a tile: A is read from shared memory once, not once per half.
__device__ __forceinline__ void wgmma_m64n256k16(float (&d)[2][64], uint32_t a, uint32_t b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %130, 0;\n"
        "mov.b64 a, {%128, 0x40000040}; mov.b64 b, {%129, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" WGMMA_NAMES_128 "}, a, b, p, 1, 1, 0, 0; }"
        : WGMMA_SUMS_64(d[0], 0), WGMMA_SUMS_64(d[1], 0)
        : "r"(a), "r"(b), "r"(accumulate));
}

// Issues d += a * b over 64 of K (one stage), or d = a * b when `accumulate` is 0; the caller fences and commits. With one
// half of 128 columns, or two.
__device__ __forceinline__ void wgmma_k64(float (&d)[1][64], uint32_t a, uint32_t b, int accumulate) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        wgmma_m64n128k16(d[0], a + kDescriptorPerKStep * k, b + kDescriptorPerKStep * k, k == 0 ? accumulate : 1);
    }
}
__device__ __forceinline__ void wgmma_k64(float (&d)[2][64], uint32_t a, uint32_t b, int accumulate) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        wgmma_m64n256k16(d, a + kDescriptorPerKStep * k, b + kDescriptorPerKStep * k, k == 0 ? accumulate : 1);
    }
}

}  // namespace megamoe::ptx
