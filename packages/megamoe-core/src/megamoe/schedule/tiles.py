"""Tile arithmetic: how rows become pool blocks, and how many blocks and tiles there are.

An owner sorts the rows that it receives by local expert and cuts each expert's rows into blocks of `block_m`. A block
never holds two experts, so its last rows may be padding. Everything here is a pure function of the exchanged counts,
which is what lets every worker of a rank, and the device, derive the same plan without talking to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

Counts = tuple[tuple[int, ...], ...]
"""`counts[src_rank][local_expert_idx]`: rows that each source rank sends to each expert of one owner."""


def ceil_div(numerator: int, denominator: int) -> int:
    """Quotient rounded up, for non-negative numbers."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return ceil_div(value, multiple) * multiple


def share(total: int, num_parts: int, part: int) -> range:
    """Part `part` of `range(total)` cut into `num_parts` contiguous parts whose lengths differ by at most one."""
    return range(total * part // num_parts, total * (part + 1) // num_parts)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive rows of a block that come from one source rank.

    `first_entry` indexes that source's route entries at this owner: rows `first_entry .. first_entry + num_rows - 1`.
    """

    src_rank: int
    first_entry: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """One pool block: at most `block_m` rows of one local expert, in ring slot `slot`.

    `segments` list its `num_rows` valid rows in order; the block's other rows are padding, which nobody reads back.
    """

    index: int
    slot: int
    local_expert_idx: int
    num_rows: int
    segments: tuple[Segment, ...]

    def rows(self, first_row: int, num_rows: int) -> tuple[Segment, ...]:
        """The segments of rows `first_row .. first_row + num_rows - 1` of this block."""
        return _cut(self.segments, first_row, num_rows)


@lru_cache(maxsize=16)  # shared by the workers of a rank, and by the ranks of one process
def plan_blocks(counts: Counts, owner_rank: int, block_m: int, ring_blocks: int) -> tuple[Block, ...]:
    """The owner's pool blocks in order.

    Experts in order; an expert with n rows takes ceil(n / block_m) blocks. Within an expert the rows are ordered by
    source rank, starting at the owner's own and wrapping around, so that owners do not all pull from the same rank at
    once. Within a source the order is that of its entries. Block b lives in ring slot b mod `ring_blocks`.
    """
    num_ranks = len(counts)
    sources = [(owner_rank + step) % num_ranks for step in range(num_ranks)]
    first_entries = [0] * num_ranks  # entries of one source are sorted by local expert
    blocks: list[Block] = []
    for expert in range(len(counts[owner_rank])):
        segments = tuple(
            Segment(src_rank=src, first_entry=first_entries[src], num_rows=counts[src][expert])
            for src in sources
            if counts[src][expert]
        )
        num_rows = sum(segment.num_rows for segment in segments)
        for first_row in range(0, num_rows, block_m):
            rows = min(block_m, num_rows - first_row)
            blocks.append(
                Block(
                    index=len(blocks),
                    slot=len(blocks) % ring_blocks,
                    local_expert_idx=expert,
                    num_rows=rows,
                    segments=_cut(segments, first_row, rows),
                )
            )
        for src in sources:
            first_entries[src] += counts[src][expert]
    return tuple(blocks)


def max_pool_blocks(
    *, ep_size: int, num_max_tokens_per_rank: int, top_k: int, num_local_experts: int, block_m: int
) -> int:
    """Blocks that the fullest possible owner needs: every pick of every rank is its own, spread to pad the most.

    Of n rows over E experts, sum(ceil(n_e / block_m)) is largest when E - 1 experts hold one row each and the last one
    holds the rest.
    """
    num_rows = ep_size * num_max_tokens_per_rank * top_k
    if num_rows <= num_local_experts:
        return num_rows
    return num_local_experts - 1 + ceil_div(num_rows - (num_local_experts - 1), block_m)


def balanced_blocks(*, num_max_tokens_per_rank: int, top_k: int, num_local_experts: int, block_m: int) -> int:
    """Blocks of an owner in a full call with balanced routing: as many rows as the rank sends, evenly over experts."""
    rows_per_expert = ceil_div(num_max_tokens_per_rank * top_k, num_local_experts)
    return num_local_experts * ceil_div(rows_per_expert, block_m)


def _cut(segments: Sequence[Segment], first_row: int, num_rows: int) -> tuple[Segment, ...]:
    """Rows `first_row .. first_row + num_rows - 1` of the concatenated segments."""
    end_row = first_row + num_rows
    pieces: list[Segment] = []
    row = 0
    for segment in segments:
        begin, end = max(row, first_row), min(row + segment.num_rows, end_row)
        if begin < end:
            pieces.append(
                Segment(
                    src_rank=segment.src_rank,
                    first_entry=segment.first_entry + begin - row,
                    num_rows=end - begin,
                )
            )
        row += segment.num_rows
    return tuple(pieces)
