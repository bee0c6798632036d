"""The tile table: complete, valid, and chosen by plain numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megamoe.errors import ConfigError
from megamoe.problem import MoEProblem
from megamoe_rocm.heuristics import buckets, session_config, tile_for, tiles_of


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


def small_problem(capacity: int) -> MoEProblem:
    return MoEProblem(
        hidden_size=512,
        intermediate_size=256,
        num_experts=8,
        top_k=2,
        num_max_tokens_per_rank=capacity,
        ep_size=2,
        quant="a4w4",
    )


def test_a_pinned_tile_serves_every_call() -> None:
    problem = small_problem(4096)
    config = session_config(problem, "m64")
    assert {config.pick(problem, count)[0].name for count in (0, 100, 4096)} == {"m64"}
    assert config.token_counts(problem) == (4096,)
    with pytest.raises(ConfigError, match="m32 or m64 or m128"):
        session_config(problem, "m16")


@pytest.mark.parametrize("capacity", [1, 128, 129, 3000])
def test_an_automatic_session_has_a_ring_for_each_tile_that_it_picks(capacity: int) -> None:
    problem = small_problem(capacity)
    config = session_config(problem, None)
    for count in range(0, capacity + 1, 64):
        tile, ring = config.pick(problem, count)
        assert ring.block_m == tile.block_m
    picked = {config.pick(problem, count)[0] for count in config.token_counts(problem)}
    assert picked == set(config.tiles)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_m": 16},
        {"block_m": 96},
        {"gemm2_block_m": 128},
        {"gemm1_block_n": 32},
        {"gemm1_block_n": 1024},
        {"gemm2_block_n": 512},
        {"pull_rows": 64},
        {"units_per_ticket": 0},
        {"weight_cache": ".nt"},
    ],
    ids=str,
)
def test_tiles_that_cannot_work_are_refused(changes: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        replace(buckets()[0].tile, **changes)
