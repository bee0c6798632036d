"""Kernels of the unfused pipeline (`megamoe_rocm.unfused`): the same arithmetic as the persistent stages, in pieces.

Between two exchanges that are somebody else's: sort the received picks by expert into blocks of rows, GEMM1 with SwiGLU
and requantisation, GEMM2 with the router weight, and the sum of a token's rows on this rank. The main loop, the
activation and the formats are those of the fused kernels, so what a comparison shows is fusion.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from megamoe_rocm.kernels.axes import columns_like, rows_like
from megamoe_rocm.kernels.gemm1_swiglu_quant import store_a2, swiglu
from megamoe_rocm.kernels.layouts import scale_offset
from megamoe_rocm.kernels.main_loop import multiply
from megamoe_rocm.kernels.numerics import bf16_bits, bf16_to_float, join_columns


@triton.jit
def place_picks(
    received_ids,
    num_received,
    counts,
    within,
    first_expert,
    num_local_experts,
    top_k,
    PICKS: tl.constexpr,
):
    """Number each pick of a local expert among that expert's picks; a program takes `PICKS` of them.

    Args:
        received_ids: `[rows, top_k]` int32 global ids of the tokens received.
        num_received: int32, tokens received.
        counts: `[num_local_experts]` int32, zeros; receives each expert's picks.
        within: `[rows * top_k]` int32; receives a pick's number, -1 where its expert is elsewhere.
    """
    num_picks = tl.load(num_received) * top_k
    pick = tl.program_id(0) * PICKS + tl.arange(0, PICKS)
    local = tl.load(received_ids + pick, mask=pick < num_picks, other=-1) - first_expert
    is_here = (pick < num_picks) & (local >= 0) & (local < num_local_experts)
    number = tl.atomic_add(counts + local, 1, mask=is_here, sem="relaxed", scope="gpu")
    tl.store(within + pick, tl.where(is_here, number, -1), mask=pick < num_picks)


@triton.jit
def plan_experts(
    counts,
    first_blocks,
    block_experts,
    num_blocks,
    num_local_experts,
    BLOCK_M: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Cut the experts' rows into blocks of BLOCK_M; one program.

    Args:
        counts: `[num_local_experts]` int32.
        first_blocks: `[num_local_experts]` int32; receives each expert's first block.
        block_experts: `[max_blocks]` int32; receives each block's expert.
        num_blocks: int32; receives their number.
        EXPERTS, BLOCKS: experts and blocks handled at a time.
    """
    total = 0
    for first in range(0, num_local_experts, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        is_expert = expert < num_local_experts
        blocks = (tl.load(counts + expert, mask=is_expert, other=0) + BLOCK_M - 1) // BLOCK_M
        end = total + tl.cumsum(blocks, axis=0)
        last = total + tl.sum(blocks, axis=0)
        tl.store(first_blocks + expert, end - blocks, mask=is_expert)
        for first_block in range(total, last, BLOCKS):
            block = first_block + tl.arange(0, BLOCKS)
            # An expert's index is the number of experts whose blocks all come before.
            before = (tl.expand_dims(end, 0) <= tl.expand_dims(block, 1)).to(tl.int32)
            tl.store(block_experts + block, first + tl.sum(before, axis=1), mask=block < last)
        total = last
    tl.store(num_blocks, total)


@triton.jit
def gather_rows(
    received_payload,
    received_scales,
    received_ids,
    received_weights,
    num_received,
    within,
    first_blocks,
    pool_payload,
    pool_scales,
    pool_weights,
    places,
    first_expert,
    top_k,
    hidden_size,
    FP4: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Copy received rows to their places in blocks; program (i, j) takes `ROWS` picks and a part of their columns.

    Args:
        received_payload, received_scales: `[rows, H / 2 or H]` and `[rows, H / 32]` bytes, contiguous.
        received_weights: `[rows, top_k]` FP32.
        pool_payload: bytes, `[max_blocks * BLOCK_M, H / 2 or H]`; receives rows in the order of blocks.
        pool_scales: bytes; receives their scales in operand order, H / 32 for each row of a block.
        pool_weights: `[max_blocks * BLOCK_M]` FP32; receives the router weights.
        places: `[rows * top_k]` int32; receives the pool row of each pick, -1 where its expert is elsewhere.
        WORDS, SCALES: 32-bit words of payload and bytes of scales of one part.
    """
    num_picks = tl.load(num_received) * top_k
    pick = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    number = tl.load(within + pick, mask=pick < num_picks, other=-1)
    is_here = number >= 0
    local = tl.load(received_ids + pick, mask=is_here, other=first_expert) - first_expert
    first_row = tl.load(first_blocks + local, mask=is_here, other=0).to(tl.int64) * BLOCK_M
    place = first_row + number
    if tl.program_id(1) == 0:
        tl.store(places + pick, tl.where(is_here, place, -1).to(tl.int32), mask=pick < num_picks)
        weight = tl.load(received_weights + pick, mask=is_here, other=0.0)
        tl.store(pool_weights + place, weight, mask=is_here)

    token = (pick // top_k).to(tl.int64)
    row_words = hidden_size // 8 if FP4 else hidden_size // 4
    word = tl.expand_dims(tl.program_id(1) * WORDS + tl.arange(0, WORDS), 0)
    inside = tl.expand_dims(is_here, 1) & (word < row_words)
    source = received_payload.to(tl.pointer_type(tl.int32)) + tl.expand_dims(token, 1) * row_words + word
    target = pool_payload.to(tl.pointer_type(tl.int32)) + tl.expand_dims(place, 1) * row_words + word
    tl.store(target, tl.load(source, mask=inside, other=0), mask=inside)

    at = tl.expand_dims(tl.program_id(1) * SCALES + tl.arange(0, SCALES), 0)
    inside = tl.expand_dims(is_here, 1) & (at < hidden_size // 32)
    source = received_scales + tl.expand_dims(token, 1) * (hidden_size // 32) + at
    block_scales = pool_scales + tl.expand_dims(place // BLOCK_M, 1) * (BLOCK_M * (hidden_size // 32))
    target = block_scales + scale_offset(tl.expand_dims((place % BLOCK_M).to(tl.int32), 1), at, hidden_size)
    tl.store(target, tl.load(source, mask=inside, other=0), mask=inside)


@triton.jit
def expert_gemm1(
    pool_payload,
    pool_scales,
    block_experts,
    num_blocks,
    w13,
    w13_scale,
    a2_payload,
    a2_scales,
    hidden_size,
    intermediate_size,
    hidden_payload_stride,
    a2_payload_stride,
    limit,
    FP4: tl.constexpr,
    OAI: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WAVES: tl.constexpr,
    WEIGHT_CACHE: tl.constexpr,
    MAIN_LOOP: tl.constexpr,
):
    """GEMM1, SwiGLU and requantisation of all blocks; a persistent launch whose programs take every n-th tile.

    Args:
        a2_payload, a2_scales: A2 in the order of the pool, scales in operand order.
        limit: of SwiGLU, infinity for none.
    """
    num_columns = 2 * intermediate_size
    num_tiles = num_columns // BLOCK_N
    num_units = tl.load(num_blocks) * num_tiles
    for unit in tl.range(tl.program_id(0), num_units, tl.num_programs(0), disable_licm=True):
        block = unit // num_tiles
        first_column = unit % num_tiles * BLOCK_N
        expert = tl.load(block_experts + block).to(tl.int64)
        block_row = tl.cast(block, tl.int64) * BLOCK_M
        acc = multiply(
            pool_payload + block_row * hidden_payload_stride,
            pool_scales + block_row * (hidden_size // 32),
            0,
            hidden_payload_stride,
            w13 + expert * num_columns * (hidden_size // 2),
            w13_scale + expert * num_columns * (hidden_size // 32),
            first_column,
            hidden_size,
            FP4,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            WEIGHT_CACHE,
            WAVES,
            MAIN_LOOP,
        )
        store_a2(
            a2_payload + block_row * a2_payload_stride,
            a2_scales + block_row * (intermediate_size // 32),
            swiglu(acc, limit, BLOCK_M, BLOCK_N // 2, OAI),
            0,
            first_column // 2,
            intermediate_size,
            a2_payload_stride,
            FP4,
            BLOCK_M,
            BLOCK_N // 2,
            "",
        )


@triton.jit
def expert_gemm2(
    a2_payload,
    a2_scales,
    block_experts,
    num_blocks,
    w2,
    w2_scale,
    pool_weights,
    rows,
    hidden_size,
    intermediate_size,
    a2_payload_stride,
    FP4: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WAVES: tl.constexpr,
    WEIGHT_CACHE: tl.constexpr,
    MAIN_LOOP: tl.constexpr,
):
    """GEMM2 and the router weight of all blocks, as BF16 into `rows` `[max_blocks * BLOCK_M, H]`."""
    num_tiles = hidden_size // BLOCK_N
    num_units = tl.load(num_blocks) * num_tiles
    for unit in tl.range(tl.program_id(0), num_units, tl.num_programs(0), disable_licm=True):
        block = unit // num_tiles
        first_column = unit % num_tiles * BLOCK_N
        expert = tl.load(block_experts + block).to(tl.int64)
        block_row = tl.cast(block, tl.int64) * BLOCK_M
        acc = multiply(
            a2_payload + block_row * a2_payload_stride,
            a2_scales + block_row * (intermediate_size // 32),
            0,
            a2_payload_stride,
            w2 + expert * hidden_size * (intermediate_size // 2),
            w2_scale + expert * hidden_size * (intermediate_size // 32),
            first_column,
            intermediate_size,
            FP4,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            WEIGHT_CACHE,
            WAVES,
            MAIN_LOOP,
        )
        acc *= tl.load(pool_weights + block_row + rows_like(acc, BLOCK_M))
        words = join_columns(bf16_bits(acc).to(tl.int32), BLOCK_M, BLOCK_N, 16)
        row = block_row + rows_like(words, BLOCK_M)
        target = (rows + row * hidden_size).to(tl.pointer_type(tl.int32))
        tl.store(target + (first_column // 2 + columns_like(words, BLOCK_N // 2)), words)


@triton.jit
def sum_picks(
    rows,
    places,
    num_received,
    sums,
    top_k,
    hidden_size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`sums[t]` = BF16 of the FP32 sum, in slot order, of the received token's rows from experts of this rank."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_token = token < tl.load(num_received)
    column = tl.expand_dims(tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), 0)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for slot in range(top_k):
        place = tl.load(places + token * top_k + slot, mask=is_token, other=-1)
        is_here = tl.expand_dims(place >= 0, 1)
        row = tl.expand_dims(tl.maximum(place, 0).to(tl.int64), 1) * hidden_size
        value = tl.load(rows + row + column, mask=is_here & (column < hidden_size), other=0.0)
        acc += tl.where(is_here, bf16_to_float(value), 0.0)
    target = sums + tl.expand_dims(token, 1).to(tl.int64) * hidden_size + column
    inside = tl.expand_dims(is_token, 1) & (column < hidden_size)
    tl.store(target, bf16_bits(acc).to(tl.bfloat16, bitcast=True), mask=inside)
