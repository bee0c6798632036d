// The kernel's arguments, one struct by value. launcher.py packs the same bytes.
#pragma once

#include "megamoe/ptx/tma.cuh"
#include "megamoe/ptx/types.cuh"

namespace megamoe {

// Where a rank reads its input and writes its output, and its weights.
struct RankArguments {
    ptx::TensorMap w13;   // [E_local * 2I, kInputRowBytes] bytes, box 256 / kClusterSize rows x 128
    ptx::TensorMap w2;    // [E_local * H, kA2RowBytes] bytes, box 256 / kClusterSize rows x 128
    ptx::TensorMap pool;  // [ring_rows, kInputRowBytes] bytes, box kBoxRows x 128
    ptx::TensorMap a2;    // [ring_rows, kA2RowBytes] bytes, box kBoxRows x 128
    const void* hidden_states;     // [T, H] BF16, or e4m3 when hidden_scales is set
    const float* hidden_scales;    // [T, kGemm1KBlocks]; null: quantise here, where the mode does
    const void* topk_ids;          // [T, K] int32 or int64
    const float* topk_weights;     // [T, K]
    const float* w13_scale;        // [E_local, 2I / 128, kGemm1KBlocks], gate rows first; not in mode bf16
    const float* w2_scale;         // [E_local, H / 128 rounded up, kGemm2KBlocks]; likewise
    void* out;                     // [T, H] BF16
    const int32_t* device_num_tokens;  // null: num_tokens counts; a negative number means none
    uint32_t* expert_counts;       // [E_local] rows received, or null
    float* gemm1_tap;              // [pool rows, 2I] accumulators, interleaved columns; only where cfg::kTapGemm1
    uint64_t* trace;               // [kCtasPerRank, kTracePoints] ns; only where cfg::kTrace
    uint32_t num_tokens;
    uint32_t topk_ids_are_int64;
    const float* w13_bias;         // [E_local, 2I], interleaved as w13; only where cfg::kHasBias
    const float* w2_bias;          // [E_local, H rounded up to 256]; likewise
    const uint8_t* w13_stages;     // [E_local, kGemm1NTiles, kGemm1KBlocks, kPackedStageBytes]; only in mode a8w4,
    const uint8_t* w2_stages;      // [E_local, kGemm2NTiles, kGemm2KBlocks, kPackedStageBytes]; which has no w13 and w2 maps
};

// What ended a call, for the host, in host-mapped memory.
struct FailureRecord {
    uint32_t failure;  // Failure of symm/watchdog.cuh
    uint32_t rank;
    uint32_t peer;
    uint32_t phase;
    uint32_t epoch;
    uint32_t index;
    uint32_t observed;
    uint32_t expected;
};

struct alignas(64) KernelArguments {
    uint8_t* workspaces[cfg::kNumRanks];  // every rank's workspace, as this GPU addresses it
    FailureRecord* failure_records;       // [kNumVirtualRanks]
    uint64_t timeout_ns;
    uint32_t first_rank;                  // rank of virtual rank 0
    RankArguments ranks[cfg::kNumVirtualRanks];
};

}  // namespace megamoe
