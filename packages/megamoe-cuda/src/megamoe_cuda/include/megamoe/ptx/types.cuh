// Fixed-width integers. NVRTC compiles this tree without any system header.
#pragma once

typedef signed int int32_t;
typedef signed long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

namespace megamoe {

constexpr uint32_t kWarpSize = 32;
constexpr uint32_t kFullMask = 0xffffffffu;

__host__ __device__ constexpr uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

__device__ __forceinline__ uint32_t lane_id() { return threadIdx.x % kWarpSize; }
// The same in all lanes, and known to be: branches on it are uniform.
__device__ __forceinline__ uint32_t warp_id() { return __shfl_sync(kFullMask, threadIdx.x / kWarpSize, 0); }

}  // namespace megamoe
