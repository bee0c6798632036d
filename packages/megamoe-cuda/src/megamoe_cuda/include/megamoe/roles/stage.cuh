// Stage: this rank's tokens become e4m3 payload and FP32 scales in its symmetric workspace, where owners pull them. In
// mode bf16 they are copied as they are. A rank without peers pulls what needs no quantisation from the caller's tensors.
//
// All threads of all CTAs; published by the join that ends `route`. Also zeroes the counters that the next call uses.
#pragma once

#include "megamoe/numerics/fp8_block.cuh"
#include "megamoe/symm/grid_join.cuh"

namespace megamoe {

__device__ __forceinline__ uint32_t thread_in_rank(const Cta& cta) { return cta.index * blockDim.x + threadIdx.x; }
constexpr uint32_t kThreadsPerRank = cfg::kCtasPerRank * cfg::kThreads;

// The counters of the other parity: nobody touches them during this call.
__device__ __forceinline__ void clear_next_counters(const Cta& cta) {
    uint32_t* counters = cta.workspace.counters(cta.epoch + 1);
    for (uint32_t i = thread_in_rank(cta); i < cfg::kCounterWords; i += kThreadsPerRank) counters[i] = 0;
    uint32_t* totals = cta.workspace.route_totals(cta.epoch + 1);
    for (uint32_t i = thread_in_rank(cta); i < cfg::kRouteTotalWords; i += kThreadsPerRank) totals[i] = 0;
}

__device__ __forceinline__ uint4 bf16x8_from(const uint16_t* row, uint32_t column) {
    return __ldg(reinterpret_cast<const uint4*>(row + column));
}

// 512 columns of a row by one warp: 16 columns a lane, so 8 lanes share a scale.
__device__ __forceinline__ void quantize_segment(const Cta& cta, uint32_t token, uint32_t segment) {
    const uint32_t column = segment * 512 + lane_id() * 16;
    const bool inside = column < cfg::kHiddenSize;
    const auto* row = static_cast<const uint16_t*>(cta.own().hidden_states) + static_cast<uint64_t>(token) * cfg::kHiddenSize;
    uint4 packed[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    if (inside) {
        packed[0] = bf16x8_from(row, column);
        packed[1] = bf16x8_from(row, column + 8);
    }
    const uint32_t* words = &packed[0].x;
    float x[16];
    uint32_t amax_bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float2 pair = ptx::unpack_bf16x2(words[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
        amax_bits = max(amax_bits, max(magnitude_bits(pair.x), magnitude_bits(pair.y)));
    }
    const BlockScale scale(max_over_lanes<8>(amax_bits));
    uint32_t q[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        q[i] = scale.quantized_x2(x[4 * i], x[4 * i + 1]) | scale.quantized_x2(x[4 * i + 2], x[4 * i + 3]) << 16;
    }
    if (!inside) return;
    *reinterpret_cast<uint4*>(cta.workspace.input_payload(token) + column) = make_uint4(q[0], q[1], q[2], q[3]);
    if (lane_id() % 8 == 0) cta.workspace.input_scales(token)[column / kScaleBlock] = scale.scale;
}

__device__ __forceinline__ void quantize_input(const Cta& cta) {
    constexpr uint32_t kSegments = ceil_div(cfg::kHiddenSize, 512);
    for (uint32_t item = thread_in_rank(cta) / kWarpSize; item < cta.num_tokens * kSegments;
         item += kThreadsPerRank / kWarpSize) {
        quantize_segment(cta, item / kSegments, item % kSegments);
    }
}

__device__ __forceinline__ void copy_payload(const Cta& cta) {
    const auto* payload = static_cast<const uint4*>(cta.own().hidden_states);
    auto* staged = reinterpret_cast<uint4*>(cta.workspace.input_payload(0));
    const uint64_t payload_words = static_cast<uint64_t>(cta.num_tokens) * (cfg::kInputRowBytes / 16);
    for (uint64_t i = thread_in_rank(cta); i < payload_words; i += kThreadsPerRank) staged[i] = __ldg(payload + i);
}

__device__ __forceinline__ void copy_quantized_input(const Cta& cta) {
    copy_payload(cta);
    const uint32_t num_scales = cta.num_tokens * cfg::kGemm1KBlocks;
    for (uint32_t i = thread_in_rank(cta); i < num_scales; i += kThreadsPerRank) {
        const uint32_t token = i / cfg::kGemm1KBlocks;
        cta.workspace.input_scales(token)[i % cfg::kGemm1KBlocks] = __ldg(cta.own().hidden_scales + i);
    }
}

// Whether rows are pulled from the caller's tensors, in multiples of 16 bytes, as bulk copies want them.
__device__ __forceinline__ bool pulls_from_caller(const Cta& cta) {
    if constexpr (!kHasNoPeers) return false;
    if constexpr (!cfg::kHasRowScales) return true;
    const float* scales = cta.own().hidden_scales;
    return cfg::kInputScaleStride == cfg::kGemm1KBlocks && scales != nullptr && reinterpret_cast<uint64_t>(scales) % 16 == 0;
}

__device__ __forceinline__ const uint8_t* caller_payload(const Cta& cta, uint32_t token) {
    return static_cast<const uint8_t*>(cta.own().hidden_states) + static_cast<uint64_t>(token) * cfg::kInputRowBytes;
}
__device__ __forceinline__ const float* caller_scales(const Cta& cta, uint32_t token) {
    return cta.own().hidden_scales + static_cast<uint64_t>(token) * cfg::kGemm1KBlocks;
}

__device__ __forceinline__ void stage_input(const Cta& cta) {
    if (pulls_from_caller(cta)) return;
    if constexpr (!cfg::kHasRowScales) {
        copy_payload(cta);
    } else {
        if (cta.own().hidden_scales == nullptr) quantize_input(cta);
        else copy_quantized_input(cta);
    }
}

}  // namespace megamoe
