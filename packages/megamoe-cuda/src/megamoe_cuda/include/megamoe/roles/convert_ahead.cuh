// Mode a8w4 with many rows: the converter warps of all CTAs make FP8 operands of each expert's packed weights once a call,
// ahead of the tiles, and store them in the workspace. Tiles load them from there, as mode a8w8 loads its weights. So an expert
// of many blocks is not converted again for each, and conversion takes no shared memory's time from the multiplication.
//
// A matrix is w13 or w2 of an expert. It has a slot of the workspace, which the expert kConvertedExperts before had.
// Matrices come in the order in which units need them. CTAs take the stages of a matrix in turn; a warp takes 64 rows of each.
//
//   Waits     for the tiles of the slot's matrix before: a2_written or block_retired of that expert's blocks.
//   Arrives   converted_parts of the matrix, red.release.gpu, each warp once, after its last part: a release takes until all
//             stores of the CTA are visible, and the warp waits for it. The weight loader waits for all warps, acquire.gpu,
//             then fence.proxy.async.
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

constexpr uint32_t kEntriesBytes = 4;  // of a row
constexpr uint32_t kAheadRows = 8;     // of a group
constexpr uint32_t kAheadWarpRows = 64;
constexpr uint32_t kAheadStageGroups = kAheadWarpRows / kAheadRows;  // of a warp
constexpr uint32_t kAheadCodeBytes = 4 * kAheadRows * kPackedRowBytes;
static_assert(kAheadCodeBytes + kAheadRows * kEntriesBytes == cfg::kAheadGroupBytes, "smem_budget.py counts a group differently");

// The packed rows of a warp's groups, which come through shared memory: [4 blocks of 32][8 rows][16 bytes] of codes, then the
// rows' entries. A lane brings 16 bytes of each group, and the first eight lanes a row's entries.
struct AheadSource {
    const uint8_t* codes;  // of this lane, in the next group

    // Where it lies. Computed anew, not kept: the converter warps have few registers.
    struct Place {
        uint32_t warp, lane;
        __device__ __forceinline__ static Place identify() {
            uint32_t thread;
            asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
            return {thread / kWarpSize - (cfg::kProducerWarps + cfg::kMathWarps), thread % kWarpSize};
        }
        __device__ __forceinline__ uint32_t row() const { return warp * kAheadWarpRows + lane % kAheadRows; }
        __device__ __forceinline__ uint32_t codes() const {
            return row() / kPackedHalfRows * kPackedHalfBytes + lane / kAheadRows * kPackedBlockBytes +
                   row() % kPackedHalfRows * kPackedRowBytes;
        }
        __device__ __forceinline__ uint32_t buffer(const Ring& ring, uint32_t group) const {
            return ring.base + cfg::kSmemAheadGroups +
                   (warp * cfg::kAheadGroups + group % cfg::kAheadGroups) * cfg::kAheadGroupBytes;
        }
    };

    // Stage `stage` of those that begin at `packed`.
    __device__ __forceinline__ AheadSource(const uint8_t* packed, uint32_t stage)
        : codes(packed + stage * cfg::kPackedStageBytes + Place::identify().codes()) {}

    // Asks for group `group` of the warp's in a stage, and goes on to the next one.
    __device__ __forceinline__ void fetch(const Ring& ring, uint32_t group) {
        const Place place = Place::identify();
        const uint32_t destination = place.buffer(ring, group);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination + place.lane * 16), "l"(codes) : "memory");
        if (place.lane < kAheadRows) {
            constexpr uint32_t kCloser = kAheadRows * (kPackedRowBytes - kEntriesBytes);  // entries come by each group
            const uint32_t to_entries =
                2 * kPackedHalfBytes + place.row() * kEntriesBytes - place.codes() - group * kCloser;
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination + kAheadCodeBytes +
                                                                         place.lane * kEntriesBytes),
                         "l"(codes + to_entries)
                         : "memory");
        }
        constexpr uint32_t kToNextStage = cfg::kCtasPerRank * cfg::kPackedStageBytes -
                                          (kAheadStageGroups - 1) * kAheadRows * kPackedRowBytes;
        codes += group + 1 < kAheadStageGroups ? kAheadRows * kPackedRowBytes : kToNextStage;
    }
};

// A lane's part of a group: a row, and of two of its four blocks of 32 the half that its neighbour has not. Four lanes store 64
// bytes of a row together.
struct AheadLane {
    uint32_t row, block, is_high;

    __device__ __forceinline__ static AheadLane identify() {
        uint32_t lane;
        asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));  // volatile: computed anew, not kept over the loop
        return {lane / 2 % kAheadRows, lane / 16, lane % 2};
    }
    // From the group's first row; of the lane's second block, ^ 64.
    __device__ __forceinline__ uint32_t operands() const {
        return row * ptx::kSwizzleBytes + ((2 * block + is_high) ^ row) * 16;
    }
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

// The operands of one half of each of four words (fp4_stages.py): 16 neighbours.
__device__ __forceinline__ uint4 half_operands(const OperandTable& table, const uint32_t (&words)[4], uint32_t is_high) {
    uint32_t operands[4];
#pragma unroll
    for (uint32_t q = 0; q < 4; ++q) {
        operands[q] = table.looked_up((words[q] & 0x77777777u) >> (16 * is_high)) | (words[q] << (4 * is_high) & 0x80808080u);
    }
    return make_uint4(operands[0], operands[1], operands[2], operands[3]);
}

// Converts what `buffer` holds of 8 rows; `operands` is where the lane's first 16 go.
__device__ __forceinline__ void convert_group(uint32_t buffer, uint32_t tables, uint8_t* operands) {
    const AheadLane lane = AheadLane::identify();
    uint32_t entries;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(entries) : "r"(buffer + kAheadCodeBytes + lane.row * kEntriesBytes) : "memory");
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t block = 2 * i + lane.block;
        uint32_t words[4];
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(buffer + (block * kAheadRows + lane.row) * kPackedRowBytes)
                     : "memory");
        const OperandTable table = load_operand_table(tables + (entries >> (8 * block) & 0xffu));
        const uint4 converted = half_operands(table, words, lane.is_high);
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(reinterpret_cast<uint64_t>(operands) ^ 64 * i),
                     "r"(converted.x), "r"(converted.y), "r"(converted.z), "r"(converted.w)
                     : "memory");
    }
}

// This CTA's stages of a matrix, which are every kCtasPerRank-th. Groups are fetched kAheadGroups ahead, over the ends of stages.
template <bool is_gemm2>
__device__ __forceinline__ void convert_matrix(const KernelArguments& arguments, const Ring& ring, uint32_t expert) {
    constexpr uint32_t kFirstThread = (cfg::kProducerWarps + cfg::kMathWarps) * kWarpSize;
    const uint32_t k_blocks = is_gemm2 ? cfg::kGemm2KBlocks : cfg::kGemm1KBlocks;
    const uint32_t stages = k_blocks * (is_gemm2 ? cfg::kGemm2NTiles : cfg::kGemm1NTiles);
    const Cta cta = recall_cta(arguments, ring.facts());
    uint32_t stage = cta.index;
    if (stage >= stages) return;
    AheadSource source(packed_weights(cta, is_gemm2, expert, 0), stage);
    uint8_t* operands = cta.workspace.converted_stages(is_gemm2, expert) + stage * cfg::kWeightStageBytes +
                        (warp_id() - (cfg::kProducerWarps + cfg::kMathWarps)) * kAheadWarpRows * ptx::kSwizzleBytes +
                        AheadLane::identify().operands();
#pragma unroll
    for (uint32_t group = 0; group < cfg::kAheadGroups; ++group) {
        source.fetch(ring, group);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
#pragma unroll 1
    for (; stage < stages; stage += cfg::kCtasPerRank) {
        if (threadIdx.x == kFirstThread && stage + cfg::kCtasPerRank < stages) {
            ptx::bulk_prefetch(packed_weights(recall_cta(arguments, ring.facts()), is_gemm2, expert, 0) +
                                   (stage + cfg::kCtasPerRank) * cfg::kPackedStageBytes,
                               cfg::kPackedStageBytes);
        }
#pragma unroll 1
        for (uint32_t group = 0; group < kAheadStageGroups; ++group) {
            asm volatile("cp.async.wait_group %0;" ::"n"(cfg::kAheadGroups - 1) : "memory");
            __syncwarp();
            convert_group(AheadSource::Place::identify().buffer(ring, group), ring.base + cfg::kSmemOperandTables, operands);
            __syncwarp();  // the buffer is read
            const uint32_t next = (group + cfg::kAheadGroups) % kAheadStageGroups;
            if (next > group || stage + cfg::kCtasPerRank < stages) source.fetch(ring, next);
            asm volatile("cp.async.commit_group;" ::: "memory");  // an empty one, too, counts
            operands += kAheadRows * ptx::kSwizzleBytes;
        }
        operands += cfg::kCtasPerRank * cfg::kWeightStageBytes - kAheadWarpRows * ptx::kSwizzleBytes;
    }
    if (lane_id() == 0) {
        const Cta self = recall_cta(arguments, ring.facts());  // kept, it would take registers that there are not
        ptx::red_add_release_gpu(self.workspace.converted_parts(self.epoch, is_gemm2, expert), 1);
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
        if (is_gemm2) convert_matrix<true>(arguments, ring, expert);
        else convert_matrix<false>(arguments, ring, expert);
        w13 += is_gemm2 ? 0 : 1;
        w2 += is_gemm2 ? 1 : 0;
    }
}

}  // namespace megamoe
