// The BF16 main loop of one tile, for both GEMMs: C[kTileM x 256] = A * B, a stage at a time (64 of K), summed by the
// tensor cores straight into the accumulators. There is nothing to promote, so each stage's WGMMAs are issued before those
// of the stage before are waited for, and the tensor cores never run dry.
#pragma once

#include "megamoe/pipeline/main_loop.cuh"
#include "megamoe/ptx/wgmma_bf16.cuh"

namespace megamoe {

struct Bf16MainLoop : StageReader {
    using StageReader::StageReader;

    // `previous` is the stage before: given back once its products are in, unless this is the tile's first.
    __device__ __forceinline__ void multiply_stage(uint32_t stage, uint32_t previous, bool is_first,
                                                   Accumulators& sums) {
        await_full(stage);
        ptx::wgmma_fence();
        uint32_t a = a_descriptor, b = b_descriptor;
        asm volatile("" : "+r"(a), "+r"(b));  // computed here, not kept for all stages
        ptx::wgmma_k64(sums.values, a + (stage * cfg::kActivationStageBytes >> 4),
                       b + (stage * cfg::kWeightStageBytes >> 4), !is_first);
        ptx::wgmma_commit();
        ptx::wgmma_wait_all_but_one();
        release_if(!is_first, previous);
    }

    __device__ __forceinline__ void multiply(const Tile& tile, const WeightScales&, Accumulators& sums) {
        uint32_t k_blocks = tile.k_blocks();
        asm volatile("" : "+r"(k_blocks));
        uint32_t last = cfg::kNumStages - 1;
        if constexpr (cfg::kUnrollByRing) {  // every K is a multiple of the ring: a tile starts at stage 0
#pragma unroll 1
            for (uint32_t k = 0; k < k_blocks; k += cfg::kNumStages) {
#pragma unroll
                for (uint32_t stage = 0; stage < cfg::kNumStages; ++stage) {
                    multiply_stage(stage, (stage + cfg::kNumStages - 1) % cfg::kNumStages, k + stage == 0, sums);
                }
                position.phase ^= 1;
            }
        } else {
#pragma unroll 1
            for (uint32_t k = 0; k < k_blocks; ++k) {
                multiply_stage(position.stage, last, k == 0, sums);
                last = position.stage;
                position.advance();
            }
        }
        ptx::wgmma_wait_all();
#pragma unroll
        for (uint32_t half = 0; half < kHalves; ++half) ptx::pin(sums.values[half]);
        release(last);
    }
};

}  // namespace megamoe
