// The ring of shared-memory stages between the loaders and the math warpgroups. A stage holds 128 of K:
// activations [kTileM][128] and weights [256][128], both swizzled by 128 bytes, and the kTileM row scales.
//
//   full[s]    two arrivals, each announcing its bytes: the weight loader and the activation loader. Completes when all
//              bytes have landed. Waited for by every math thread.
//   empty[s]   one arrival per math warp, of all CTAs of a cluster, after its last read of the stage. Waited for by both
//              loaders.
//   phase      both flip once per trip round the ring. A loader's first trip waits for the parity 1, which a fresh
//              barrier passes at once.
#pragma once

#include "megamoe/ptx/mbarrier.cuh"
#include "megamoe/ptx/types.cuh"

namespace megamoe {

struct Ring {
    uint32_t base;  // shared address of the CTA's dynamic shared memory

    __device__ __forceinline__ uint32_t activations(uint32_t stage) const {
        return base + cfg::kSmemActivations + stage * cfg::kActivationStageBytes;
    }
    __device__ __forceinline__ uint32_t weights(uint32_t stage) const {
        return base + cfg::kSmemWeights + stage * cfg::kWeightStageBytes;
    }
    __device__ __forceinline__ uint32_t scales(uint32_t stage) const {
        return base + cfg::kSmemScales + stage * cfg::kScaleStageBytes;
    }
    __device__ __forceinline__ uint32_t full(uint32_t stage) const { return base + cfg::kSmemBarriers + 8 * stage; }
    __device__ __forceinline__ uint32_t empty(uint32_t stage) const {
        return base + cfg::kSmemBarriers + 8 * (cfg::kNumStages + stage);
    }

    __device__ __forceinline__ uint32_t facts() const { return base + cfg::kSmemFacts; }  // CtaFacts

    // Set by a loader that leaves because of an abort: its stages will never be full.
    __device__ __forceinline__ void give_up() const {
        asm volatile("st.volatile.shared.u32 [%0], 1;" ::"r"(base + cfg::kSmemGaveUp) : "memory");
    }
    __device__ __forceinline__ bool gave_up() const {
        uint32_t flag;
        asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(flag) : "r"(base + cfg::kSmemGaveUp) : "memory");
        return flag != 0;
    }

    // One thread; __syncthreads() follows.
    __device__ __forceinline__ void initialize() const {
        for (uint32_t stage = 0; stage < cfg::kNumStages; ++stage) {
            ptx::mbarrier_init(full(stage), 2);
            ptx::mbarrier_init(empty(stage), cfg::kMathWarps * cfg::kClusterSize);
        }
        ptx::fence_mbarrier_init();
        asm volatile("st.volatile.shared.u32 [%0], 0;" ::"r"(base + cfg::kSmemGaveUp) : "memory");
    }
};

// A position on the ring: which stage, and the parity of the trip.
struct RingPosition {
    uint32_t stage = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == cfg::kNumStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

}  // namespace megamoe
