// FP8 warpgroup MMA, 64 x 128 x 32, FP32 accumulators in registers, both operands K-major in shared memory.
//
// Shared-memory descriptor (128-byte swizzle, tile base 1024-byte aligned): bits 0-13 address >> 4; 16-29 leading
// offset, ignored here; 32-45 stride between groups of 8 rows >> 4 (1024 >> 4); 49-51 base offset 0; 62-63 swizzle 1.
// The next 32 bytes of K are +2, the next 64 rows +512. Only the low word varies; it alone is passed around, since a main
// loop has no registers for 64-bit descriptors of all its stages.
//
// Accumulators: thread `lane` of warp w holds rows 16 w + lane / 4 (+ 8 for odd pairs) and columns
// 8 j + 2 (lane % 4) + {0, 1}: d[4 j + 2 half + {0, 1}].
#pragma once

#include "megamoe/ptx/types.cuh"
#include "megamoe/ptx/wgmma_operands.cuh"

namespace megamoe::ptx {

constexpr uint32_t kDescriptorPerKStep = 32 >> 4;
constexpr uint32_t kSwizzleBytes = 128;

__device__ __forceinline__ uint32_t wgmma_descriptor_low(uint32_t shared_address) {
    return ((shared_address & 0x3ffff) >> 4) | (1u << 16);
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait_all() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// Waits until all but the last group are done.
__device__ __forceinline__ void wgmma_wait_all_but_one() {
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

// Keeps the compiler from moving reads of `d` above wgmma_wait_all().
template <int kLength>
__device__ __forceinline__ void pin(float (&d)[kLength]) {
#pragma unroll
    for (int i = 0; i < kLength; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d = a * b, or d += a * b when `accumulate` is not 0; a and b are low words of descriptors.
__device__ __forceinline__ void wgmma_m64n128k32(float (&d)[64], uint32_t a, uint32_t b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %66, 0;\n"
        "mov.b64 a, {%64, 0x40000040}; mov.b64 b, {%65, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" WGMMA_NAMES_64 "}, a, b, p, 1, 1; }"
        : WGMMA_SUMS_64(d, 0)
        : "r"(a), "r"(b), "r"(accumulate));
}

// Issues d = a * b over 128 of K (one stage) and commits; the caller waits and pins.
__device__ __forceinline__ void wgmma_m64n128k128(float (&d)[64], uint32_t a, uint32_t b) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_m64n128k32(d, a + kDescriptorPerKStep * k, b + kDescriptorPerKStep * k, k != 0);
    wgmma_commit();
}

}  // namespace megamoe::ptx
