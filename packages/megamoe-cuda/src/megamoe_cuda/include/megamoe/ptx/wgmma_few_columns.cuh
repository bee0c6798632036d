// FP8 warpgroup MMA with few columns, for swapped operands: 64 weight rows x N tokens x 32, N = 8 to 64.
//
// The length of the accumulator array says N: a thread holds N / 2 of the 64 x N sums, laid out as wgmma.cuh says. Both
// operands are K-major in shared memory; descriptors as there.
#pragma once

#include "megamoe/ptx/wgmma.cuh"

namespace megamoe::ptx {

// d = a * b, or d += a * b when `accumulate` is not 0; a and b are low words of descriptors.
__device__ __forceinline__ void wgmma_m64k32(float (&d)[4], uint32_t a, uint32_t b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %6, 0;\n"
        "mov.b64 a, {%4, 0x40000040}; mov.b64 b, {%5, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {" WGMMA_NAMES_4 "}, a, b, p, 1, 1; }"
        : WGMMA_SUMS_4(d, 0)
        : "r"(a), "r"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_m64k32(float (&d)[8], uint32_t a, uint32_t b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %10, 0;\n"
        "mov.b64 a, {%8, 0x40000040}; mov.b64 b, {%9, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {" WGMMA_NAMES_8 "}, a, b, p, 1, 1; }"
        : WGMMA_SUMS_8(d, 0)
        : "r"(a), "r"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_m64k32(float (&d)[16], uint32_t a, uint32_t b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %18, 0;\n"
        "mov.b64 a, {%16, 0x40000040}; mov.b64 b, {%17, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {" WGMMA_NAMES_16 "}, a, b, p, 1, 1; }"
        : WGMMA_SUMS_16(d, 0)
        : "r"(a), "r"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_m64k32(float (&d)[32], uint32_t a, uint32_t b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %34, 0;\n"
        "mov.b64 a, {%32, 0x40000040}; mov.b64 b, {%33, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" WGMMA_NAMES_32 "}, a, b, p, 1, 1; }"
        : WGMMA_SUMS_32(d, 0)
        : "r"(a), "r"(b), "r"(accumulate));
}

// The same with a in registers: a[i] are four bytes of K of row 16 w + lane / 4 (+ 8 for odd i), from 4 (lane % 4) on (+ 16 for
// i >= 2). They belong to the tensor cores until the wait.
__device__ __forceinline__ void wgmma_m64k32(float (&d)[4], const uint32_t (&a)[4], uint32_t b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 b; setp.ne.b32 p, %9, 0;\n"
        "mov.b64 b, {%8, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {" WGMMA_NAMES_4 "}, "
        "{%4, %5, %6, %7}, b, p, 1, 1; }"
        : WGMMA_SUMS_4(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_m64k32(float (&d)[8], const uint32_t (&a)[4], uint32_t b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 b; setp.ne.b32 p, %13, 0;\n"
        "mov.b64 b, {%12, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {" WGMMA_NAMES_8 "}, "
        "{%8, %9, %10, %11}, b, p, 1, 1; }"
        : WGMMA_SUMS_8(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_m64k32(float (&d)[16], const uint32_t (&a)[4], uint32_t b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 b; setp.ne.b32 p, %21, 0;\n"
        "mov.b64 b, {%20, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {" WGMMA_NAMES_16 "}, "
        "{%16, %17, %18, %19}, b, p, 1, 1; }"
        : WGMMA_SUMS_16(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_m64k32(float (&d)[32], const uint32_t (&a)[4], uint32_t b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 b; setp.ne.b32 p, %37, 0;\n"
        "mov.b64 b, {%36, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" WGMMA_NAMES_32 "}, "
        "{%32, %33, %34, %35}, b, p, 1, 1; }"
        : WGMMA_SUMS_32(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate));
}

}  // namespace megamoe::ptx
