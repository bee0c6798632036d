// Where a math thread's accumulators lie in a tile of kTileM x 256.
//
// How the two math warpgroups share a tile
//   split N   kTileM 64: both take all rows; warpgroup w takes columns [128 w, 128 w + 128): one half.
//   split M   kTileM 128: warpgroup w takes rows [64 w, 64 w + 64) and all columns, as two halves of 128.
// Tiles of fewer rows, and blocks of up to kSwappedRows, are multiplied otherwise (swapped_loop.cuh).
#pragma once

#include "megamoe/ptx/types.cuh"
#include "megamoe/ptx/wgmma.cuh"

namespace megamoe {

constexpr uint32_t kHalves = cfg::kSplitM ? 2 : 1;
constexpr uint32_t kHalfColumns = 128;
constexpr uint32_t kHalfBytes = kHalfColumns * ptx::kSwizzleBytes;
constexpr uint32_t kMathBarrier = 1;  // all math threads
constexpr uint32_t kMathThreads = cfg::kMathWarps * kWarpSize;
constexpr uint32_t kSwappedHalves = 16 / cfg::kMathWarps;  // of 64 weight rows, for each warpgroup, with swapped operands
constexpr uint32_t kSwappedRowsEach = 64 * kSwappedHalves;

// Place of a math thread: its warpgroup, and where its accumulators lie.
struct MathThread {
    uint32_t warpgroup;  // 0 or 1; up to 3 where there are four (register_loop.cuh)
    uint32_t warp;       // in the warpgroup
    uint32_t lane;
    uint32_t first_row;  // of its warp's 16 rows, in the tile
    uint32_t quad;       // lane % 4: columns 8 j + 2 quad + {0, 1}

    __device__ __forceinline__ static MathThread identify() {
        uint32_t thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));  // volatile: recomputed, not kept over the main loop
        return MathThread(thread - cfg::kProducerWarps * kWarpSize);
    }
    __device__ __forceinline__ explicit MathThread(uint32_t math_thread)
        : warpgroup(__shfl_sync(kFullMask, math_thread / (4 * kWarpSize), 0)),
          warp(__shfl_sync(kFullMask, math_thread / kWarpSize % 4, 0)),
          lane(math_thread % kWarpSize),
          first_row((cfg::kSplitM ? warpgroup * 64 : 0) + warp * 16),
          quad(lane % 4) {}

    // Its two rows are row() and row() + 8.
    __device__ __forceinline__ uint32_t row() const { return first_row + lane / 4; }
    // First of the 128 columns of half h, in the tile.
    __device__ __forceinline__ uint32_t column(uint32_t half) const {
        return (cfg::kSplitM ? half : warpgroup) * kHalfColumns;
    }
};

// Accumulators: values[half][4 j + 2 h + {0, 1}] is row() + 8 h, column(half) + 8 j + 2 quad + {0, 1}.
struct Accumulators {
    float values[kHalves][64];
};

}  // namespace megamoe
