"""The kernel's source text: constants of one KernelConfig, then the headers that ship with the package."""

from __future__ import annotations

import struct
from pathlib import Path

from megamoe.problem import Activation, QuantMode, Transport
from megamoe.schedule.workspace import combine_row_bytes
from megamoe_cuda.kernel_config import (
    BLOCK_K,
    BLOCK_N,
    NUM_DISPATCH_WARPS,
    NUM_PRODUCER_WARPS,
    PREFETCHED_K_BLOCKS,
    KernelConfig,
)
from megamoe_cuda.smem_budget import (
    AHEAD_GROUP_BYTES,
    AHEAD_GROUPS,
    FACTS_BYTES,
    PACKED_STAGE_BYTES,
    STAGING_WARP_BYTES,
    TILE_BYTES,
    TILE_SLOT_BYTES,
    shared_memory,
)
from megamoe_cuda.workspace_layout import kernel_workspace

INCLUDE_DIR = Path(__file__).resolve().parent.parent / "include"
KERNEL_NAME = "sm90_mega_moe"

_TRANSPORTS = {Transport.BF16: "kBf16", Transport.FP8_BLOCKWISE_1X32: "kFp8Blockwise1x32"}
_ACTIVATIONS = {Activation.SWIGLU: "kSwiglu", Activation.SWIGLU_OAI: "kSwigluOai"}
_MODES = {QuantMode.A8W8: "kA8w8", QuantMode.BF16: "kBf16", QuantMode.A8W4: "kA8w4"}
_OFFSETS = {
    "InputPayload": "input_payload",
    "InputScales": "input_scales",
    "RouteEntries": "route_entries",
    "RouteCounts": "route_counts",
    "Combine": "combine",
    "CountsPublished": "counts_published",
    "RankFinished": "rank_finished",
    "Abort": "abort",
    "PoolPayload": "pool_payload",
    "PoolScales": "pool_scales",
    "PoolMeta": "pool_meta",
    "A2Payload": "a2_payload",
    "A2Scales": "a2_scales",
    "Counters": "counters",
    "DroppedIds": "dropped_ids",
    "Epoch": "epoch",
    "RouteTotals": "route_totals",
    "ConvertedWeights": "converted_weights",
}


def _rounded_to_float32(value: float) -> float:
    """Digits that a float has no room for would be a warning of the compiler's."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def kernel_source(config: KernelConfig) -> str:
    """The translation unit to compile; its `#include`s resolve in INCLUDE_DIR."""
    lines = [f"constexpr unsigned int k{name} = {value}u;" for name, value in _integers(config).items()]
    lines += [f"constexpr bool k{name} = {str(value).lower()};" for name, value in _booleans(config).items()]
    lines += [f"constexpr unsigned long long kOffset{name} = {value}ull;" for name, value in _offsets(config).items()]
    lines += [
        f"constexpr float kLimit = {_rounded_to_float32(config.swiglu_limit or 0.0).hex()}f;",
        f"constexpr Transport kTransport = Transport::{_TRANSPORTS[config.transport]};",
        f"constexpr Activation kActivation = Activation::{_ACTIVATIONS[config.activation]};",
        f"constexpr Mode kMode = Mode::{_MODES[config.quant]};",
    ]
    constants = "\n".join(lines)
    return (
        "namespace megamoe {\n"
        f"enum class Transport {{ {', '.join(_TRANSPORTS.values())} }};\n"
        f"enum class Activation {{ {', '.join(_ACTIVATIONS.values())} }};\n"
        f"enum class Mode {{ {', '.join(_MODES.values())} }};\n"
        f"namespace cfg {{\n{constants}\n}}\n"
        "}\n"
        f'#include "megamoe/{KERNEL_NAME}.cuh"\n'
    )


def _integers(config: KernelConfig) -> dict[str, int]:
    tile = config.tile
    layout = kernel_workspace(config)
    memory = shared_memory(config)
    return {
        "NumRanks": config.num_ranks,
        "NumVirtualRanks": config.num_virtual_ranks,
        "CtasPerRank": config.ctas_per_rank,
        "NumLocalExperts": config.num_local_experts,
        "NumExperts": config.num_experts,
        "HiddenSize": config.hidden_size,
        "IntermediateSize": config.intermediate_size,
        "InputRowBytes": config.input_row_bytes,
        "A2RowBytes": config.a2_row_bytes,
        "TopK": config.top_k,
        "MaxTokens": config.num_max_tokens_per_rank,
        "Threads": tile.num_threads,
        "ProducerWarps": NUM_PRODUCER_WARPS,
        "DispatchWarps": NUM_DISPATCH_WARPS,
        "PullSlots": memory.pull_slots,
        "PullSlotBytes": memory.pull_slot_bytes,
        "MathWarps": tile.math_warps,
        "ConverterWarps": tile.converter_warps,
        "ProducerRegisters": tile.producer_registers,
        "MathRegisters": tile.math_registers,
        "ConverterRegisters": tile.converter_registers,
        "BlockM": tile.block_m,
        "TileM": tile.tile_m,
        "ClusterSize": tile.cluster_size,
        "BoxRows": tile.box_rows,
        "SwappedRows": tile.swapped_rows,
        "BlockN": BLOCK_N,
        "NumStages": tile.num_stages,
        "NumWeightBuffers": memory.num_weight_buffers,
        "NumPackedStages": tile.packed_stages,
        "ConvertedExperts": config.converted_experts,
        "Gemm1KBlocks": config.gemm1_k_blocks,
        "Gemm2KBlocks": config.gemm2_k_blocks,
        "Gemm1NTiles": config.gemm1_n_tiles,
        "Gemm2NTiles": config.gemm2_n_tiles,
        # a2_written and block_retired count column tiles, of each CTA of a cluster
        "Gemm1Arrivals": config.gemm1_n_tiles * tile.cluster_size,
        "Gemm2Arrivals": config.gemm2_n_tiles * tile.cluster_size,
        "PrefetchedKBlocks": PREFETCHED_K_BLOCKS,
        "RingBlocks": config.ring.ring_blocks,
        "LagBlocks": config.ring.lag_blocks,
        "GroupBlocks": config.ring.group_blocks,
        "MaxBlocks": config.max_blocks,
        "CounterWords": layout["counters"].dims[1],
        "RouteTotalWords": layout["route_totals"].dims[1],
        "InputScaleStride": layout["input_scales"].row_bytes // 4 if config.has_row_scales else 0,
        "CombineRowBytes": combine_row_bytes(config.transport, config.hidden_size),
        "ActivationStageBytes": memory.activation_stage_bytes,
        "WeightStageBytes": memory.weight_stage_bytes,
        "PackedStageBytes": PACKED_STAGE_BYTES,
        "ScaleStageBytes": memory.scale_stage_bytes,
        "WeightScaleRowBytes": memory.weight_scale_row_bytes,
        "StagesBytes": memory.scales,
        "StagingWarpBytes": STAGING_WARP_BYTES,
        "SmemActivations": memory.activations,
        "SmemWeights": memory.weights,
        "SmemScales": memory.scales,
        "SmemPacked": memory.packed,
        "SmemOperandTables": memory.operand_tables,
        "SmemAheadGroups": memory.ahead_groups,
        "AheadGroups": AHEAD_GROUPS,
        "AheadGroupBytes": AHEAD_GROUP_BYTES,
        "SmemStaging": memory.staging,
        "SmemExchange": memory.exchange,
        "SmemWeightScales": memory.weight_scales,
        "SmemTiles": memory.tiles,
        "SmemBarriers": memory.barriers,
        "SmemQueueBarriers": memory.queue_barriers,
        "SmemPackedBarriers": memory.packed_barriers,
        "TileBytes": TILE_BYTES,
        "TileSlotBytes": TILE_SLOT_BYTES,
        "SmemClaimBarriers": memory.claim_barriers,
        "SmemClaim": memory.claim,
        "SmemResult": memory.result,
        "SmemGaveUp": memory.gave_up,
        "SmemFacts": memory.facts,
        "FactsBytes": FACTS_BYTES,
        "SmemPull": memory.pull,
        "SmemPullBarriers": memory.pull_barriers,
        "SmemPoolPlan": memory.pool_plan,
        "PoolPlanBytes": memory.pool_plan_bytes,
    }


def _booleans(config: KernelConfig) -> dict[str, bool]:
    tile = config.tile
    return {
        "SplitM": config.split_m,
        "UnrollByRing": config.unroll_by_ring,
        "RingWraps": config.ring_wraps,
        "HasRowScales": config.has_row_scales,
        "RegistersHoldWeights": tile.registers_hold_weights,
        "ConvertsAhead": tile.converts_ahead,
        "HasBias": config.expert_bias,
        "RaggedHidden": config.hidden_size % BLOCK_K != 0,
        "HasLimit": config.swiglu_limit is not None,
        "TapGemm1": config.tap_gemm1,
        "Trace": config.trace,
    }


def _offsets(config: KernelConfig) -> dict[str, int]:
    layout = kernel_workspace(config)
    # Scales that the mode does not have lie nowhere.
    return {constant: layout.offset(array) if array in layout else 0 for constant, array in _OFFSETS.items()}
