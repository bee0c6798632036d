// Who this CTA is: its rank, its place in the rank, the call's epoch, and what it may address.
#pragma once

#include "megamoe/symm/arguments.cuh"
#include "megamoe/symm/watchdog.cuh"
#include "megamoe/symm/workspace.cuh"

namespace megamoe {

struct Cta {
    const KernelArguments& arguments;
    uint32_t virtual_rank;
    uint32_t rank;
    uint32_t index;  // in [0, kCtasPerRank)
    uint32_t epoch;
    uint32_t num_tokens;
    Workspace workspace;

    __device__ __forceinline__ Cta(const KernelArguments& arguments_, uint32_t epoch_, uint32_t num_tokens_)
        : arguments(arguments_),
          virtual_rank(cfg::kNumVirtualRanks == 1 ? 0 : blockIdx.x / cfg::kCtasPerRank),
          rank(arguments_.first_rank + virtual_rank),
          index(cfg::kNumVirtualRanks == 1 ? blockIdx.x : blockIdx.x % cfg::kCtasPerRank),
          epoch(epoch_),
          num_tokens(num_tokens_),
          workspace{arguments_.workspaces[rank]} {}

    __device__ __forceinline__ const RankArguments& own() const { return arguments.ranks[virtual_rank]; }
    __device__ __forceinline__ Workspace peer(uint32_t rank_) const { return Workspace{arguments.workspaces[rank_]}; }
    __device__ __forceinline__ Watchdog watchdog() const {
        return {arguments, virtual_rank, rank, epoch, arguments.timeout_ns};
    }
};

// What a Cta holds that is not in the arguments, in shared memory: the math warps have no registers for it while they
// multiply, and recall it for each epilogue.
struct CtaFacts {
    uint32_t epoch;
    uint32_t num_tokens;
    uint32_t takes_part;
};
static_assert(sizeof(CtaFacts) == cfg::kFactsBytes, "smem_budget.py counts the facts differently");

// One thread; a barrier follows.
__device__ __forceinline__ void identify_cta(const KernelArguments& arguments, uint32_t facts_address) {
    const Cta cta(arguments, 0, 0);
    const RankArguments& own = cta.own();
    // The abort flag once per launch: what a CTA does from here on must be the same in all its threads. The epoch is read
    // by all CTAs before the rank's last grid join, raised by one after it.
    const bool aborted = cta.watchdog().aborted();
    const uint32_t epoch = ptx::ld_relaxed_gpu(cta.workspace.epoch()) + 1;
    uint32_t tokens = min(own.num_tokens, cfg::kMaxTokens);
    if (own.device_num_tokens != nullptr) {  // never past the caller's tensors
        tokens = min(static_cast<uint32_t>(max(*own.device_num_tokens, 0)), tokens);
    }
    asm volatile("st.volatile.shared.v2.u32 [%0], {%1, %2};" ::"r"(facts_address), "r"(epoch), "r"(tokens) : "memory");
    asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(facts_address + 8), "r"(aborted ? 0 : 1) : "memory");
}

// Whether this launch takes part in the protocol: not after a call that failed, until the session is reset.
__device__ __forceinline__ bool takes_part(uint32_t facts_address) {
    uint32_t result;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(result) : "r"(facts_address + 8) : "memory");
    return result != 0;
}

__device__ __forceinline__ Cta recall_cta(const KernelArguments& arguments, uint32_t facts_address) {
    uint32_t epoch, num_tokens;
    asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];"  // volatile: not kept from an earlier recall
                 : "=r"(epoch), "=r"(num_tokens)
                 : "r"(facts_address)
                 : "memory");
    return Cta(arguments, epoch, num_tokens);
}

}  // namespace megamoe
