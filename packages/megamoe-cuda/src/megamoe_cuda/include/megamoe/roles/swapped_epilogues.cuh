// The ends of both GEMMs with swapped operands (pipeline/swapped_loop.cuh), through shared memory: a thread's accumulators
// are single columns of many rows, and stores want many columns of one row.
//
// In turns of a few rows, all math threads stage FP32 values as [row][column], and then take kReaderColumns columns of one
// row each: those of its warp's staging lines, so that no other warp reads these once the warp has ended the tile. Arithmetic is that of gemm1_epilogue.cuh and gemm2_epilogue.cuh, element by element.
#pragma once

#include "megamoe/pipeline/swapped_loop.cuh"
#include "megamoe/roles/gemm2_epilogue.cuh"

namespace megamoe {

constexpr uint32_t kReaderColumns = 16;                            // of a thread and a turn
constexpr uint32_t kStagedValues = kMathThreads * kReaderColumns;  // of a turn
static_assert(kStagedValues * 4 == cfg::kMathWarps * cfg::kStagingWarpBytes, "a warp reads the rows in its own lines");

// A turn's values, kColumns of each row. Columns are swizzled in groups of 8 by the row, so that the lanes of a warp, which
// write 8 columns of 4 rows at a time, meet all banks.
template <uint32_t kColumns>
struct StagedRows {
    static constexpr uint32_t kRows = kStagedValues / kColumns;
    static constexpr uint32_t kReaders = kColumns / kReaderColumns;  // threads per row
    uint32_t base;

    __device__ __forceinline__ uint32_t address(uint32_t row, uint32_t column) const {
        return base + 4 * (row * kColumns + (column ^ (row / 2 % 4 * 8)));
    }
    __device__ __forceinline__ void store(uint32_t row, uint32_t column, float value) const {
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(address(row, column)), "f"(value) : "memory");
    }
    // Four neighbouring columns, the first a multiple of 4.
    __device__ __forceinline__ void load(uint32_t row, uint32_t column, float* values) const {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
                     : "r"(address(row, column))
                     : "memory");
    }
};

// In turns: `write(staged row, j, c)` for the rows that a thread has sums of, then `read(staged row, first, reader)` for the
// row whose columns it takes; `first` is the block's row that is staged as row 0. All math threads.
template <uint32_t kTokens, uint32_t kColumns, typename Write, typename Read>
__device__ __forceinline__ void take_turns(const MathThread& thread, uint32_t num_rows, Write write, Read read) {
    constexpr uint32_t kRows = StagedRows<kColumns>::kRows, kReaders = StagedRows<kColumns>::kReaders;
    const uint32_t math_thread = (thread.warpgroup * 4 + thread.warp) * kWarpSize + thread.lane;
#pragma unroll
    for (uint32_t first = 0; first < kTokens; first += kRows) {
        if (first >= num_rows) break;  // the same in all math threads
        ptx::named_barrier_sync(kMathBarrier, kMathThreads);  // the turn before, or the tile before, has been read
#pragma unroll
        for (uint32_t j = 0; j < (kRows < kTokens ? kRows : kTokens) / 8; ++j)
#pragma unroll
            for (uint32_t c = 0; c < 2; ++c) write(8 * j + 2 * thread.quad + c, first / 8 + j, c);
        ptx::named_barrier_sync(kMathBarrier, kMathThreads);
        read(math_thread / kReaders, first, math_thread % kReaders);
    }
}

// `bias` belongs to the tile's first weight row and goes on for 256.
template <uint32_t kTokens>
__device__ __forceinline__ void add_bias(SwappedAccumulators<kTokens>& sums, const MathThread& thread, const float* bias) {
#pragma unroll
    for (uint32_t half = 0; half < kSwappedHalves; ++half)
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
            const float added =
                __ldg(bias + thread.warpgroup * kSwappedRowsEach + half * 64 + thread.warp * 16 + h * 8 +
                      thread.lane / 4);
#pragma unroll
            for (uint32_t i = 0; i < kTokens / 4; ++i) {
                float& value = sums.values[half][4 * (i / 2) + 2 * h + i % 2];
                value = __fadd_rn(value, added);
            }
        }
}

template <uint32_t kTokens>
__device__ __forceinline__ void tap_swapped(const Cta& cta, const PoolPlan& plan, const MathThread& thread,
                                            const Tile& tile, const SwappedAccumulators<kTokens>& sums) {
    const uint32_t first_row =
        plan.rows_begin[tile.expert] + (tile.block - plan.blocks_begin[tile.expert]) * cfg::kBlockM;
#pragma unroll
    for (uint32_t half = 0; half < kSwappedHalves; ++half)
#pragma unroll
        for (uint32_t i = 0; i < kTokens / 2; ++i) {
            const uint32_t row = 8 * (i / 4) + 2 * thread.quad + i % 2;
            const uint32_t column = tile.n_tile * cfg::kBlockN + thread.warpgroup * kSwappedRowsEach + half * 64 +
                                    thread.warp * 16 + i / 2 % 2 * 8 + thread.lane / 4;
            if (row >= tile.num_rows) continue;
            cta.own().gemm1_tap[static_cast<uint64_t>(first_row + row) * (2 * cfg::kIntermediateSize) + column] =
                sums.values[half][i];
        }
}

template <uint32_t kTokens>
__device__ __forceinline__ void swapped_gemm1_epilogue(const Cta& cta, const PoolPlan& plan, const MathThread& thread,
                                                       const Tile& tile, SwappedAccumulators<kTokens>& sums,
                                                       uint32_t staging, bool alive) {
    if constexpr (cfg::kHasBias) {
        constexpr uint32_t kColumns = 2 * cfg::kIntermediateSize;
        add_bias(sums, thread, cta.own().w13_bias + tile.expert * kColumns + tile.n_tile * cfg::kBlockN);
    }
    if constexpr (cfg::kTapGemm1) {
        if (alive) tap_swapped(cta, plan, thread, tile, sums);
    }
    constexpr uint32_t kChannels = cfg::kBlockN / 2;
    const StagedRows<kChannels> staged{staging};
    const auto write = [&](uint32_t staged_row, uint32_t j, uint32_t c) {
#pragma unroll
        for (uint32_t half = 0; half < kSwappedHalves; ++half) {
            const float* pair = sums.values[half] + 4 * j + c;
            staged.store(staged_row,
                         thread.warpgroup * (kSwappedRowsEach / 2) + half * 32 + thread.warp * 8 + thread.lane / 4,
                         activate(pair[0], pair[2]));
        }
    };
    const auto read = [&](uint32_t staged_row, uint32_t first, uint32_t reader) {
        const uint32_t row = first + staged_row;
        float values[kReaderColumns];
        uint32_t amax_bits = 0;
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) staged.load(staged_row, 32 * k + 4 * reader, values + 4 * k);
#pragma unroll
        for (uint32_t i = 0; i < kReaderColumns; ++i) amax_bits = max(amax_bits, magnitude_bits(values[i]));
        const BlockScale scale(max_over_lanes<StagedRows<kChannels>::kReaders>(amax_bits));
        if (!alive || row >= tile.num_rows) return;
        uint8_t* payload = cta.workspace.a2_payload(tile.ring_slot * cfg::kBlockM + row) + tile.n_tile * kChannels;
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) {
            *reinterpret_cast<uint32_t*>(payload + 32 * k + 4 * reader) =
                scale.quantized_x2(values[4 * k], values[4 * k + 1]) |
                scale.quantized_x2(values[4 * k + 2], values[4 * k + 3]) << 16;
        }
        if (reader == 0) cta.workspace.a2_scales(tile.ring_slot, tile.n_tile)[row] = scale.scale;
    };
    take_turns<kTokens, kChannels>(thread, tile.num_rows, write, read);
    ptx::fence_proxy_async_global();  // GEMM2 reads A2 with bulk copies
}

// Where the rows go that a thread takes in GEMM2's turns.
template <uint32_t kTokens>
struct RowHomes {
    static constexpr uint32_t kTurnRows = StagedRows<cfg::kBlockN>::kRows;
    static constexpr uint32_t kTurns = ceil_div(kTokens, kTurnRows);
    PoolMeta meta[kTurns];

    // Before the main loop, which hides the latency; the block's meta is visible to this thread. GEMM1 has no use for it, but
    // registers without a value on some path live round the loop over tiles, and cost the other tiles spills.
    __device__ __forceinline__ void load(const Cta& cta, const MathThread& thread, const Tile& tile) {
        const uint32_t math_thread = (thread.warpgroup * 4 + thread.warp) * kWarpSize + thread.lane;
#pragma unroll
        for (uint32_t turn = 0; turn < kTurns; ++turn) {
            const uint32_t row = turn * kTurnRows + math_thread / StagedRows<cfg::kBlockN>::kReaders;
            meta[turn] = PoolMeta{};
            if (!tile.is_gemm2 || row >= tile.num_rows) continue;
            const uint4 words = ptx::ld_l2(
                reinterpret_cast<const uint4*>(cta.workspace.pool_meta(tile.ring_slot * cfg::kBlockM + row)));
            meta[turn] = {words.x, words.y, __uint_as_float(words.z), 0};
        }
    }
};

// Whether eight columns lie in a row: all or none do.
__device__ __forceinline__ bool is_inside(uint32_t column) { return !cfg::kRaggedHidden || column < cfg::kHiddenSize; }

// Eight neighbouring columns of a row, weighted, to its home.
__device__ __forceinline__ void send_bf16(const float (&values)[8], uint8_t* home_row, uint32_t column) {
    *reinterpret_cast<uint4*>(home_row + 2 * column) =
        make_uint4(ptx::pack_bf16x2(values[0], values[1]), ptx::pack_bf16x2(values[2], values[3]),
                   ptx::pack_bf16x2(values[4], values[5]), ptx::pack_bf16x2(values[6], values[7]));
}

// The same as FP8 with a scale per 32 columns; 16 lanes hold 128 columns of the row. All lanes of the warp.
__device__ __forceinline__ void send_fp8(const float (&values)[8], uint8_t* home_row, uint32_t column,
                                         uint32_t reader) {
    uint32_t amax_bits = 0;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) amax_bits = max(amax_bits, magnitude_bits(values[i]));
    const uint32_t byte = e8m0_round_up(max_over_lanes<4>(amax_bits));
    const float reciprocal = e8m0_reciprocal(byte);
    uint32_t scales = byte << (reader / 4 * 8);  // of the row's four blocks, lowest first
    scales |= __shfl_xor_sync(kFullMask, scales, 4);
    scales |= __shfl_xor_sync(kFullMask, scales, 8);
    if (home_row == nullptr) return;
    const auto pair = [&](uint32_t i) {
        return ptx::pack_e4m3x2(__fmul_rn(values[2 * i], reciprocal), __fmul_rn(values[2 * i + 1], reciprocal));
    };
    if (is_inside(column)) {
        *reinterpret_cast<uint2*>(home_row + column) = make_uint2(pair(0) | pair(1) << 16, pair(2) | pair(3) << 16);
    }
    if (reader == 0) *reinterpret_cast<uint32_t*>(home_row + cfg::kHiddenSize + column / kMxBlock) = scales;
}

template <uint32_t kTokens>
__device__ __forceinline__ void swapped_gemm2_epilogue(const Cta& cta, const MathThread& thread, const Tile& tile,
                                                       SwappedAccumulators<kTokens>& sums,
                                                       const RowHomes<kTokens>& homes, uint32_t staging, bool alive) {
    if constexpr (cfg::kHasBias) {
        constexpr uint32_t kColumns = cfg::kGemm2NTiles * cfg::kBlockN;
        add_bias(sums, thread, cta.own().w2_bias + tile.expert * kColumns + tile.n_tile * cfg::kBlockN);
    }
    const StagedRows<cfg::kBlockN> staged{staging};
    const auto write = [&](uint32_t staged_row, uint32_t j, uint32_t c) {
#pragma unroll
        for (uint32_t half = 0; half < kSwappedHalves; ++half)
#pragma unroll
            for (uint32_t h = 0; h < 2; ++h) {
                staged.store(staged_row,
                             thread.warpgroup * kSwappedRowsEach + half * 64 + thread.warp * 16 + h * 8 + thread.lane / 4,
                             sums.values[half][4 * j + 2 * h + c]);
            }
    };
    const auto read = [&](uint32_t staged_row, uint32_t first, uint32_t reader) {
        const PoolMeta& meta = homes.meta[first / RowHomes<kTokens>::kTurnRows];
        uint8_t* home_row = nullptr;  // padding, or an aborted call
        if (alive && first + staged_row < tile.num_rows) {
            home_row = cta.peer(meta.src_rank).combine_row(meta.token_slot % cfg::kTopK, meta.token_slot / cfg::kTopK);
        }
#pragma unroll
        for (uint32_t part = 0; part < 2; ++part) {
            const uint32_t in_tile = 128 * part + 8 * reader, column = tile.n_tile * cfg::kBlockN + in_tile;
            if (tile.n_tile * cfg::kBlockN + 128 * part >= cfg::kHiddenSize) break;  // H may be no multiple of 256
            float values[8];
            staged.load(staged_row, in_tile, values);
            staged.load(staged_row, in_tile + 4, values + 4);
#pragma unroll
            for (uint32_t i = 0; i < 8; ++i) values[i] = __fmul_rn(values[i], meta.weight);
            if constexpr (cfg::kTransport == Transport::kBf16) {
                if (home_row != nullptr && is_inside(column)) send_bf16(values, home_row, column);
            } else {
                send_fp8(values, home_row, column, reader);
            }
        }
    };
    take_turns<kTokens, cfg::kBlockN>(thread, tile.num_rows, write, read);
}

}  // namespace megamoe
