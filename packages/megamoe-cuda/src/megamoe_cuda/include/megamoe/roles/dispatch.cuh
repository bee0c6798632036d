// Dispatch: pulls the rows that this rank's experts were picked for into the ring of blocks.
//
// Worker w of W pulls rows w, w + W, ... of the pool. A warp looks up 32 of its rows at a time, one per lane, then copies
// row after row: 16 bytes a lane, kPullLoadsInFlight loads before the first store.
//
//   Waits     block_retired[b - ring] before it writes a row of block b: covers the slot's rows, meta and A2
//             (schedule/persistent.py says why)
//   Raises    rows_arrived[b] by one per row, release.gpu, after the row, its scales and its meta
#pragma once

#include "megamoe/schedule/units.cuh"

namespace megamoe {

struct PoolRow {
    uint32_t block;
    uint32_t row_in_block;
    uint32_t src_rank;
    RouteEntry entry;
};

// Which source a row of an expert comes from, and which of its entries it is.
__device__ __forceinline__ PoolRow locate_row(const Cta& cta, const PoolPlan& plan, uint32_t row) {
    const uint32_t expert = find_segment(plan.rows_begin, cfg::kNumLocalExperts, row);
    uint32_t index = row - plan.rows_begin[expert];
    const uint32_t block = plan.blocks_begin[expert] + index / cfg::kBlockM;
    const uint32_t row_in_block = index % cfg::kBlockM;
    uint32_t src = cta.rank;
#pragma unroll 1
    while (index >= plan.counts[src][expert]) {
        index -= plan.counts[src][expert];
        src = src + 1 == cfg::kNumRanks ? 0 : src + 1;
    }
    const RouteEntry* entry = cta.workspace.route_entries(src) + plan.entries_begin[src][expert] + index;
    const uint2 words = ptx::ld_l2(reinterpret_cast<const uint2*>(entry));
    return {block, row_in_block, src, {words.x, __uint_as_float(words.y)}};
}

__device__ __forceinline__ PoolRow broadcast(const PoolRow& row, uint32_t lane) {
    return {__shfl_sync(kFullMask, row.block, lane),
            __shfl_sync(kFullMask, row.row_in_block, lane),
            __shfl_sync(kFullMask, row.src_rank, lane),
            {__shfl_sync(kFullMask, row.entry.token_slot, lane), __shfl_sync(kFullMask, row.entry.weight, lane)}};
}

__device__ __forceinline__ void copy_payload(const uint8_t* source, uint8_t* destination) {
    constexpr uint32_t kStride = kWarpSize * 16;
#pragma unroll 1
    for (uint32_t first = lane_id() * 16; first < cfg::kHiddenSize; first += cfg::kPullLoadsInFlight * kStride) {
        uint4 v[cfg::kPullLoadsInFlight];
#pragma unroll
        for (uint32_t i = 0; i < cfg::kPullLoadsInFlight; ++i) {
            const uint32_t column = first + i * kStride;
            if (column < cfg::kHiddenSize) v[i] = ptx::ld_l2(reinterpret_cast<const uint4*>(source + column));
        }
#pragma unroll
        for (uint32_t i = 0; i < cfg::kPullLoadsInFlight; ++i) {
            const uint32_t column = first + i * kStride;
            if (column < cfg::kHiddenSize) *reinterpret_cast<uint4*>(destination + column) = v[i];
        }
    }
}

__device__ __forceinline__ void pull_row(const Cta& cta, const PoolRow& row) {
    const Workspace source = cta.peer(row.src_rank);
    const uint32_t token = row.entry.token_slot / cfg::kTopK;
    const uint32_t ring_slot = row.block % cfg::kRingBlocks;
    const uint32_t ring_row = ring_slot * cfg::kBlockM + row.row_in_block;
    copy_payload(source.input_payload(token), cta.workspace.pool_payload(ring_row));
    const float* scales = source.input_scales(token);
    for (uint32_t k = lane_id(); k < cfg::kGemm1KBlocks; k += kWarpSize) {
        const uint32_t bits = ptx::ld_l2(reinterpret_cast<const uint32_t*>(scales + k));
        cta.workspace.pool_scales(ring_slot, k)[row.row_in_block] = __uint_as_float(bits);
    }
    if (lane_id() == 0) {
        *cta.workspace.pool_meta(ring_row) = PoolMeta{row.src_rank, row.entry.token_slot, row.entry.weight, 0};
    }
    ptx::fence_proxy_async_global();  // GEMM1 reads the row with bulk copies
    __syncwarp();
    if (lane_id() == 0) ptx::red_add_release_gpu(cta.workspace.rows_arrived(cta.epoch) + row.block, 1);
}

__device__ __forceinline__ bool await_ring_slot(const Cta& cta, uint32_t block) {
    if (!cfg::kRingWraps || block < cfg::kRingBlocks) return true;
    const uint32_t previous = block - cfg::kRingBlocks;
    const uint32_t* retired = cta.workspace.block_retired(cta.epoch) + previous;
    return wait_until(cta.watchdog(), Phase::kDispatch, cta.rank, previous, cfg::kGemm2Arrivals,
                      [=] { return ptx::ld_acquire_gpu(retired); });
}

__device__ __forceinline__ void dispatch_role(const Cta& cta, const PoolPlan& plan, uint32_t warp) {
    constexpr uint32_t kWorkers = cfg::kDispatchWarps * cfg::kCtasPerRank;
    const uint32_t worker = warp * cfg::kCtasPerRank + cta.index;
    const uint32_t num_rows = plan.num_rows();
    for (uint32_t first = worker; first < num_rows; first += kWarpSize * kWorkers) {
        const uint32_t own_row = first + lane_id() * kWorkers;
        PoolRow own{};
        if (own_row < num_rows) own = locate_row(cta, plan, own_row);
        const uint32_t count = min(ceil_div(num_rows - first, kWorkers), kWarpSize);
#pragma unroll 1
        for (uint32_t i = 0; i < count; ++i) {
            const PoolRow row = broadcast(own, i);
            if (!__all_sync(kFullMask, await_ring_slot(cta, row.block))) return;
            pull_row(cta, row);
        }
    }
}

}  // namespace megamoe
