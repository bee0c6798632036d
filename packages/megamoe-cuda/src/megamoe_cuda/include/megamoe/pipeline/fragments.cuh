// From accumulator fragments to wide stores.
#pragma once

#include "megamoe/ptx/convert.cuh"
#include "megamoe/ptx/types.cuh"

namespace megamoe {

// Transposes 4 x 4 words inside each quad of lanes: lane q ends with words[i] = lane i's words[q].
__device__ __forceinline__ void transpose_in_quad(uint32_t (&words)[4], uint32_t quad) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t other = __shfl_xor_sync(kFullMask, (quad & 1) ? words[i] : words[i + 1], 1);
        if (quad & 1) words[i] = other;
        else words[i + 1] = other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t other = __shfl_xor_sync(kFullMask, (quad & 2) ? words[i] : words[i + 2], 2);
        if (quad & 2) words[i] = other;
        else words[i + 2] = other;
    }
}

// One row of 64 FP8 columns held by a quad, 16-bit pairs of 8 groups of 8 columns: pairs(j) are columns 8 j + 2 quad +
// {0, 1}. Lane q gets columns [16 q, 16 q + 16) in order.
template <typename Pairs>
__device__ __forceinline__ uint4 gather_fp8_columns(uint32_t quad, Pairs pairs) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pairs(2 * i) | pairs(2 * i + 1) << 16;
    transpose_in_quad(words, quad);
    return make_uint4(__byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410),
                      __byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632));
}

}  // namespace megamoe
