// Which rows this rank receives and where they lie in its pool, from the exchanged counts.
//
// Experts in order; an expert with n rows takes ceil(n / kBlockM) blocks. Within an expert, rows are ordered by source
// rank, starting at the owner's own, so that owners do not all pull from the same rank. Lives in shared memory, equal
// in every CTA of the rank; the counts themselves only while it is made.
#pragma once

#include "megamoe/ptx/ld_st.cuh"
#include "megamoe/schedule/warp_scan.cuh"
#include "megamoe/symm/cta.cuh"

namespace megamoe {

// Rows by source and expert, in the pipeline's shared memory, which is not in use yet.
struct SourceCounts {
    uint32_t rows[cfg::kNumRanks][cfg::kNumLocalExperts];
};
static_assert(sizeof(SourceCounts) <= cfg::kStagesBytes, "the exchanged counts do not fit the pipeline's stages");

struct PoolPlan {
    uint32_t entries_begin[cfg::kNumRanks][cfg::kNumLocalExperts + 1];  // first entry of the expert, by source
    uint32_t rows_begin[cfg::kNumLocalExperts + 1];                   // first row of the expert, padding not counted
    uint32_t blocks_begin[cfg::kNumLocalExperts + 1];                 // first block of the expert

    __device__ __forceinline__ uint32_t source_rows(uint32_t src, uint32_t expert) const {
        return entries_begin[src][expert + 1] - entries_begin[src][expert];
    }
    __device__ __forceinline__ uint32_t num_rows() const { return rows_begin[cfg::kNumLocalExperts]; }
    __device__ __forceinline__ uint32_t num_blocks() const { return blocks_begin[cfg::kNumLocalExperts]; }
    __device__ __forceinline__ uint32_t expert_rows(uint32_t expert) const {
        return rows_begin[expert + 1] - rows_begin[expert];
    }
    __device__ __forceinline__ uint32_t expert_of_block(uint32_t block) const {
        return find_segment(blocks_begin, cfg::kNumLocalExperts, block);
    }
    __device__ __forceinline__ uint32_t block_rows(uint32_t block, uint32_t expert) const {
        return min(expert_rows(expert) - (block - blocks_begin[expert]) * cfg::kBlockM, cfg::kBlockM);
    }
};
static_assert(sizeof(PoolPlan) == cfg::kPoolPlanBytes, "smem_budget.py counts the plan differently");

// A source sends no more, so no more entries lie in its array, and no plan has more than kMaxBlocks blocks.
constexpr uint32_t kMaxPicks = cfg::kMaxTokens * cfg::kTopK;

// Whether a source can send so many rows. Counts come from peers: what they say must not lead out of an array.
__device__ __forceinline__ bool require_possible(const Cta& cta, uint32_t src, uint32_t expert, uint32_t rows) {
    if (rows <= kMaxPicks) return true;
    cta.watchdog().report(Failure::kImpossibleCounts, Phase::kDispatch, src, expert, rows, kMaxPicks);
    return false;
}

// All threads of the CTA; a __syncthreads() follows. False in a thread that found an impossible count.
__device__ __forceinline__ bool load_counts(const Cta& cta, SourceCounts& counts) {
    const uint32_t* published = cta.workspace.route_counts(0);
    bool possible = true;
    for (uint32_t i = threadIdx.x; i < cfg::kNumRanks * cfg::kNumLocalExperts; i += blockDim.x) {
        const uint32_t rows = ptx::ld_l2(published + i);
        (&counts.rows[0][0])[i] = rows;
        possible &= require_possible(cta, i / cfg::kNumLocalExperts, i % cfg::kNumLocalExperts, rows);
    }
    return possible;
}

// All threads, after load_counts() and a barrier; a barrier follows. False in threads that found an impossible sum.
__device__ __forceinline__ bool build_pool_plan(const Cta& cta, const SourceCounts& counts, PoolPlan& plan) {
    constexpr uint32_t kExperts = cfg::kNumLocalExperts;
    bool possible = true;
    const auto expert_rows = [&](uint32_t expert) {
        uint32_t rows = 0;
#pragma unroll 1
        for (uint32_t src = 0; src < cfg::kNumRanks; ++src) rows += counts.rows[src][expert];
        return rows;
    };
    for (uint32_t task = warp_id(); task < cfg::kNumRanks + 2; task += blockDim.x / kWarpSize) {
        if (task == 0) {
            warp_prefix_sums(kExperts, plan.rows_begin, expert_rows);
        } else if (task == 1) {
            warp_prefix_sums(kExperts, plan.blocks_begin,
                             [&](uint32_t expert) { return ceil_div(expert_rows(expert), cfg::kBlockM); });
        } else {
            const uint32_t src = task - 2;
            const uint32_t rows = warp_prefix_sums(kExperts, plan.entries_begin[src],
                                                   [&](uint32_t expert) { return counts.rows[src][expert]; });
            possible &= require_possible(cta, src, kExperts, rows);
        }
    }
    return possible;
}

// All threads; a barrier follows. The plan of a call that is not to be: no rows.
__device__ __forceinline__ void plan_nothing(PoolPlan& plan) {
    for (uint32_t expert = threadIdx.x; expert <= cfg::kNumLocalExperts; expert += blockDim.x) {
        plan.rows_begin[expert] = plan.blocks_begin[expert] = 0;
    }
}

}  // namespace megamoe
