// What stands between the two GEMMs, element by element. NaN passes through the clamps.
#pragma once

#include "megamoe/ptx/convert.cuh"
#include "megamoe/ptx/types.cuh"

namespace megamoe {

__device__ __forceinline__ float scaled_sigmoid_product(float gate, float alpha) {
    return __fdividef(gate, __fadd_rn(1.f, __expf(__fmul_rn(-alpha, gate))));
}

__device__ __forceinline__ float activate(float gate, float up) {
    if constexpr (cfg::kHasLimit) {
        gate = ptx::min_keep_nan(gate, cfg::kLimit);
        up = ptx::max_keep_nan(ptx::min_keep_nan(up, cfg::kLimit), -cfg::kLimit);
    }
    if constexpr (cfg::kActivation == Activation::kSwigluOai) {  // gpt-oss: alpha 1.702, beta 1
        return __fmul_rn(scaled_sigmoid_product(gate, 1.702f), __fadd_rn(up, 1.f));
    } else {
        return __fmul_rn(scaled_sigmoid_product(gate, 1.f), up);
    }
}

}  // namespace megamoe
