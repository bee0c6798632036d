// The converter warps of mode a8w4: packed FP4 weights become the FP8 operands of a stage, in the order of the CTA's tiles.
// What follows is mode a8w8: the math warps can't tell where a stage's weights come from.
//
// A packed stage is what register_weights.cuh says. A thread converts whole rows.
//
//   Waits     packed_full[p]; then for the operands' buffer: the math warps released K block n - kNumWeightBuffers, of which
//             empty[] of that block's stage tells. Ends early when a loader gave up.
//   Arrives   packed_empty[p] after the loads; full[s] after the stores, each warp for itself. WGMMAs read the operands
//             through the async proxy: every lane fences before its warp arrives.
//
// A group does not see the phases of barriers whose blocks another one converts, and a parity can't tell phases apart that
// lie two trips back. That never happens: packed stages are shared out among the groups, and a group that starts on block n
// has seen n - 2 - kNumWeightBuffers released, in order, so all earlier ones.
#pragma once

#include "megamoe/pipeline/register_weights.cuh"
#include "megamoe/pipeline/tile_queue.cuh"
#include "megamoe/ptx/tma.cuh"
#include "megamoe/ptx/wgmma.cuh"

namespace megamoe {

// 32 codes of a row, and what their operands are looked up in.
struct PackedBlock {
    uint32_t words[4];
    OperandTable table;
};

struct Converter {
    static constexpr uint32_t kThreads = kConverterGroupWarps * kWarpSize;
    static constexpr uint32_t kRows = cfg::kBlockN / kThreads;  // of a thread

    const Ring& ring;
    uint32_t first_row;

    // Block `block` of the thread's row `row`, whose entries are given; `codes` is where its first row's codes are.
    __device__ __forceinline__ PackedBlock load(uint32_t codes, uint32_t row, uint32_t block, uint32_t row_entries) const {
        constexpr uint32_t kStride = kThreads / kPackedHalfRows * kPackedHalfBytes;
        PackedBlock packed;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(packed.words[0]), "=r"(packed.words[1]), "=r"(packed.words[2]), "=r"(packed.words[3])
                     : "r"(codes + row * kStride + block * kPackedBlockBytes)
                     : "memory");
        packed.table = load_operand_table(ring.base + cfg::kSmemOperandTables + (row_entries >> (8 * block) & 0xffu));
        return packed;
    }

    // `first` is where the first 16 operands of the thread's first row go.
    __device__ __forceinline__ static void store(const PackedBlock& packed, uint32_t first, uint32_t row, uint32_t block) {
        uint32_t operands[2][4];
#pragma unroll
        for (uint32_t q = 0; q < 4; ++q) {
            const uint2 looked_up = packed.table.operands(packed.words[q]);
            operands[0][q] = looked_up.x;
            operands[1][q] = looked_up.y;
        }
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t destination = (first ^ (2 * block + i) * 16) + row * kThreads * ptx::kSwizzleBytes;
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(destination), "r"(operands[i][0]),
                         "r"(operands[i][1]), "r"(operands[i][2]), "r"(operands[i][3])
                         : "memory");
        }
    }

    // Each block's loads come before the stores of the one before, so that nothing waits for them.
    __device__ __forceinline__ void convert(uint32_t packed_stage, uint32_t buffer) const {
        uint32_t its_row = first_row;
        asm volatile("" : "+r"(its_row));  // addresses are computed here, not kept
        const uint32_t stage = ring.packed(packed_stage);
        const uint32_t codes =
            stage + its_row / kPackedHalfRows * kPackedHalfBytes + its_row % kPackedHalfRows * kPackedRowBytes;
        uint32_t first = ring.weights(buffer) + its_row * ptx::kSwizzleBytes + its_row % 8 * 16;
        asm volatile("" : "+r"(first));
        uint32_t row_entries[kRows];
#pragma unroll
        for (uint32_t row = 0; row < kRows; ++row) {
            asm volatile("ld.shared.u32 %0, [%1];"
                         : "=r"(row_entries[row])
                         : "r"(stage + 2 * kPackedHalfBytes + 4 * (its_row + kThreads * row))
                         : "memory");
        }
        PackedBlock packed = load(codes, 0, 0, row_entries[0]);
#pragma unroll
        for (uint32_t i = 0; i < 4 * kRows; ++i) {
            PackedBlock next = packed;
            if (i + 1 < 4 * kRows) next = load(codes, (i + 1) / 4, (i + 1) % 4, row_entries[(i + 1) / 4]);
            store(packed, first, i / 4, i % 4);
            packed = next;
        }
    }
};

// False when a loader gave up.
__device__ __forceinline__ bool await_or_give_up(const Ring& ring, uint32_t barrier, uint32_t parity) {
    while (!ptx::mbarrier_try_wait(barrier, parity)) {
        if (ring.gave_up()) return false;
    }
    return true;
}

// Groups of four warps take K blocks in turn, so that what one waits for is hidden by the other's conversion.
__device__ __forceinline__ void converter_role(const Ring& ring, const TileQueue& queue) {
    constexpr uint32_t kGroups = cfg::kConverterWarps / kConverterGroupWarps;
    const uint32_t warp = warp_id() - (cfg::kProducerWarps + cfg::kMathWarps);
    const uint32_t group = warp / kConverterGroupWarps;
    const Converter converter{ring, warp % kConverterGroupWarps * kWarpSize + lane_id()};
    PackedPosition packed;
    // Counts K blocks from two trips round the ring on: so the wait for the one that was before the first in its buffer looks
    // like a loader's first wait, and passes at once.
    uint32_t block = 2 * cfg::kNumStages;
#pragma unroll 1
    for (uint32_t turn = 0;; ++turn) {
        if (!await_or_give_up(ring, queue.published(turn), TileQueue::parity(turn))) return;
        const Tile tile = queue.read(turn);
        if (tile.is_end()) return;
#pragma unroll 1
        for (uint32_t k = tile.k_blocks(); k > 0; --k, ++block, packed.advance()) {
            if (kGroups > 1 && block % kGroups != group) continue;
            if (!await_or_give_up(ring, ring.packed_full(packed.stage), packed.phase)) return;
            const uint32_t previous = block - cfg::kNumWeightBuffers;
            if (!await_or_give_up(ring, ring.empty(previous % cfg::kNumStages), previous / cfg::kNumStages % 2)) return;
            converter.convert(packed.stage, block % cfg::kNumWeightBuffers);
            ptx::fence_proxy_async_shared();
            __syncwarp();
            if (lane_id() == 0) {
                ptx::mbarrier_arrive(ring.packed_empty(packed.stage));
                ptx::mbarrier_arrive(ring.full(block % cfg::kNumStages));
            }
        }
    }
}

}  // namespace megamoe
