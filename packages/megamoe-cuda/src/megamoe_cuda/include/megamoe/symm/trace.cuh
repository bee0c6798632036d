// Time stamps of a call's phases, one set per CTA, for kernels compiled with `trace`. Without it, nothing is left.
#pragma once

#include "megamoe/symm/cta.cuh"

namespace megamoe {

// Numbered as launcher.py names them.
enum class TracePoint : uint32_t {
    kStarted = 0,
    kRouted = 1,      // staged and pushed
    kPlanned = 2,     // every source's counts are here, the pool is planned
    kPulled = 3,      // this CTA's first dispatch warp has pulled all its rows
    kMultiplied = 4,  // this CTA's tiles are done
    kFinished = 5,    // every rank's rows are here
    kCombined = 6,
};
constexpr uint32_t kTracePoints = 7;

// One thread of the CTA per point. Nanoseconds of %globaltimer.
__device__ __forceinline__ void trace(const Cta& cta, TracePoint point, bool is_speaker) {
    if constexpr (cfg::kTrace) {
        if (is_speaker) cta.own().trace[cta.index * kTracePoints + static_cast<uint32_t>(point)] = Watchdog::now_ns();
    }
}

}  // namespace megamoe
