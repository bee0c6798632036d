// The FP8 main loop with swapped operands, for blocks of few rows: the weights are the wide operand, so that rows are not
// padded to 64. C^T[256 x kTokens] = sum over K blocks of 128 of row scale * weight scale * (W * A^T).
//
// Warpgroup w takes weight rows [128 w, 128 w + 128) of the tile, as two halves of 64, and all rows of the block; kTokens is
// the least of 8, 16, 32, 64 that holds them, chosen per tile. K order, the promotion chunk and the arithmetic are those of
// main_loop.cuh, so a row has the same bits as there.
#pragma once

#include "megamoe/pipeline/main_loop.cuh"
#include "megamoe/ptx/wgmma_few_columns.cuh"

namespace megamoe {

constexpr uint32_t kWeightHalfBytes = 64 * ptx::kSwizzleBytes;

// values[half][4 j + 2 h + c] is weight row kSwappedRowsEach warpgroup + 64 half + 16 warp + 8 h + lane / 4 of the tile, row
// 8 j + 2 quad + c of the block. GEMM1's weights alternate 8 gate and 8 up rows: h = 0 is gate, h = 1 the same channel's up.
template <uint32_t kTokens>
struct SwappedAccumulators {
    float values[kSwappedHalves][kTokens / 2];
};

template <uint32_t kTokens>
struct SwappedLoop {
    static constexpr uint32_t kLength = kTokens / 2;  // accumulators of a half

    StageReader& loop;
    uint32_t weight_descriptor;  // low words, of stage 0
    uint32_t token_descriptor;
    uint32_t row_scale_address;
    uint32_t weight_scale_rows[2];  // of WeightScales: for h = 0 and h = 1

    __device__ __forceinline__ SwappedLoop(StageReader& loop_, const MathThread& thread, bool is_gemm2)
        : loop(loop_),
          weight_descriptor(
              ptx::wgmma_descriptor_low(loop_.ring.weights(0) + thread.warpgroup * 2 * kWeightHalfBytes)),
          token_descriptor(ptx::wgmma_descriptor_low(loop_.ring.activations(0))),
          row_scale_address(loop_.ring.scales(0) + 8 * thread.quad),
          weight_scale_rows{weight_scale_row(is_gemm2, 0), weight_scale_row(is_gemm2, 1)} {}

    // Issues both halves' products with the tokens, over the stage's 128 of K.
    __device__ __forceinline__ void issue(float (&product)[2][kLength], uint32_t stage) const {
        uint32_t a = weight_descriptor, b = token_descriptor;
        asm volatile("" : "+r"(a), "+r"(b));  // computed here, not kept over the loop
        a += weight_buffer_offset(stage) >> 4;
        b += stage * cfg::kActivationStageBytes >> 4;
        ptx::wgmma_fence();
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half)
#pragma unroll
            for (uint32_t k = 0; k < 4; ++k) {
                ptx::wgmma_m64k32(product[half], a + half * (kWeightHalfBytes >> 4) + k * ptx::kDescriptorPerKStep,
                                  b + k * ptx::kDescriptorPerKStep, k != 0);
            }
        ptx::wgmma_commit();
    }

    // sums += product * scales. Rows' scales are read here, two at a time: kept over the product, they would take a register
    // per row.
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

    __device__ __forceinline__ void multiply_stage(uint32_t k, uint32_t stage, const WeightScales& weight_scales,
                                                   SwappedAccumulators<kTokens>& sums, float (&product)[2][kLength]) {
        loop.await_full(stage);
        issue(product, stage);
        const float gate = weight_scales.at(weight_scale_rows[0], k);  // GEMM2: twice the same
        const float up = weight_scales.at(weight_scale_rows[1], k);
        ptx::wgmma_wait_all();
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            ptx::pin(product[half]);
            promote(sums.values[half], product[half], stage, gate, up);
        }
        loop.release(stage);
    }

    __device__ __forceinline__ void multiply(bool is_gemm2, const WeightScales& weight_scales,
                                             SwappedAccumulators<kTokens>& sums) {
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half)
#pragma unroll
            for (uint32_t i = 0; i < kLength; ++i) sums.values[half][i] = 0.f;
        float product[2][kLength];
        uint32_t k_blocks = is_gemm2 ? cfg::kGemm2KBlocks : cfg::kGemm1KBlocks;
        asm volatile("" : "+r"(k_blocks));  // as in MainLoop
#pragma unroll 1
        for (uint32_t k = 0; k < k_blocks; ++k) {  // not unrolled by the ring: memory bounds it, and cold code costs
            multiply_stage(k, loop.position.stage, weight_scales, sums, product);
            loop.position.advance();
        }
    }
};

}  // namespace megamoe
