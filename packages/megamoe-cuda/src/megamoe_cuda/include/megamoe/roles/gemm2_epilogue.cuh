// GEMM2's end: bias, router weight on the FP32 accumulator, the transport's rounding, and each row to its token's home rank.
//
// A warp stages its 16 rows in shared memory, 128 bytes a row at a time, and stores whole lines: four rows of 128
// contiguous bytes per instruction, which NVLink likes better than the fragments' 16.
#pragma once

#include "megamoe/numerics/e8m0.cuh"
#include "megamoe/numerics/fp8_block.cuh"
#include "megamoe/pipeline/fragments.cuh"
#include "megamoe/roles/gemm1_epilogue.cuh"

namespace megamoe {

constexpr uint32_t kStagedRowBytes = 128;
constexpr uint32_t kLaneBytes = 16;
constexpr uint32_t kSentPayloadBytes = cfg::kTransport == Transport::kBf16 ? 2 * cfg::kHiddenSize : cfg::kHiddenSize;

// Asks for the meta of the warp's 16 rows, before the main loop: it lies in the staging lines when the epilogue
// comes, and costs no register meanwhile.
__device__ __forceinline__ void fetch_row_meta(const Cta& cta, const MathThread& thread, const Tile& tile,
                                               uint32_t staging) {
    if (thread.lane >= 16) return;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     staging + thread.lane * static_cast<uint32_t>(sizeof(PoolMeta))),
                 "l"(cta.workspace.pool_meta(tile.ring_row() + thread.first_row + thread.lane))
                 : "memory");
}

// The home of a row of the warp: lane r holds row r's (lanes from 16 on hold nothing).
struct RowHome {
    uint8_t* combine_row;  // null: padding, or an aborted call
    float weight;

    __device__ __forceinline__ static RowHome await(const Cta& cta, const MathThread& thread, const Tile& tile,
                                                    uint32_t staging, bool alive) {
        asm volatile("cp.async.wait_all;" ::: "memory");  // each lane reads what it fetched itself
        RowHome home{nullptr, 0.f};
        if (alive && thread.lane < 16 && thread.first_row + thread.lane < tile.num_rows) {
            uint32_t src_rank, token_slot;
            asm volatile("{ .reg .b32 unused; ld.shared.v4.b32 {%0, %1, %2, unused}, [%3]; }"
                         : "=r"(src_rank), "=r"(token_slot), "=f"(home.weight)
                         : "r"(staging + thread.lane * static_cast<uint32_t>(sizeof(PoolMeta)))
                         : "memory");
            home.combine_row = cta.peer(src_rank).combine_row(token_slot % cfg::kTopK, token_slot / cfg::kTopK);
        }
        __syncwarp();
        return home;
    }
};

__device__ __forceinline__ uint8_t* shuffle_pointer(uint8_t* pointer, uint32_t lane) {
    return reinterpret_cast<uint8_t*>(__shfl_sync(kFullMask, reinterpret_cast<uint64_t>(pointer), lane));
}

// Shared address of 16-byte column `chunk` of staged row `row`; swizzled, so that neither side has bank conflicts.
__device__ __forceinline__ uint32_t staged_address(uint32_t staging, uint32_t row, uint32_t chunk) {
    return staging + row * kStagedRowBytes + ((chunk ^ (row & 7)) * kLaneBytes);
}

// Sends the 16 staged lines to byte `offset` of their rows; what lies past the row's payload is not sent.
__device__ __forceinline__ void send_staged_lines(uint32_t staging, uint8_t* const (&rows)[4], uint32_t offset,
                                                  uint32_t lane) {
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t chunk = lane % 8;
        uint4 v;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(staged_address(staging, 4 * i + lane / 8, chunk))
                     : "memory");
        const bool inside = !cfg::kRaggedHidden || offset + chunk * kLaneBytes < kSentPayloadBytes;
        if (rows[i] != nullptr && inside) *reinterpret_cast<uint4*>(rows[i] + offset + chunk * kLaneBytes) = v;
    }
    __syncwarp();
}

// 64 columns from `values` (8 groups of 8) to BF16 lines.
__device__ __forceinline__ void stage_bf16(uint32_t staging, const float* values, const float (&weight)[2],
                                           uint32_t lane) {
    const uint32_t row = lane % 16, odd_group = lane / 16;
#pragma unroll
    for (uint32_t j = 0; j < 8; j += 2) {
        uint32_t words[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const float* pair = values + 4 * j + 2 * i;
            words[i] = ptx::pack_bf16x2(__fmul_rn(pair[0], weight[i & 1]), __fmul_rn(pair[1], weight[i & 1]));
        }
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         staged_address(staging, row, j + odd_group)),
                     "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
    }
}

// 128 columns of one of the thread's rows: scales the values in place, returns the four scale bytes, lowest first.
__device__ __forceinline__ uint32_t scale_mx_blocks(float (&values)[64], int h, float weight) {
    uint32_t bytes = 0;
#pragma unroll
    for (int block = 0; block < 4; ++block) {
        uint32_t amax_bits = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float& value = values[16 * block + 4 * (i / 2) + 2 * h + i % 2];
            value = __fmul_rn(value, weight);
            amax_bits = max(amax_bits, magnitude_bits(value));
        }
        const uint32_t byte = e8m0_round_up(max_over_lanes<4>(amax_bits));
        const float reciprocal = e8m0_reciprocal(byte);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float& value = values[16 * block + 4 * (i / 2) + 2 * h + i % 2];
            value = __fmul_rn(value, reciprocal);
        }
        bytes |= byte << (8 * block);
    }
    return bytes;
}

__device__ __forceinline__ void stage_fp8(uint32_t staging, const float (&values)[64], int h, const MathThread& thread) {
#pragma unroll
    for (uint32_t group = 0; group < 2; ++group) {
        const uint4 columns = gather_fp8_columns(thread.quad, [&](int j) {
            const float* pair = values + 32 * group + 4 * j + 2 * h;
            return ptx::pack_e4m3x2(pair[0], pair[1]);
        });
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(staged_address(
                         staging, thread.lane / 4 + 8 * h, 4 * group + thread.quad)),
                     "r"(columns.x), "r"(columns.y), "r"(columns.z), "r"(columns.w)
                     : "memory");
    }
}

__device__ __forceinline__ void send_half_bf16(float (&values)[64], const float (&weight)[2], uint8_t* const (&rows)[4],
                                               uint32_t column, uint32_t staging, const MathThread& thread) {
#pragma unroll
    for (uint32_t part = 0; part < 2; ++part) {
        stage_bf16(staging, values + 32 * part, weight, thread.lane);
        send_staged_lines(staging, rows, (column + 64 * part) * 2, thread.lane);
    }
}

__device__ __forceinline__ void send_half_fp8(float (&values)[64], const float (&weight)[2], uint8_t* const (&rows)[4],
                                              uint8_t* home_row, uint32_t column, uint32_t staging,
                                              const MathThread& thread) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const uint32_t scales = scale_mx_blocks(values, h, weight[h]);
        stage_fp8(staging, values, h, thread);
        uint8_t* row = shuffle_pointer(home_row, thread.lane / 4 + 8 * h);
        if (row != nullptr && thread.quad == 0) {
            *reinterpret_cast<uint32_t*>(row + cfg::kHiddenSize + column / kMxBlock) = scales;
        }
    }
    send_staged_lines(staging, rows, column, thread.lane);
}

__device__ __forceinline__ void gemm2_epilogue(const Cta& cta, const MathThread& thread, const Tile& tile,
                                               Accumulators& sums, uint32_t staging, bool alive) {
    const RowHome home = RowHome::await(cta, thread, tile, staging, alive);  // before the lines are used
    if constexpr (cfg::kHasBias) {
        constexpr uint32_t kColumns = cfg::kGemm2NTiles * cfg::kBlockN;
        add_bias(sums, thread, cta.own().w2_bias + tile.expert * kColumns + tile.n_tile * cfg::kBlockN);
    }
    const float weight[2] = {__shfl_sync(kFullMask, home.weight, thread.lane / 4),
                             __shfl_sync(kFullMask, home.weight, thread.lane / 4 + 8)};
    uint8_t* rows[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) rows[i] = shuffle_pointer(home.combine_row, 4 * i + thread.lane / 8);
#pragma unroll
    for (uint32_t half = 0; half < kHalves; ++half) {
        const uint32_t column = tile.n_tile * cfg::kBlockN + thread.column(half);
        if (column >= cfg::kHiddenSize) continue;  // the last tile of an H that is no multiple of 256
        if constexpr (cfg::kTransport == Transport::kBf16) {
            send_half_bf16(sums.values[half], weight, rows, column, staging, thread);
        } else {
            send_half_fp8(sums.values[half], weight, rows, home.combine_row, column, staging, thread);
        }
    }
}

}  // namespace megamoe
