// How a math thread follows the ring of stages: what the main loops of all modes share.
#pragma once

#include "megamoe/pipeline/cluster.cuh"
#include "megamoe/pipeline/math_thread.cuh"
#include "megamoe/ptx/wgmma.cuh"

namespace megamoe {

struct StageReader {
    const Ring& ring;
    bool is_first_lane;
    uint32_t peer_empty;  // in a cluster: ring.empty(0) of CTA `lane`, 0 in lanes that have none
    uint32_t a_descriptor;  // low words, of stage 0
    uint32_t b_descriptor;
    RingPosition position;
    bool alive = true;  // false once a wait was aborted; from then on nothing is waited for

    __device__ __forceinline__ StageReader(const Ring& ring_, const MathThread& thread_)
        : ring(ring_),
          is_first_lane(thread_.lane == 0),
          peer_empty(kInCluster && thread_.lane < cfg::kClusterSize
                         ? ptx::shared_address_in(ring_.empty(0), thread_.lane)
                         : 0),
          a_descriptor(ptx::wgmma_descriptor_low(ring_.activations(0) +
                                             (cfg::kSplitM ? thread_.warpgroup * 64 * ptx::kSwizzleBytes : 0))),
          b_descriptor(
              ptx::wgmma_descriptor_low(ring_.weights(0) + (cfg::kSplitM ? 0 : thread_.warpgroup * kHalfBytes))) {}

    // The loaders keep the time and say when they gave up: the math warps have no registers to spare for a watchdog.
    __device__ __forceinline__ void await_full(uint32_t stage) {
        while (alive && !ptx::mbarrier_try_wait(ring.full(stage), position.phase)) alive = !ring.gave_up();
    }

    // Whether the stage behind `stage` of this trip round the ring is full already; behind a tile's last, the next tile's first.
    // A yes acquires what await_full would.
    __device__ __forceinline__ bool is_next_full(uint32_t stage) const {
        const bool wraps = stage == cfg::kNumStages - 1;
        return ptx::mbarrier_test_wait(ring.full(wraps ? 0 : stage + 1), position.phase ^ wraps);
    }

    // The warp has read all it needs of the stage.
    __device__ __forceinline__ void release(uint32_t stage) { release_if(true, stage); }
    __device__ __forceinline__ void release_if(bool condition, uint32_t stage) {
        __syncwarp();
        if constexpr (kInCluster) {
            // Lane r tells CTA r. Not after an abort: a peer's loader would take the stage for read by its own CTA too.
            if (condition && alive && peer_empty != 0) ptx::mbarrier_arrive_in_cluster(peer_empty + 8 * stage);
        } else {
            if (condition && is_first_lane) ptx::mbarrier_arrive(ring.empty(stage));
        }
    }

    // Keeps the ring in step for a warpgroup whose rows are all padding.
    __device__ __forceinline__ void skip(uint32_t k_blocks) {
#pragma unroll 1
        for (uint32_t k = 0; k < k_blocks; ++k) {
            await_full(position.stage);
            release(position.stage);
            position.advance();
        }
    }
};

}  // namespace megamoe
