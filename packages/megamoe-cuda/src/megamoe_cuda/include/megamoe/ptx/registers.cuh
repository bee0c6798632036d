// Moves registers between the warpgroups of a CTA. All four warps of a warpgroup call it.
#pragma once

#include "megamoe/ptx/types.cuh"

namespace megamoe::ptx {

template <uint32_t kRegisters>
__device__ __forceinline__ void release_registers_to() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <uint32_t kRegisters>
__device__ __forceinline__ void claim_registers_to() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace megamoe::ptx
