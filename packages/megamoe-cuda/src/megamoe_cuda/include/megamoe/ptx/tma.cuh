// Bulk copies between global and shared memory. They go through the async proxy: a proxy fence stands between ordinary
// accesses and bulk copies of the same bytes.
#pragma once

#include "megamoe/ptx/types.cuh"

namespace megamoe::ptx {

// A CUtensorMap, passed by value inside the kernel's arguments.
struct alignas(64) TensorMap {
    uint64_t words[16];
};

__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Box at (column `x`, row `y`) of a 2-D map.
__device__ __forceinline__ void tma_load_2d(uint32_t destination, const TensorMap& map, uint32_t x, uint32_t y,
                                            uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            destination),
        "l"(&map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}
// The same box to the same place in every CTA of `ctas`, a bit each; each one's own `barrier` is told of the bytes.
__device__ __forceinline__ void tma_load_2d_multicast(uint32_t destination, const TensorMap& map, uint32_t x, uint32_t y,
                                                      uint32_t barrier, uint16_t ctas) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
        "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"(ctas)
        : "memory");
}
// The same box into the L2 cache only; a hint.
__device__ __forceinline__ void tma_prefetch_2d(const TensorMap& map, uint32_t x, uint32_t y) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(x), "r"(y) : "memory");
}
// Contiguous bytes into the L2 cache only; a hint.
__device__ __forceinline__ void bulk_prefetch(const void* source, uint32_t num_bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(num_bytes) : "memory");
}
// Contiguous bytes; addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source, uint32_t num_bytes,
                                          uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
        "l"(source), "r"(num_bytes), "r"(barrier)
        : "memory");
}

// Four bytes, by the generic proxy.
__device__ __forceinline__ void copy_word(uint32_t destination, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(source) : "memory");
}
__device__ __forceinline__ void await_words() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Contiguous bytes from shared to global memory; joins the thread's open bulk group.
__device__ __forceinline__ void bulk_store(void* destination, uint32_t source, uint32_t num_bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source),
                 "r"(num_bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the last kPending groups of this thread are written, not only read.
template <int kPending>
__device__ __forceinline__ void bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace megamoe::ptx
