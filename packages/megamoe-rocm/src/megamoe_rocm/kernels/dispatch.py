"""Phase `dispatch`: rows are pulled from their home ranks into the pool, payload, scales and meta together."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from megamoe_rocm.kernels.axes import columns_of_copy, rows_of_copy
from megamoe_rocm.kernels.flags import peer_address
from megamoe_rocm.kernels.layouts import scale_offset


@triton.jit
def parameter(parameters, name: tl.constexpr):
    """A parameter of stage 1, int64; `name` is its place in launch.Stage1Parameter."""
    return tl.load(parameters + name)


@triton.jit
def array(parameters, name: tl.constexpr, dtype: tl.constexpr):
    """A parameter that is the address of an array; arrays of a workspace are aligned."""
    return tl.multiple_of(parameter(parameters, name).to(tl.pointer_type(dtype)), 16)


@triton.jit
def source_at(step, rank, ep_size):
    """The rank whose rows are at place `step` among an expert's, this rank's own first."""
    return tl.where(rank + step < ep_size, rank + step, rank + step - ep_size)


@triton.jit
def rows_from(step, route_counts, first_entries, rank, ep_size, num_local_experts, expert):
    """How many rows of `expert` come from the source at each place `step`, 0 past the last, and its first entry."""
    of_expert = source_at(step, rank, ep_size) * num_local_experts + expert
    num = tl.load(route_counts + of_expert, mask=step < ep_size, other=0)
    return num, tl.load(first_entries + of_expert, mask=step < ep_size, other=0)


@triton.jit
def row_words_at(address):
    """Pointers `[N, 1]` to 32-bit words of rows; rows are aligned to 16 bytes, which a change of type forgets."""
    return tl.multiple_of(tl.expand_dims(address.to(tl.pointer_type(tl.int32)), 1), [16, 16])


@triton.jit
def pull_rows(
    parameters,
    block_table,
    peers,
    block,
    slot,
    first_row,
    FP4: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    WORDS: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Pull rows `first_row .. first_row + ROWS - 1` of `block` into ring slot `slot`; returns how many there were.

    Which source and entry a row of the block is follows from the counts: an expert's rows are ordered by source rank,
    this rank's own first. Padding rows are neither read nor written.

    Args:
        parameters: int64 words in the order of launch.Stage1Parameter. They are in memory because a persistent kernel
            holds its arguments in scalar registers from beginning to end, and there are too few.
        WORDS, SCALES: 32-bit words and scale bytes of a row that are moved at a time.
    """
    route_counts = array(parameters, 0, tl.int32)
    first_entries = array(parameters, 1, tl.int32)
    route_entries = array(parameters, 2, tl.int64)
    pool_payload = array(parameters, 3, tl.uint8)
    pool_scales = array(parameters, 4, tl.uint8)
    pool_meta = array(parameters, 5, tl.int32)
    home_rows = array(parameters, 6, tl.int64)
    input_payload_offset = parameter(parameters, 7)
    input_scales_offset = parameter(parameters, 8)
    combine_offset = parameter(parameters, 9)
    combine_row_bytes = parameter(parameters, 10)
    payload_stride = tl.multiple_of(parameter(parameters, 11), 16)
    scales_stride = tl.multiple_of(parameter(parameters, 12), 16)
    hidden_size = parameter(parameters, 13).to(tl.int32)
    top_k = parameter(parameters, 14).to(tl.int32)
    capacity = parameter(parameters, 15)
    num_local_experts = parameter(parameters, 16).to(tl.int32)
    ep_size = parameter(parameters, 17).to(tl.int32)
    rank = parameter(parameters, 18).to(tl.int32)

    expert = tl.load(block_table + block * 4)
    expert_row = tl.load(block_table + block * 4 + 1) + first_row
    num_rows = tl.minimum(tl.load(block_table + block * 4 + 2) - first_row, ROWS)
    row = rows_of_copy(ROWS)
    # Sources in the order of this expert's rows; `start` is the number of rows before each one's.
    step, earlier = columns_of_copy(RANKS), rows_of_copy(RANKS)
    num, first_entry = rows_from(step, route_counts, first_entries, rank, ep_size, num_local_experts, expert)
    before, _ = rows_from(earlier, route_counts, first_entries, rank, ep_size, num_local_experts, expert)
    is_before = tl.expand_dims(earlier, 1) < tl.expand_dims(step, 0)
    start = tl.sum(tl.where(is_before, tl.expand_dims(before, 1), 0), axis=0)
    of_block = tl.expand_dims(expert_row + row, 1)
    is_from = (of_block < tl.expand_dims(start + num, 0)) & (of_block >= tl.expand_dims(start, 0))
    src = tl.sum(tl.where(is_from, tl.expand_dims(source_at(step, rank, ep_size), 0), 0), axis=1)
    entry = tl.sum(tl.where(is_from, of_block + tl.expand_dims(first_entry - start, 0), 0), axis=1)

    is_row = row < num_rows
    record = tl.load(route_entries + src.to(tl.int64) * capacity * top_k + entry, mask=is_row, other=0)
    pick = (record & 0xFFFFFFFF).to(tl.int32)
    token = (pick // top_k).to(tl.int64)
    pool_row = tl.cast(slot, tl.int64) * BLOCK_M + first_row + row
    meta = pool_meta + pool_row * 4
    tl.store(meta, src, mask=is_row)
    tl.store(meta + 1, pick, mask=is_row)
    tl.store(meta + 2, (record >> 32).to(tl.int32), mask=is_row)
    place = (pick % top_k).to(tl.int64) * capacity + token
    home_row = peer_address(peers, src, combine_offset) + place * combine_row_bytes
    tl.store(home_rows + pool_row, home_row, mask=is_row)

    source_row = peer_address(peers, src, input_payload_offset) + token * payload_stride
    target_row = pool_payload + pool_row * payload_stride
    row_words = tl.multiple_of(hidden_size // 8 if FP4 else hidden_size // 4, 16)
    for first in range(0, row_words, WORDS):
        word = first + columns_of_copy(WORDS)
        inside = tl.expand_dims(is_row, 1) & tl.expand_dims(word < row_words, 0)
        values = tl.load(row_words_at(source_row) + tl.expand_dims(word, 0), mask=inside, other=0)
        tl.store(row_words_at(target_row) + tl.expand_dims(word, 0), values, mask=inside)

    source_row = peer_address(peers, src, input_scales_offset) + token * scales_stride
    slot_scales = pool_scales + tl.cast(slot, tl.int64) * BLOCK_M * scales_stride
    num_scales = tl.multiple_of(hidden_size // 32, 8)
    for first in range(0, num_scales, SCALES):
        at = tl.expand_dims(first + columns_of_copy(SCALES), 0)
        inside = tl.expand_dims(is_row, 1) & (at < num_scales)
        source_bytes = row_words_at(source_row).to(tl.pointer_type(tl.uint8)) + at
        target = slot_scales + scale_offset(tl.expand_dims(first_row + row, 1), at, hidden_size)
        tl.store(target, tl.load(source_bytes, mask=inside, other=0), mask=inside)
    return num_rows
