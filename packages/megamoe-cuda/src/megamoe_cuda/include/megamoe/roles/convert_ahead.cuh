// Mode a8w4 with many rows: the converter warps of all CTAs make FP8 operands of each expert's packed weights once a call,
// ahead of the tiles, and store them in the workspace. Tiles load them from there, as mode a8w8 loads its weights. So an expert
// of many blocks is not converted again for each, and conversion takes no shared memory's time from the multiplication.
//
// A matrix is w13 or w2 of an expert. It has a slot of the workspace, which the expert kConvertedExperts before had.
// Matrices come in the order in which units need them. CTAs take the stages of a matrix in turn; a warp takes 64 rows of each.
//
//   Waits     for the tiles of the slot's matrix before: a2_written or block_retired of that expert's blocks.
//   Arrives   converted_parts of the column tile, red.release.gpu, each warp after its part of a stage. The weight loader
//             waits for all parts of its tile, acquire.gpu, then fence.proxy.async.
//
// No deadlock: a unit waits for matrices that come with it in the order of units, or before it; a matrix for units that come
// before it, since the blocks of the expert that had the slot do. Both orders are the same in all CTAs.
#pragma once

#include "megamoe/numerics/fp4_as_fp8.cuh"
#include "megamoe/pipeline/ring.cuh"
#include "megamoe/ptx/wgmma.cuh"
#include "megamoe/roles/convert.cuh"
#include "megamoe/roles/load.cuh"

namespace megamoe {

constexpr uint32_t kEntriesBytes = 4;     // of a row
constexpr uint32_t kPackedRowBlocks = 4;  // of 32 codes, of a row

// A lane's part of a stage. Its warp has 64 rows, in groups of 16; of a group a lane has a row, and of each 32 of K the half
// that its neighbour has not: so neighbours store 32 bytes of a row, a sector of memory, and a warp reads without gaps.
struct AheadLane {
    static constexpr uint32_t kGroups = 4, kGroupRows = 16, kWarpRows = kGroups * kGroupRows;

    uint32_t row;      // in the first group, of the stage
    uint32_t is_high;  // which half of 32

    __device__ __forceinline__ static AheadLane identify() {
        const uint32_t warp = warp_id() - (cfg::kProducerWarps + cfg::kMathWarps);
        return {warp * kWarpRows + lane_id() / 2, lane_id() % 2};
    }
    __device__ __forceinline__ uint32_t codes() const {
        return row / kPackedHalfRows * kPackedHalfBytes + row % kPackedHalfRows * kPackedRowBytes + is_high * 8;
    }
    __device__ __forceinline__ uint32_t entries() const { return 2 * kPackedHalfBytes + row * kEntriesBytes; }
    __device__ __forceinline__ uint32_t operands() const { return row * ptx::kSwizzleBytes + (row % 8 ^ is_high) * 16; }
};

// Whether the slot of `expert`'s matrix is free. False: aborted.
__device__ __forceinline__ bool await_slot(const Cta& cta, const PoolPlan& plan, bool is_gemm2, uint32_t expert) {
    uint32_t before = expert;
    do {
        if (before < max(cfg::kConvertedExperts, 1u)) return true;  // NVRTC warns of a comparison with 0
        before -= cfg::kConvertedExperts;
    } while (plan.expert_rows(before) == 0);
    const uint32_t* flags = is_gemm2 ? cta.workspace.block_retired(cta.epoch) : cta.workspace.a2_written(cta.epoch);
    const uint32_t target = is_gemm2 ? cfg::kGemm2Arrivals : cfg::kGemm1Arrivals;
#pragma unroll 1
    for (uint32_t block = plan.blocks_begin[before]; block < plan.blocks_begin[before + 1]; ++block) {
        const bool done = wait_until(cta.watchdog().secondary(), Phase::kPipeline, cta.rank, block, target,
                                     [&] { return ptx::ld_acquire_gpu(flags + block); });
        if (!done) return false;
    }
    return true;
}

// 16 codes of a row, and the entries of all of its 128.
__device__ __forceinline__ uint2 load_codes(const uint8_t* p) {
    uint2 codes;  // not ld.global.nc, which ptxas moves down to its use
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(codes.x), "=r"(codes.y) : "l"(p) : "memory");
    return codes;
}
__device__ __forceinline__ uint32_t load_entries(const uint8_t* p) {
    uint32_t entries;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(entries) : "l"(p) : "memory");
    return entries;
}

// This CTA's stages of a matrix, which are every kCtasPerRank-th. A group's codes are loaded while those of the one before are
// converted, the first of a stage with the last of the stage before.
__device__ __forceinline__ void convert_matrix(const KernelArguments& arguments, const Ring& ring, bool is_gemm2,
                                               uint32_t expert) {
    constexpr uint32_t kFirstThread = (cfg::kProducerWarps + cfg::kMathWarps) * kWarpSize;
    constexpr uint32_t kGroupBytes = AheadLane::kGroupRows * kPackedRowBytes;
    constexpr uint32_t kCloser = AheadLane::kGroupRows * (kPackedRowBytes - kEntriesBytes);  // entries come by each group
    constexpr uint32_t kPackedStride = cfg::kCtasPerRank * cfg::kPackedStageBytes;
    const uint32_t k_blocks = is_gemm2 ? cfg::kGemm2KBlocks : cfg::kGemm1KBlocks;
    const uint32_t stages = k_blocks * (is_gemm2 ? cfg::kGemm2NTiles : cfg::kGemm1NTiles);
    const Cta cta = recall_cta(arguments, ring.facts());
    uint32_t stage = cta.index;
    if (stage >= stages) return;
    const AheadLane lane = AheadLane::identify();
    const uint8_t* packed = packed_weights(cta, is_gemm2, expert, 0) + stage * cfg::kPackedStageBytes;
    uint8_t* operands =
        cta.workspace.converted_stages(is_gemm2, expert) + stage * cfg::kWeightStageBytes + lane.operands();
    const uint32_t to_entries = lane.entries() - lane.codes();
    packed += lane.codes();
    uint2 codes[kPackedRowBlocks];
#pragma unroll
    for (uint32_t block = 0; block < kPackedRowBlocks; ++block) codes[block] = load_codes(packed + block * kPackedBlockBytes);
    uint32_t entries = load_entries(packed + to_entries), group = 0;
#pragma unroll 1
    for (;;) {
        const bool ends_stage = group == AheadLane::kGroups - 1;
        const bool ends_matrix = ends_stage && stage + cfg::kCtasPerRank >= stages;
        const uint8_t* next = packed;  // at the end, what nobody needs is loaded once more
        uint32_t next_group = group;
        if (!ends_stage) {
            next += kGroupBytes;
            next_group = group + 1;
        } else if (!ends_matrix) {
            next += kPackedStride - group * kGroupBytes;
            next_group = 0;
        }
        const uint32_t next_entries = load_entries(next + (to_entries - next_group * kCloser));
#pragma unroll
        for (uint32_t block = 0; block < kPackedRowBlocks; ++block) {
            const OperandTable table =
                load_operand_table(ring.base + cfg::kSmemOperandTables + (entries >> (8 * block) & 0xffu));
            const uint2 low = table.operands(codes[block].x), high = table.operands(codes[block].y);
            const uint64_t destination = reinterpret_cast<uint64_t>(operands) ^ block * 32;
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "r"(low.x), "r"(low.y),
                         "r"(high.x), "r"(high.y)
                         : "memory");
            codes[block] = load_codes(next + block * kPackedBlockBytes);
        }
        entries = next_entries;
        packed = next;
        operands += AheadLane::kGroupRows * ptx::kSwizzleBytes;
        ++group;
        if (!ends_stage) continue;
        __syncwarp();
        if (lane_id() == 0) {
            const Cta self = recall_cta(arguments, ring.facts());  // kept, it would take registers that there are not
            uint32_t* parts = self.workspace.converted_parts(self.epoch, is_gemm2, expert);
            ptx::red_add_release_gpu(parts + stage / k_blocks, 1);
        }
        if (ends_matrix) return;
        operands += cfg::kCtasPerRank * cfg::kWeightStageBytes - AheadLane::kWarpRows * ptx::kSwizzleBytes;
        stage += cfg::kCtasPerRank;
        group = 0;
        if (threadIdx.x == kFirstThread && stage + cfg::kCtasPerRank < stages) {
            ptx::bulk_prefetch(packed + kPackedStride, cfg::kPackedStageBytes);
        }
    }
}

// One warpgroup. Leaves after the last matrix, or when the call is aborted.
__device__ __forceinline__ void ahead_converter_role(const KernelArguments& arguments, const PoolPlan& plan,
                                                     const Ring& ring) {
    uint32_t w13 = 0, w2 = 0;  // experts whose matrices come next
#pragma unroll 1
    for (;;) {
        while (w13 < cfg::kNumLocalExperts && plan.expert_rows(w13) == 0) ++w13;
        while (w2 < cfg::kNumLocalExperts && plan.expert_rows(w2) == 0) ++w2;
        if (w2 == cfg::kNumLocalExperts) return;  // w13 of the same expert comes first
        const bool is_gemm2 = w13 == cfg::kNumLocalExperts ||
                              plan.blocks_begin[w2] + cfg::kLagBlocks < plan.blocks_begin[w13];
        const uint32_t expert = is_gemm2 ? w2 : w13;
        const bool free =
            lane_id() != 0 || await_slot(recall_cta(arguments, ring.facts()), plan, is_gemm2, expert);
        if (!__all_sync(kFullMask, free)) return;
        __syncwarp();  // orders the other lanes' stores behind lane 0's acquire, which a vote does not
        convert_matrix(arguments, ring, is_gemm2, expert);
        w13 += is_gemm2 ? 0 : 1;
        w2 += is_gemm2 ? 1 : 0;
    }
}

}  // namespace megamoe
