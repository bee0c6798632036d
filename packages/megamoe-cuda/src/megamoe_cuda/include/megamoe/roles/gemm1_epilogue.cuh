// GEMM1's end: bias, activation, one scale per row and 128 channels, FP8, into the A2 ring. Mode bf16: BF16, no scale.
//
// A tile of 256 interleaved columns gives 128 channels, and they share ONE scale per row: with split N each warpgroup
// finishes 64 of them, and the two exchange their rows' amax through shared memory. (Scales per 64 cost end-to-end
// accuracy.)
#pragma once

#include "megamoe/numerics/activation.cuh"
#include "megamoe/numerics/fp8_block.cuh"
#include "megamoe/pipeline/bias.cuh"
#include "megamoe/pipeline/fragments.cuh"
#include "megamoe/pipeline/main_loop.cuh"
#include "megamoe/ptx/tma.cuh"

namespace megamoe {

// values[0..31] := activations of channels 8 p + 2 quad + {0, 1}, p = 0..7: even groups of 8 columns are gate, odd up.
__device__ __forceinline__ void activate_half(float (&values)[64]) {
#pragma unroll
    for (int p = 0; p < 8; ++p)
#pragma unroll
        for (int i = 0; i < 4; ++i) values[4 * p + i] = activate(values[8 * p + i], values[8 * p + 4 + i]);
}

__device__ __forceinline__ uint32_t row_amax_bits(const Accumulators& sums, int h) {
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t half = 0; half < kHalves; ++half)
#pragma unroll
        for (int p = 0; p < 8; ++p)
#pragma unroll
            for (int i = 0; i < 2; ++i) bits = max(bits, magnitude_bits(sums.values[half][4 * p + 2 * h + i]));
    return max_over_lanes<4>(bits);
}

// The larger of both warpgroups' amax of the same rows, through `exchange` [2 warpgroups][kTileM].
__device__ __forceinline__ void exchange_amax(uint32_t exchange, const MathThread& thread, uint32_t (&amax_bits)[2]) {
    const uint32_t rows = exchange + 4 * thread.row();
    const uint32_t own = rows + 4 * thread.warpgroup * cfg::kTileM;
    const uint32_t other = rows + 4 * (thread.warpgroup ^ 1) * cfg::kTileM;
    ptx::named_barrier_sync(kMathBarrier, kMathThreads);  // those of the tile before have been read
    if (thread.quad == 0) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(own), "r"(amax_bits[0]) : "memory");
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(own + 4 * 8), "r"(amax_bits[1]) : "memory");
    }
    ptx::named_barrier_sync(kMathBarrier, kMathThreads);
    uint32_t others[2];
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(others[0]) : "r"(other) : "memory");
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(others[1]) : "r"(other + 4 * 8) : "memory");
    amax_bits[0] = max(amax_bits[0], others[0]);
    amax_bits[1] = max(amax_bits[1], others[1]);
}

__device__ __forceinline__ void store_a2_row(const Cta& cta, const MathThread& thread, const Tile& tile,
                                             const Accumulators& sums, int h, const BlockScale& scale, bool valid) {
    const uint32_t row = thread.row() + 8 * h;
    const uint32_t first_channel = tile.n_tile * 128 + (cfg::kSplitM ? 0 : thread.warpgroup * 64);
    uint8_t* payload = cta.workspace.a2_payload(tile.ring_row() + row) + first_channel;
#pragma unroll
    for (uint32_t half = 0; half < kHalves; ++half) {
        const uint4 columns = gather_fp8_columns(thread.quad, [&](int p) {
            return scale.quantized_x2(sums.values[half][4 * p + 2 * h], sums.values[half][4 * p + 2 * h + 1]);
        });
        if (valid) *reinterpret_cast<uint4*>(payload + half * 64 + thread.quad * 16) = columns;
    }
    if (valid && thread.quad == 0 && (cfg::kSplitM || thread.warpgroup == 0)) {
        cta.workspace.a2_scales(tile.ring_slot, tile.n_tile)[row] = scale.scale;
    }
}

__device__ __forceinline__ void store_a2_fp8(const Cta& cta, const MathThread& thread, const Tile& tile,
                                             const Accumulators& sums, uint32_t exchange, bool alive) {
    uint32_t amax_bits[2] = {row_amax_bits(sums, 0), row_amax_bits(sums, 1)};
    if constexpr (!cfg::kSplitM) exchange_amax(exchange, thread, amax_bits);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const BlockScale scale(amax_bits[h]);
        store_a2_row(cta, thread, tile, sums, h, scale, alive && thread.row() + 8 * h < tile.num_rows);
    }
}

// A half holds 64 channels of a row: 8 groups of 8, of which each lane of a quad gets two to store, 16 bytes each.
__device__ __forceinline__ void store_a2_bf16(const Cta& cta, const MathThread& thread, const Tile& tile,
                                              const Accumulators& sums, bool alive) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const uint32_t row = thread.row() + 8 * h;
        uint8_t* payload = cta.workspace.a2_payload(tile.ring_row() + row);
#pragma unroll
        for (uint32_t group = 0; group < 2 * kHalves; ++group) {
            const float* values = sums.values[group / 2] + 16 * (group % 2) + 2 * h;
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = ptx::pack_bf16x2(values[4 * i], values[4 * i + 1]);
            transpose_in_quad(words, thread.quad);
            const uint32_t channel = tile.n_tile * 128 + thread.column(group / 2) / 2 + 32 * (group % 2) + 8 * thread.quad;
            if (alive && row < tile.num_rows) {
                *reinterpret_cast<uint4*>(payload + 2 * channel) = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
}

__device__ __forceinline__ void tap_accumulators(const Cta& cta, const PoolPlan& plan, const MathThread& thread,
                                                 const Tile& tile, const Accumulators& sums) {
    const uint32_t first_row =
        plan.rows_begin[tile.expert] + (tile.block - plan.blocks_begin[tile.expert]) * cfg::kBlockM + tile.row_in_block();
#pragma unroll
    for (uint32_t half = 0; half < kHalves; ++half)
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            const uint32_t row = thread.row() + 8 * ((i >> 1) & 1);
            const uint32_t column =
                tile.n_tile * cfg::kBlockN + thread.column(half) + 8 * (i >> 2) + 2 * thread.quad + (i & 1);
            if (row >= tile.num_rows) continue;
            cta.own().gemm1_tap[static_cast<uint64_t>(first_row + row) * (2 * cfg::kIntermediateSize) + column] =
                sums.values[half][i];
        }
}

__device__ __forceinline__ void gemm1_epilogue(const Cta& cta, const PoolPlan& plan, const MathThread& thread,
                                               const Tile& tile, Accumulators& sums, uint32_t exchange, bool alive) {
    if constexpr (cfg::kHasBias) {
        constexpr uint32_t kColumns = 2 * cfg::kIntermediateSize;
        add_bias(sums, thread, cta.own().w13_bias + tile.expert * kColumns + tile.n_tile * cfg::kBlockN);
    }
    if constexpr (cfg::kTapGemm1) {
        if (alive) tap_accumulators(cta, plan, thread, tile, sums);
    }
#pragma unroll
    for (uint32_t half = 0; half < kHalves; ++half) activate_half(sums.values[half]);
    if constexpr (cfg::kHasRowScales) store_a2_fp8(cta, thread, tile, sums, exchange, alive);
    else store_a2_bf16(cta, thread, tile, sums, alive);
    ptx::fence_proxy_async_global();  // GEMM2 reads A2 with bulk copies
}

}  // namespace megamoe
