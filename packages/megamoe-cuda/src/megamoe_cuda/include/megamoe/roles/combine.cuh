// Combine: every token's rows, from wherever its experts live, summed in slot order in FP32 and stored as BF16.
//
// Math threads only; after `finish`. A slot without a valid expert is never read and adds exactly 0.
#pragma once

#include "megamoe/numerics/e8m0.cuh"
#include "megamoe/roles/gemm2_epilogue.cuh"
#include "megamoe/roles/route.cuh"

namespace megamoe {

constexpr uint32_t kLaneColumns = cfg::kTransport == Transport::kBf16 ? 8 : 16;  // of a transported row, 16 bytes
constexpr uint32_t kCombineColumns = kWarpSize * kLaneColumns;                    // of a warp's item

// Tells every home rank that all of this rank's rows are stored, then waits for every owner.
//
//   Arrives   all CTAs at Join::kFinished, one thread after a barrier of the math threads; CTA 0 waits and signals.
//   Signal    rank_finished[this rank] at the home rank := epoch, st.release.sys. One writer per word.
//   No peers  no flag: every CTA waits for the join itself
//   Also      CTA 0 raises the epoch for the next call: by then every CTA of the rank has read it.
__device__ __forceinline__ bool finish(const Cta& cta, uint32_t warp, uint32_t result_address) {
    ptx::named_barrier_sync(kMathBarrier, kMathThreads);
    if (warp == 0) {
        bool done = !cta.watchdog().aborted();  // a CTA that skipped stores must not say that it is done
        if (done && lane_id() == 0) {
            if constexpr (!kHasNoPeers) ptx::fence_acq_rel_sys();  // this CTA's rows went to peers
            arrive(cta, Join::kFinished);
        }
        if (done && (kHasNoPeers || cta.index == 0)) {
            done = await_join(cta, Join::kFinished, Phase::kFinish);
            if constexpr (!kHasNoPeers) {
                for (uint32_t i = lane_id(); done && i < cfg::kNumRanks; i += kWarpSize) {
                    const uint32_t home = (cta.rank + i) % cfg::kNumRanks;
                    ptx::st_release_sys(cta.peer(home).rank_finished(cta.rank), cta.epoch);
                }
            }
            if (done && cta.index == 0 && lane_id() == 0) *cta.workspace.epoch() = cta.epoch;
        }
        if constexpr (!kHasNoPeers) {
            for (uint32_t owner = lane_id(); done && owner < cfg::kNumRanks; owner += kWarpSize) {
                const uint32_t* flag = cta.workspace.rank_finished(owner);
                done = wait_until(cta.watchdog(), Phase::kCombine, owner, owner, cta.epoch,
                                  [=] { return ptx::ld_acquire_sys(flag); });
            }
        }
        done = __all_sync(kFullMask, done);
        if (lane_id() == 0) {
            asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(result_address), "r"(static_cast<uint32_t>(done))
                         : "memory");
        }
    }
    ptx::named_barrier_sync(kMathBarrier, kMathThreads);
    uint32_t result;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(result) : "r"(result_address) : "memory");
    return result != 0;
}

// Whether slot `lane` of the token has an expert.
__device__ __forceinline__ bool lane_slot_is_valid(const Cta& cta, uint32_t token) {
    bool is_dropped;
    return lane_id() < cfg::kTopK && token < cta.num_tokens &&
           expert_of_pick(cta, token * cfg::kTopK + lane_id(), is_dropped) != kNoExpert;
}

// A lane's columns of a transported row, as loaded.
struct TransportedColumns {
    uint4 words;
    uint32_t scale_byte;  // FP8 only

    __device__ __forceinline__ static TransportedColumns load(const uint8_t* row, uint32_t column) {
        if constexpr (cfg::kTransport == Transport::kBf16) {
            return {ptx::ld_l2(reinterpret_cast<const uint4*>(row + 2 * column)), 0};
        } else {
            return {ptx::ld_l2(reinterpret_cast<const uint4*>(row + column)),
                    ptx::ld_l2(row + cfg::kHiddenSize + column / kMxBlock)};
        }
    }
    __device__ __forceinline__ float2 pair(int i) const {
        const uint32_t w[4] = {words.x, words.y, words.z, words.w};
        if constexpr (cfg::kTransport == Transport::kBf16) {
            return ptx::unpack_bf16x2(w[i]);
        } else {
            const float scale = e8m0_decode(scale_byte);
            const float2 payload = ptx::unpack_e4m3x2(static_cast<uint16_t>(w[i / 2] >> (16 * (i % 2))));
            return make_float2(__fmul_rn(payload.x, scale), __fmul_rn(payload.y, scale));
        }
    }
    __device__ __forceinline__ void add_to(float (&sum)[kLaneColumns]) const {
#pragma unroll
        for (int i = 0; i < kLaneColumns / 2; ++i) {
            const float2 addend = pair(i);
            sum[2 * i] = __fadd_rn(sum[2 * i], addend.x);
            sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], addend.y);
        }
    }
};

__device__ __forceinline__ uint4* out_columns(const Cta& cta, uint32_t token, uint32_t column) {
    auto* out = static_cast<uint16_t*>(cta.own().out);
    return reinterpret_cast<uint4*>(out + static_cast<uint64_t>(token) * cfg::kHiddenSize + column);
}

constexpr uint32_t kItemsPerToken = ceil_div(cfg::kHiddenSize, kCombineColumns);

// One warp's share: kCombineColumns columns of a token. Loading and summing are apart, so that the loads of
// several items are in flight at once.
struct CombineItem {
    uint32_t token, column, slots;  // bit k: slot k of the token has an expert
    TransportedColumns rows[cfg::kTopK];

    // `item` past the end loads nothing.
    __device__ __forceinline__ void load(const Cta& cta, uint32_t item, uint32_t valid_slots) {
        token = item / kItemsPerToken;
        column = item % kItemsPerToken * kCombineColumns + lane_id() * kLaneColumns;
        if (token >= cta.num_tokens) column = cfg::kHiddenSize;
        slots = valid_slots;
        if (column >= cfg::kHiddenSize) return;
#pragma unroll
        for (uint32_t k = 0; k < cfg::kTopK; ++k) {
            if (slots >> k & 1) rows[k] = TransportedColumns::load(cta.workspace.combine_row(k, token), column);
        }
    }
    __device__ __forceinline__ void store(const Cta& cta) const {
        if (column >= cfg::kHiddenSize) return;
        float sum[kLaneColumns] = {};
#pragma unroll
        for (uint32_t k = 0; k < cfg::kTopK; ++k) {
            if (slots >> k & 1) rows[k].add_to(sum);
        }
#pragma unroll
        for (uint32_t i = 0; i < kLaneColumns; i += 8) {
            *out_columns(cta, token, column + i) =
                make_uint4(ptx::pack_bf16x2(sum[i], sum[i + 1]), ptx::pack_bf16x2(sum[i + 2], sum[i + 3]),
                           ptx::pack_bf16x2(sum[i + 4], sum[i + 5]), ptx::pack_bf16x2(sum[i + 6], sum[i + 7]));
        }
    }
};

// The call was aborted: the output says so in every element, and the peers are told.
__device__ __forceinline__ void leave(const Cta& cta, uint32_t math_thread) {
    if (math_thread < cfg::kNumRanks && math_thread != cta.rank) {
        ptx::st_release_sys(cta.peer(math_thread).abort_flag(cta.rank), 1);
    }
    constexpr uint32_t kWordsPerToken = cfg::kHiddenSize / 8;
    const uint64_t words = static_cast<uint64_t>(cta.num_tokens) * kWordsPerToken;
    for (uint64_t i = cta.index * kMathThreads + math_thread; i < words; i += cfg::kCtasPerRank * kMathThreads) {
        out_columns(cta, 0, 0)[i] = make_uint4(0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u);
    }
}

// The items that a warp combines next. Their tokens' ids are asked for ahead, while rows of earlier items are under way, and
// the first ones' before every rank is known to be done: they have left the caches since they were routed.
struct NextItems {
    static constexpr uint32_t kCount = cfg::kTopK * cfg::kMathWarps > 64 ? 1 : 2;  // what registers hold
    static constexpr uint32_t kStride = cfg::kMathWarps * cfg::kCtasPerRank;
    uint32_t first;
    bool lane_slot[kCount];  // whether slot `lane` of the item's token has an expert

    __device__ __forceinline__ NextItems(const Cta& cta, uint32_t warp) : first(warp * cfg::kCtasPerRank + cta.index) {
        ask(cta);
    }
    __device__ __forceinline__ uint32_t item(uint32_t i) const { return first + i * kStride; }
    __device__ __forceinline__ void ask(const Cta& cta) {
#pragma unroll
        for (uint32_t i = 0; i < kCount; ++i) lane_slot[i] = lane_slot_is_valid(cta, item(i) / kItemsPerToken);
    }
};

__device__ __forceinline__ void combine_role(const Cta& cta, NextItems& next) {
    const uint32_t num_items = cta.num_tokens * kItemsPerToken;
#pragma unroll 1
    while (next.first < num_items) {
        CombineItem items[NextItems::kCount];
#pragma unroll
        for (uint32_t i = 0; i < NextItems::kCount; ++i) {
            items[i].load(cta, next.item(i), __ballot_sync(kFullMask, next.lane_slot[i]));
        }
        next.first += NextItems::kCount * NextItems::kStride;
        next.ask(cta);
#pragma unroll
        for (uint32_t i = 0; i < NextItems::kCount; ++i) items[i].store(cta);
    }
}

}  // namespace megamoe
