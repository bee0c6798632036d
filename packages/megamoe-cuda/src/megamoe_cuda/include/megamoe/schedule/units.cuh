// The order of the GEMM tiles of a rank: megamoe/schedule/persistent.py in closed form (`unit_at` there).
//
// In step s come the GEMM1 tiles of block s, then the GEMM2 tiles of block s - lag. CTAs claim units in this order, and
// each runs its own in increasing order: what a unit waits for has a lower number, so another CTA has claimed it, and
// that CTA runs.
#pragma once

#include "megamoe/schedule/pool_plan.cuh"

namespace megamoe {

struct Unit {
    bool is_gemm2;
    uint32_t block;
    uint32_t n_tile;
};

__device__ __forceinline__ uint32_t num_units(uint32_t num_blocks) {
    return num_blocks * (cfg::kGemm1NTiles + cfg::kGemm2NTiles);
}

__device__ __forceinline__ Unit unit_at(uint32_t unit, uint32_t num_blocks) {
    constexpr uint32_t kStepUnits = cfg::kGemm1NTiles + cfg::kGemm2NTiles;
    const uint32_t lead = min(cfg::kLagBlocks, num_blocks);
    const uint32_t lead_units = lead * cfg::kGemm1NTiles;
    if (unit < lead_units) return {false, unit / cfg::kGemm1NTiles, unit % cfg::kGemm1NTiles};
    unit -= lead_units;
    const uint32_t both_units = (num_blocks - lead) * kStepUnits;
    if (unit < both_units) {
        const uint32_t step = unit / kStepUnits, n_tile = unit % kStepUnits;
        if (n_tile < cfg::kGemm1NTiles) return {false, lead + step, n_tile};
        return {true, step, n_tile - cfg::kGemm1NTiles};
    }
    unit -= both_units;
    return {true, num_blocks - lead + unit / cfg::kGemm2NTiles, unit % cfg::kGemm2NTiles};
}

// A unit with what its roles need to know about its block.
struct Tile {
    uint32_t is_gemm2;
    uint32_t block;
    uint32_t n_tile;
    uint32_t expert;
    uint32_t ring_slot;
    uint32_t num_rows;  // valid rows, 1 to kBlockM; 0: no tile, the end

    __device__ __forceinline__ bool is_end() const { return num_rows == 0; }
    __device__ __forceinline__ uint32_t k_blocks() const {
        return is_gemm2 ? cfg::kGemm2KBlocks : cfg::kGemm1KBlocks;
    }
};

__device__ __forceinline__ Tile tile_at(uint32_t unit, const PoolPlan& plan) {
    const Unit u = unit_at(unit, plan.num_blocks());
    const uint32_t expert = plan.expert_of_block(u.block);
    return {u.is_gemm2, u.block, u.n_tile, expert, u.block % cfg::kRingBlocks, plan.block_rows(u.block, expert)};
}

}  // namespace megamoe
