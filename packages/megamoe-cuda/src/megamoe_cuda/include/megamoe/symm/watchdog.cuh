// Every wait of the kernel, and how it ends when nothing comes.
//
// A wait that outlives the timeout never traps: a trap would leave the CUDA context unusable. It writes what it waited
// for to host-mapped memory and sets the rank's abort flag, which every wait of the rank polls. From then on waits
// return false at once; roles stop touching memory but keep their barriers in step, all CTAs leave, and the output is
// filled with NaN. The flag stays set until the session is reset, so a launch after a failed one leaves at once too.
#pragma once

#include "megamoe/ptx/ld_st.cuh"
#include "megamoe/ptx/mbarrier.cuh"
#include "megamoe/symm/arguments.cuh"

namespace megamoe {

// Numbered as errors name them: launcher.py holds the same list.
enum class Phase : uint32_t {
    kStage = 0,
    kRoute = 1,
    kDispatch = 2,
    kGemm1 = 3,
    kGemm2 = 4,
    kFinish = 5,
    kCombine = 6,
    kPipeline = 7,  // an mbarrier inside the CTA
};

struct Watchdog {
    uint32_t* abort_flag;
    TimeoutRecord* record;
    uint64_t timeout_ns;
    uint32_t rank;
    uint32_t epoch;

    __device__ __forceinline__ static uint64_t now_ns() {
        uint64_t t;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
        return t;
    }

    __device__ __forceinline__ bool aborted() const { return ptx::ld_relaxed_gpu(abort_flag) != 0; }

    __device__ __forceinline__ void report(Phase phase, uint32_t peer, uint32_t index, uint32_t observed,
                                        uint32_t expected) const {
        if (atomicCAS(abort_flag, 0u, 1u) != 0u) return;  // the first wait to time out tells
        volatile TimeoutRecord* r = record;
        r->rank = rank;
        r->peer = peer;
        r->phase = static_cast<uint32_t>(phase);
        r->epoch = epoch;
        r->index = index;
        r->observed = observed;
        r->expected = expected;
        __threadfence_system();
        r->happened = 1;
        __threadfence_system();
    }
};

__device__ __forceinline__ bool reached(uint32_t value, uint32_t target) {
    return static_cast<int32_t>(value - target) >= 0;  // survives the wrap at 2^32
}

// Polls `load()` until it reaches `target`. True: it did, and `load`'s acquire orders what follows. False: aborted.
template <typename Load>
__device__ __forceinline__ bool wait_until(const Watchdog& watchdog, Phase phase, uint32_t peer, uint32_t index,
                                           uint32_t target, Load load) {
    uint32_t value = load();
    if (reached(value, target)) return true;
    const uint64_t start = Watchdog::now_ns();
    for (uint32_t spins = 1;; ++spins) {
        value = load();
        if (reached(value, target)) return true;
        if (spins % 32 != 0) continue;
        if (watchdog.aborted()) return false;
        if (Watchdog::now_ns() - start > watchdog.timeout_ns) {
            watchdog.report(phase, peer, index, value, target);
            return false;
        }
    }
}

// The same for the completion of an mbarrier's phase.
__device__ __forceinline__ bool wait_mbarrier(const Watchdog& watchdog, uint32_t barrier, uint32_t parity) {
    if (ptx::mbarrier_try_wait(barrier, parity)) return true;
    const uint64_t start = Watchdog::now_ns();
    while (!ptx::mbarrier_try_wait(barrier, parity)) {
        if (watchdog.aborted()) return false;
        if (Watchdog::now_ns() - start > watchdog.timeout_ns) {
            watchdog.report(Phase::kPipeline, watchdog.rank, blockIdx.x, barrier, parity);
            return false;
        }
    }
    return true;
}

}  // namespace megamoe
