// A cluster of CTAs: barriers between them, and what one writes to another's shared memory.
//
// A CTA may write to a peer's shared memory only between the peer's start and its end, so a cluster meets before the first
// such write and after the last.
#pragma once

#include "megamoe/ptx/types.cuh"

namespace megamoe::ptx {

// Threads that have ended are not waited for.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Cluster address of what CTA `cta` of the cluster has at the same shared address.
__device__ __forceinline__ uint32_t shared_address_in(uint32_t shared_address, uint32_t cta) {
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address), "r"(cta));
    return address;
}
// The barrier lies at a cluster address. Default scope, as in mbarrier.cuh.
__device__ __forceinline__ void mbarrier_arrive_in_cluster(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Stores a word and then tells `barrier` of four bytes; both lie at cluster addresses of one CTA.
__device__ __forceinline__ void store_async(uint32_t destination, uint32_t value, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(destination),
                 "r"(value), "r"(barrier)
                 : "memory");
}

}  // namespace megamoe::ptx
