"""Shared memory of the SM90 kernel, counted once: offsets for the device code, bytes for the launch."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.errors import ConfigError
from megamoe.schedule.tiles import round_up
from megamoe_cuda.kernel_config import BLOCK_K, BLOCK_N, NUM_MATH_WARPS, KernelConfig

MAX_DYNAMIC_BYTES = 232448  # 227 KiB, CUDA C++ programming guide, compute capability 9.0
FLOAT_BYTES = 4
WORD_BYTES = 4
BARRIER_BYTES = 8
FACTS_BYTES = 8  # CtaFacts of symm/cta.cuh
QUEUE_SLOTS = 4  # kQueueSlots of pipeline/tile_queue.cuh
TILE_BYTES = 24  # Tile of schedule/units.cuh
TILE_SLOT_BYTES = 32
STAGING_WARP_BYTES = 16 * 128  # a math warp's 16 rows, 128 bytes at a time
SCALES_ALIGNMENT = 128


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """Byte offsets from the start of dynamic shared memory; `num_bytes` in all."""

    activation_stage_bytes: int
    weight_stage_bytes: int
    scale_stage_bytes: int
    activations: int
    weights: int
    scales: int
    staging: int
    exchange: int
    tiles: int
    barriers: int
    queue_barriers: int
    result: int
    gave_up: int
    facts: int
    pool_plan: int
    pool_plan_bytes: int
    num_bytes: int


def shared_memory(config: KernelConfig) -> SharedMemory:
    """Lay out the shared memory of one CTA.

    Raises:
        ConfigError: it exceeds what an SM90 block may use.
    """
    tile = config.tile
    activation_stage = tile.block_m * BLOCK_K
    weight_stage = BLOCK_N * BLOCK_K
    scale_stage = tile.block_m * FLOAT_BYTES

    activations = 0
    weights = activations + tile.num_stages * activation_stage
    scales = weights + tile.num_stages * weight_stage
    staging = round_up(scales + tile.num_stages * scale_stage, SCALES_ALIGNMENT)
    exchange = staging + NUM_MATH_WARPS * STAGING_WARP_BYTES
    tiles = exchange + 2 * tile.block_m * FLOAT_BYTES  # two warpgroups
    barriers = tiles + QUEUE_SLOTS * TILE_SLOT_BYTES
    queue_barriers = barriers + 2 * tile.num_stages * BARRIER_BYTES
    result = queue_barriers + 2 * QUEUE_SLOTS * BARRIER_BYTES
    gave_up = result + WORD_BYTES
    facts = gave_up + WORD_BYTES
    pool_plan = facts + FACTS_BYTES
    pool_plan_bytes = _pool_plan_bytes(config)
    num_bytes = pool_plan + pool_plan_bytes
    if num_bytes > MAX_DYNAMIC_BYTES:
        raise ConfigError(
            "the kernel's shared memory does not fit",
            got=num_bytes,
            expected=f"at most {MAX_DYNAMIC_BYTES} bytes",
            hint="use fewer stages",
        )
    return SharedMemory(
        activation_stage_bytes=activation_stage,
        weight_stage_bytes=weight_stage,
        scale_stage_bytes=scale_stage,
        activations=activations,
        weights=weights,
        scales=scales,
        staging=staging,
        exchange=exchange,
        tiles=tiles,
        barriers=barriers,
        queue_barriers=queue_barriers,
        result=result,
        gave_up=gave_up,
        facts=facts,
        pool_plan=pool_plan,
        pool_plan_bytes=pool_plan_bytes,
        num_bytes=num_bytes,
    )


def _pool_plan_bytes(config: KernelConfig) -> int:
    """Counts and first entries by source and expert, first rows and blocks by expert (schedule/pool_plan.cuh)."""
    experts = config.num_local_experts
    return WORD_BYTES * (config.num_ranks * (experts + experts + 1) + 2 * (experts + 1))
