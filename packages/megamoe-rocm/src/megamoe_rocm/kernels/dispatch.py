"""Phase `dispatch`: rows are pulled from their home ranks into the pool, payload, scales and meta together."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from megamoe_rocm.kernels.flags import peer_address
from megamoe_rocm.kernels.layouts import scale_offset


@triton.jit
def pull_rows(
    block_table,
    route_counts,
    first_entries,
    route_entries,
    peers,
    input_payload_offset,
    input_scales_offset,
    pool_payload,
    pool_scales,
    pool_meta,
    block,
    slot,
    first_row,
    rank,
    ep_size,
    num_local_experts,
    entries_per_src,
    top_k,
    hidden_size,
    payload_stride,
    scales_stride,
    FP4: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    WORDS: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Pull rows `first_row .. first_row + ROWS - 1` of `block` into ring slot `slot`; returns how many there were.

    Which source and entry a row of the block is follows from the counts: an expert's rows are ordered by source rank,
    `rank` first. Padding rows are neither read nor written.

    Args:
        payload_stride, scales_stride: bytes from row to row, of the input arrays and of the pool alike.
        WORDS, SCALES: 32-bit words and scale bytes of a row that are moved at a time.
    """
    expert = tl.load(block_table + block * 4)
    expert_row = tl.load(block_table + block * 4 + 1) + first_row
    num_rows = tl.minimum(tl.load(block_table + block * 4 + 2) - first_row, ROWS)
    row = tl.arange(0, ROWS)
    # Sources in the order of this expert's rows; `end` is the number of rows up to and with each.
    step = tl.arange(0, RANKS)
    source = (rank + step) % ep_size
    of_expert = source * num_local_experts + expert
    num = tl.load(route_counts + of_expert, mask=step < ep_size, other=0)
    end = tl.cumsum(num, axis=0)
    first_entry = tl.load(first_entries + of_expert, mask=step < ep_size, other=0)
    place = tl.expand_dims(expert_row + row, 1)
    is_from = (place < tl.expand_dims(end, 0)) & (place >= tl.expand_dims(end - num, 0))
    src = tl.sum(tl.where(is_from, tl.expand_dims(source, 0), 0), axis=1)
    entry = tl.sum(tl.where(is_from, place + tl.expand_dims(first_entry - (end - num), 0), 0), axis=1)

    is_row = row < num_rows
    record = tl.load(route_entries + src.to(tl.int64) * entries_per_src + entry, mask=is_row, other=0)
    pick = (record & 0xFFFFFFFF).to(tl.int32)
    token = (pick // top_k).to(tl.int64)
    pool_row = tl.cast(slot, tl.int64) * BLOCK_M + first_row + row
    meta = pool_meta + pool_row * 4
    tl.store(meta, src, mask=is_row)
    tl.store(meta + 1, pick, mask=is_row)
    tl.store(meta + 2, (record >> 32).to(tl.int32), mask=is_row)

    source_row = peer_address(peers, src, input_payload_offset) + token * payload_stride
    target_row = pool_payload + pool_row * payload_stride
    row_words = hidden_size // 8 if FP4 else hidden_size // 4
    for first in range(0, row_words, WORDS):
        word = first + tl.arange(0, WORDS)
        inside = tl.expand_dims(is_row, 1) & tl.expand_dims(word < row_words, 0)
        source_words = tl.expand_dims(source_row.to(tl.pointer_type(tl.int32)), 1) + tl.expand_dims(word, 0)
        target_words = tl.expand_dims(target_row.to(tl.pointer_type(tl.int32)), 1) + tl.expand_dims(word, 0)
        tl.store(target_words, tl.load(source_words, mask=inside, other=0), mask=inside)

    source_row = peer_address(peers, src, input_scales_offset) + token * scales_stride
    slot_scales = pool_scales + tl.cast(slot, tl.int64) * BLOCK_M * scales_stride
    for first in range(0, hidden_size // 32, SCALES):
        at = tl.expand_dims(first + tl.arange(0, SCALES), 0)
        inside = tl.expand_dims(is_row, 1) & (at < hidden_size // 32)
        source_bytes = tl.expand_dims(source_row.to(tl.pointer_type(tl.uint8)), 1) + at
        target = slot_scales + scale_offset(tl.expand_dims(first_row + row, 1), at, hidden_size)
        tl.store(target, tl.load(source_bytes, mask=inside, other=0), mask=inside)
    return num_rows
