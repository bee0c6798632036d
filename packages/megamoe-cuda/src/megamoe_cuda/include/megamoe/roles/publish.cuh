// Publish: raises the flag of each of this CTA's tiles once its math warps have stored, so that none of them waits for the
// release: it takes until all stores of the CTA are visible, microseconds, and the other warps of the math warp that
// waited could not multiply without it (2% of a call from 1,024 tokens, H200).
//
//   Waits     done[t] of the tile queue: every math warp has ended the tile. No watchdog, as the queue's other readers
//   Raises    a2_written[b], or block_retired[b] where somebody waits for it, by one per column tile; red.release.gpu.
//             Not after an abort: then a tile may not have been multiplied
#pragma once

#include "megamoe/pipeline/tile_queue.cuh"
#include "megamoe/symm/cta.cuh"

namespace megamoe {

// One thread.
__device__ __forceinline__ void publisher(const KernelArguments& arguments, const Ring& ring, const TileQueue& queue) {
#pragma unroll 1
    for (uint32_t turn = 0;; ++turn) {
        queue.await(turn);
        const Tile tile = queue.read(turn);
        if (tile.is_end()) return;
        queue.await_end_of_tile(turn);
        const bool is_awaited = !tile.is_gemm2 || cfg::kRingWraps || cfg::kConvertsAhead;
        if (!is_awaited || ring.gave_up()) continue;
        const Cta cta = recall_cta(arguments, ring.facts());
        uint32_t* flags = tile.is_gemm2 ? cta.workspace.block_retired(cta.epoch) : cta.workspace.a2_written(cta.epoch);
        ptx::red_add_release_gpu(flags + tile.block, tile.arrivals());
    }
}

}  // namespace megamoe
