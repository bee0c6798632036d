// Every wait of the kernel, and how it ends when nothing comes.
//
// A wait that outlives the timeout never traps: a trap would leave the CUDA context unusable. It sets the rank's abort
// flag and writes what it waited for to host-mapped memory. Every wait of the rank polls the flag. From then on waits
// return false at once; roles stop touching memory but keep their barriers in step, all CTAs leave, and the output is
// filled with NaN.
//
// The flag is word `rank` of the rank's `abort` row. CTAs that leave set the same word at every peer (leave() in
// roles/combine.cuh), and a wait for a peer also polls that peer's word: nobody sits out his own timeout behind a rank
// that has given up.
//
// The flag stays set until the session is reset. A launch that finds it set takes no part in the protocol (takes_part()
// of symm/cta.cuh): the failed call left counters and the epoch half-way, and what such a launch pushed would land under
// a peer that still works on that epoch.
#pragma once

#include "megamoe/ptx/ld_st.cuh"
#include "megamoe/ptx/mbarrier.cuh"
#include "megamoe/symm/arguments.cuh"
#include "megamoe/symm/workspace.cuh"

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

// What ended a call. launcher.py holds the same list.
enum class Failure : uint32_t {
    kNone = 0,
    kTimeout = 1,
    kPeerFailed = 2,        // the peer said so
    kImpossibleCounts = 3,  // the peer's counts exceed what it can send
};

struct Watchdog {
    const KernelArguments& arguments;
    uint32_t virtual_rank;
    uint32_t rank;
    uint32_t epoch;
    uint64_t timeout_ns;

    __device__ __forceinline__ static uint64_t now_ns() {
        uint64_t t;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
        return t;
    }

    // For a wait that a fault elsewhere in the rank holds up: it waits longer, so that the fault's own wait is named.
    __device__ __forceinline__ Watchdog secondary() const {
        return {arguments, virtual_rank, rank, epoch, timeout_ns + timeout_ns / 4};
    }

    // Signed: nothing promises that %globaltimer never steps back.
    __device__ __forceinline__ bool has_expired(uint64_t start) const {
        return static_cast<int64_t>(now_ns() - start) > static_cast<int64_t>(timeout_ns);
    }

    __device__ __forceinline__ uint32_t* abort_flag() const {
        return Workspace{arguments.workspaces[rank]}.abort_flag(rank);
    }
    __device__ __forceinline__ bool aborted() const { return ptx::ld_relaxed_gpu(abort_flag()) != 0; }
    __device__ __forceinline__ bool peer_failed(uint32_t peer) const {
        return ptx::ld_relaxed_sys(Workspace{arguments.workspaces[rank]}.abort_flag(peer)) != 0;
    }

    __device__ __forceinline__ void report(Failure failure, Phase phase, uint32_t peer, uint32_t index,
                                           uint32_t observed, uint32_t expected) const {
        if (atomicCAS(abort_flag(), 0u, 1u) != 0u) return;  // the first wait to end tells
        volatile FailureRecord* r = arguments.failure_records + virtual_rank;
        r->rank = rank;
        r->peer = peer;
        r->phase = static_cast<uint32_t>(phase);
        r->epoch = epoch;
        r->index = index;
        r->observed = observed;
        r->expected = expected;
        __threadfence_system();
        r->failure = static_cast<uint32_t>(failure);
        __threadfence_system();
    }
};

__device__ __forceinline__ bool reached(uint32_t value, uint32_t target) {
    return static_cast<int32_t>(value - target) >= 0;  // survives the wrap at 2^32
}

// Polls `load()` until it reaches `target`. True: it did, and `load`'s acquire orders what follows. False: aborted.
// `peer` is the rank that raises the flag. Why the wait should end is looked up before the load, so that a CTA which was
// not scheduled for the whole timeout still sees a flag that was raised meanwhile.
template <typename Load>
__device__ __forceinline__ bool wait_until(const Watchdog& watchdog, Phase phase, uint32_t peer, uint32_t index,
                                           uint32_t target, Load load) {
    uint32_t value = load();
    if (reached(value, target)) return true;
    const uint64_t start = Watchdog::now_ns();
    for (uint32_t spins = 1;; ++spins) {
        const bool looks = spins % 32 == 0;
        const bool aborted = looks && watchdog.aborted();
        const bool peer_failed = looks && peer != watchdog.rank && watchdog.peer_failed(peer);
        const bool expired = looks && watchdog.has_expired(start);
        value = load();
        if (reached(value, target)) return true;
        if (aborted) return false;
        if (!peer_failed && !expired) continue;
        watchdog.report(peer_failed ? Failure::kPeerFailed : Failure::kTimeout, phase, peer, index, value, target);
        return false;
    }
}

// The same for the completion of an mbarrier's phase, which nobody announces a failure of.
__device__ __forceinline__ bool wait_mbarrier(const Watchdog& watchdog, Phase phase, uint32_t peer, uint32_t barrier,
                                              uint32_t parity) {
    if (ptx::mbarrier_try_wait(barrier, parity)) return true;
    const uint64_t start = Watchdog::now_ns();
    for (;;) {
        const bool aborted = watchdog.aborted(), expired = watchdog.has_expired(start);
        if (ptx::mbarrier_try_wait(barrier, parity)) return true;
        if (aborted) return false;
        if (!expired) continue;
        watchdog.report(Failure::kTimeout, phase, peer, blockIdx.x, barrier, parity);
        return false;
    }
}

}  // namespace megamoe
