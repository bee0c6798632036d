// Typed views of a rank's workspace. Offsets come from the layout in megamoe/schedule/workspace.py (and the few arrays
// that workspace_layout.py adds); nothing else knows them.
#pragma once

#include "megamoe/ptx/types.cuh"

namespace megamoe {

// Joins of all CTAs of a rank; the first two are megamoe.schedule.protocol.Join.
enum class Join : uint32_t { kRouted = 0, kFinished = 1, kCounted = 2 };

// One pick of a token: what its home rank pushes to the expert's owner.
struct RouteEntry {
    uint32_t token_slot;  // token * K + slot
    float weight;
};

// What a pool row must know to find its way home.
struct alignas(16) PoolMeta {
    uint32_t src_rank;
    uint32_t token_slot;
    float weight;
    uint32_t unused;
};

struct Workspace {
    uint8_t* base;

    template <typename T>
    __device__ __forceinline__ T* at(uint64_t offset) const {
        return reinterpret_cast<T*>(base + offset);
    }

    // Words that outlive a call.
    __device__ __forceinline__ uint32_t* epoch() const { return at<uint32_t>(cfg::kOffsetEpoch); }
    __device__ __forceinline__ uint32_t* abort_flag(uint32_t rank) const {
        return at<uint32_t>(cfg::kOffsetAbort) + rank;
    }
    __device__ __forceinline__ uint32_t* dropped_ids() const { return at<uint32_t>(cfg::kOffsetDroppedIds); }
    __device__ __forceinline__ uint32_t* counts_published(uint32_t src_rank) const {
        return at<uint32_t>(cfg::kOffsetCountsPublished) + src_rank;
    }
    __device__ __forceinline__ uint32_t* rank_finished(uint32_t owner_rank) const {
        return at<uint32_t>(cfg::kOffsetRankFinished) + owner_rank;
    }

    // Counters, kept twice, by the epoch's parity: rows_arrived, a2_written, block_retired, joins (protocol.PARITY_FLAGS).
    __device__ __forceinline__ uint32_t* counters(uint32_t epoch) const {
        return at<uint32_t>(cfg::kOffsetCounters) + (epoch & 1) * cfg::kCounterWords;
    }
    __device__ __forceinline__ uint32_t* rows_arrived(uint32_t epoch) const { return counters(epoch); }
    __device__ __forceinline__ uint32_t* a2_written(uint32_t epoch) const { return counters(epoch) + cfg::kMaxBlocks; }
    __device__ __forceinline__ uint32_t* block_retired(uint32_t epoch) const {
        return counters(epoch) + 2 * cfg::kMaxBlocks;
    }
    // Likewise: picks of this rank by expert, the join of the routing CTAs, and the units that CTAs have claimed.
    __device__ __forceinline__ uint32_t* route_totals(uint32_t epoch) const {
        return at<uint32_t>(cfg::kOffsetRouteTotals) + (epoch & 1) * cfg::kRouteTotalWords;
    }
    __device__ __forceinline__ uint32_t* join(Join which, uint32_t epoch) const {
        if (which == Join::kCounted) return route_totals(epoch) + cfg::kNumExperts;
        return counters(epoch) + 3 * cfg::kMaxBlocks + static_cast<uint32_t>(which);
    }
    __device__ __forceinline__ uint32_t* claimed_units(uint32_t epoch) const {
        return route_totals(epoch) + cfg::kNumExperts + 1;
    }
    // Likewise, where converter warps work ahead: how many of them have stored their parts of a matrix, by local expert, w13
    // first. The stages themselves lie in as many slots as kConvertedExperts, w13's before w2's in each.
    __device__ __forceinline__ uint32_t* converted_parts(uint32_t epoch, bool is_gemm2, uint32_t expert) const {
        return route_totals(epoch) + cfg::kNumExperts + 2 + 2 * expert + (is_gemm2 ? 1 : 0);
    }
    __device__ __forceinline__ uint8_t* converted_stages(bool is_gemm2, uint32_t expert) const {
        constexpr uint32_t kW13Stages = cfg::kGemm1NTiles * cfg::kGemm1KBlocks;
        constexpr uint32_t kStages = kW13Stages + cfg::kGemm2NTiles * cfg::kGemm2KBlocks;
        const uint32_t slot = expert % max(cfg::kConvertedExperts, 1u);
        return base + cfg::kOffsetConvertedWeights +
               (static_cast<uint64_t>(slot) * kStages + (is_gemm2 ? kW13Stages : 0)) * cfg::kWeightStageBytes;
    }

    // Written by peers or read by them.
    __device__ __forceinline__ uint8_t* input_payload(uint32_t token) const {
        return base + cfg::kOffsetInputPayload + static_cast<uint64_t>(token) * cfg::kInputRowBytes;
    }
    __device__ __forceinline__ float* input_scales(uint32_t token) const {
        return at<float>(cfg::kOffsetInputScales) + static_cast<uint64_t>(token) * cfg::kInputScaleStride;
    }
    __device__ __forceinline__ RouteEntry* route_entries(uint32_t src_rank) const {
        return at<RouteEntry>(cfg::kOffsetRouteEntries) +
               static_cast<uint64_t>(src_rank) * (cfg::kMaxTokens * cfg::kTopK);
    }
    __device__ __forceinline__ uint32_t* route_counts(uint32_t src_rank) const {
        return at<uint32_t>(cfg::kOffsetRouteCounts) + src_rank * cfg::kNumLocalExperts;
    }
    __device__ __forceinline__ uint8_t* combine_row(uint32_t slot, uint32_t token) const {
        return base + cfg::kOffsetCombine +
               (static_cast<uint64_t>(slot) * cfg::kMaxTokens + token) * cfg::kCombineRowBytes;
    }

    // The ring. Scales are transposed inside a block, [K / 128][kBlockM], as the main loop reads them.
    __device__ __forceinline__ uint8_t* pool_payload(uint32_t ring_row) const {
        return base + cfg::kOffsetPoolPayload + static_cast<uint64_t>(ring_row) * cfg::kInputRowBytes;
    }
    __device__ __forceinline__ float* pool_scales(uint32_t ring_slot, uint32_t k_block) const {
        return at<float>(cfg::kOffsetPoolScales) +
               (static_cast<uint64_t>(ring_slot) * cfg::kGemm1KBlocks + k_block) * cfg::kBlockM;
    }
    __device__ __forceinline__ PoolMeta* pool_meta(uint32_t ring_row) const {
        return at<PoolMeta>(cfg::kOffsetPoolMeta) + ring_row;
    }
    __device__ __forceinline__ uint8_t* a2_payload(uint32_t ring_row) const {
        return base + cfg::kOffsetA2Payload + static_cast<uint64_t>(ring_row) * cfg::kA2RowBytes;
    }
    __device__ __forceinline__ float* a2_scales(uint32_t ring_slot, uint32_t k_block) const {
        return at<float>(cfg::kOffsetA2Scales) +
               (static_cast<uint64_t>(ring_slot) * cfg::kGemm2KBlocks + k_block) * cfg::kBlockM;
    }
};

}  // namespace megamoe
