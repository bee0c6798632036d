// FP8 warpgroup MMA with few columns, for swapped operands: 64 weight rows x N tokens x 32, N = 8 to 64.
//
// The length of the accumulator array says N: a thread holds N / 2 of the 64 x N sums, laid out as wgmma.cuh says. Both
// operands are K-major in shared memory; descriptors as there.
#pragma once

#include "megamoe/ptx/wgmma.cuh"

namespace megamoe::ptx {

template <int kLength>
__device__ __forceinline__ void pin(float (&d)[kLength]) {
#pragma unroll
    for (int i = 0; i < kLength; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ void wgmma_m64k32(float (&d)[4], uint32_t a, uint32_t b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %6, 0;\n"
        "mov.b64 a, {%4, 0x40000040}; mov.b64 b, {%5, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3"
        "}, a, b, p, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a), "r"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_m64k32(float (&d)[8], uint32_t a, uint32_t b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %10, 0;\n"
        "mov.b64 a, {%8, 0x40000040}; mov.b64 b, {%9, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, a, b, p, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a), "r"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_m64k32(float (&d)[16], uint32_t a, uint32_t b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %18, 0;\n"
        "mov.b64 a, {%16, 0x40000040}; mov.b64 b, {%17, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, a, b, p, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "r"(a), "r"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_m64k32(float (&d)[32], uint32_t a, uint32_t b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %34, 0;\n"
        "mov.b64 a, {%32, 0x40000040}; mov.b64 b, {%33, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, a, b, p, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a), "r"(b), "r"(accumulate));
}

}  // namespace megamoe::ptx
