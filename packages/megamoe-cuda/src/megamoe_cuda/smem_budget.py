"""Shared memory of the SM90 kernel, counted once: offsets for the device code, bytes for the launch."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.errors import ConfigError
from megamoe.problem import QuantMode, Transport
from megamoe.schedule.tiles import round_up
from megamoe_cuda.kernel_config import (
    BLOCK_K,
    BLOCK_N,
    NUM_DISPATCH_WARPS,
    KernelConfig,
)
from megamoe_cuda.workspace_layout import kernel_workspace

MAX_DYNAMIC_BYTES = 232448  # 227 KiB, CUDA C++ programming guide, compute capability 9.0
SHARED_BASE = 1024  # kSharedBase of pipeline/ring.cuh: where dynamic shared memory begins in a CTA's
FLOAT_BYTES = 4
WORD_BYTES = 4
BARRIER_BYTES = 8
FACTS_BYTES = 12  # CtaFacts of symm/cta.cuh
QUEUE_SLOTS = 4  # kQueueSlots of pipeline/tile_queue.cuh
TILE_BYTES = 28  # Tile of schedule/units.cuh
TILE_SLOT_BYTES = 32
PACKED_STAGE_BYTES = BLOCK_N * (BLOCK_K // 2 + 4)  # mode a8w4: two codes a byte, and a word of table entries per row
AHEAD_GROUP_BYTES = 8 * (BLOCK_K // 2 + 4)  # of packed rows that a warp converts together (roles/convert_ahead.cuh)
AHEAD_GROUPS = 4  # of a warp, on their way
NUM_OPERAND_TABLES = 16  # numerics/fp4_as_fp8.cuh
OPERAND_TABLE_BYTES = 8
OPERAND_TABLES_ALIGNMENT = 256  # an entry's byte is the last of its address (pipeline/register_weights.cuh)
STAGING_WARP_BYTES = 16 * 128  # a math warp's 16 rows, 128 bytes at a time
PIECE_BYTES = {Transport.BF16: 512, Transport.FP8_BLOCKWISE_1X32: 528}  # PieceRow of roles/combine.cuh
BULK_ALIGNMENT = 128  # bulk copies want 16
MAX_PULL_SLOTS = 8  # rows in flight per dispatch warp
FEWER_EXPERTS = "tables in it grow with experts and ranks: plan fewer"


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """Byte offsets from the start of dynamic shared memory; `num_bytes` in all."""

    activation_stage_bytes: int
    weight_stage_bytes: int
    scale_stage_bytes: int
    weight_scale_row_bytes: int
    num_weight_buffers: int
    activations: int
    weights: int
    packed: int
    scales: int
    staging: int
    exchange: int
    weight_scales: int
    tiles: int
    barriers: int
    queue_barriers: int
    packed_barriers: int
    pull_barriers: int
    claim_barriers: int
    claim: int
    result: int
    gave_up: int
    facts: int
    operand_tables: int
    ahead_groups: int
    pool_plan: int
    pool_plan_bytes: int
    pull: int
    pull_slots: int
    pull_slot_bytes: int
    num_bytes: int


def shared_memory(config: KernelConfig) -> SharedMemory:
    """Lay out the shared memory of one CTA.

    What stages, staging and plan leave free holds the rows that dispatch pulls, up to MAX_PULL_SLOTS for each of its
    warps.

    Raises:
        ConfigError: it exceeds what an SM90 block may use.
    """
    tile = config.tile
    activation_stage = tile.tile_m * BLOCK_K
    weight_stage = PACKED_STAGE_BYTES if tile.registers_hold_weights else BLOCK_N * BLOCK_K
    weight_scale_row = round_up(max(config.gemm1_k_blocks, config.gemm2_k_blocks) * FLOAT_BYTES, 16)  # by bulk copies
    weight_buffers = tile.operand_buffers or tile.num_stages
    scale_stage = tile.tile_m * FLOAT_BYTES if config.has_row_scales else 0

    activations = 0
    weights = activations + tile.num_stages * activation_stage
    packed = weights + weight_buffers * weight_stage
    scales = packed + tile.packed_stages * PACKED_STAGE_BYTES
    _require_route_scratch(config, scales)
    _require_combine_buffers(config, scales)
    staging = round_up(scales + tile.num_stages * scale_stage, BULK_ALIGNMENT)
    exchange = staging + tile.math_warps * STAGING_WARP_BYTES
    exchanges_amax = config.has_row_scales and not config.split_m and tile.swapped_rows < tile.block_m
    weight_scales = exchange + (2 * tile.tile_m * FLOAT_BYTES if exchanges_amax else 0)  # two warpgroups
    tiles = weight_scales + (QUEUE_SLOTS * 2 * weight_scale_row if config.has_row_scales else 0)  # two rows a tile
    barriers = tiles + QUEUE_SLOTS * TILE_SLOT_BYTES
    queue_barriers = barriers + 2 * tile.num_stages * BARRIER_BYTES
    packed_barriers = queue_barriers + 2 * QUEUE_SLOTS * BARRIER_BYTES
    pull_barriers = packed_barriers + 2 * tile.packed_stages * BARRIER_BYTES
    claim_barriers = pull_barriers + NUM_DISPATCH_WARPS * MAX_PULL_SLOTS * BARRIER_BYTES
    in_cluster = tile.cluster_size > 1
    result = claim_barriers + (2 * BARRIER_BYTES if in_cluster else 0)
    gave_up = result + WORD_BYTES
    facts = gave_up + WORD_BYTES
    claim = facts + FACTS_BYTES
    operand_tables = claim + (WORD_BYTES if in_cluster else 0)
    ahead_groups = operand_tables
    if config.quant is QuantMode.A8W4:
        operand_tables = round_up(operand_tables, OPERAND_TABLES_ALIGNMENT)
        ahead_groups = operand_tables + NUM_OPERAND_TABLES * OPERAND_TABLE_BYTES
    pool_plan = ahead_groups + (tile.converter_warps * AHEAD_GROUPS * AHEAD_GROUP_BYTES if tile.converts_ahead else 0)
    pool_plan_bytes = _pool_plan_bytes(config)
    pull = round_up(pool_plan + pool_plan_bytes, BULK_ALIGNMENT)

    layout = kernel_workspace(config)
    scales_row = layout["input_scales"].row_bytes if config.has_row_scales else 0
    pull_slot = round_up(config.input_row_bytes + scales_row, BULK_ALIGNMENT)
    pull_slots = min((MAX_DYNAMIC_BYTES - pull) // pull_slot // NUM_DISPATCH_WARPS, MAX_PULL_SLOTS)
    if pull_slots < 1:
        raise ConfigError(
            "the kernel's shared memory does not fit",
            got=pull + NUM_DISPATCH_WARPS * pull_slot,
            expected=f"at most {MAX_DYNAMIC_BYTES} bytes",
            hint=FEWER_EXPERTS,
        )
    return SharedMemory(
        activation_stage_bytes=activation_stage,
        weight_stage_bytes=weight_stage,
        scale_stage_bytes=scale_stage,
        weight_scale_row_bytes=weight_scale_row,
        activations=activations,
        num_weight_buffers=weight_buffers,
        weights=weights,
        packed=packed,
        scales=scales,
        staging=staging,
        exchange=exchange,
        weight_scales=weight_scales,
        tiles=tiles,
        barriers=barriers,
        queue_barriers=queue_barriers,
        packed_barriers=packed_barriers,
        pull_barriers=pull_barriers,
        claim_barriers=claim_barriers,
        claim=claim,
        result=result,
        gave_up=gave_up,
        facts=facts,
        operand_tables=operand_tables,
        ahead_groups=ahead_groups,
        pool_plan=pool_plan,
        pool_plan_bytes=pool_plan_bytes,
        pull=pull,
        pull_slots=pull_slots,
        pull_slot_bytes=pull_slot,
        num_bytes=pull + NUM_DISPATCH_WARPS * pull_slots * pull_slot,
    )


def _require_route_scratch(config: KernelConfig, stages_bytes: int) -> None:
    """Routing uses the stages before they are in use: picks by expert, twice, and first entries by owner and expert
    (RouteScratch of roles/route.cuh)."""
    scratch = WORD_BYTES * (3 * config.num_experts + config.num_ranks)
    if scratch > stages_bytes:
        raise ConfigError(
            "the tables of routing do not fit the shared memory of the pipeline's stages",
            got=scratch,
            expected=f"at most {stages_bytes} bytes",
            hint=FEWER_EXPERTS,
        )


def _require_combine_buffers(config: KernelConfig, stages_bytes: int) -> None:
    """Combine uses the stages when they are no longer in use: a piece of each of a token's rows for every math warp
    (Combiner of roles/combine.cuh)."""
    buffers = config.tile.math_warps * config.top_k * PIECE_BYTES[config.transport]
    if buffers > stages_bytes:
        raise ConfigError(
            "a token's rows do not fit the shared memory of the pipeline's stages when they are combined",
            got=buffers,
            expected=f"at most {stages_bytes} bytes",
            hint=f"{FEWER_EXPERTS}; or pick fewer experts for a token",
        )


def _pool_plan_bytes(config: KernelConfig) -> int:
    """First entries by source and expert, first rows and blocks by expert (schedule/pool_plan.cuh)."""
    return WORD_BYTES * (config.num_ranks + 2) * (config.num_local_experts + 1)
