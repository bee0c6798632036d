// CTAs that work as one: with kClusterSize 2, two CTAs multiply the two halves of a block's rows by the same weights. Each
// loads half of a stage's weights into both CTAs' shared memory, so that the L2 cache hands out each byte once.
//
//   A cluster claims one unit at a time. In a block with more than kTileM rows CTA r takes rows [r kTileM, (r + 1) kTileM).
//   Otherwise CTA r of a unit with number n takes all rows and column tile 2 n + r; units past the last column are empty.
//   Either way both run as many K blocks, and their rings stay in step.
//
//   full[s]       completes when both CTAs' halves have landed.
//   empty[s]      counts the math warps of both CTAs: what a CTA loads overwrites both CTAs' stages.
//   sent          in the second CTA: the first one's loader has stored its claim there (UnitClaims).
//   taken         in the first CTA: the second one's loader has read it.
#pragma once

#include "megamoe/pipeline/ring.cuh"
#include "megamoe/ptx/cluster.cuh"
#include "megamoe/symm/cta.cuh"

namespace megamoe {

constexpr bool kInCluster = cfg::kClusterSize > 1;
constexpr uint32_t kClusters = cfg::kCtasPerRank / cfg::kClusterSize;
static_assert(cfg::kCtasPerRank % cfg::kClusterSize == 0, "a cluster belongs to one rank");

__device__ __forceinline__ uint32_t rank_in_cluster() { return kInCluster ? blockIdx.x % cfg::kClusterSize : 0; }

// The weight loader's way to the next unit; the first one is the cluster's own number.
struct UnitClaims {
    uint32_t base;  // shared address of the CTA's dynamic shared memory
    uint32_t turn = 0;

    __device__ __forceinline__ uint32_t sent() const { return base + cfg::kSmemClaimBarriers; }
    __device__ __forceinline__ uint32_t taken() const { return base + cfg::kSmemClaimBarriers + 8; }
    __device__ __forceinline__ uint32_t word() const { return base + cfg::kSmemClaim; }

    // One thread; a barrier of the cluster follows.
    __device__ __forceinline__ void initialize() const {
        if constexpr (kInCluster) {
            ptx::mbarrier_init(sent(), 1);
            ptx::mbarrier_init(taken(), 1);
            ptx::fence_mbarrier_init();
        }
    }

    // False: aborted.
    __device__ __forceinline__ bool next(const Cta& cta, uint32_t& unit) {
        if constexpr (!kInCluster) {
            unit = kClusters + atomicAdd(cta.workspace.claimed_units(cta.epoch), 1u);
            return true;
        }
        const uint32_t phase = turn++ % 2;
        const bool leads = rank_in_cluster() == 0;
        if (leads) unit = kClusters + atomicAdd(cta.workspace.claimed_units(cta.epoch), 1u);
        else ptx::mbarrier_arrive_expect_tx(sent(), sizeof(unit));
        if (!wait_mbarrier(cta.watchdog().secondary(), Phase::kPipeline, cta.rank, leads ? taken() : sent(),
                           leads ? phase ^ 1 : phase)) {
            return false;
        }
        if (leads) {
            ptx::store_async(ptx::shared_address_in(word(), 1), unit, ptx::shared_address_in(sent(), 1));
        } else {
            asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(unit) : "r"(word()) : "memory");
            ptx::mbarrier_arrive_in_cluster(ptx::shared_address_in(taken(), 0));
        }
        return true;
    }
};

}  // namespace megamoe
