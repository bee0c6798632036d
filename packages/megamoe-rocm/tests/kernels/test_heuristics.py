"""The tile table: complete, valid, and chosen by plain numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megamoe.errors import ConfigError
from megamoe_rocm.heuristics import buckets, tile_for, tile_named, tiles_of


def test_every_bucket_says_where_its_numbers_come_from() -> None:
    assert all(bucket.tile.provenance.endswith(".") for bucket in buckets())
    assert len({bucket.tile.name for bucket in buckets()}) == len(buckets())
    assert buckets()[-1].max_tokens is None


@pytest.mark.parametrize(
    "tokens, block_m", [(0, 32), (1, 32), (128, 32), (129, 64), (2048, 64), (2049, 128), (32768, 128)]
)
def test_row_blocks_grow_with_tokens(tokens: int, block_m: int) -> None:
    assert tile_for(num_max_tokens_per_rank=32768, num_tokens=tokens).block_m == block_m


def test_a_session_knows_all_tiles_that_its_calls_can_use() -> None:
    for capacity in (1, 128, 129, 2048, 8192):
        tiles = tiles_of(capacity)
        used = {tile_for(num_max_tokens_per_rank=capacity, num_tokens=count).name for count in range(capacity + 1)}
        assert {tile.name for tile in tiles} == used


def test_a_pinned_tile() -> None:
    assert tile_named("m64").block_m == 64
    with pytest.raises(ConfigError, match="m32 or m64 or m128"):
        tile_named("m16")


@pytest.mark.parametrize(
    "changes",
    [
        {"block_m": 16},
        {"block_m": 96},
        {"gemm2_block_m": 128},
        {"gemm1_block_n": 32},
        {"pull_rows": 64},
        {"units_per_ticket": 0},
        {"weight_cache": ".nt"},
    ],
    ids=str,
)
def test_tiles_that_cannot_work_are_refused(changes: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        replace(tile_named("m32"), **changes)
