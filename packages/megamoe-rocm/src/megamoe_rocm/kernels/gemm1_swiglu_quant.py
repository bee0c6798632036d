"""Stage 1, persistent: pulls rows into the pool; GEMM1, SwiGLU and requantisation of a tile once its rows are there.

Units are chunks of rows to pull and tiles of GEMM1, in one order: the tiles of a block come `lead_blocks` blocks after
its chunks, so that pulls run ahead of the multiplication by that much.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from megamoe_rocm.kernels.axes import columns_like, rows_like
from megamoe_rocm.kernels.dispatch import array, parameter, pull_rows
from megamoe_rocm.kernels.flags import acquire_ranks, arrive, call_epoch, wait_for
from megamoe_rocm.kernels.layouts import scale_offset
from megamoe_rocm.kernels.main_loop import multiply
from megamoe_rocm.kernels.numerics import quantize_blocks
from megamoe_rocm.kernels.units import lagging_unit, take_ticket

GEMM1 = tl.constexpr(3)  # place in launch.PHASES


@triton.jit
def swiglu(gate_up, limit, ROWS: tl.constexpr, CHANNELS: tl.constexpr, OAI: tl.constexpr):
    """`[ROWS, CHANNELS]` FP32 of accumulators `[ROWS, 2 * CHANNELS]` in the order BLOCKS_16.

    silu(gate) * up, or gate * sigmoid(1.702 * gate) * (up + 1); `limit` bounds gate from above and up on both sides,
    infinity for none. NaN passes through the clamp.
    """
    # Column 64 J + 32 b + 16 is_up + 4 g + r holds channel 32 J + 8 g + 4 b + r.
    split = tl.reshape(gate_up, [ROWS, CHANNELS // 32, 2, 2, 4, 4])  # J, b, is_up, g, r
    gate, up = tl.split(tl.permute(split, [0, 1, 4, 2, 5, 3]))
    gate = tl.reshape(gate, [ROWS, CHANNELS])
    up = tl.reshape(up, [ROWS, CHANNELS])
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    if OAI:
        y = gate / (1.0 + tl.exp(gate * -1.702)) * (up + 1.0)
    else:
        y = gate / (1.0 + tl.exp(-gate)) * up
    return y


@triton.jit
def store_a2(
    a2_payload,
    a2_scales,
    y,
    first_row,
    first_channel,
    intermediate_size,
    payload_stride,
    FP4: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHANNELS: tl.constexpr,
    STORE_CACHE: tl.constexpr,
):
    """Requantise `[BLOCK_M, CHANNELS]` per 1x32 and store it into a ring slot of A2.

    Padding rows are stored too: nobody reads what comes of them, and a mask per row costs more scalar registers than
    there are.
    """
    words, scales = quantize_blocks(y, BLOCK_M, CHANNELS, FP4)
    PER_WORD: tl.constexpr = 8 if FP4 else 4
    word = first_channel // PER_WORD + columns_like(words, CHANNELS // PER_WORD)
    target_row = a2_payload + (first_row + rows_like(words, BLOCK_M)) * payload_stride
    tl.store(target_row.to(tl.pointer_type(tl.int32)) + word, words, cache_modifier=STORE_CACHE)
    block = first_channel // 32 + columns_like(scales, CHANNELS // 32)
    target = a2_scales + scale_offset(first_row + rows_like(scales, BLOCK_M), block, intermediate_size)
    tl.store(target, scales, cache_modifier=STORE_CACHE)


@triton.jit
def dispatch_gemm1(
    counts_published,
    rows_arrived,
    launch_counters,
    epoch,
    status,
    block_table,
    num_blocks,
    peers,
    stage1_parameters,
    w13,
    w13_scale,
    w13_bias,
    gate_up_tap,
    ep_size,
    hidden_size,
    intermediate_size,
    counter_words,
    launch_words,
    ticket,
    first_block,
    ring_blocks,
    lead_blocks,
    limit,
    patience,
    FP4: tl.constexpr,
    OAI: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PULL_ROWS: tl.constexpr,
    PULL_WORDS: tl.constexpr,
    PULL_SCALES: tl.constexpr,
    RANKS: tl.constexpr,
    UNITS_PER_TICKET: tl.constexpr,
    WAVES: tl.constexpr,
    LANES: tl.constexpr,
    CLOCK: tl.constexpr,
    WEIGHT_CACHE: tl.constexpr,
    STORE_CACHE: tl.constexpr,
    MAIN_LOOP: tl.constexpr,
):
    """Blocks `first_block .. first_block + ring_blocks - 1` of this rank's plan, those that there are.

    BLOCK_N divides 2I: it is at most 512, and I a multiple of 256.

    Args:
        counts_published: `[ep_size]` flags; every program acquires them, since it reads what peers stored.
        rows_arrived: `[2, counter_words]` int32 by parity, one word per block; the chunks of a block count rows and
            waves.
        launch_counters: `[2, launch_words]` int32; `ticket` is the word that counts this launch's tickets.
        stage1_parameters: int64 words in the order of launch.Stage1Parameter; see `pull_rows` for why.
        w13, w13_scale: `[E_local, 2I, H / 2]`, `[E_local, 2I, H / 32]` in the layout of weights.py.
        w13_bias: `[E_local, 2I]` FP32 in the order BLOCKS_16, read if HAS_BIAS.
        gate_up_tap: `[ring rows, 2I]` FP32; receives the accumulators if TAP.
    """
    call = call_epoch(epoch)
    acquire_ranks(counts_published, ep_size, RANKS)  # nothing to wait for: `plan_blocks` has, or has found no blocks
    arrived = rows_arrived + (call & 1) * counter_words + first_block
    tickets = launch_counters + (call & 1) * launch_words + ticket

    blocks = tl.minimum(tl.maximum(tl.load(num_blocks) - first_block, 0), ring_blocks)
    num_columns = 2 * intermediate_size
    PARTS: tl.constexpr = BLOCK_M // TILE_M
    num_tiles = num_columns // BLOCK_N * PARTS
    CHUNKS: tl.constexpr = BLOCK_M // PULL_ROWS
    num_units = blocks * (CHUNKS + num_tiles)
    first_unit = tl.program_id(0) * 0
    while first_unit < num_units:
        first_unit = take_ticket(tickets) * UNITS_PER_TICKET
        for unit in tl.range(first_unit, tl.minimum(first_unit + UNITS_PER_TICKET, num_units), disable_licm=True):
            is_tile, slot, index = lagging_unit(unit, blocks, CHUNKS, num_tiles, lead_blocks)
            block = first_block + slot
            num_rows = tl.load(block_table + block * 4 + 2)
            if is_tile == 0:
                if index * PULL_ROWS < num_rows:
                    pulled = pull_rows(
                        stage1_parameters,
                        block_table,
                        peers,
                        block,
                        slot,
                        index * PULL_ROWS,
                        FP4,
                        BLOCK_M,
                        PULL_ROWS,
                        RANKS,
                        PULL_WORDS,
                        PULL_SCALES,
                    )
                    arrive(arrived + slot, pulled, WAVES, "gpu", LANES)
            elif index % PARTS * TILE_M < num_rows:
                rank = parameter(stage1_parameters, 18).to(tl.int32)
                wait_for(
                    arrived + slot, num_rows * WAVES, patience, status, rank, GEMM1, call, block, CLOCK, WAVES, LANES
                )
                expert = tl.load(block_table + block * 4).to(tl.int64)
                slot_row = tl.cast(slot, tl.int64) * BLOCK_M
                first_row = index % PARTS * TILE_M  # tiles of the same weights follow each other
                first_column = index // PARTS * BLOCK_N
                row_stride = tl.multiple_of(parameter(stage1_parameters, 11).to(tl.int32), 16)
                acc = multiply(
                    array(stage1_parameters, 3, tl.uint8) + slot_row * row_stride,
                    array(stage1_parameters, 4, tl.uint8) + slot_row * parameter(stage1_parameters, 12),
                    first_row,
                    row_stride,
                    w13 + expert * num_columns * (hidden_size // 2),
                    w13_scale + expert * num_columns * (hidden_size // 32),
                    first_column,
                    hidden_size,
                    FP4,
                    TILE_M,
                    BLOCK_N,
                    BLOCK_K,
                    WEIGHT_CACHE,
                    WAVES,
                    MAIN_LOOP,
                )
                if HAS_BIAS:
                    acc += tl.load(w13_bias + expert * num_columns + first_column + columns_like(acc, BLOCK_N))
                if TAP:
                    row = slot_row + first_row + rows_like(acc, TILE_M)
                    target = gate_up_tap + row * num_columns + first_column + columns_like(acc, BLOCK_N)
                    tl.store(target, acc, mask=row < slot_row + num_rows)
                a2_stride = tl.multiple_of(parameter(stage1_parameters, 21).to(tl.int32), 16)
                store_a2(
                    array(stage1_parameters, 19, tl.uint8) + slot_row * a2_stride,
                    array(stage1_parameters, 20, tl.uint8) + slot_row * parameter(stage1_parameters, 22),
                    swiglu(acc, limit, TILE_M, BLOCK_N // 2, OAI),
                    first_row,
                    first_column // 2,
                    intermediate_size,
                    a2_stride,
                    FP4,
                    TILE_M,
                    BLOCK_N // 2,
                    STORE_CACHE,
                )
