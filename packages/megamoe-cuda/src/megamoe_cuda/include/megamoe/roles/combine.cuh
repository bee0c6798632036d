// Combine: every token's rows, from wherever its experts live, summed in slot order in FP32 and stored as BF16.
//
// Math threads only; after `finish`. A slot without a valid expert is never read and adds exactly 0. Rows come by bulk
// copies into the ring's stages, which nobody needs any more: more are on their way than registers could hold.
#pragma once

#include "megamoe/numerics/e8m0.cuh"
#include "megamoe/pipeline/ring.cuh"
#include "megamoe/ptx/tma.cuh"
#include "megamoe/roles/gemm2_epilogue.cuh"
#include "megamoe/roles/route.cuh"

namespace megamoe {

// A piece is as many columns of a token as the lanes of a warp hold with 16 bytes each.
constexpr uint32_t kLaneColumns = cfg::kTransport == Transport::kBf16 ? 8 : 16;  // of a transported row
constexpr uint32_t kPieceColumns = kWarpSize * kLaneColumns;
constexpr uint32_t kPiecesPerToken = ceil_div(cfg::kHiddenSize, kPieceColumns);

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

// Bit k: slot k of the token has an expert.
__device__ __forceinline__ uint32_t valid_slots(const Cta& cta, uint32_t token) {
    bool is_dropped;
    const bool is_valid =
        lane_id() < cfg::kTopK && expert_of_pick(cta, token * cfg::kTopK + lane_id(), is_dropped) != kNoExpert;
    return __ballot_sync(kFullMask, is_valid);
}

// What a piece needs of a transported row, in shared memory: payload, then FP8's scale bytes.
struct PieceRow {
    static constexpr uint32_t kPayloadBytes = kWarpSize * kLaneBytes;
    static constexpr uint32_t kScaleBytes = cfg::kTransport == Transport::kBf16 ? 0 : kPieceColumns / kMxBlock;
    static constexpr uint32_t kBytes = kPayloadBytes + kScaleBytes;
    static_assert(kScaleBytes % 16 == 0, "bulk copies are of multiples of 16 bytes");

    uint32_t address;

    // Of a row's part `part`: the last may be short.
    __device__ __forceinline__ static uint32_t payload_bytes(uint32_t part) {
        return min(kSentPayloadBytes - part * kPayloadBytes, kPayloadBytes);
    }
    __device__ __forceinline__ static uint32_t num_bytes(uint32_t part) { return payload_bytes(part) + kScaleBytes; }
    __device__ __forceinline__ void fetch(const uint8_t* row, uint32_t part, uint32_t barrier) const {
        ptx::bulk_load(address, row + part * kPayloadBytes, payload_bytes(part), barrier);
        if constexpr (kScaleBytes > 0) {
            ptx::bulk_load(address + kPayloadBytes, row + cfg::kHiddenSize + part * kScaleBytes, kScaleBytes, barrier);
        }
    }
    __device__ __forceinline__ uint4 lane_words() const {
        uint4 v;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(address + lane_id() * kLaneBytes)
                     : "memory");
        return v;
    }
    __device__ __forceinline__ float lane_scale() const {
        uint32_t byte;
        asm volatile("ld.shared.u8 %0, [%1];"
                     : "=r"(byte)
                     : "r"(address + kPayloadBytes + lane_id() * kLaneColumns / kMxBlock)
                     : "memory");
        return e8m0_decode(byte);
    }
};

// A lane's columns of a row.
struct LaneColumns {
    uint4 words;
    float scale;  // FP8 only

    __device__ __forceinline__ static LaneColumns load(const PieceRow& row) {
        if constexpr (cfg::kTransport == Transport::kBf16) return {row.lane_words(), 0.f};
        else return {row.lane_words(), row.lane_scale()};
    }
    __device__ __forceinline__ float2 pair(int i) const {
        const uint32_t w[4] = {words.x, words.y, words.z, words.w};
        if constexpr (cfg::kTransport == Transport::kBf16) {
            return ptx::unpack_bf16x2(w[i]);
        } else {
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

// A warp's part of combine. A CTA takes neighbouring pieces, so that its warps read the same rows at about one time;
// warp w of W takes pieces w, w + W, ... of the CTA's. Its turn t uses buffer t mod kBuffers.
//
//   Shared memory   buffers: in the stages, which are free behind `finish`. Barriers, and a list of which slots of the
//                   CTA's tokens have an expert: in the staging lines of the warp that writes them, which are free once
//                   the warp has ended its last tile
//   Copies          from this rank's memory: they need nobody, so the wait for them has no clock
struct Combiner {
    static constexpr uint32_t kBufferBytes = cfg::kTopK * PieceRow::kBytes;
    static constexpr uint32_t kFitting = cfg::kSmemScales / (cfg::kMathWarps * kBufferBytes);
    static constexpr uint32_t kBuffers = kFitting < 8 ? kFitting : 8;
    static_assert(kBuffers > 0, "the stages hold a piece for each math warp");
    static constexpr uint32_t kBarrierBytes = kBuffers * 8;
    static constexpr uint32_t kListedTokens = cfg::kMathWarps * (cfg::kStagingWarpBytes - kBarrierBytes) / 4;

    const Cta& cta;
    uint32_t base;  // shared address of the CTA's memory
    uint32_t warp;
    uint32_t first, count;  // pieces of the CTA

    // Before `finish`, while other CTAs multiply: the ids have left the caches since they were routed.
    __device__ __forceinline__ Combiner(const Cta& cta_, const Ring& ring, uint32_t warp_)
        : cta(cta_),
          base(ring.base),
          warp(warp_) {
        const uint32_t pieces = cta.num_tokens * kPiecesPerToken, share = ceil_div(pieces, cfg::kCtasPerRank);
        first = min(cta.index * share, pieces);
        count = min(share, pieces - first);
        if (lane_id() == 0) {
            for (uint32_t turn = 0; turn < kBuffers; ++turn) ptx::mbarrier_init(barrier(turn), 1);
            ptx::fence_mbarrier_init();
        }
        const uint32_t tokens = min(ceil_div(first + count, kPiecesPerToken) - first_token(), kListedTokens);
#pragma unroll 4
        for (uint32_t i = warp; i < tokens; i += cfg::kMathWarps) {
            const uint32_t slots = valid_slots(cta, first_token() + i);
            if (lane_id() == 0) asm volatile("st.shared.u32 [%0], %1;" ::"r"(listed(i)), "r"(slots) : "memory");
        }
    }

    __device__ __forceinline__ uint32_t lines(uint32_t of_warp) const {
        return base + cfg::kSmemStaging + of_warp * cfg::kStagingWarpBytes;
    }
    __device__ __forceinline__ uint32_t barrier(uint32_t turn) const { return lines(warp) + turn % kBuffers * 8; }
    __device__ __forceinline__ uint32_t listed(uint32_t i) const {
        return lines(i % cfg::kMathWarps) + kBarrierBytes + i / cfg::kMathWarps * 4;
    }
    __device__ __forceinline__ PieceRow row(uint32_t turn, uint32_t slot) const {
        return {base + (warp * kBuffers + turn % kBuffers) * kBufferBytes + slot * PieceRow::kBytes};
    }
    __device__ __forceinline__ uint32_t first_token() const { return first / kPiecesPerToken; }
    __device__ __forceinline__ uint32_t piece(uint32_t turn) const { return first + warp + turn * cfg::kMathWarps; }
    __device__ __forceinline__ uint32_t slots(uint32_t turn) const {
        const uint32_t token = piece(turn) / kPiecesPerToken, i = token - first_token();
        if (i >= kListedTokens) return valid_slots(cta, token);
        uint32_t slots;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(slots) : "r"(listed(i)) : "memory");
        return slots;
    }

    // Lane k asks for the row in slot k.
    __device__ __forceinline__ void fetch(uint32_t turn) const {
        const uint32_t token = piece(turn) / kPiecesPerToken, part = piece(turn) % kPiecesPerToken;
        const uint32_t slots = this->slots(turn);
        if (lane_id() == 0) {
            ptx::mbarrier_arrive_expect_tx(barrier(turn), __popc(slots) * PieceRow::num_bytes(part));
        }
        __syncwarp();
        if (slots >> lane_id() & 1) {
            row(turn, lane_id()).fetch(cta.workspace.combine_row(lane_id(), token), part, barrier(turn));
        }
    }

    // Sums what was fetched, and stores it.
    __device__ __forceinline__ void sum(uint32_t turn) const {
        while (!ptx::mbarrier_try_wait(barrier(turn), turn / kBuffers % 2)) {
        }
        const uint32_t token = piece(turn) / kPiecesPerToken, part = piece(turn) % kPiecesPerToken;
        const uint32_t slots = this->slots(turn), column = part * kPieceColumns + lane_id() * kLaneColumns;
        if (column >= cfg::kHiddenSize) return;
        LaneColumns rows[cfg::kTopK];
#pragma unroll
        for (uint32_t k = 0; k < cfg::kTopK; ++k) {
            if (slots >> k & 1) rows[k] = LaneColumns::load(row(turn, k));
        }
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

    // Behind `finish`.
    __device__ __forceinline__ void combine() const {
        const uint32_t turns = warp < count ? ceil_div(count - warp, cfg::kMathWarps) : 0;
        ptx::fence_proxy_async_global();  // ordinary stores brought the rows home
#pragma unroll 1
        for (uint32_t turn = 0; turn < min(turns, kBuffers); ++turn) fetch(turn);
#pragma unroll 1
        for (uint32_t turn = 0; turn < turns; ++turn) {
            sum(turn);
            ptx::fence_proxy_async_shared();  // the next copies overwrite what was read
            __syncwarp();
            if (turn + kBuffers < turns) fetch(turn + kBuffers);
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

}  // namespace megamoe
