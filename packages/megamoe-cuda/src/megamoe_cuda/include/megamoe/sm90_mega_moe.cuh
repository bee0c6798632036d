// One launch of one MoE layer on SM90: stage, route, dispatch, GEMM1 + activation, GEMM2, send home, combine.
//
// Persistent and cooperative: one CTA per SM, of three warpgroups. All threads stage and route; then the first warpgroup
// loads (warp 0 weights, warp 1 activations), pulls rows from peers (warp 2) and publishes tiles (warp 3), and two multiply,
// send and combine. In mode a8w4 one or two further warpgroups unpack weights, or four multiply and look them up.
// With virtual ranks, several ranks share the GPU: rank r has CTAs [r * kCtasPerRank, (r + 1) * kCtasPerRank).
//
// codegen.py puts the constants of megamoe::cfg before this file.
#pragma once

#include "megamoe/ptx/registers.cuh"
#include "megamoe/roles/convert.cuh"
#include "megamoe/roles/convert_ahead.cuh"
#include "megamoe/roles/dispatch.cuh"
#include "megamoe/roles/load.cuh"
#include "megamoe/roles/math.cuh"
#include "megamoe/roles/publish.cuh"
#include "megamoe/roles/route.cuh"
#include "megamoe/roles/stage.cuh"
#include "megamoe/symm/trace.cuh"

namespace megamoe {

__device__ __forceinline__ void exchange_routes(const Cta& cta, uint8_t* shared) {
    clear_next_counters(cta);
    stage_input(cta);
    const bool routed = route_picks(cta, *reinterpret_cast<RouteScratch*>(shared));
    trace(cta, TracePoint::kRouted, threadIdx.x == 0);
    publish_counts(cta, routed);
}

// The plan of the counts that the sources sent, if all did and they are possible; an aborted call plans zero rows.
__device__ __forceinline__ void plan_pool(const Cta& cta, SourceCounts& counts, PoolPlan& plan, bool takes_part) {
    bool counted = takes_part && await_counts(cta) && load_counts(cta, counts);
    counted = __syncthreads_and(counted);
    counted = counted && build_pool_plan(cta, counts, plan);
    // The loaders' bulk copies overwrite what routing and the counts left in shared memory.
    ptx::fence_proxy_async_shared();
    if (!__syncthreads_and(counted)) {
        plan_nothing(plan);
        __syncthreads();
    }
    if (cta.own().expert_counts == nullptr || cta.index != 0) return;
    for (uint32_t expert = threadIdx.x; expert < cfg::kNumLocalExperts; expert += blockDim.x) {
        cta.own().expert_counts[expert] = plan.expert_rows(expert);
    }
}

__device__ __forceinline__ void producer_role(const Cta& cta, const PoolPlan& plan, const Ring& ring,
                                              const TileQueue& queue, uint32_t warp) {
    if (warp == 0) {
        if (lane_id() == 0) weight_loader(cta, plan, ring, queue);
    } else if (warp == 1) {
        if (lane_id() == 0) activation_loader(cta, ring, queue);
    } else if (warp < 2 + cfg::kDispatchWarps) {
        dispatch_role(cta.arguments, plan, ring, warp - 2);
        trace(cta, TracePoint::kPulled, warp == 2 && lane_id() == 0);
    } else {
        if (lane_id() == 0) publisher(cta.arguments, ring, queue);
    }
}

}  // namespace megamoe

extern "C" __global__ void __launch_bounds__(megamoe::cfg::kThreads, 1)
    sm90_mega_moe(const __grid_constant__ megamoe::KernelArguments arguments) {
    using namespace megamoe;
    extern __shared__ __align__(1024) uint8_t shared[];
    const Ring ring{ptx::shared_address(shared)};
    const TileQueue queue{ring.base};
    auto& plan = *reinterpret_cast<PoolPlan*>(shared + cfg::kSmemPoolPlan);
    prefetch_picks(arguments);
    if (threadIdx.x == 0) {
        ring.initialize();
        queue.initialize();
        UnitClaims{ring.base}.initialize();
        identify_cta(arguments, ring.facts());
    }
    if constexpr (cfg::kMode == Mode::kA8w4) fill_operand_tables(ring.base + cfg::kSmemOperandTables);
    __syncthreads();
    const Cta cta = recall_cta(arguments, ring.facts());
    trace(cta, TracePoint::kStarted, threadIdx.x == 0);
    const bool takes_part = megamoe::takes_part(ring.facts());
    if (takes_part) exchange_routes(cta, shared);
    if (threadIdx.x == kWarpSize) prefetch_first_weights(cta);
    plan_pool(cta, *reinterpret_cast<SourceCounts*>(shared), plan, takes_part);
    if constexpr (kInCluster) {  // from here on CTAs write to each other's shared memory
        ptx::cluster_arrive();
        ptx::cluster_wait();
    }
    trace(cta, TracePoint::kPlanned, threadIdx.x == 0);

    const uint32_t warp = warp_id();
    if (warp < cfg::kProducerWarps) {
        ptx::release_registers_to<cfg::kProducerRegisters>();
        producer_role(cta, plan, ring, queue, warp);
    } else if (cfg::kConverterWarps == 0 || warp < cfg::kProducerWarps + cfg::kMathWarps) {
        ptx::claim_registers_to<cfg::kMathRegisters>();
        math_role(arguments, plan, ring, queue);
    } else {
        if constexpr (cfg::kConverterWarps > 0) {
            ptx::release_registers_to<cfg::kConverterRegisters>();
            if constexpr (kConverts) converter_role(ring, queue);
            else ahead_converter_role(arguments, plan, ring);
        }
    }
}
