"""Between `route` and `dispatch`: one program waits for every rank's counts and cuts the rows that arrive into blocks.

The device's form of `megamoe.schedule.tiles.plan_blocks`: experts in order, an expert's rows ordered by source rank,
this rank's own first, in blocks of at most BLOCK_M rows of one expert.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from megamoe_rocm.kernels.flags import call_epoch, read_by_one, wait_for_ranks

BLOCK_WORDS = tl.constexpr(4)  # of a row of the block table: local expert, first row within it, rows, unused
DISPATCH = tl.constexpr(2)  # place of Phase.DISPATCH in launch.PHASES


@triton.jit
def plan_blocks(
    counts_published,
    abort,
    route_counts,
    first_entries,
    block_table,
    num_blocks,
    receive_counts,
    epoch,
    status,
    rank,
    ep_size,
    num_local_experts,
    patience,
    BLOCK_M: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    TILE: tl.constexpr,
    CLOCK: tl.constexpr,
    WAVES: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program.

    Args:
        counts_published, abort: `[ep_size]` int32 flags.
        route_counts: `[ep_size, num_local_experts]` int32, pushed by the source ranks.
        first_entries: the same shape; receives where an expert's entries begin among a source's.
        block_table: `[max_blocks, BLOCK_WORDS]` int32; receives the blocks.
        num_blocks: int32; receives their number, 0 after a time-out.
        receive_counts: `[num_local_experts]` int32; receives the rows of each expert, 0 after a time-out.
        EXPERTS, RANKS, TILE: experts, ranks and blocks handled at a time; RANKS is at least `ep_size`.
    """
    call = call_epoch(epoch)
    wait_for_ranks(counts_published, abort, call, ep_size, patience, status, rank, DISPATCH, RANKS, CLOCK, WAVES, LANES)

    src = tl.arange(0, RANKS)
    # After a time-out nobody's rows are planned: counts that were pushed by halves would make more blocks than there
    # is room for.
    is_rank = tl.expand_dims(src < tl.where(read_by_one(status) == 0, ep_size, 0), 0)
    entries = tl.zeros([RANKS], tl.int32)
    total_blocks = 0
    for first in range(0, num_local_experts, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        is_expert = expert < num_local_experts
        at = tl.expand_dims(src, 0) * num_local_experts + tl.expand_dims(expert, 1)
        inside = tl.expand_dims(is_expert, 1) & is_rank
        counts = tl.load(route_counts + at, mask=inside, other=0)
        before = tl.expand_dims(entries, 0) + tl.cumsum(counts, axis=0) - counts
        tl.store(first_entries + at, before, mask=inside)
        entries += tl.sum(counts, axis=0)

        rows = tl.sum(counts, axis=1)
        tl.store(receive_counts + expert, rows, mask=is_expert)
        blocks = (rows + BLOCK_M - 1) // BLOCK_M
        end = total_blocks + tl.cumsum(blocks, axis=0)
        last_block = total_blocks + tl.sum(blocks, axis=0)
        for first_block in range(total_blocks, last_block, TILE):
            block = first_block + tl.arange(0, TILE)
            # An expert's index is the number of experts whose blocks all come before; one-hot sums gather by it.
            local = tl.sum((tl.expand_dims(end, 0) <= tl.expand_dims(block, 1)).to(tl.int32), axis=1)
            is_local = tl.expand_dims(local, 1) == tl.expand_dims(tl.arange(0, EXPERTS), 0)
            begin = tl.sum(tl.where(is_local, tl.expand_dims(end - blocks, 0), 0), axis=1)
            num_rows = tl.sum(tl.where(is_local, tl.expand_dims(rows, 0), 0), axis=1)
            first_row = (block - begin) * BLOCK_M
            row = block_table + block * BLOCK_WORDS
            tl.store(row, first + local, mask=block < last_block)
            tl.store(row + 1, first_row, mask=block < last_block)
            tl.store(row + 2, tl.minimum(num_rows - first_row, BLOCK_M), mask=block < last_block)
        total_blocks = last_block
    tl.store(num_blocks, total_blocks)
