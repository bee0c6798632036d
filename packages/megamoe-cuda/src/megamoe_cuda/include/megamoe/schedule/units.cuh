// The order of the GEMM tiles of a rank: megamoe/schedule/persistent.py in closed form (`unit_at` there).
//
// In step s come the GEMM1 tiles of group s of blocks, then the GEMM2 tiles of the group that trails by the lag, each column
// by column. CTAs, or clusters of them, claim units in this order, and each runs its own in increasing order: what a unit
// waits for has a lower number, so somebody has claimed it, and runs.
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

__device__ __forceinline__ Unit unit_in_group(bool is_gemm2, uint32_t group, uint32_t index, uint32_t num_blocks) {
    const uint32_t first = group * cfg::kGroupBlocks;
    const uint32_t blocks = cfg::kGroupBlocks == 1 ? 1 : min(num_blocks - first, cfg::kGroupBlocks);
    return {is_gemm2, first + index % blocks, index / blocks};
}

__device__ __forceinline__ Unit unit_at(uint32_t unit, uint32_t num_blocks) {
    constexpr uint32_t kGroup = cfg::kGroupBlocks, kLag = cfg::kLagBlocks / kGroup;
    constexpr uint32_t kGemm1Units = kGroup * cfg::kGemm1NTiles, kGemm2Units = kGroup * cfg::kGemm2NTiles;
    const uint32_t groups = ceil_div(num_blocks, kGroup), lead = min(kLag, groups);
    const uint32_t lead_blocks = min(lead * kGroup, num_blocks);             // whose GEMM1 comes alone
    const uint32_t early_blocks = min((groups - lead) * kGroup, num_blocks);  // whose GEMM2 does not
    const uint32_t lead_units = lead_blocks * cfg::kGemm1NTiles;
    if (unit < lead_units) return unit_in_group(false, unit / kGemm1Units, unit % kGemm1Units, num_blocks);
    unit -= lead_units;
    const uint32_t both_units = (num_blocks - lead_blocks) * cfg::kGemm1NTiles + early_blocks * cfg::kGemm2NTiles;
    if (unit < both_units) {
        const uint32_t step = min(unit / (kGemm1Units + kGemm2Units), groups - lead - 1);  // the last one may have fewer
        const uint32_t index = unit - step * (kGemm1Units + kGemm2Units);
        const uint32_t own_gemm1_units = min(num_blocks - (lead + step) * kGroup, kGroup) * cfg::kGemm1NTiles;
        if (index < own_gemm1_units) return unit_in_group(false, lead + step, index, num_blocks);
        return unit_in_group(true, step, index - own_gemm1_units, num_blocks);
    }
    unit -= both_units;
    return unit_in_group(true, groups - lead + unit / kGemm2Units, unit % kGemm2Units, num_blocks);
}

// A unit with what its roles need to know about its block.
struct Tile {
    uint32_t is_gemm2;
    uint32_t block;
    uint32_t n_tile;
    uint32_t expert;
    uint32_t ring_slot;   // in tiles of kTileM rows
    uint32_t num_rows;    // valid rows, 1 to kTileM; 0: no tile, the end
    uint32_t block_rows;  // valid rows of the block

    __device__ __forceinline__ bool is_end() const { return num_rows == 0; }
    __device__ __forceinline__ uint32_t k_blocks() const {
        return is_gemm2 ? cfg::kGemm2KBlocks : cfg::kGemm1KBlocks;
    }
    __device__ __forceinline__ uint32_t ring_row() const { return ring_slot * cfg::kTileM; }
    __device__ __forceinline__ uint32_t row_in_block() const { return ring_slot % cfg::kClusterSize * cfg::kTileM; }
    // Whether the CTAs of a cluster multiply by the same weights (pipeline/cluster.cuh).
    __device__ __forceinline__ bool shares_weights() const { return cfg::kClusterSize > 1 && block_rows > cfg::kTileM; }
    // Of a CTA on its block's flags, which count to the same number however few rows the block has.
    __device__ __forceinline__ uint32_t arrivals() const {
        return cfg::kClusterSize == 1 || shares_weights() ? 1 : cfg::kClusterSize;
    }
};

// The tile that CTA `rank` of a cluster has in a unit; one without rows where it has none.
__device__ __forceinline__ Tile tile_at(uint32_t unit, const PoolPlan& plan, uint32_t rank) {
    const Unit u = unit_at(unit, plan.num_blocks());
    const uint32_t expert = plan.expert_of_block(u.block), rows = plan.block_rows(u.block, expert);
    const uint32_t ring_slot = u.block % cfg::kRingBlocks * cfg::kClusterSize;
    Tile tile{u.is_gemm2, u.block, u.n_tile, expert, ring_slot, rows, rows};
    if constexpr (cfg::kClusterSize > 1) {
        if (tile.shares_weights()) {
            tile.ring_slot += rank;
            tile.num_rows = min(rows - rank * cfg::kTileM, cfg::kTileM);
        } else {
            tile.n_tile = u.n_tile * cfg::kClusterSize + rank;
            if (tile.n_tile >= (u.is_gemm2 ? cfg::kGemm2NTiles : cfg::kGemm1NTiles)) tile.num_rows = 0;
        }
    }
    return tile;
}

}  // namespace megamoe
