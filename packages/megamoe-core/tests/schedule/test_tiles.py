"""Blocks from counts: every row once, in the promised order, never two experts in a block."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.schedule.tiles import (
    balanced_blocks,
    ceil_div,
    max_pool_blocks,
    plan_blocks,
    round_up,
    share,
)


def counts_of(num_ranks: int, num_experts: int) -> st.SearchStrategy[tuple[tuple[int, ...], ...]]:
    rows = st.tuples(*[st.integers(0, 9)] * num_experts)
    return st.tuples(*[rows] * num_ranks)


@given(counts=counts_of(3, 4), owner=st.integers(0, 2), block_m=st.integers(1, 5), ring=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_blocks_hold_every_entry_once(counts, owner, block_m, ring) -> None:
    blocks = plan_blocks(counts, owner, block_m, ring)
    entries = [
        (segment.src_rank, segment.first_entry + row)
        for block in blocks
        for segment in block.segments
        for row in range(segment.num_rows)
    ]
    assert sorted(entries) == [(src, entry) for src in range(3) for entry in range(sum(counts[src]))]
    assert [block.index for block in blocks] == list(range(len(blocks)))
    assert all(block.slot == block.index % ring for block in blocks)
    assert all(1 <= block.num_rows <= block_m for block in blocks)
    assert all(block.num_rows == sum(segment.num_rows for segment in block.segments) for block in blocks)
    for expert in range(4):
        own = [block for block in blocks if block.local_expert_idx == expert]
        assert len(own) == ceil_div(sum(of_src[expert] for of_src in counts), block_m)
        assert all(block.num_rows == block_m for block in own[:-1])


@given(counts=counts_of(3, 4), first=st.integers(0, 4), num=st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_rows_of_a_block_are_a_slice_of_its_segments(counts, first, num) -> None:
    for block in plan_blocks(counts, 1, 5, 2):
        rows = [(s.src_rank, s.first_entry + i) for s in block.segments for i in range(s.num_rows)]
        cut = [(s.src_rank, s.first_entry + i) for s in block.rows(first, num) for i in range(s.num_rows)]
        assert cut == rows[first : first + num]


def test_rows_start_at_the_owners_own_and_wrap_around() -> None:
    """Each owner starts with another source, so that they do not all pull from one rank at a time."""
    counts = ((1, 2), (3, 0), (1, 1))
    blocks = plan_blocks(counts, owner_rank=1, block_m=4, ring_blocks=2)
    # expert 0: one row from rank 1's three entries on, then rank 2, then rank 0; entry numbers count over experts
    assert [(s.src_rank, s.first_entry, s.num_rows) for s in blocks[0].segments] == [(1, 0, 3), (2, 0, 1)]
    assert [(s.src_rank, s.first_entry, s.num_rows) for s in blocks[1].segments] == [(0, 0, 1)]
    assert [(s.src_rank, s.first_entry, s.num_rows) for s in blocks[2].segments] == [(2, 1, 1), (0, 1, 2)]


def test_no_rows_no_blocks() -> None:
    assert plan_blocks(((0, 0), (0, 0)), 0, 4, 2) == ()


@given(
    rows=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    block_m=st.integers(1, 8),
)
@settings(max_examples=200, deadline=None)
def test_no_call_needs_more_than_max_pool_blocks(rows, block_m) -> None:
    num_rows = sum(rows)
    limit = max_pool_blocks(ep_size=1, num_max_tokens_per_rank=num_rows, top_k=1, num_local_experts=3, block_m=block_m)
    assert len(plan_blocks((tuple(rows),), 0, block_m, 1)) <= limit


def test_max_pool_blocks_is_reached() -> None:
    """E - 1 experts with one row each, the rest on the last."""
    limit = max_pool_blocks(ep_size=2, num_max_tokens_per_rank=10, top_k=2, num_local_experts=4, block_m=8)
    assert len(plan_blocks(((1, 1, 1, 17), (0, 0, 0, 20)), 0, 8, 1)) == limit == 8


def test_balanced_blocks() -> None:
    sizes = {"num_max_tokens_per_rank": 8192, "top_k": 8, "num_local_experts": 32}
    assert balanced_blocks(block_m=128, **sizes) == 512
    assert balanced_blocks(num_max_tokens_per_rank=8, top_k=8, num_local_experts=32, block_m=64) == 32


@given(total=st.integers(0, 50), parts=st.integers(1, 9))
@settings(deadline=None)
def test_shares_cover_everything_evenly(total, parts) -> None:
    shares = [share(total, parts, part) for part in range(parts)]
    assert [item for one in shares for item in one] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_rounding() -> None:
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [round_up(n, 16) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
