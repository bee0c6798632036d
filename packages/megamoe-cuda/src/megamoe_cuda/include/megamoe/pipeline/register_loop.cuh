// The main loop with swapped operands whose weights come packed, in mode a8w4: see swapped_loop.cuh, whose sums it leaves, bit
// for bit. Weights are the register operand of the WGMMAs (register_weights.cuh).
//
// Looking up is the work: with two warpgroups of 128 weight rows a scheduler's two warps waited for the same things at the same
// time. So there are four of 64, and where registers allow it a warp has two K blocks under way: 132, 130 and 126 us for 8 tokens
// (H200).
#pragma once

#include "megamoe/pipeline/register_weights.cuh"
#include "megamoe/pipeline/swapped_loop.cuh"

namespace megamoe {

template <uint32_t kTokens>
struct RegisterLoop {
    static constexpr uint32_t kLength = kTokens / 2;  // accumulators of a thread
    static constexpr uint32_t kAtOnce = kTokens <= 16 ? 2 : 1;

    StageReader& loop;
    RegisterWeights weights;
    uint32_t token_descriptor;  // low word, of stage 0
    uint32_t row_scale_address;
    uint32_t weight_scale_rows[2];  // as in SwappedLoop

    __device__ __forceinline__ RegisterLoop(StageReader& loop_, const MathThread& thread, bool is_gemm2)
        : loop(loop_),
          weights(loop_.ring, thread),
          token_descriptor(ptx::wgmma_descriptor_low(loop_.ring.activations(0))),
          row_scale_address(loop_.ring.scales(0) + 8 * thread.quad),
          weight_scale_rows{weight_scale_row(is_gemm2, 0), weight_scale_row(is_gemm2, 1)} {}

    // product = weights * the tokens of the stage, over its 128 of K, as a group of its own.
    __device__ __forceinline__ void issue(float (&product)[kLength], const WeightFragment& fragment, uint32_t stage) const {
        uint32_t b = token_descriptor;
        asm volatile("" : "+r"(b));  // computed here, not kept over the loop
        b += stage * cfg::kActivationStageBytes >> 4;
        ptx::wgmma_fence();
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) {
            ptx::wgmma_m64k32(product, fragment.words[k], b + k * ptx::kDescriptorPerKStep, k != 0);
        }
        ptx::wgmma_commit();
    }

    // sums += product * scales.
    __device__ __forceinline__ void promote(float (&sums)[kLength], const float (&product)[kLength], uint32_t stage,
                                            float gate, float up) const {
#pragma unroll
        for (uint32_t j = 0; j < kTokens / 8; ++j) {
            float row[2];
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                         : "=f"(row[0]), "=f"(row[1])
                         : "r"(row_scale_address + stage * cfg::kScaleStageBytes + 32 * j)
                         : "memory");
            const float scale[4] = {__fmul_rn(row[0], gate), __fmul_rn(row[1], gate), __fmul_rn(row[0], up),
                                    __fmul_rn(row[1], up)};
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) sums[4 * j + i] = __fmaf_rn(product[4 * j + i], scale[i], sums[4 * j + i]);
        }
    }

    // K blocks from k on, which are full when the first one is multiplied: nothing conditional may stand between a WGMMA and
    // its wait (main_loop.cuh).
    template <uint32_t kNumBlocks>
    __device__ __forceinline__ void multiply_blocks(uint32_t k, const WeightScales& weight_scales, float (&sums)[kLength]) {
        uint32_t stages[kNumBlocks];
#pragma unroll
        for (uint32_t i = 0; i < kNumBlocks; ++i) {
            stages[i] = loop.position.stage;
            loop.await_full(stages[i]);
            loop.position.advance();
        }
        float products[kNumBlocks][kLength], gate[kNumBlocks], up[kNumBlocks];  // GEMM2: twice the same
#pragma unroll
        for (uint32_t i = 0; i < kNumBlocks; ++i) {
            issue(products[i], weights.look_up(stages[i]), stages[i]);
            gate[i] = weight_scales.at(weight_scale_rows[0], k + i);
            up[i] = weight_scales.at(weight_scale_rows[1], k + i);
        }
#pragma unroll
        for (uint32_t i = 0; i < kNumBlocks; ++i) {
            if (i + 1 < kNumBlocks) ptx::wgmma_wait_all_but_one();
            else ptx::wgmma_wait_all();
            ptx::pin(products[i]);
            promote(sums, products[i], stages[i], gate[i], up[i]);
            loop.release(stages[i]);
        }
    }

    __device__ __forceinline__ void multiply(bool is_gemm2, const WeightScales& weight_scales,
                                             SwappedAccumulators<kTokens>& sums) {
        static_assert(kSwappedHalves == 1, "a warpgroup has 64 weight rows");
#pragma unroll
        for (uint32_t i = 0; i < kLength; ++i) sums.values[0][i] = 0.f;
        uint32_t k_blocks = is_gemm2 ? cfg::kGemm2KBlocks : cfg::kGemm1KBlocks;
        asm volatile("" : "+r"(k_blocks));  // as in MainLoop
        uint32_t k = 0;
#pragma unroll 1
        for (; k + kAtOnce <= k_blocks; k += kAtOnce) multiply_blocks<kAtOnce>(k, weight_scales, sums.values[0]);
        constexpr bool kIsEven = cfg::kGemm1KBlocks % kAtOnce == 0 && cfg::kGemm2KBlocks % kAtOnce == 0;
        if (!kIsEven && k < k_blocks) multiply_blocks<1>(k, weight_scales, sums.values[0]);
    }
};

}  // namespace megamoe
