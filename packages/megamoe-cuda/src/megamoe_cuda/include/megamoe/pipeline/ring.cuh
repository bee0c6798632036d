// The ring of shared-memory stages between the loaders and the math warpgroups. A stage holds 128 of K:
// activations [kTileM][128] and weights [256][128], both swizzled by 128 bytes, and the kTileM row scales.
//
//   full[s]    two arrivals, each announcing its bytes: the weight loader and the activation loader. Completes when all
//              bytes have landed, with a tile's first stage those of its weight scales too. Waited for by every math
//              thread.
//   empty[s]   one arrival per math warp, of all CTAs of a cluster, after its last read of the stage. Waited for by both
//              loaders.
//   phase      both flip once per trip round the ring. A loader's first trip waits for the parity 1, which a fresh
//              barrier passes at once.
//
// In mode a8w4 the weights come packed, through a ring of their own, and the converter warps make of them the operands of a
// stage (roles/convert.cuh). There are fewer buffers of operands than stages: stage s has buffer s mod kNumWeightBuffers.
//
//   full[s]           instead of the weight loader's, an arrival of each warp of the group that converts the stage
//   packed_full[p]    one arrival with the stage's bytes, the weight loader's. Waited for by the group.
//   packed_empty[p]   one arrival per warp of the group, after its last read. Waited for by the weight loader.
//
// Where converter warps work ahead instead (roles/convert_ahead.cuh), the ring is that of mode a8w8.
#pragma once

#include "megamoe/ptx/mbarrier.cuh"
#include "megamoe/ptx/types.cuh"

namespace megamoe {

constexpr bool kConverts = cfg::kConverterWarps > 0 && !cfg::kConvertsAhead;
constexpr uint32_t kConverterGroupWarps = 4;  // that convert a stage together
static_assert(cfg::kNumStages % cfg::kNumWeightBuffers == 0, "a stage has one buffer");

// Where dynamic shared memory begins in a CTA's: behind what CUDA keeps for itself; there is no static. WGMMA descriptors of an operand
// that both warpgroups use are then constants, in uniform registers: 1 to 2% of a call from 512 tokens (H200).
constexpr uint32_t kSharedBase = 1024;

// Of the weights of stage `stage`, from those of stage 0.
__device__ __forceinline__ constexpr uint32_t weight_buffer_offset(uint32_t stage) {
    return stage % cfg::kNumWeightBuffers * cfg::kWeightStageBytes;
}

// A position on a ring: which stage, and the parity of the trip.
template <uint32_t kStages>
struct PositionOn {
    uint32_t stage = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};
using RingPosition = PositionOn<cfg::kNumStages>;
struct PackedPosition : PositionOn<cfg::kNumPackedStages> {};  // of packed weights

struct Ring {
    uint32_t base;  // shared address of the CTA's dynamic shared memory

    __device__ __forceinline__ uint32_t activations(uint32_t stage) const {
        return base + cfg::kSmemActivations + stage * cfg::kActivationStageBytes;
    }
    __device__ __forceinline__ uint32_t weights(uint32_t buffer) const {
        return base + cfg::kSmemWeights + buffer * cfg::kWeightStageBytes;
    }
    __device__ __forceinline__ uint32_t packed(uint32_t stage) const {
        return base + cfg::kSmemPacked + stage * cfg::kPackedStageBytes;
    }
    __device__ __forceinline__ uint32_t scales(uint32_t stage) const {
        return base + cfg::kSmemScales + stage * cfg::kScaleStageBytes;
    }
    __device__ __forceinline__ uint32_t full(uint32_t stage) const { return base + cfg::kSmemBarriers + 8 * stage; }
    __device__ __forceinline__ uint32_t empty(uint32_t stage) const {
        return base + cfg::kSmemBarriers + 8 * (cfg::kNumStages + stage);
    }
    __device__ __forceinline__ uint32_t packed_full(uint32_t stage) const {
        return base + cfg::kSmemPackedBarriers + 8 * stage;
    }
    __device__ __forceinline__ uint32_t packed_empty(uint32_t stage) const {
        return base + cfg::kSmemPackedBarriers + 8 * (cfg::kNumPackedStages + stage);
    }

    __device__ __forceinline__ uint32_t full(const RingPosition& at) const { return full(at.stage); }
    __device__ __forceinline__ uint32_t empty(const RingPosition& at) const { return empty(at.stage); }
    __device__ __forceinline__ uint32_t full(const PackedPosition& at) const { return packed_full(at.stage); }
    __device__ __forceinline__ uint32_t empty(const PackedPosition& at) const { return packed_empty(at.stage); }

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
            ptx::mbarrier_init(full(stage), 1 + (kConverts ? kConverterGroupWarps : 1));
            ptx::mbarrier_init(empty(stage), cfg::kMathWarps * cfg::kClusterSize);
        }
        for (uint32_t stage = 0; stage != cfg::kNumPackedStages; ++stage) {
            ptx::mbarrier_init(packed_full(stage), 1);
            ptx::mbarrier_init(packed_empty(stage), kConverterGroupWarps);
        }
        ptx::fence_mbarrier_init();
        asm volatile("st.volatile.shared.u32 [%0], 0;" ::"r"(base + cfg::kSmemGaveUp) : "memory");
    }
};

}  // namespace megamoe
