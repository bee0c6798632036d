// What stands between the two GEMMs, element by element. NaN passes through the clamps.
#pragma once

#include "megamoe/ptx/convert.cuh"
#include "megamoe/ptx/types.cuh"

namespace megamoe {

// gate / (1 + exp(-scaled)). A divisor that is at least 1 shows nothing of subnormal powers, so they are flushed: the bits are
// those of __expf and __fdividef, whose care for them is 7 of 13 instructions.
__device__ __forceinline__ float sigmoid_product(float gate, float scaled) {
    constexpr float kLog2E = 1.44269504f;
    const float power = ptx::approximate_exp2(__fmul_rn(scaled, -kLog2E));
    return __fmul_rn(gate, ptx::approximate_reciprocal(__fadd_rn(1.f, power)));
}

__device__ __forceinline__ float activate(float gate, float up) {
    if constexpr (cfg::kHasLimit) {
        gate = ptx::min_keep_nan(gate, cfg::kLimit);
        up = ptx::max_keep_nan(ptx::min_keep_nan(up, cfg::kLimit), -cfg::kLimit);
    }
    if constexpr (cfg::kActivation == Activation::kSwigluOai) {  // gpt-oss: alpha 1.702, beta 1
        return __fmul_rn(sigmoid_product(gate, __fmul_rn(1.702f, gate)), __fadd_rn(up, 1.f));
    } else {
        return __fmul_rn(sigmoid_product(gate, gate), up);
    }
}

}  // namespace megamoe
