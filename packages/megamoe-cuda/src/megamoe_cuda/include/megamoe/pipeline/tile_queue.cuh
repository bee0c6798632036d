// Which tiles this CTA runs, from the weight loader to the activation loader and the math warps.
//
// CTAs claim units one at a time, in the order of schedule/units.cuh: the first is the CTA's own number, the next ones
// come from a counter. A fixed assignment left the last CTA 7 to 11% behind the median (H200, 8 and 1024 tokens).
//
//   published[s]   one arrival, the weight loader, after it wrote slot s. Waited for by the readers: the activation loader,
//                  the math warps, the publisher and the converter warps.
//   done[s]        one arrival per math warp, at the end of its epilogue, and one of the publisher, once it has read the slot.
//                  Waited for by the weight loader, and by the publisher: what the math warps stored is then ordered
//                  before the flag that it raises. Other readers need none: math warps end a tile only after these have
//                  read it (kernel_config.py refuses what breaks that).
//   phase          turn t uses slot t mod kQueueSlots; both flip once per trip.
//   end            the last tile has no rows. It always comes, after an abort too: readers wait without a watchdog.
#pragma once

#include "megamoe/pipeline/ring.cuh"
#include "megamoe/schedule/units.cuh"

namespace megamoe {

constexpr uint32_t kQueueSlots = 4;
static_assert(sizeof(Tile) == cfg::kTileBytes, "smem_budget.py counts a tile differently");

struct TileQueue {
    uint32_t base;  // shared address of the CTA's dynamic shared memory

    __device__ __forceinline__ uint32_t slot(uint32_t turn) const {
        return base + cfg::kSmemTiles + turn % kQueueSlots * cfg::kTileSlotBytes;
    }
    __device__ __forceinline__ uint32_t published(uint32_t turn) const {
        return base + cfg::kSmemQueueBarriers + turn % kQueueSlots * 8;
    }
    __device__ __forceinline__ uint32_t done(uint32_t turn) const { return published(turn) + kQueueSlots * 8; }
    __device__ __forceinline__ static uint32_t parity(uint32_t turn) { return turn / kQueueSlots % 2; }

    // The tile's weight scales: two rows that are filled and freed with the slot (WeightScales of main_loop.cuh).
    __device__ __forceinline__ uint32_t weight_scales(uint32_t turn) const {
        return base + cfg::kSmemWeightScales + turn % kQueueSlots * (2 * cfg::kWeightScaleRowBytes);
    }

    // One thread; __syncthreads() follows.
    __device__ __forceinline__ void initialize() const {
        for (uint32_t turn = 0; turn < kQueueSlots; ++turn) {
            ptx::mbarrier_init(published(turn), 1);
            ptx::mbarrier_init(done(turn), cfg::kMathWarps + 1);
        }
        ptx::fence_mbarrier_init();
    }

    __device__ __forceinline__ void publish(uint32_t turn, const Tile& tile) const {
        while (!ptx::mbarrier_try_wait(done(turn), parity(turn) ^ 1)) {
        }
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(slot(turn)), "r"(tile.is_gemm2), "r"(tile.block),
                     "r"(tile.n_tile), "r"(tile.expert)
                     : "memory");
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(slot(turn) + 16), "r"(tile.ring_slot), "r"(tile.num_rows)
                     : "memory");
        if constexpr (cfg::kClusterSize > 1) {
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(slot(turn) + 24), "r"(tile.block_rows) : "memory");
        }
        ptx::mbarrier_arrive(published(turn));
    }

    __device__ __forceinline__ void await(uint32_t turn) const {
        while (!ptx::mbarrier_try_wait(published(turn), parity(turn))) {
        }
    }
    // The publisher: it needs the slot no more, and waits until every math warp has ended the tile.
    __device__ __forceinline__ void await_end_of_tile(uint32_t turn) const {
        ptx::mbarrier_arrive(done(turn));
        while (!ptx::mbarrier_try_wait(done(turn), parity(turn))) {
        }
    }
    // After await(). Volatile: read again where it is needed, not kept in registers.
    __device__ __forceinline__ Tile read(uint32_t turn) const {
        Tile tile;
        asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(tile.is_gemm2), "=r"(tile.block), "=r"(tile.n_tile), "=r"(tile.expert)
                     : "r"(slot(turn))
                     : "memory");
        asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(tile.ring_slot), "=r"(tile.num_rows)
                     : "r"(slot(turn) + 16)
                     : "memory");
        tile.block_rows = tile.num_rows;
        if constexpr (cfg::kClusterSize > 1) {
            asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(tile.block_rows) : "r"(slot(turn) + 24) : "memory");
        }
        return tile;
    }
    // One warp, when it needs the tile no more.
    __device__ __forceinline__ void release(uint32_t turn) const {
        __syncwarp();
        if (lane_id() == 0) ptx::mbarrier_arrive(done(turn));
    }
};

}  // namespace megamoe
