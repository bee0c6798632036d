// The main loop of mode a8w4: FP8 activations, weights in FP4 that become FP8 operands on the way. As in main_loop.cuh, C =
// sum over K blocks of 128 of row scale * base scale * (A * B); base scales are powers of two per 128 x 128 weights.
//
// A stage holds the weights as weights.py packs them: for each warpgroup [4 blocks of 32 along K][128 rows][16 bytes] of
// codes, then [2][128 rows] words whose byte c is where block c's entry lies in the operand table. Each math thread owns one
// weight row of its warpgroup's 128: it converts the row's next K block, where it can while the tensor cores multiply the
// current one.
//
//   operands   two buffers of [256][128] bytes, swizzled by 128; K block k lies in buffer k mod 2. Written by ordinary stores,
//              read by WGMMAs: a proxy fence by the writer and a barrier of the warpgroup stand between. That barrier also
//              says that the other buffer's WGMMAs are done, since every warp waited for its own before.
#pragma once

#include "megamoe/numerics/fp4_as_fp8.cuh"
#include "megamoe/pipeline/main_loop.cuh"
#include "megamoe/ptx/tma.cuh"

namespace megamoe {

constexpr uint32_t kPackedRowBytes = 16;                                     // 32 codes
constexpr uint32_t kPackedBlockBytes = kHalfColumns * kPackedRowBytes;       // 32 of K, 128 rows
constexpr uint32_t kPackedHalfBytes = 4 * kPackedBlockBytes;                 // 128 of K, 128 rows
constexpr uint32_t kOperandBufferBytes = cfg::kBlockN * ptx::kSwizzleBytes;  // 128 of K, 256 rows

struct Fp4MainLoop : MainLoop {
    uint32_t weight_row;  // of the tile's 256: the one that this thread converts

    __device__ __forceinline__ Fp4MainLoop(const Ring& ring_, const MathThread& thread)
        : MainLoop(ring_, thread),
          weight_row(thread.warpgroup * kHalfColumns + thread.warp * kWarpSize + thread.lane) {
        b_descriptor = ptx::wgmma_descriptor_low(ring_.base + cfg::kSmemOperands + thread.warpgroup * kHalfBytes);
    }

    // Converts this thread's row of `stage` into `buffer`. Its addresses are computed here: kept, they would take registers
    // that the main loop does not have. All loads come before the first store, so that they wait for each other only once.
    __device__ __forceinline__ void convert(uint32_t stage, uint32_t buffer) const {
        uint32_t row = weight_row;
        asm volatile("" : "+r"(row));
        const uint32_t weights = ring.weights(stage);
        uint32_t entries;
        asm volatile("ld.shared.u32 %0, [%1];"
                     : "=r"(entries)
                     : "r"(weights + 2 * kPackedHalfBytes + 4 * row)
                     : "memory");
        const uint32_t codes = weights + row / kHalfColumns * kPackedHalfBytes + row % kHalfColumns * kPackedRowBytes;
        uint32_t words[4][4];
        OperandTable tables[4];
#pragma unroll
        for (uint32_t block = 0; block < 4; ++block) load_codes(codes + block * kPackedBlockBytes, words[block]);
#pragma unroll
        for (uint32_t block = 0; block < 4; ++block) {
            tables[block] = load_operand_table(ring.base + cfg::kSmemOperandTables + (entries >> (8 * block) & 0xffu));
        }
        const uint32_t operands =
            ring.base + cfg::kSmemOperands + buffer * kOperandBufferBytes + row * ptx::kSwizzleBytes;
#pragma unroll
        for (uint32_t chunk = 0; chunk < 8; ++chunk) {
            const uint2 low = tables[chunk / 2].operands(words[chunk / 2][2 * (chunk % 2)]);
            const uint2 high = tables[chunk / 2].operands(words[chunk / 2][2 * (chunk % 2) + 1]);
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(operands + (chunk ^ row % 8) * 16), "r"(low.x),
                         "r"(low.y), "r"(high.x), "r"(high.y)
                         : "memory");
        }
    }

    // 32 codes.
    __device__ __forceinline__ static void load_codes(uint32_t address, uint32_t (&words)[4]) {
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(address)
                     : "memory");
    }

    // What this warpgroup wrote to a buffer is there for its WGMMAs, and the other buffer may be written.
    __device__ __forceinline__ void publish_operands(uint32_t warpgroup) const {
        ptx::fence_proxy_async_shared();
        ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, kMathThreads / 2);
    }

    // Multiplies part `part` of the stage at `position` with buffer `k % 2`; with `kConvertsNext`, converts stage `next`
    // meanwhile.
    template <bool kConvertsNext>
    __device__ __forceinline__ void multiply_part(uint32_t part, uint32_t k, uint32_t next, bool is_gemm2,
                                                  const WeightScales& weight_scales, Accumulators& sums,
                                                  float (&product)[64]) {
        const uint32_t stage = position.stage, buffer = k % 2;
        const float row_scale[2] = {load_row_scale(stage, 64 * part), load_row_scale(stage, 64 * part + 8)};
        ptx::wgmma_m64n128k128(product,
                               a_descriptor + ((stage * cfg::kActivationStageBytes + part * 64 * ptx::kSwizzleBytes) >> 4),
                               b_descriptor + (buffer * kOperandBufferBytes >> 4));
        const float first = weight_scales.at(0, k), second = weight_scales.at(1, k);
        if constexpr (kConvertsNext) convert(next, buffer ^ 1);
        ptx::wgmma_wait_all();
        ptx::pin(product);
        if (part == 0) release(stage);
        promote(sums.values[0], product, row_scale, first, is_gemm2 ? first : second);
    }

    // One part: each stage is converted while the one before is multiplied.
    __device__ __forceinline__ void multiply_one_part(const Tile& tile, uint32_t k_blocks, const WeightScales& weight_scales,
                                                      Accumulators& sums, uint32_t warpgroup) {
        const bool is_gemm2 = tile.is_gemm2;
        float product[64];
#pragma unroll 1
        for (uint32_t k = 0; k + 1 < k_blocks; ++k) {
            RingPosition next = position;
            next.advance();
            await_position(next);
            multiply_part<true>(0, k, next.stage, is_gemm2, weight_scales, sums, product);
            publish_operands(warpgroup);
            position = next;
        }
        multiply_part<false>(0, k_blocks - 1, 0, is_gemm2, weight_scales, sums, product);
        position.advance();
    }

    // Two parts: with their sums and a product there are no registers left to convert with, so the other warpgroup's WGMMAs
    // cover the conversion. The second part may be all padding.
    __device__ __forceinline__ void multiply_two_parts(const Tile& tile, uint32_t k_blocks,
                                                       const WeightScales& weight_scales, Accumulators (&sums)[kParts],
                                                       uint32_t warpgroup) {
        const bool is_gemm2 = tile.is_gemm2, both = tile.num_rows > 64;
        float product[64];
#pragma unroll 1
        for (uint32_t k = 0; k < k_blocks; ++k) {
            if (both) multiply_part<false>(1, k, 0, is_gemm2, weight_scales, sums[kParts - 1], product);
            multiply_part<false>(0, k, 0, is_gemm2, weight_scales, sums[0], product);
            position.advance();
            if (k + 1 == k_blocks) break;
            await_position(position);
            convert(position.stage, (k + 1) % 2);
            publish_operands(warpgroup);
        }
    }

    __device__ __forceinline__ void await_position(const RingPosition& at) {
        while (alive && !ptx::mbarrier_try_wait(ring.full(at.stage), at.phase)) alive = !ring.gave_up();
    }

    __device__ __forceinline__ void multiply(const Tile& tile, const WeightScales& weight_scales,
                                             Accumulators (&sums)[kParts]) {
#pragma unroll
        for (uint32_t part = 0; part < kParts; ++part)
#pragma unroll
            for (int i = 0; i < 64; ++i) sums[part].values[0][i] = 0.f;
        const uint32_t warpgroup = MathThread::identify().warpgroup;
        uint32_t k_blocks = tile.k_blocks();
        asm volatile("" : "+r"(k_blocks));  // as in MainLoop
        await_position(position);
        convert(position.stage, 0);
        publish_operands(warpgroup);
        if constexpr (kParts == 1) multiply_one_part(tile, k_blocks, weight_scales, sums[0], warpgroup);
        else multiply_two_parts(tile, k_blocks, weight_scales, sums, warpgroup);
        // The next tile converts into buffer 0, which a warp of this one may still multiply with.
        ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, kMathThreads / 2);
    }
};

}  // namespace megamoe
