// Who this CTA is: its rank, its place in the rank, the call's epoch, and what it may address.
#pragma once

#include "megamoe/symm/arguments.cuh"
#include "megamoe/symm/watchdog.cuh"
#include "megamoe/symm/workspace.cuh"

namespace megamoe {

struct Cta {
    const KernelArguments& arguments;
    const RankArguments& own;  // this rank's arguments
    uint32_t rank;
    uint32_t index;  // in [0, kCtasPerRank)
    uint32_t epoch;
    uint32_t num_tokens;
    Workspace workspace;
    Watchdog watchdog;

    __device__ __forceinline__ Workspace peer(uint32_t rank_) const { return Workspace{arguments.workspaces[rank_]}; }
};

__device__ __forceinline__ Cta identify_cta(const KernelArguments& arguments) {
    const uint32_t virtual_rank = blockIdx.x / cfg::kCtasPerRank;
    const RankArguments& own = arguments.ranks[virtual_rank];
    const uint32_t rank = arguments.first_rank + virtual_rank;
    const Workspace workspace{arguments.workspaces[rank]};
    // Read by all CTAs before the rank's last grid join, raised by one after it.
    const uint32_t epoch = ptx::ld_relaxed_gpu(workspace.epoch()) + 1;
    const uint32_t tokens = own.device_num_tokens != nullptr ? *own.device_num_tokens : own.num_tokens;
    return Cta{arguments,
               own,
               rank,
               blockIdx.x % cfg::kCtasPerRank,
               epoch,
               min(tokens, cfg::kMaxTokens),
               workspace,
               Watchdog{workspace.abort_flag(rank), arguments.timeout_records + virtual_rank, arguments.timeout_ns, rank,
                        epoch}};
}

}  // namespace megamoe
