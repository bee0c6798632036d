// An expert's FP32 bias on a tile's FP32 accumulators.
#pragma once

#include "megamoe/pipeline/math_thread.cuh"

namespace megamoe {

// `bias` belongs to the tile's first column and goes on for 256, which weights.py pads for.
__device__ __forceinline__ void add_bias(Accumulators& sums, const MathThread& thread, const float* bias) {
#pragma unroll
    for (uint32_t half = 0; half < kHalves; ++half) {
        const auto* columns = reinterpret_cast<const float2*>(bias + thread.column(half)) + thread.quad;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const float2 pair = __ldg(columns + 4 * j);
            float* values = sums.values[half] + 4 * j;
            values[0] = __fadd_rn(values[0], pair.x);
            values[1] = __fadd_rn(values[1], pair.y);
            values[2] = __fadd_rn(values[2], pair.x);
            values[3] = __fadd_rn(values[3], pair.y);
        }
    }
}

}  // namespace megamoe
