// The two loaders: one thread streams weights, another activations with their scales, each through its own wait, so
// that weights never wait for tokens.
//
//   Weight scales      come with the weights of a tile's first stage, whose full barrier math warps wait for anyway, to the
//                      tile's slot of the tile queue: publish() has waited until nobody reads the ones before. Where
//                      converter warps wait for the weights, their arrival passes it on.
//   Activations wait   GEMM1: rows_arrived[b] == valid rows; GEMM2: a2_written[b] == all column tiles; both acquire.gpu,
//                      then fence.proxy.async, because ordinary stores wrote what bulk copies read.
#pragma once

#include "megamoe/pipeline/cluster.cuh"
#include "megamoe/pipeline/tile_queue.cuh"
#include "megamoe/ptx/tma.cuh"

namespace megamoe {

// Runs `load(stage, full barrier, k block)` for every K block of a tile as stages become empty, on the ring that `position`
// belongs to.
template <typename Position, typename Load>
__device__ __forceinline__ bool fill_stages(const Cta& cta, const Ring& ring, Position& position, uint32_t k_blocks,
                                            Load load) {
#pragma unroll 1
    for (uint32_t k = 0; k < k_blocks; ++k) {
        if (!wait_mbarrier(cta.watchdog().secondary(), Phase::kPipeline, cta.rank, ring.empty(position),
                           position.phase ^ 1)) {
            return false;
        }
        if (ring.gave_up()) return false;  // the math warps released the stage without waiting for it
        load(position.stage, ring.full(position), k);
        position.advance();
    }
    return true;
}

// The two rows of a tile's weight scales (WeightScales of pipeline/main_loop.cuh), in global memory.
struct ScaleRows {
    const float* rows[2];
    uint32_t num_bytes;  // of each

    __device__ __forceinline__ ScaleRows(const Cta& cta, const Tile& tile) {
        constexpr uint32_t kGemm1Rows = cfg::kIntermediateSize / 128, kGemm2Rows = ceil_div(cfg::kHiddenSize, 128);
        const uint32_t k_blocks = tile.k_blocks();
        const float* scales = tile.is_gemm2 ? cta.own().w2_scale : cta.own().w13_scale;
        scales += static_cast<uint64_t>(tile.expert) * (tile.is_gemm2 ? kGemm2Rows : 2 * kGemm1Rows) * k_blocks;
        rows[0] = scales + (tile.is_gemm2 ? 2 * tile.n_tile : tile.n_tile) * k_blocks;
        rows[1] = scales + (tile.is_gemm2 ? min(2 * tile.n_tile + 1, kGemm2Rows - 1) : kGemm1Rows + tile.n_tile) * k_blocks;
        num_bytes = k_blocks * static_cast<uint32_t>(sizeof(float));
    }

    __device__ __forceinline__ bool suit_bulk_copies() const {
        return (reinterpret_cast<uint64_t>(rows[0]) | reinterpret_cast<uint64_t>(rows[1]) | num_bytes) % 16 == 0;
    }
    __device__ __forceinline__ void load(uint32_t destination, uint32_t full) const {
#pragma unroll
        for (uint32_t r = 0; r < 2; ++r) {
            ptx::bulk_load(destination + r * cfg::kWeightScaleRowBytes, rows[r], num_bytes, full);
        }
    }
    // Where they do not, at once: the arrival that follows tells of it.
    __device__ __forceinline__ void copy(uint32_t destination) const {
#pragma unroll 1
        for (uint32_t k = 0; 4 * k < num_bytes; ++k) {
            ptx::copy_word(destination + 4 * k, rows[0] + k);
            ptx::copy_word(destination + cfg::kWeightScaleRowBytes + 4 * k, rows[1] + k);
        }
        ptx::await_words();
        ptx::fence_proxy_async_shared();  // the next rows in this place may come by bulk copies
    }
};

// fill_stages() with weights: `copy(stage, full barrier, k block)` brings `num_bytes`. With the first stage come the tile's
// weight scales, to `scales`.
template <typename Position, typename Copy>
__device__ __forceinline__ bool fill_with_weights(const Cta& cta, const Tile& tile, const Ring& ring, Position& position,
                                                  uint32_t scales, uint32_t num_bytes, Copy copy) {
    return fill_stages(cta, ring, position, tile.k_blocks(), [&](uint32_t stage, uint32_t full, uint32_t k) {
        if (cfg::kHasRowScales && k == 0) {
            const ScaleRows rows(cta, tile);
            const bool in_bulk = rows.suit_bulk_copies();
            if (!in_bulk) rows.copy(scales);
            ptx::mbarrier_arrive_expect_tx(full, num_bytes + (in_bulk ? 2 * rows.num_bytes : 0));
            if (in_bulk) rows.load(scales, full);
        } else {
            ptx::mbarrier_arrive_expect_tx(full, num_bytes);
        }
        copy(stage, full, k);
    });
}

// A CTA must not end while bulk copies still write to its shared memory, and after an abort nobody waits for them; they
// land within microseconds.
__device__ __forceinline__ void outlast_copies_in_flight() {
    for (int i = 0; i < 64; ++i) __nanosleep(1000);
}

// Mode a8w4: the packed weights of a tile, stage by stage.
__device__ __forceinline__ const uint8_t* packed_weights(const Cta& cta, bool is_gemm2, uint32_t expert,
                                                         uint32_t n_tile) {
    const uint8_t* stages = is_gemm2 ? cta.own().w2_stages : cta.own().w13_stages;
    const uint32_t tiles = is_gemm2 ? cfg::kGemm2NTiles : cfg::kGemm1NTiles;
    const uint32_t k_blocks = is_gemm2 ? cfg::kGemm2KBlocks : cfg::kGemm1KBlocks;
    return stages + (static_cast<uint64_t>(expert) * tiles + n_tile) * k_blocks * cfg::kPackedStageBytes;
}

// While the ranks' counts are under way, device memory is idle. With few tokens, nearly every expert gets one block, so the
// first tile of this CTA is known by guess: its first weights move to the L2 cache. A wrong guess costs nothing else.
// Not earlier: routing would queue for memory behind these copies (2 us, and all ranks wait for the routes).
__device__ __forceinline__ void prefetch_first_weights(const Cta& cta) {
    const uint32_t expert = cta.index / cfg::kGemm1NTiles;
    if constexpr (kInCluster || cfg::kConvertsAhead) return;  // for many tokens
    const bool one_block_each = cta.num_tokens * cfg::kTopK * 2 <= cfg::kNumLocalExperts * cfg::kBlockM;
    if (!one_block_each || expert >= min(cfg::kNumLocalExperts, cfg::kLagBlocks)) return;
    const uint32_t n_tile = cta.index % cfg::kGemm1NTiles;
    const uint32_t k_blocks = min(cfg::kPrefetchedKBlocks, cfg::kGemm1KBlocks);
    if constexpr (cfg::kMode == Mode::kA8w4) {
        ptx::bulk_prefetch(packed_weights(cta, false, expert, n_tile), k_blocks * cfg::kPackedStageBytes);
    } else {
        const uint32_t row = expert * 2 * cfg::kIntermediateSize + n_tile * cfg::kBlockN;
        for (uint32_t k = 0; k < k_blocks; ++k) ptx::tma_prefetch_2d(cta.own().w13, k * 128, row);
    }
}

// The weights of a tile: packed ones, for the converter warps, or the operands themselves.
__device__ __forceinline__ bool load_weights(const Cta& cta, const Tile& tile, const Ring& ring,
                                             PackedPosition& position, uint32_t scales) {
    const uint8_t* source = packed_weights(cta, tile.is_gemm2, tile.expert, tile.n_tile);
    const auto copy = [&](uint32_t stage, uint32_t full, uint32_t k) {
        ptx::bulk_load(ring.packed(stage), source + k * cfg::kPackedStageBytes, cfg::kPackedStageBytes, full);
    };
    return fill_with_weights(cta, tile, ring, position, scales, cfg::kPackedStageBytes, copy);
}

// The same, on the ring of stages: the math warps look them up.
__device__ __forceinline__ bool load_packed_weights(const Cta& cta, const Tile& tile, const Ring& ring,
                                                    RingPosition& position, uint32_t scales) {
    const uint8_t* source = packed_weights(cta, tile.is_gemm2, tile.expert, tile.n_tile);
    const auto copy = [&](uint32_t stage, uint32_t full, uint32_t k) {
        ptx::bulk_load(ring.weights(stage), source + k * cfg::kPackedStageBytes, cfg::kPackedStageBytes, full);
    };
    return fill_with_weights(cta, tile, ring, position, scales, cfg::kPackedStageBytes, copy);
}

// The stages that converter warps of all CTAs have stored, once the tile's are all there.
__device__ __forceinline__ bool load_converted_weights(const Cta& cta, const Tile& tile, const Ring& ring,
                                                       RingPosition& position, uint32_t scales) {
    const uint32_t k_blocks = tile.k_blocks();
    const uint32_t* parts = cta.workspace.converted_parts(cta.epoch, tile.is_gemm2, tile.expert);
    const uint32_t stages = k_blocks * (tile.is_gemm2 ? cfg::kGemm2NTiles : cfg::kGemm1NTiles);
    const bool ready = wait_until(cta.watchdog().secondary(), Phase::kPipeline, cta.rank, tile.expert,
                                  min(stages, cfg::kCtasPerRank) * kConverterGroupWarps,
                                  [&] { return ptx::ld_acquire_gpu(parts); });
    if (!ready) return false;
    ptx::fence_proxy_async_global();  // ordinary stores wrote what bulk copies read
    const uint8_t* source = cta.workspace.converted_stages(tile.is_gemm2, tile.expert) +
                            static_cast<uint64_t>(tile.n_tile) * k_blocks * cfg::kWeightStageBytes;
    const auto copy = [&](uint32_t stage, uint32_t full, uint32_t k) {
        ptx::bulk_load(ring.weights(stage), source + k * cfg::kWeightStageBytes, cfg::kWeightStageBytes, full);
    };
    return fill_with_weights(cta, tile, ring, position, scales, cfg::kWeightStageBytes, copy);
}

// In a cluster: one part of a stage's weights for all CTAs, or all parts for this one.
__device__ __forceinline__ bool load_weights_in_parts(const Cta& cta, const Tile& tile, const Ring& ring,
                                                      RingPosition& position, const ptx::TensorMap& map, uint32_t row) {
    constexpr uint32_t kRows = cfg::kBlockN / cfg::kClusterSize, kBytes = cfg::kWeightStageBytes / cfg::kClusterSize;
    constexpr uint16_t kAllCtas = (1 << cfg::kClusterSize) - 1;
    const uint32_t own = rank_in_cluster();
    const bool shared = tile.shares_weights();
    return fill_stages(cta, ring, position, tile.k_blocks(), [&](uint32_t stage, uint32_t full, uint32_t k) {
        ptx::mbarrier_arrive_expect_tx(full, cfg::kWeightStageBytes);
        if (shared) {
            ptx::tma_load_2d_multicast(ring.weights(stage) + own * kBytes, map, k * 128, row + own * kRows, full, kAllCtas);
            return;
        }
#pragma unroll
        for (uint32_t part = 0; part < cfg::kClusterSize; ++part) {
            ptx::tma_load_2d(ring.weights(stage) + part * kBytes, map, k * 128, row + part * kRows, full);
        }
    });
}

__device__ __forceinline__ bool load_weights(const Cta& cta, const Tile& tile, const Ring& ring,
                                             RingPosition& position, uint32_t scales) {
    if constexpr (cfg::kRegistersHoldWeights) return load_packed_weights(cta, tile, ring, position, scales);
    if constexpr (cfg::kConvertsAhead) return load_converted_weights(cta, tile, ring, position, scales);
    const ptx::TensorMap& map = tile.is_gemm2 ? cta.own().w2 : cta.own().w13;
    const uint32_t expert_rows = tile.is_gemm2 ? cfg::kHiddenSize : 2 * cfg::kIntermediateSize;
    const uint32_t row = tile.expert * expert_rows + tile.n_tile * cfg::kBlockN;
    if constexpr (kInCluster) return load_weights_in_parts(cta, tile, ring, position, map, row);
    const auto copy = [&](uint32_t stage, uint32_t full, uint32_t k) {
        // Without an L2 hint: evict_first gained nothing, at 8 and at 128 tokens (H200, 2026-11-30).
        ptx::tma_load_2d(ring.weights(stage), map, k * 128, row, full);
    };
    return fill_with_weights(cta, tile, ring, position, scales, cfg::kWeightStageBytes, copy);
}

template <bool kPacked>
struct WeightPosition {
    using Type = RingPosition;
};
template <>
struct WeightPosition<true> {
    using Type = PackedPosition;
};

// One thread: claims units, publishes them to the other roles, loads their weights.
__device__ __forceinline__ void weight_loader(const Cta& cta, const PoolPlan& plan, const Ring& ring,
                                              const TileQueue& queue) {
    if ((ring.base & 0xffffff) != kSharedBase) __trap();  // above: the CTA's number in its cluster
    WeightPosition<kConverts>::Type position;
    const uint32_t units = num_units(plan.num_blocks());
    UnitClaims claims{ring.base};
    uint32_t unit = cta.index / cfg::kClusterSize, turn = 0;
    bool working = true;
#pragma unroll 1
    while (working && unit < units) {
        const Tile tile = tile_at(unit, plan, rank_in_cluster());
        if (!tile.is_end()) {
            queue.publish(turn, tile);
            working = load_weights(cta, tile, ring, position, queue.weight_scales(turn));
            ++turn;
        }
        working = working && claims.next(cta, unit);
    }
    queue.publish(turn, Tile{});
    if (working) return;
    ring.give_up();
    outlast_copies_in_flight();
}

__device__ __forceinline__ bool await_activations(const Cta& cta, const Tile& tile) {
    const uint32_t* flag = (tile.is_gemm2 ? cta.workspace.a2_written(cta.epoch) : cta.workspace.rows_arrived(cta.epoch));
    const uint32_t target = tile.is_gemm2 ? cfg::kGemm1Arrivals : tile.block_rows;
    const Phase phase = tile.is_gemm2 ? Phase::kGemm2 : Phase::kGemm1;
    const bool ready = wait_until(cta.watchdog(), phase, cta.rank, tile.block, target,
                                  [&] { return ptx::ld_acquire_gpu(flag + tile.block); });
    ptx::fence_proxy_async_global();
    return ready;
}

__device__ __forceinline__ bool load_activations(const Cta& cta, const Tile& tile, const Ring& ring,
                                                 RingPosition& position) {
    const ptx::TensorMap& map = tile.is_gemm2 ? cta.own().a2 : cta.own().pool;
    const float* scales =
        tile.is_gemm2 ? cta.workspace.a2_scales(tile.ring_slot, 0) : cta.workspace.pool_scales(tile.ring_slot, 0);
    // Boxes that hold a valid row; the rest of the stage stays as it is, and only padding rows see it.
    constexpr bool kWholeBlocks = cfg::kBoxRows == cfg::kTileM;
    const uint32_t rows = kWholeBlocks ? cfg::kTileM : ceil_div(tile.num_rows, cfg::kBoxRows) * cfg::kBoxRows;
    return fill_stages(cta, ring, position, tile.k_blocks(), [&](uint32_t stage, uint32_t full, uint32_t k) {
        constexpr uint32_t kScaleBytes = cfg::kHasRowScales ? sizeof(float) : 0;
        ptx::mbarrier_arrive_expect_tx(full, rows * (128 + kScaleBytes));
        if constexpr (kWholeBlocks) {
            ptx::tma_load_2d(ring.activations(stage), map, k * 128, tile.ring_row(), full);
        } else {
            for (uint32_t row = 0; row < rows; row += cfg::kBoxRows) {
                ptx::tma_load_2d(ring.activations(stage) + row * 128, map, k * 128, tile.ring_row() + row,
                                 full);
            }
        }
        if constexpr (cfg::kHasRowScales) {
            ptx::bulk_load(ring.scales(stage), scales + k * cfg::kBlockM, rows * kScaleBytes, full);
        }
    });
}

// One thread.
__device__ __forceinline__ void activation_loader(const Cta& cta, const Ring& ring, const TileQueue& queue) {
    RingPosition position;
#pragma unroll 1
    for (uint32_t turn = 0;; ++turn) {
        queue.await(turn);
        const Tile tile = queue.read(turn);
        if (tile.is_end()) return;
        if (await_activations(cta, tile) && load_activations(cta, tile, ring, position)) continue;
        ring.give_up();
        return outlast_copies_in_flight();
    }
}

}  // namespace megamoe
