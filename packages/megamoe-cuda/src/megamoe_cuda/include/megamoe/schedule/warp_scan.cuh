// Prefix sums by one warp, and where a value falls among them.
#pragma once

#include "megamoe/ptx/types.cuh"

namespace megamoe {

// Inclusive sum over the lanes of a warp.
__device__ __forceinline__ uint32_t warp_inclusive_sum(uint32_t value) {
#pragma unroll
    for (uint32_t step = 1; step < kWarpSize; step *= 2) {
        const uint32_t below = __shfl_up_sync(kFullMask, value, step);
        if (lane_id() >= step) value += below;
    }
    return value;
}

// out[i] = sum of load(j) for j < i, for i in [0, n]; one warp. Returns out[n] in all lanes.
template <typename Load>
__device__ __forceinline__ uint32_t warp_prefix_sums(uint32_t n, uint32_t* out, Load load) {
    uint32_t carry = 0;
    for (uint32_t first = 0; first < n; first += kWarpSize) {
        const uint32_t i = first + lane_id();
        const uint32_t value = i < n ? load(i) : 0;
        const uint32_t inclusive = warp_inclusive_sum(value) + carry;
        if (i < n) out[i] = inclusive - value;
        carry = __shfl_sync(kFullMask, inclusive, kWarpSize - 1);
    }
    if (lane_id() == 0) out[n] = carry;
    return carry;
}

// The last i in [0, n) with begin[i] <= value, for ascending begin and begin[0] = 0: where `value` falls.
__device__ __forceinline__ uint32_t find_segment(const uint32_t* begin, uint32_t n, uint32_t value) {
    uint32_t low = 0, high = n;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (begin[middle] <= value) low = middle;
        else high = middle;
    }
    return low;
}

}  // namespace megamoe
