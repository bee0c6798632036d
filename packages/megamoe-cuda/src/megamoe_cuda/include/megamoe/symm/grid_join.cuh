// Joins all CTAs of a rank.
//
//   Arrives   every CTA of the rank, once per call and join; one thread, after a barrier of the threads it speaks for.
//   Counter   kept twice, by the epoch's parity, and zeroed by the call of the other parity; the target is kCtasPerRank.
//   Order     red.release.gpu publishes what the CTA did; ld.acquire.gpu orders what follows the wait.
//   Failure   an aborted launch leaves the counter short, since a CTA that did not do its part must not arrive: reset()
//             zeroes it.
#pragma once

#include "megamoe/symm/cta.cuh"

namespace megamoe {

// Then a join says all that a flag of the rank would, and every CTA waits for it itself: one trip to memory less, 1 us.
constexpr bool kHasNoPeers = cfg::kNumRanks == 1;

__device__ __forceinline__ void arrive(const Cta& cta, Join join) {
    ptx::red_add_release_gpu(cta.workspace.join(join, cta.epoch), 1);
}

__device__ __forceinline__ bool await_join(const Cta& cta, Join join, Phase phase) {
    const uint32_t* counter = cta.workspace.join(join, cta.epoch);
    return wait_until(cta.watchdog().secondary(), phase, cta.rank, static_cast<uint32_t>(join), cfg::kCtasPerRank,
                      [=] { return ptx::ld_acquire_gpu(counter); });
}

}  // namespace megamoe
