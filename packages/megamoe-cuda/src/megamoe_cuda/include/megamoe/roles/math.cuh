// The math warpgroups: this CTA's tiles in order, then finish and combine.
//
// A math thread holds up to 128 sums and a temporary of 64 in up to 224 registers. So little else may live while it
// multiplies: who the CTA and the thread are is recalled for each epilogue.
#pragma once

#include "megamoe/pipeline/main_loop_bf16.cuh"
#include "megamoe/pipeline/register_loop.cuh"
#include "megamoe/pipeline/tile_queue.cuh"
#include "megamoe/roles/combine.cuh"
#include "megamoe/roles/swapped_epilogues.cuh"
#include "megamoe/symm/trace.cuh"

namespace megamoe {

template <Mode kMode>
struct MainLoopOf {
    using Type = MainLoop;
};
template <>
struct MainLoopOf<Mode::kBf16> {
    using Type = Bf16MainLoop;
};
using ModeMainLoop = MainLoopOf<cfg::kMode>::Type;

// Shared memory of the math warps besides the ring.
__device__ __forceinline__ uint32_t staging_lines(const Ring& ring, const MathThread& thread) {
    return ring.base + cfg::kSmemStaging + (thread.warpgroup * 4 + thread.warp) * cfg::kStagingWarpBytes;
}

__device__ __forceinline__ void start_tile(const KernelArguments& arguments, const Ring& ring, const TileQueue& queue,
                                           uint32_t turn, ModeMainLoop& loop) {
    const Tile tile = queue.read(turn);
    if (!tile.is_gemm2) return;
    loop.await_full(loop.position.stage);  // what the loader waited for is visible: the block's meta too
    const MathThread thread = MathThread::identify();
    fetch_row_meta(recall_cta(arguments, ring.facts()), thread, tile, staging_lines(ring, thread));
}

__device__ __forceinline__ void end_tile(const KernelArguments& arguments, const PoolPlan& plan, const Ring& ring,
                                         const TileQueue& queue, uint32_t turn, Accumulators& sums, bool alive) {
    const Cta cta = recall_cta(arguments, ring.facts());
    const MathThread thread = MathThread::identify();
    const Tile tile = queue.read(turn);
    if (tile.is_gemm2) {
        gemm2_epilogue(cta, thread, tile, sums, staging_lines(ring, thread), alive);
    } else {
        gemm1_epilogue(cta, plan, thread, tile, sums, ring.base + cfg::kSmemExchange, alive);
    }
}

// Waits for the tile of `turn`; false at the end.
__device__ __forceinline__ bool has_tile(const TileQueue& queue, uint32_t turn) {
    queue.await(turn);
    return !queue.read(turn).is_end();
}

template <uint32_t kTokens>
__device__ __forceinline__ void run_swapped_tile(const KernelArguments& arguments, const PoolPlan& plan, const Ring& ring,
                                                 const TileQueue& queue, const WeightScales& weight_scales,
                                                 uint32_t turn, bool is_gemm2, ModeMainLoop& loop) {
    RowHomes<kTokens> homes;
    loop.await_full(loop.position.stage);  // what the loader waited for is visible: the block's meta too
    homes.load(recall_cta(arguments, ring.facts()), MathThread::identify(), queue.read(turn));
    SwappedAccumulators<kTokens> sums;
    if constexpr (cfg::kRegistersHoldWeights) {
        RegisterLoop<kTokens>(loop, MathThread::identify(), is_gemm2).multiply(is_gemm2, weight_scales, sums);
    } else {
        SwappedLoop<kTokens>(loop, MathThread::identify(), is_gemm2).multiply(is_gemm2, weight_scales, sums);
    }
    const Cta cta = recall_cta(arguments, ring.facts());
    const MathThread thread = MathThread::identify();
    const Tile tile = queue.read(turn);
    const uint32_t staging = ring.base + cfg::kSmemStaging;
    if (tile.is_gemm2) {
        swapped_gemm2_epilogue(cta, thread, tile, sums, homes, staging, loop.alive);
    } else {
        swapped_gemm1_epilogue(cta, plan, thread, tile, sums, staging, loop.alive);
    }
}

// With the fewest columns that hold the tile's rows, from kTokens up.
template <uint32_t kTokens>
__device__ __forceinline__ void run_swapped(const KernelArguments& arguments, const PoolPlan& plan, const Ring& ring,
                                            const TileQueue& queue, const WeightScales& weight_scales, uint32_t turn,
                                            const Tile& tile, ModeMainLoop& loop) {
    if constexpr (kTokens < cfg::kSwappedRows) {
        if (tile.num_rows > kTokens) {
            run_swapped<2 * kTokens>(arguments, plan, ring, queue, weight_scales, turn, tile, loop);
            return;
        }
    }
    run_swapped_tile<kTokens>(arguments, plan, ring, queue, weight_scales, turn, tile.is_gemm2, loop);
}

// Whether the warpgroup has nothing to multiply: with split M, the second one's rows may all be padding. Where such blocks
// are multiplied with swapped operands, they never are.
__device__ __forceinline__ bool has_only_padding(const Tile& tile) {
    return cfg::kSplitM && cfg::kSwappedRows < 64 && MathThread::identify().warpgroup == 1 && tile.num_rows <= 64;
}

__device__ __forceinline__ void end_call(const KernelArguments& arguments, const Ring& ring, bool alive) {
    const Cta cta = recall_cta(arguments, ring.facts());
    const MathThread thread = MathThread::identify();
    const uint32_t warp = thread.warpgroup * 4 + thread.warp;
    const bool is_speaker = warp == 0 && thread.lane == 0;
    trace(cta, TracePoint::kMultiplied, is_speaker);
    // A peer may still write here, to barriers and, after an abort, to stages: nobody ends before all have come so far.
    if constexpr (kInCluster) ptx::cluster_arrive();
    Combiner combiner(cta, ring, warp);
    const bool finished = finish(cta, warp, ring.base + cfg::kSmemResult);
    trace(cta, TracePoint::kFinished, is_speaker);
    if (finished && alive) combiner.combine();
    else leave(cta, warp * kWarpSize + thread.lane);
    trace(cta, TracePoint::kCombined, is_speaker);
    if constexpr (kInCluster) ptx::cluster_wait();
}

__device__ __forceinline__ void math_role(const KernelArguments& arguments, const PoolPlan& plan, const Ring& ring,
                                          const TileQueue& queue) {
    ModeMainLoop loop(ring, MathThread::identify());
    bool more = has_tile(queue, 0);
    // What follows the last tile stands inside the loop: code after it made ptxas drop the register budget and spill
    // (2.5 times slower).
#pragma unroll 1
    for (uint32_t turn = 0;; ++turn) {
        if (!more) {
            end_call(arguments, ring, loop.alive);
            break;
        }
        const Tile tile = queue.read(turn);
        if (has_only_padding(tile)) {
            loop.skip(tile.k_blocks());
            queue.release(turn);
            more = has_tile(queue, turn + 1);
            continue;
        }
        const WeightScales weight_scales{queue.weight_scales(turn)};
        if (cfg::kSwappedRows == 0 || tile.num_rows > cfg::kSwappedRows) {
            if constexpr (cfg::kSwappedRows < cfg::kBlockM) {
                Accumulators sums;
                start_tile(arguments, ring, queue, turn, loop);
                loop.multiply(tile, weight_scales, sums);
                end_tile(arguments, plan, ring, queue, turn, sums, loop.alive);
            }
        } else {
            if constexpr (cfg::kSwappedRows > 0) {
                run_swapped<8>(arguments, plan, ring, queue, weight_scales, turn, tile, loop);
            }
        }
        queue.release(turn);
        more = has_tile(queue, turn + 1);  // asked at the loop's start, it made ptxas spill 500 bytes (EP8, mode a8w4)
    }
}

}  // namespace megamoe
