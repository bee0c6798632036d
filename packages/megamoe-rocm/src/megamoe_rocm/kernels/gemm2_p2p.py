"""Stage 2, persistent: GEMM2, bias and router weight in FP32, transport rounding, rows straight to their home rank."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from megamoe_rocm.kernels.axes import columns_like, rows_like
from megamoe_rocm.kernels.flags import arrive, call_epoch, publish
from megamoe_rocm.kernels.main_loop import multiply
from megamoe_rocm.kernels.numerics import bf16_bits, join_columns, quantize_blocks
from megamoe_rocm.kernels.stores import drain, store_through
from megamoe_rocm.kernels.units import take_ticket


@triton.jit
def send_rows(
    rows,
    home_rows,
    num_rows,
    first_column,
    hidden_size,
    FP8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store FP32 `[BLOCK_M, BLOCK_N]` into rows of `combine` at the addresses in `home_rows`; write-through.

    bf16: 2 H bytes a row. FP8: H bytes of e4m3, then H / 32 scale bytes; H + H / 32 bytes move. Rows from `num_rows` on
    are padding and go nowhere.
    """
    if FP8:
        words, scales = quantize_blocks(rows, BLOCK_M, BLOCK_N, False)
        pairs = join_columns(scales.to(tl.int32), BLOCK_M, BLOCK_N // 32, 8)
        # Both loads come before the stores: a wait for a load is one for the stores before it.
        row, row_of_pair = rows_like(words, BLOCK_M), rows_like(pairs, BLOCK_M)
        home_row = tl.load(home_rows + row, mask=row < num_rows, other=0)
        home_row_of_pair = tl.load(home_rows + row_of_pair, mask=row_of_pair < num_rows, other=0) + hidden_size
        word = first_column // 4 + columns_like(words, BLOCK_N // 4)
        store_through(home_row.to(tl.pointer_type(tl.int32)) + word, words, row < num_rows, 4)
        pair = first_column // 64 + columns_like(pairs, BLOCK_N // 64)
        store_through(home_row_of_pair.to(tl.pointer_type(tl.int16)) + pair, pairs, row_of_pair < num_rows, 2)
    else:
        words = join_columns(bf16_bits(rows).to(tl.int32), BLOCK_M, BLOCK_N, 16)
        low, high = tl.split(tl.reshape(words, [BLOCK_M, BLOCK_N // 4, 2]))
        values = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
        row = rows_like(values, BLOCK_M)
        home_row = tl.load(home_rows + row, mask=row < num_rows, other=0)
        target = home_row.to(tl.pointer_type(tl.int64)) + (first_column // 4 + columns_like(values, BLOCK_N // 4))
        store_through(target, values, row < num_rows, 8)


@triton.jit
def gemm2_p2p(
    launch_counters,
    epoch,
    status,
    block_table,
    num_blocks,
    peers,
    pool_meta,
    home_rows,
    a2_payload,
    a2_scales,
    w2,
    w2_scale,
    w2_bias,
    finished_offset,
    rank,
    ep_size,
    hidden_size,
    intermediate_size,
    a2_payload_stride,
    a2_scales_stride,
    launch_words,
    ticket,
    join,
    is_last,
    first_block,
    ring_blocks,
    FP4: tl.constexpr,
    FP8_TRANSPORT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RANKS: tl.constexpr,
    UNITS_PER_TICKET: tl.constexpr,
    WAVES: tl.constexpr,
    LANES: tl.constexpr,
    WEIGHT_CACHE: tl.constexpr,
    MAIN_LOOP: tl.constexpr,
):
    """Blocks `first_block .. first_block + ring_blocks - 1`, those that there are; stage 1 of them has ended.

    A unit is a tile of `TILE_M` rows of a block and `BLOCK_N` columns; tiles without a valid row are skipped. In the
    call's last launch (`is_last`), the last program to arrive raises rank_finished on every rank. BLOCK_N divides H: it
    is at most 256, and H a multiple of 256.

    Args:
        w2, w2_scale: `[E_local, H, I / 2]`, `[E_local, H, I / 32]` in the layout of weights.py.
        w2_bias: `[E_local, H]` FP32, read if HAS_BIAS.
        home_rows: address of each pool row's place in `combine` of its home rank.
        finished_offset: bytes from a rank's base to its `rank_finished`.
        ticket, join: words of `launch_counters`: tickets of this launch, arrivals of the call's last one.
    """
    call = call_epoch(epoch)
    counters = launch_counters + (call & 1) * launch_words
    blocks = tl.minimum(tl.maximum(tl.load(num_blocks) - first_block, 0), ring_blocks)
    num_tiles = hidden_size // BLOCK_N
    PARTS: tl.constexpr = BLOCK_M // TILE_M
    num_units = blocks * PARTS * num_tiles
    first_unit = tl.program_id(0) * 0
    while first_unit < num_units:
        first_unit = take_ticket(counters + ticket) * UNITS_PER_TICKET
        for unit in tl.range(first_unit, tl.minimum(first_unit + UNITS_PER_TICKET, num_units), disable_licm=True):
            slot = unit // (PARTS * num_tiles)
            first_row = unit % PARTS * TILE_M  # tiles of the same weights follow each other
            first_column = unit // PARTS % num_tiles * BLOCK_N
            expert = tl.load(block_table + (first_block + slot) * 4).to(tl.int64)
            num_rows = tl.load(block_table + (first_block + slot) * 4 + 2)
            slot_row = tl.cast(slot, tl.int64) * BLOCK_M
            if first_row < num_rows:
                acc = multiply(
                    a2_payload + slot_row * a2_payload_stride,
                    a2_scales + slot_row * a2_scales_stride,
                    first_row,
                    a2_payload_stride,
                    w2 + expert * hidden_size * (intermediate_size // 2),
                    w2_scale + expert * hidden_size * (intermediate_size // 32),
                    first_column,
                    intermediate_size,
                    FP4,
                    TILE_M,
                    BLOCK_N,
                    BLOCK_K,
                    WEIGHT_CACHE,
                    WAVES,
                    MAIN_LOOP,
                )
                if HAS_BIAS:
                    acc += tl.load(w2_bias + expert * hidden_size + first_column + columns_like(acc, BLOCK_N))
                weight = tl.load(pool_meta + (slot_row + first_row + rows_like(acc, TILE_M)) * 4 + 2)
                acc *= weight.to(tl.float32, bitcast=True)
                send_rows(
                    acc,
                    home_rows + slot_row + first_row,
                    num_rows - first_row,
                    first_column,
                    hidden_size,
                    FP8_TRANSPORT,
                    TILE_M,
                    BLOCK_N,
                )

    if is_last != 0:
        drain(WAVES)
        before = arrive(counters + join, 1, WAVES, "sys", LANES)
        if (before == WAVES * tl.num_programs(0) - 1) & (tl.load(status, volatile=True) == 0):
            publish(peers, rank, ep_size, finished_offset, call, RANKS)
