// The FP8 main loop of one tile, for both GEMMs: C[kTileM x 256] = sum over K blocks of 128 of
// row scale * weight scale * (A * B), each block's product from the tensor cores, the sum in FP32 registers.
//
// One temporary of 64 registers serves all halves in turn: the other warpgroup covers the promotion. K order, the
// promotion chunk and the arithmetic are the same in every tile shape, so a row's bits do not depend on the shape.
//
// Whether the next stage is full is asked while the last product of a stage is under way: asked at the border of two stages, the
// answer delays the next WGMMA, and a block of K takes 4% longer (H200).
//
// Nothing conditional may stand between a WGMMA and its wait: ptxas would serialise the WGMMAs (C7518). The loop is
// unrolled by the ring, so that stage addresses are constants: rolled, it is 5% slower (H200).
#pragma once

#include "megamoe/pipeline/stage_reader.cuh"
#include "megamoe/schedule/units.cuh"

namespace megamoe {

// The weight scales of a tile, two rows in shared memory, a float per K block. GEMM1: row 0 is gate, row 1 is up. GEMM2: row h
// is of columns [128 h, 128 h + 128). The weight loader brings them with the tile's first stage (roles/load.cuh).
struct WeightScales {
    uint32_t address;

    __device__ __forceinline__ float at(uint32_t row, uint32_t k) const {
        float scale;
        asm volatile("ld.shared.f32 %0, [%1];"
                     : "=f"(scale)
                     : "r"(address + row * cfg::kWeightScaleRowBytes + 4 * k)
                     : "memory");
        return scale;
    }
};

// The row of WeightScales of a thread's gate columns (h = 0) or up columns (h = 1), where its GEMM2 columns all share one.
__device__ __forceinline__ uint32_t weight_scale_row(bool is_gemm2, uint32_t h) {
    return is_gemm2 ? MathThread::identify().warpgroup / (2 / kSwappedHalves) : h;
}

// sum += product * scale; even and odd groups of 8 columns have their own weight scale (gate and up in GEMM1).
__device__ __forceinline__ void promote(float (&sum)[64], const float (&product)[64], const float (&row_scale)[2],
                                        float even, float odd) {
    const float scale[2][2] = {{__fmul_rn(row_scale[0], even), __fmul_rn(row_scale[1], even)},
                               {__fmul_rn(row_scale[0], odd), __fmul_rn(row_scale[1], odd)}};
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] = __fmaf_rn(product[i], scale[(i >> 2) & 1][(i >> 1) & 1], sum[i]);
}

struct MainLoop : StageReader {
    uint32_t row_scale_address;

    __device__ __forceinline__ MainLoop(const Ring& ring_, const MathThread& thread_)
        : StageReader(ring_, thread_), row_scale_address(ring_.scales(0) + 4 * thread_.row()) {}

    __device__ __forceinline__ float load_row_scale(uint32_t stage, uint32_t row_offset) const {
        float scale;
        asm volatile("ld.shared.f32 %0, [%1];"
                     : "=f"(scale)
                     : "r"(row_scale_address + stage * cfg::kScaleStageBytes + 4 * row_offset)
                     : "memory");
        return scale;
    }

    // `is_full`: whether the stage is known to be full; then whether the next one is.
    __device__ __forceinline__ void multiply_stage(uint32_t k, uint32_t stage, bool is_gemm2,
                                                   const WeightScales& weight_scales, Accumulators& sums,
                                                   const uint32_t (&scale_rows)[2], float (&product)[64],
                                                   bool& is_full) {
        if (!is_full) await_full(stage);
        const float row_scale[2] = {load_row_scale(stage, 0), load_row_scale(stage, 8)};
#pragma unroll
        for (uint32_t half = 0; half < kHalves; ++half) {
            uint32_t own = cfg::kSplitM ? a_descriptor : b_descriptor;  // the warpgroup's; the other operand is for both
            asm volatile("" : "+r"(own));  // computed here: hoisted, those of all stages would take 40 registers
            const uint32_t a = cfg::kSplitM ? own : ptx::wgmma_descriptor_low(kSharedBase + cfg::kSmemActivations);
            const uint32_t b = cfg::kSplitM ? ptx::wgmma_descriptor_low(kSharedBase + cfg::kSmemWeights) : own;
            ptx::wgmma_m64n128k128(product, a + (stage * cfg::kActivationStageBytes >> 4),
                                   b + ((weight_buffer_offset(stage) + half * kHalfBytes) >> 4));
            if (half == kHalves - 1) is_full = is_next_full(stage);
            const float first = weight_scales.at(scale_rows[0], k), second = weight_scales.at(scale_rows[1], k);
            const float even = is_gemm2 && half == 1 ? second : first;
            const float odd = is_gemm2 && half == 0 && kHalves == 2 ? first : second;
            ptx::wgmma_wait_all();
            ptx::pin(product);
            if (half == kHalves - 1) release(stage);
            promote(sums.values[half], product, row_scale, even, odd);
        }
    }

    __device__ __forceinline__ void multiply(const Tile& tile, const WeightScales& weight_scales, Accumulators& sums) {
        const bool is_gemm2 = tile.is_gemm2;
        const uint32_t scale_rows[2] = {kHalves == 2 ? 0 : weight_scale_row(is_gemm2, 0),
                                        kHalves == 2 ? 1 : weight_scale_row(is_gemm2, 1)};
#pragma unroll
        for (uint32_t half = 0; half < kHalves; ++half)
#pragma unroll
            for (int i = 0; i < 64; ++i) sums.values[half][i] = 0.f;
        float product[64];
        bool is_full = false;
        uint32_t k_blocks = is_gemm2 ? cfg::kGemm2KBlocks : cfg::kGemm1KBlocks;
        asm volatile("" : "+r"(k_blocks));  // known, it made ptxas shuffle the sums between registers, and spill
        if constexpr (cfg::kUnrollByRing) {  // every K is a multiple of the ring: a tile starts at stage 0
#pragma unroll 1
            for (uint32_t k = 0; k < k_blocks; k += cfg::kNumStages) {
#pragma unroll
                for (uint32_t stage = 0; stage < cfg::kNumStages; ++stage) {
                    multiply_stage(k + stage, stage, is_gemm2, weight_scales, sums, scale_rows, product, is_full);
                }
                position.phase ^= 1;
            }
        } else {
#pragma unroll 1
            for (uint32_t k = 0; k < k_blocks; ++k) {
                multiply_stage(k, position.stage, is_gemm2, weight_scales, sums, scale_rows, product, is_full);
                position.advance();
            }
        }
    }
};

}  // namespace megamoe
