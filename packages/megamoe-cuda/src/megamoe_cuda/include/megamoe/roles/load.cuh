// The two loaders: one thread streams weights, another activations with their scales, each through its own wait, so
// that weights never wait for tokens.
//
//   Activations wait   GEMM1: rows_arrived[b] == valid rows; GEMM2: a2_written[b] == all column tiles; both acquire.gpu,
//                      then fence.proxy.async, because ordinary stores wrote what bulk copies read.
#pragma once

#include "megamoe/pipeline/ring.cuh"
#include "megamoe/ptx/tma.cuh"
#include "megamoe/schedule/units.cuh"

namespace megamoe {

// Runs `load(stage, full barrier, k block)` for every K block of a tile as stages become empty.
template <typename Load>
__device__ __forceinline__ bool fill_stages(const Cta& cta, const Ring& ring, RingPosition& position, uint32_t k_blocks,
                                            Load load) {
#pragma unroll 1
    for (uint32_t k = 0; k < k_blocks; ++k) {
        if (!wait_mbarrier(cta.watchdog(), ring.empty(position.stage), position.phase ^ 1)) return false;
        load(position.stage, ring.full(position.stage), k);
        position.advance();
    }
    return true;
}

// Leaves after an abort. A CTA must not end while bulk copies still write to its shared memory, and nobody waits for
// them any more; they land within microseconds.
__device__ __forceinline__ void give_up(const Ring& ring) {
    ring.give_up();
    for (int i = 0; i < 64; ++i) __nanosleep(1000);
}

// One thread.
__device__ __forceinline__ void weight_loader(const Cta& cta, const PoolPlan& plan, const Ring& ring) {
    RingPosition position;
    const uint32_t units = num_units(plan.num_blocks());
    for (uint32_t unit = cta.index; unit < units; unit += cfg::kCtasPerRank) {
        const Tile tile = tile_at(unit, plan);
        const ptx::TensorMap& map = tile.is_gemm2 ? cta.own().w2 : cta.own().w13;
        const uint32_t expert_rows = tile.is_gemm2 ? cfg::kHiddenSize : 2 * cfg::kIntermediateSize;
        const uint32_t row = tile.expert * expert_rows + tile.n_tile * cfg::kBlockN;
        const auto load = [&](uint32_t stage, uint32_t full, uint32_t k) {
            ptx::mbarrier_arrive_expect_tx(full, cfg::kWeightStageBytes);
            if constexpr (cfg::kWeightsEvictFirst) {
                ptx::tma_load_2d_evict_first(ring.weights(stage), map, k * 128, row, full);
            } else {
                ptx::tma_load_2d(ring.weights(stage), map, k * 128, row, full);
            }
        };
        if (!fill_stages(cta, ring, position, tile.k_blocks(), load)) return give_up(ring);
    }
}

__device__ __forceinline__ bool await_activations(const Cta& cta, const Tile& tile) {
    const uint32_t* flag = (tile.is_gemm2 ? cta.workspace.a2_written(cta.epoch) : cta.workspace.rows_arrived(cta.epoch));
    const uint32_t target = tile.is_gemm2 ? cfg::kGemm1Arrivals : tile.num_rows;
    const Phase phase = tile.is_gemm2 ? Phase::kGemm2 : Phase::kGemm1;
    const bool ready = wait_until(cta.watchdog(), phase, cta.rank, tile.block, target,
                                  [&] { return ptx::ld_acquire_gpu(flag + tile.block); });
    ptx::fence_proxy_async_global();
    return ready;
}

// One thread.
__device__ __forceinline__ void activation_loader(const Cta& cta, const PoolPlan& plan, const Ring& ring) {
    RingPosition position;
    const uint32_t units = num_units(plan.num_blocks());
    for (uint32_t unit = cta.index; unit < units; unit += cfg::kCtasPerRank) {
        const Tile tile = tile_at(unit, plan);
        if (!await_activations(cta, tile)) return give_up(ring);
        const ptx::TensorMap& map = tile.is_gemm2 ? cta.own().a2 : cta.own().pool;
        const float* scales = tile.is_gemm2 ? cta.workspace.a2_scales(tile.ring_slot, 0)
                                            : cta.workspace.pool_scales(tile.ring_slot, 0);
        const auto load = [&](uint32_t stage, uint32_t full, uint32_t k) {
            ptx::mbarrier_arrive_expect_tx(full, cfg::kActivationStageBytes + cfg::kScaleStageBytes);
            ptx::tma_load_2d(ring.activations(stage), map, k * 128, tile.ring_slot * cfg::kBlockM, full);
            ptx::bulk_load(ring.scales(stage), scales + k * cfg::kBlockM, cfg::kScaleStageBytes, full);
        };
        if (!fill_stages(cta, ring, position, tile.k_blocks(), load)) return give_up(ring);
    }
}

}  // namespace megamoe
