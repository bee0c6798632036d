// Mode a8w4 with few rows: packed weights as the register operand of swapped WGMMAs. Nothing is stored: a math thread loads the
// codes that its registers hold, and looks them up.
//
// A packed stage (fp4_stages.py): for each half of 128 rows [4 blocks of 32 along K][128 rows][16 bytes] of codes, then
// [2][128 rows] words whose byte c is where block c's entry lies in the operand table. Word q of a row's block holds codes
// 4 q to 4 q + 3 and 16 + 4 q to 16 + 4 q + 3: what lane % 4 == q holds of the row in a WGMMA of 32 along K.
#pragma once

#include "megamoe/numerics/fp4_as_fp8.cuh"
#include "megamoe/pipeline/math_thread.cuh"
#include "megamoe/pipeline/ring.cuh"

namespace megamoe {

constexpr uint32_t kPackedHalfRows = 128;
constexpr uint32_t kPackedRowBytes = 16;                                   // 32 codes
constexpr uint32_t kPackedBlockBytes = kPackedHalfRows * kPackedRowBytes;  // 32 of K, 128 rows
constexpr uint32_t kPackedHalfBytes = 4 * kPackedBlockBytes;               // 128 of K, 128 rows

// 64 rows x 128 of K: a thread's registers for each 32 of K.
struct WeightFragment {
    uint32_t words[4][4];
};

struct RegisterWeights {
    uint32_t codes;  // where this lane's are, in stage 0
    uint32_t entries;
    uint32_t tables;

    __device__ __forceinline__ RegisterWeights(const Ring& ring, const MathThread& thread)
        : tables(ring.base + cfg::kSmemOperandTables) {
        const uint32_t row = thread.warpgroup * kSwappedRowsEach + thread.warp * 16 + thread.lane / 4;
        codes = ring.weights(0) + row / kPackedHalfRows * kPackedHalfBytes + row % kPackedHalfRows * kPackedRowBytes +
                thread.quad * 4;
        entries = ring.weights(0) + 2 * kPackedHalfBytes + row * 4;
    }

    // Where the entry of byte `block` lies: the tables' address ends in a byte of zeros.
    __device__ __forceinline__ uint32_t table_address(uint32_t row_entries, uint32_t block) const {
        uint32_t address;
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(address) : "r"(row_entries), "r"(tables), "r"(0x7650 + block));
        return address;
    }

    // The warpgroup's 64 rows.
    __device__ __forceinline__ WeightFragment look_up(uint32_t stage) const {
        uint32_t packed[4][2], row_entries[2];
        const uint32_t offset = stage * cfg::kWeightStageBytes;
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
            row_entries[h] = load(entries + offset + 8 * h * 4);
        }
#pragma unroll
        for (uint32_t block = 0; block < 4; ++block)
#pragma unroll
            for (uint32_t h = 0; h < 2; ++h) {
                packed[block][h] = load(codes + offset + block * kPackedBlockBytes + 8 * h * kPackedRowBytes);
            }
        WeightFragment fragment;
#pragma unroll
        for (uint32_t block = 0; block < 4; ++block)
#pragma unroll
            for (uint32_t h = 0; h < 2; ++h) {
                const OperandTable table = load_operand_table(table_address(row_entries[h], block));
                const uint2 operands = table.operands(packed[block][h]);
                fragment.words[block][h] = operands.x;
                fragment.words[block][2 + h] = operands.y;
            }
        return fragment;
    }

    __device__ __forceinline__ static uint32_t load(uint32_t address) {
        uint32_t word;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
        return word;
    }
};

}  // namespace megamoe
