// The math warpgroups: this CTA's tiles in order, then finish and combine.
#pragma once

#include "megamoe/roles/combine.cuh"

namespace megamoe {

// Shared memory of the math warps besides the ring.
struct MathScratch {
    uint32_t staging;     // shared address of this warp's staging lines
    uint32_t* exchange;   // amax exchange of the two warpgroups
    uint32_t* result;     // one word: how `finish` ended
};

__device__ __forceinline__ void run_tile(const Cta& cta, const PoolPlan& plan, const MathThread& thread,
                                         const Tile& tile, const WeightScales& weight_scales, MainLoop& loop,
                                         Accumulators& sums, RowHomes& homes) {
    loop.await_full(loop.position.stage);  // what the loader waited for is visible: the block's meta too
    if (tile.is_gemm2) homes.load(cta, thread, tile);
    loop.multiply(tile, weight_scales, sums);
}

__device__ __forceinline__ void math_role(const Cta& cta, const PoolPlan& plan, const Ring& ring, uint32_t warp,
                                          const MathScratch& scratch) {
    const MathThread thread(warp);
    MainLoop loop(cta.watchdog, ring, thread);
    const uint32_t units = num_units(plan.num_blocks());
    uint32_t buffer = 0;
    WeightScales weight_scales{};
    Tile tile{};
    if (cta.index < units) {
        tile = tile_at(cta.index, plan);
        weight_scales.load(cta, thread, tile);
    }
    // What follows the last tile stands inside the loop: code after it made ptxas drop the 240-register budget and
    // spill (2.5 times slower).
#pragma unroll 1
    for (uint32_t unit = cta.index;; unit += cfg::kCtasPerRank) {
        if (unit >= units) {
            const bool finished = finish(cta, warp, scratch.result);
            combine_role(cta, warp, finished && loop.alive);
            break;
        }
        const Tile current = tile;
        Accumulators sums;
        RowHomes homes{};
        const bool has_rows = !cfg::kSplitM || thread.warpgroup == 0 || current.num_rows > 64;
        if (has_rows) run_tile(cta, plan, thread, current, weight_scales, loop, sums, homes);
        else loop.skip(current);
        if (unit + cfg::kCtasPerRank < units) {  // the next tile's scales arrive during this epilogue
            tile = tile_at(unit + cfg::kCtasPerRank, plan);
            weight_scales.load(cta, thread, tile);
        }
        if (current.is_gemm2) {
            gemm2_epilogue(cta, thread, current, sums, homes, scratch.staging, loop.alive);
        } else {
            gemm1_epilogue(cta, plan, thread, current, sums, scratch.exchange, buffer, loop.alive);
            buffer ^= 1;
        }
    }
}

}  // namespace megamoe
