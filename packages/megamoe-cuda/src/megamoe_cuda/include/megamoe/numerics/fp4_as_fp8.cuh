// MXFP4 weights as e4m3 operands: code -> e2m1 value * 2^d, d in [-8, 6], always exact. (d is what a block of 32 has over the
// base scale of its 128 x 128 block; weights.py sees to the range.)
//
// A table of 16 entries of 8 bytes in shared memory holds, for each d, the operands of the eight magnitudes; entry 15 is
// NaN. One byte permute looks up four codes at once.
//
//   packed word   8 codes: nibble n holds the magnitude of code n; the sign of code i stands in nibble 2 i + 1 and that of
//                 code 4 + i in nibble 2 i, i < 4, so that both groups of four signs are a mask away from their bytes
#pragma once

#include "megamoe/ptx/convert.cuh"
#include "megamoe/ptx/types.cuh"

namespace megamoe {

constexpr uint32_t kOperandEntries = 16;
constexpr uint32_t kOperandEntryBytes = 8;
constexpr uint32_t kNanEntry = 15;
constexpr int32_t kLowestShift = -8;

// The operands of the eight magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 under one scale.
struct OperandTable {
    uint32_t low, high;

    __device__ __forceinline__ uint2 operands(uint32_t packed) const {
        const uint32_t magnitudes = packed & 0x77777777u;
        return make_uint2(looked_up(magnitudes) | (packed & 0x80808080u),
                          looked_up(magnitudes >> 16) | (packed << 4 & 0x80808080u));
    }

    // Of the four nibbles in the lower half. Not __byte_perm, which masks them once more.
    __device__ __forceinline__ uint32_t looked_up(uint32_t magnitudes) const {
        uint32_t found;
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(low), "r"(high), "r"(magnitudes));
        return found;
    }
};

// Threads [0, 128) of the CTA fill the table at `address`; a barrier follows.
__device__ __forceinline__ void fill_operand_tables(uint32_t address) {
    if (threadIdx.x >= kOperandEntries * kOperandEntryBytes) return;
    const uint32_t entry = threadIdx.x / kOperandEntryBytes, code = threadIdx.x % kOperandEntryBytes;
    const float value = code < 4 ? 0.5f * code : (code % 2 ? 3.f : 2.f) * (code < 6 ? 1.f : 2.f);
    const float scale = __uint_as_float((127 + kLowestShift + entry) << 23);
    const uint32_t operand = entry == kNanEntry ? 0x7fu : ptx::pack_e4m3x2(__fmul_rn(value, scale), 0.f) & 0xffu;
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(address + threadIdx.x), "r"(operand) : "memory");
}

__device__ __forceinline__ OperandTable load_operand_table(uint32_t address) {
    OperandTable table;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(table.low), "=r"(table.high) : "r"(address));
    return table;
}

}  // namespace megamoe
