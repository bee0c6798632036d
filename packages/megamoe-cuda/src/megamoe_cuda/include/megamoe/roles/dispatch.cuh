// Dispatch: pulls the rows that this rank's experts were picked for into the ring of blocks.
//
// Worker w of W pulls rows w, w + W, ... of the pool. A worker is a warp with kPullSlots row buffers in shared memory: a row
// comes from its home rank by one bulk copy (over NVLink as a rule) and goes to the pool by another, so that the warp
// keeps kPullSlots rows in flight and holds none in registers.
//
//   Waits     block_retired[b - ring] before it writes a row of block b: covers the slot's rows, meta and A2
//             (schedule/persistent.py says why). It never blocks on this wait with rows unfinished: an earlier block
//             may need them in order to retire.
//   Raises    rows_arrived[b] by one per row, release.gpu, once the row, its scales and its meta are written
#pragma once

#include "megamoe/pipeline/ring.cuh"
#include "megamoe/ptx/tma.cuh"
#include "megamoe/roles/stage.cuh"
#include "megamoe/schedule/units.cuh"

namespace megamoe {

constexpr uint32_t kScaleRowBytes = cfg::kInputScaleStride * 4;
constexpr uint64_t kLongestCopyNs = 10'000'000;  // of a row over NVLink, which takes microseconds

struct PoolRow {
    uint32_t block;
    uint32_t row_in_block;
    uint32_t src_rank;
    RouteEntry entry;

    __device__ __forceinline__ uint32_t ring_slot() const { return block % cfg::kRingBlocks; }
    __device__ __forceinline__ uint32_t ring_row() const { return ring_slot() * cfg::kBlockM + row_in_block; }
};

// Which source a row of the pool comes from, and which of its entries it is.
__device__ __forceinline__ PoolRow locate_row(const Cta& cta, const PoolPlan& plan, uint32_t row) {
    const uint32_t expert = find_segment(plan.rows_begin, cfg::kNumLocalExperts, row);
    uint32_t index = row - plan.rows_begin[expert];
    const uint32_t block = plan.blocks_begin[expert] + index / cfg::kBlockM;
    const uint32_t row_in_block = index % cfg::kBlockM;
    uint32_t src = cta.rank;
#pragma unroll 1
    for (uint32_t rows; index >= (rows = plan.source_rows(src, expert)); index -= rows) {
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

// The buffers of one worker. All lanes call every function; turn t uses buffer t mod kPullSlots. Who the CTA is, is recalled
// where it is needed: kept, it would take registers that the math warps are short of.
struct Puller {
    const KernelArguments& arguments;
    const Ring& ring;
    uint32_t warp;

    __device__ __forceinline__ Puller(const KernelArguments& arguments_, const Ring& ring_, uint32_t warp_)
        : arguments(arguments_),
          ring(ring_),
          warp(warp_) {
        if (lane_id() == 0) {
            for (uint32_t slot = 0; slot < cfg::kPullSlots; ++slot) ptx::mbarrier_init(barrier(slot), 1);
            ptx::fence_mbarrier_init();
            ptx::fence_proxy_async_global();  // peers wrote their rows with ordinary stores
        }
        __syncwarp();
    }

    __device__ __forceinline__ Cta cta() const { return recall_cta(arguments, ring.facts()); }
    __device__ __forceinline__ uint32_t slot(uint32_t turn) const {
        uint32_t first = warp * cfg::kPullSlots;
        asm volatile("" : "+r"(first));
        return first + turn % cfg::kPullSlots;
    }
    __device__ __forceinline__ uint32_t buffer(uint32_t turn) const {
        return ring.base + cfg::kSmemPull + slot(turn) * cfg::kPullSlotBytes;
    }
    __device__ __forceinline__ uint32_t scales(uint32_t turn) const { return buffer(turn) + cfg::kInputRowBytes; }
    // One per buffer: one arrival with the row's bytes.
    __device__ __forceinline__ uint32_t barrier(uint32_t turn) const {
        return ring.base + cfg::kSmemPullBarriers + slot(turn) * 8;
    }
    __device__ __forceinline__ static uint32_t parity(uint32_t turn) { return turn / cfg::kPullSlots % 2; }

    __device__ __forceinline__ void fetch(const PoolRow& row, uint32_t turn) const {
        if (lane_id() != 0) return;
        const Cta cta = this->cta();
        const Workspace source = cta.peer(row.src_rank);
        const uint32_t token = row.entry.token_slot / cfg::kTopK;
        const bool in_place = pulls_from_caller(cta);
        ptx::mbarrier_arrive_expect_tx(barrier(turn), cfg::kInputRowBytes + kScaleRowBytes);
        ptx::bulk_load(buffer(turn), in_place ? caller_payload(cta, token) : source.input_payload(token), cfg::kInputRowBytes,
                       barrier(turn));
        if constexpr (cfg::kHasRowScales) {
            ptx::bulk_load(scales(turn), in_place ? caller_scales(cta, token) : source.input_scales(token), kScaleRowBytes,
                           barrier(turn));
        }
    }

    // Waits for the row and sends it on; false when the wait was aborted.
    __device__ __forceinline__ bool store(const PoolRow& row, uint32_t turn) const {
        const Cta cta = this->cta();
        if (!wait_mbarrier(cta.watchdog(), Phase::kDispatch, row.src_rank, barrier(turn), parity(turn))) return false;
        if (lane_id() == 0) {
            ptx::bulk_store(cta.workspace.pool_payload(row.ring_row()), buffer(turn), cfg::kInputRowBytes);
            ptx::bulk_commit_group();
            *cta.workspace.pool_meta(row.ring_row()) = PoolMeta{row.src_rank, row.entry.token_slot, row.entry.weight, 0};
        }
        if constexpr (cfg::kHasRowScales) store_scales(cta, row, turn);
        ptx::fence_proxy_async_global();  // GEMM1 reads the scales with bulk copies
        ptx::fence_proxy_async_shared();  // the next row of this buffer overwrites them with one
        return true;
    }

    __device__ __forceinline__ void store_scales(const Cta& cta, const PoolRow& row, uint32_t turn) const {
        for (uint32_t k = lane_id(); k < cfg::kGemm1KBlocks; k += kWarpSize) {
            float scale;
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(scale) : "r"(scales(turn) + 4 * k) : "memory");
            cta.workspace.pool_scales(row.ring_slot(), k)[row.row_in_block] = scale;
        }
    }

    // Tells GEMM1 that the oldest row that is not published is in its block; `kLater` rows were stored after it.
    template <int kLater>
    __device__ __forceinline__ void publish(const PoolRow& row) const {
        __syncwarp();
        if (lane_id() != 0) return;
        ptx::bulk_wait_group<kLater>();
        const Cta cta = this->cta();
        ptx::red_add_release_gpu(cta.workspace.rows_arrived(cta.epoch) + row.block, 1);
    }

    // After an abort: waits until no copy reads or writes the buffers any more, for the CTA's shared memory is the next
    // kernel's when it ends. Rows of turns [begin, end) are fetched and not stored. Bounded, since a peer may be gone.
    __device__ __forceinline__ void outlast_copies(uint32_t begin, uint32_t end) const {
        const uint64_t start = Watchdog::now_ns();
#pragma unroll 1
        for (uint32_t turn = begin; turn < end; ++turn) {
            while (!ptx::mbarrier_try_wait(barrier(turn), parity(turn)) && Watchdog::now_ns() - start < kLongestCopyNs) {
            }
        }
        if (lane_id() == 0) ptx::bulk_wait_group<0>();
    }
};

__device__ __forceinline__ const uint32_t* previous_block_retired(const Cta& cta, uint32_t block) {
    return cta.workspace.block_retired(cta.epoch) + (block - cfg::kRingBlocks);
}

// Whether the block's ring slot may be written now.
__device__ __forceinline__ bool ring_slot_is_free(const Cta& cta, uint32_t block) {
    if (!cfg::kRingWraps || block < cfg::kRingBlocks) return true;
    const bool free = reached(ptx::ld_acquire_gpu(previous_block_retired(cta, block)), cfg::kGemm2Arrivals);
    return __all_sync(kFullMask, free);
}

__device__ __forceinline__ bool await_ring_slot(const Cta& cta, uint32_t block) {
    const uint32_t* retired = previous_block_retired(cta, block);
    const bool free = wait_until(cta.watchdog(), Phase::kDispatch, cta.rank, block - cfg::kRingBlocks,
                                 cfg::kGemm2Arrivals, [=] { return ptx::ld_acquire_gpu(retired); });
    return __all_sync(kFullMask, free);
}

// Pulls `count` rows, lane i holding the i-th. `turn` counts the worker's rows. False: aborted.
__device__ __forceinline__ bool pull_rows(const Puller& puller, const PoolRow& own, uint32_t count, uint32_t turn) {
    uint32_t fetched = 0, stored = 0, published = 0;
#pragma unroll 1
    while (published < count) {
        if (fetched < count && fetched - published < cfg::kPullSlots) {
            const PoolRow row = broadcast(own, fetched);
            if (ring_slot_is_free(puller.cta(), row.block)) {
                puller.fetch(row, turn + fetched++);
                continue;
            }
            if (fetched == published) {  // nothing unfinished: may block
                if (!await_ring_slot(puller.cta(), row.block)) return false;
                continue;
            }
        }
        if (stored < fetched) {
            if (!__all_sync(kFullMask, puller.store(broadcast(own, stored), turn + stored))) {
                puller.outlast_copies(turn + stored, turn + fetched);
                return false;
            }
            ++stored;
            if (published + 1 < stored) puller.publish<1>(broadcast(own, published++));
        } else {
            puller.publish<0>(broadcast(own, published++));
        }
    }
    return true;
}

__device__ __forceinline__ void dispatch_role(const KernelArguments& arguments, const PoolPlan& plan, const Ring& ring,
                                              uint32_t warp) {
    constexpr uint32_t kWorkers = cfg::kDispatchWarps * cfg::kCtasPerRank;
    const Puller puller(arguments, ring, warp);
#pragma unroll 1
    for (uint32_t turn = 0;; turn += kWarpSize) {
        const Cta cta = puller.cta();
        const uint32_t num_rows = plan.num_rows();
        uint32_t earlier = turn * kWorkers;
        asm volatile("" : "+r"(earlier));  // rows before this turn's: computed here, not kept over the pulls
        const uint32_t first = warp * cfg::kCtasPerRank + cta.index + earlier;
        if (first >= num_rows) return;
        const uint32_t own_row = first + lane_id() * kWorkers;
        PoolRow own{};
        if (own_row < num_rows) own = locate_row(cta, plan, own_row);
        const uint32_t count = min(ceil_div(num_rows - first, kWorkers), kWarpSize);
        if (!pull_rows(puller, own, count, turn)) return;
    }
}

}  // namespace megamoe
