// Route: every pick of this rank is pushed to the rank that owns its expert, sorted by expert, and then the counts.
//
// The last `num_routers` CTAs share the picks. Each counts its picks per expert in shared memory and claims a range per
// expert; when there are several, they join once (Join::kCounted) so that all know where each expert's entries begin.
// The order of entries within an expert does not matter for the result.
#pragma once

#include "megamoe/schedule/warp_scan.cuh"
#include "megamoe/symm/cta.cuh"
#include "megamoe/symm/grid_join.cuh"

namespace megamoe {

constexpr uint32_t kPicksPerRouter = 1024;  // few picks: one CTA routes and no join is needed
constexpr uint32_t kNoExpert = 0xffffffffu;
constexpr uint32_t kPickBatch = 3;  // of a thread, loaded together: kPicksPerRouter is some 3 per thread

// Scratch in the pipeline's shared memory, which is not in use yet.
struct RouteScratch {
    uint32_t counts[cfg::kNumExperts];                               // this CTA's picks, then this CTA's next position
    uint32_t totals[cfg::kNumExperts];                               // this rank's picks
    uint32_t begin[cfg::kNumRanks][cfg::kNumLocalExperts + 1];       // first entry of the expert at its owner
};
static_assert(sizeof(RouteScratch) <= cfg::kStagesBytes, "routing scratch does not fit the pipeline's stages");

struct PickRange {
    uint32_t begin, end;
};

__device__ __forceinline__ uint32_t num_routers(const Cta& cta) {
    return max(1u, min(ceil_div(cta.num_tokens * cfg::kTopK, kPicksPerRouter), cfg::kCtasPerRank));
}

__device__ __forceinline__ PickRange router_share(const Cta& cta, uint32_t routers) {
    const uint32_t picks = cta.num_tokens * cfg::kTopK;
    const uint32_t router = cta.index - (cfg::kCtasPerRank - routers);
    const uint32_t each = ceil_div(picks, routers);
    return {min(router * each, picks), min((router + 1) * each, picks)};
}

// Moves this CTA's picks to the L2 cache, if it routes. The first thing in a call: loads of them queue behind the weights
// that other CTAs ask for meanwhile (128 tokens on an H200: routes are out 2.5 us earlier).
__device__ __forceinline__ void prefetch_picks(const KernelArguments& arguments) {
    Cta cta(arguments, 0, 0);
    cta.num_tokens = cta.own().num_tokens;  // the most that a device-side count may say
    const uint32_t routers = num_routers(cta);
    if (cta.index < cfg::kCtasPerRank - routers) return;
    const PickRange share = router_share(cta, routers);
    const uint32_t id_bytes = cta.own().topk_ids_are_int64 ? 8 : 4;
    constexpr uint32_t kPicks = 16;  // whose ids fill a line
    for (uint32_t pick = share.begin + threadIdx.x * kPicks; pick < share.end; pick += blockDim.x * kPicks) {
        ptx::prefetch_l2(static_cast<const uint8_t*>(cta.own().topk_ids) + static_cast<uint64_t>(pick) * id_bytes);
        ptx::prefetch_l2(cta.own().topk_weights + pick);
    }
}

// The expert of a pick; kNoExpert for -1 and for ids outside [-1, E), which `is_dropped` tells apart.
__device__ __forceinline__ uint32_t expert_of_pick(const Cta& cta, uint32_t pick, bool& is_dropped) {
    const int64_t id = cta.own().topk_ids_are_int64 ? __ldg(static_cast<const int64_t*>(cta.own().topk_ids) + pick)
                                                  : __ldg(static_cast<const int32_t*>(cta.own().topk_ids) + pick);
    const bool valid = id >= 0 && id < static_cast<int64_t>(cfg::kNumExperts);
    is_dropped = !valid && id != -1;
    return valid ? static_cast<uint32_t>(id) : kNoExpert;
}

__device__ __forceinline__ void count_picks(const Cta& cta, RouteScratch& scratch, PickRange share) {
    for (uint32_t e = threadIdx.x; e < cfg::kNumExperts; e += blockDim.x) scratch.counts[e] = 0;
    __syncthreads();
    for (uint32_t first = share.begin + threadIdx.x; first < share.end; first += kPickBatch * blockDim.x) {
        uint32_t experts[kPickBatch];
        bool is_dropped[kPickBatch];
#pragma unroll
        for (uint32_t i = 0; i < kPickBatch; ++i) {
            const uint32_t pick = first + i * blockDim.x;
            experts[i] = kNoExpert;
            is_dropped[i] = false;
            if (pick < share.end) experts[i] = expert_of_pick(cta, pick, is_dropped[i]);
        }
#pragma unroll
        for (uint32_t i = 0; i < kPickBatch; ++i) {
            if (experts[i] != kNoExpert) atomicAdd(&scratch.counts[experts[i]], 1u);
            if (is_dropped[i]) atomicAdd(cta.workspace.dropped_ids(), 1u);
        }
    }
    __syncthreads();
}

// Turns counts[e] into this CTA's first position within the expert's entries, and fills totals[e].
__device__ __forceinline__ bool claim_ranges(const Cta& cta, RouteScratch& scratch, uint32_t routers) {
    uint32_t* totals = cta.workspace.route_totals(cta.epoch);
    for (uint32_t e = threadIdx.x; e < cfg::kNumExperts; e += blockDim.x) {
        const uint32_t count = scratch.counts[e];
        scratch.totals[e] = count;
        scratch.counts[e] = routers > 1 && count > 0 ? atomicAdd(totals + e, count) : 0;
    }
    if (routers == 1) return true;
    __syncthreads();
    bool joined = true;
    if (threadIdx.x == 0) {
        arrive(cta, Join::kCounted);
        joined = await_join(cta, Join::kCounted, Phase::kRoute);
    }
    joined = __syncthreads_and(joined);
    for (uint32_t e = threadIdx.x; e < cfg::kNumExperts; e += blockDim.x) scratch.totals[e] = ptx::ld_l2(totals + e);
    return joined;
}

__device__ __forceinline__ void find_segments(RouteScratch& scratch) {
    __syncthreads();
    for (uint32_t owner = warp_id(); owner < cfg::kNumRanks; owner += blockDim.x / kWarpSize) {
        const uint32_t* totals = scratch.totals + owner * cfg::kNumLocalExperts;
        warp_prefix_sums(cfg::kNumLocalExperts, scratch.begin[owner], [&](uint32_t expert) { return totals[expert]; });
    }
    __syncthreads();
}

__device__ __forceinline__ void push_entries(const Cta& cta, RouteScratch& scratch, PickRange share) {
    for (uint32_t first = share.begin + threadIdx.x; first < share.end; first += kPickBatch * blockDim.x) {
        uint32_t experts[kPickBatch];
        float weights[kPickBatch];
#pragma unroll
        for (uint32_t i = 0; i < kPickBatch; ++i) {
            const uint32_t pick = first + i * blockDim.x;
            bool is_dropped;
            experts[i] = kNoExpert;
            weights[i] = 0.f;
            if (pick < share.end) {
                experts[i] = expert_of_pick(cta, pick, is_dropped);
                weights[i] = __ldg(cta.own().topk_weights + pick);
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < kPickBatch; ++i) {
            const uint32_t expert = experts[i];
            if (expert == kNoExpert) continue;
            const uint32_t owner = expert / cfg::kNumLocalExperts;
            const uint32_t position =
                scratch.begin[owner][expert % cfg::kNumLocalExperts] + atomicAdd(&scratch.counts[expert], 1u);
            cta.peer(owner).route_entries(cta.rank)[position] = RouteEntry{first + i * blockDim.x, weights[i]};
        }
    }
}

__device__ __forceinline__ void push_counts(const Cta& cta, const RouteScratch& scratch) {
    for (uint32_t expert = threadIdx.x; expert < cfg::kNumExperts; expert += blockDim.x) {
        const uint32_t owner = expert / cfg::kNumLocalExperts;
        cta.peer(owner).route_counts(cta.rank)[expert % cfg::kNumLocalExperts] = scratch.totals[expert];
    }
}

// False, in all threads, if the call was aborted before this CTA had pushed its share.
__device__ __forceinline__ bool route_picks(const Cta& cta, RouteScratch& scratch) {
    const uint32_t routers = num_routers(cta);
    if (cta.index < cfg::kCtasPerRank - routers) {
        if (threadIdx.x == 0) arrive(cta, Join::kCounted);  // every CTA arrives at every join
        return true;
    }
    const PickRange share = router_share(cta, routers);
    count_picks(cta, scratch, share);
    if (!claim_ranges(cta, scratch, routers)) return false;
    find_segments(scratch);
    push_entries(cta, scratch, share);
    if (cta.index == cfg::kCtasPerRank - 1) push_counts(cta, scratch);
    if (routers == 1 && threadIdx.x == 0) arrive(cta, Join::kCounted);
    return true;
}

// Tells every owner that this rank's entries, counts and input rows are stored, once all its CTAs are done.
//
//   Arrives   all CTAs that did their part (`routed`) at Join::kRouted; CTA 0 waits and signals, one lane per owner.
//   Signal    counts_published[this rank] at the owner := epoch, st.release.sys. One writer per word.
//   No peers  no flag: await_counts() waits for the join
__device__ __forceinline__ void publish_counts(const Cta& cta, bool routed) {
    __syncthreads();
    if (routed && threadIdx.x == 0) {
        if constexpr (!kHasNoPeers) ptx::fence_acq_rel_sys();  // the pushes of this CTA went to peers
        arrive(cta, Join::kRouted);
    }
    if (kHasNoPeers || cta.index != 0 || threadIdx.x >= kWarpSize) return;
    const bool joined = await_join(cta, Join::kRouted, Phase::kRoute);
    for (uint32_t i = lane_id(); joined && i < cfg::kNumRanks; i += kWarpSize) {
        const uint32_t owner = (cta.rank + i) % cfg::kNumRanks;
        ptx::st_release_sys(cta.peer(owner).counts_published(cta.rank), cta.epoch);
    }
}

// Waits until every source has published, one thread per source. The result is the same in all threads.
__device__ __forceinline__ bool await_counts(const Cta& cta) {
    bool published = true;
    if constexpr (kHasNoPeers) {
        if (threadIdx.x == 0) published = await_join(cta, Join::kRouted, Phase::kRoute);
    } else {
        for (uint32_t src = threadIdx.x; src < cfg::kNumRanks; src += blockDim.x) {
            const uint32_t* flag = cta.workspace.counts_published(src);
            published &= wait_until(cta.watchdog(), Phase::kDispatch, src, src, cta.epoch,
                                    [=] { return ptx::ld_acquire_sys(flag); });
        }
    }
    return __syncthreads_and(published);
}

}  // namespace megamoe
