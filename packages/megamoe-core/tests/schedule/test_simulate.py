"""The simulation against what was measured, and against what must hold whatever was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megamoe.errors import ConfigError
from megamoe.problem import MoEProblem
from megamoe.schedule.device_spec import H200
from megamoe.schedule.expected_rows import Source, expected_rows, two_rank_sources, uniform_sources
from megamoe.schedule.kernel_rates import H200_RATES, NVLINK_FLAG_US, KernelRates, Link, links_of
from megamoe.schedule.simulate import Prediction, Tiling, simulate
from megamoe.schedule.tiles import ceil_div
from megamoe.schedule.workspace import combine_row_bytes

MEASURED = json.loads((Path(__file__).parent / "measured_calls.json").read_text())
EP8_REMOTE = 7 / 8
MOST_ERROR = 0.15
HOLDS_ALL = 1 << 20  # blocks of a ring that no call turns

EP8_LINK = replace(links_of(H200, 8, 8)[0], share=EP8_REMOTE)
EP8_EQUIVALENT = MoEProblem(
    hidden_size=MEASURED["hidden_size"],
    intermediate_size=MEASURED["intermediate_size"],
    num_experts=64,
    top_k=MEASURED["top_k"],
    ep_size=2,
    num_max_tokens_per_rank=8192,
    quant=MEASURED["mode"],
)
ROWS = [
    pytest.param(
        of_run, row, id=f"{of_run['routing']}-{row['num_tokens']}of{row['capacity']}-{row['transport']}-{index}"
    )
    for of_run in MEASURED["runs"]
    for index, row in enumerate(of_run["rows"])
]


def tiling(num_tokens: int, block_m: int, lag_blocks: int = 12, ring_blocks: int = 48, num_ctas: int = 132) -> Tiling:
    """The measured kernel's: 256 columns, 4 stages, whole blocks of activations; 8 K blocks of a first tile prefetched
    where an expert has one block."""
    one_block_each = 2 * num_tokens * EP8_EQUIVALENT.top_k <= EP8_EQUIVALENT.num_local_experts * block_m
    return Tiling(
        block_m=block_m,
        block_n=256,
        block_k=128,
        num_ctas=num_ctas,
        num_stages=4,
        box_rows=block_m,
        lag_blocks=lag_blocks,
        ring_blocks=ring_blocks,
        prefetched_k_blocks=8 if one_block_each else 0,
    )


def predict(
    num_tokens: int,
    cut: Tiling,
    *,
    transport: str = "bf16",
    rows: tuple[int, ...] | None = None,
    links: tuple[Link, ...] = (EP8_LINK,),
    rates: KernelRates = H200_RATES,
) -> Prediction:
    problem = replace(EP8_EQUIVALENT, transport=transport)
    sources = two_rank_sources(problem, num_tokens, EP8_REMOTE)
    return simulate(
        problem,
        cut,
        num_tokens=num_tokens,
        rows_per_expert=expected_rows(sources, problem.num_local_experts) if rows is None else rows,
        links=links,
        rates=rates,
    )


@pytest.mark.parametrize("run, row", ROWS)
def test_measured_rows_are_predicted(run: dict[str, Any], row: dict[str, Any]) -> None:
    num_tokens = row["num_tokens"]
    problem = replace(
        EP8_EQUIVALENT, num_experts=run["num_experts"], ep_size=run["ep_size"], transport=row["transport"]
    )
    stands_for_ep8 = run["routing"] == "ep8-equivalent"
    sources = (
        two_rank_sources(problem, num_tokens, EP8_REMOTE) if stands_for_ep8 else uniform_sources(problem, num_tokens)
    )
    predicted = simulate(
        problem,
        tiling(num_tokens, row["block_m"], row["lag_blocks"], row["ring_blocks"] or HOLDS_ALL),
        num_tokens=num_tokens,
        rows_per_expert=expected_rows(sources, problem.num_local_experts),
        links=(EP8_LINK,) if stands_for_ep8 else (),
        rates=H200_RATES,
        dirty_l2_bytes=H200.l2_bytes or 0,  # the L2 cache was flushed by writing
    )
    assert predicted.us == pytest.approx(row["us_median"], rel=MOST_ERROR)


def test_dirty_lines_cost_their_write_back_where_memory_bounds_and_nothing_where_it_does_not() -> None:
    for num_tokens, block_m, least_us, most_us in ((8, 64, 10.0, 18.0), (2048, 128, 0.0, 1.0)):
        problem, cut = EP8_EQUIVALENT, tiling(num_tokens, block_m)
        rows = expected_rows(two_rank_sources(problem, num_tokens, EP8_REMOTE), 32)
        clean, dirty = (
            simulate(
                problem,
                cut,
                num_tokens=num_tokens,
                rows_per_expert=rows,
                links=(EP8_LINK,),
                rates=H200_RATES,
                dirty_l2_bytes=num_bytes,
            )
            for num_bytes in (0, 50 << 20)
        )
        assert least_us <= dirty.us - clean.us <= most_us


def test_parts_make_the_whole() -> None:
    call = predict(512, tiling(512, 128))
    assert call.us == pytest.approx(call.exchange_us + call.multiply_us + call.finish_us + call.combine_us)
    rows = expected_rows(two_rank_sources(EP8_EQUIVALENT, 512, EP8_REMOTE), 32)
    assert call.num_blocks == sum(ceil_div(count, 128) for count in rows)
    in_and_out = 4096 + 4096 // 128 * 4 + combine_row_bytes("bf16", 4096)
    assert call.link_bytes == pytest.approx(sum(rows) * EP8_REMOTE * in_and_out)
    padding = call.num_blocks * 128 - sum(rows)
    assert call.hbm_bytes == pytest.approx(32 * 3 * 4096 * 2048 + padding * (4096 + 2048))


def test_no_call_is_faster_than_its_floors() -> None:
    for num_tokens, block_m in ((8, 64), (256, 128), (2048, 128)):
        call = predict(num_tokens, tiling(num_tokens, block_m))
        prefetched = 132 * 8 * 256 * 128
        assert call.multiply_us > (call.hbm_bytes - prefetched) / H200_RATES.hbm_bytes_per_s * 1e6
        assert call.multiply_us > call.link_bytes / EP8_LINK.push_bytes_per_s * 1e6
        assert 0 < call.math_share <= 1


def test_a_slow_link_bounds_the_call() -> None:
    slow = replace(EP8_LINK, pull_bytes_per_s=20e9, push_bytes_per_s=20e9)
    call = predict(1024, tiling(1024, 128), links=(slow,))
    assert call.multiply_us == pytest.approx(call.link_bytes / 20e9 * 1e6, rel=0.1)


@pytest.mark.parametrize(
    "change",
    [
        {"hbm_bytes_per_s": 2e12},
        {"k_block_us": {64: 1.0, 128: 1.0}},
        {"activation_epilogue_us": 8.0},
        {"store_epilogue_us": 8.0},
        {"sustained_slowdown": 1.5},
        {"copy_bytes_per_s": 1e12},
        {"sm_push_bytes_per_s": 5e9},
        {"launch_us": 30.0},
        {"memory_latency_us": 4.0},
        {"grid_join_us": 8.0},
        {"plan_us": 9.0},
        {"tile_us": 3.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_gets_slower_slows_the_call(change: dict[str, Any]) -> None:
    cut = tiling(512, 128)
    assert predict(512, cut, rates=replace(H200_RATES, **change)).us > predict(512, cut).us + 1


def test_half_empty_tiles_and_one_sm_s_stream_matter_where_they_bound() -> None:
    rows = (40,) * 32
    cut = tiling(160, 128)
    full = replace(H200_RATES, half_tile=1.0, hbm_bytes_per_s=40e12)
    assert (
        predict(160, cut, rows=rows, rates=replace(full, half_tile=0.5)).us
        < predict(160, cut, rows=rows, rates=full).us
    )
    one_expert = (8, *(0,) * 31)
    slow = replace(H200_RATES, sm_stream_bytes_per_s=20e9)
    assert predict(1, cut, rows=one_expert, rates=slow).us > predict(1, cut, rows=one_expert).us + 20


def test_more_rows_take_longer_and_skew_longer_still() -> None:
    cut = tiling(512, 128)
    balanced = predict(512, cut, rows=(128,) * 32)
    assert predict(512, cut, rows=(256,) * 32).us > 1.5 * balanced.us
    one_row_more = predict(512, cut, rows=(129,) * 32)  # a second block of every expert, half of whose math is skipped
    assert balanced.us + 50 < one_row_more.us < predict(512, cut, rows=(256,) * 32).us


def test_the_ring_holds_pulls_back() -> None:
    """On a slow link, a ring of the live set alone can't pull ahead while GEMM2 of its oldest block is to come."""
    slow = (replace(EP8_LINK, pull_bytes_per_s=60e9),)
    tight, wide = (predict(1024, tiling(1024, 128, 2, ring), links=slow) for ring in (3, 79))
    assert tight.us > wide.us


@pytest.mark.parametrize("num_ctas", [1, 7, 132])
@pytest.mark.parametrize(
    "rows", [(), (0,) * 32, (1, *(0,) * 31), (5, 0, 300, 64) * 8], ids=["none", "zeros", "one", "odd"]
)
def test_every_call_ends(rows: tuple[int, ...], num_ctas: int) -> None:
    call = predict(4, tiling(4, 64, lag_blocks=3, ring_blocks=4, num_ctas=num_ctas), rows=rows, links=())
    assert call.us > call.exchange_us > 0
    assert call.num_blocks == sum(ceil_div(count, 64) for count in rows)
    assert (call.hbm_bytes > 0) == any(rows)
    assert call.link_bytes == 0


def test_what_was_not_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="16 rows was measured"):
        predict(8, tiling(8, 16))
    with pytest.raises(ConfigError, match="bf16"):
        simulate(
            replace(EP8_EQUIVALENT, quant="bf16"),
            tiling(8, 64),
            num_tokens=8,
            rows_per_expert=(1,) * 32,
            links=(),
            rates=H200_RATES,
        )


@pytest.mark.parametrize("num_tokens", [0, 1, 8, 128, 2048])
def test_expected_rows_have_the_mean_and_the_empty_experts_of_the_routing(num_tokens: int) -> None:
    problem = replace(EP8_EQUIVALENT, num_experts=256, ep_size=8)
    rows = expected_rows(uniform_sources(problem, num_tokens), 32)
    assert len(rows) == 32
    assert sum(rows) == pytest.approx(num_tokens * 8, rel=0.02, abs=2)
    empty = 32 * (1 - 8 / 256) ** (num_tokens * 8)
    assert abs(sum(count == 0 for count in rows) - empty) <= 0.5
    spread = (num_tokens * 8 * (1 / 32) * (31 / 32)) ** 0.5
    assert max(rows, default=0) - min(rows, default=0) <= 6 * spread


def test_expected_rows_of_certain_and_impossible_picks() -> None:
    assert expected_rows([Source(num_tokens=9, probability=1.0)], 3) == (9, 9, 9)
    assert expected_rows([Source(num_tokens=9, probability=0.0)], 3) == (0, 0, 0)
    # Two fair coins: 0, 1, 1, 2 heads in four.
    coin = Source(num_tokens=1, probability=0.5)
    assert sorted(expected_rows([coin, coin], 4)) == [0, 1, 1, 2]


@pytest.mark.parametrize(
    "ep_size, domain_size, shares", [(1, 8, ()), (8, 8, (7 / 8,)), (16, 8, (7 / 16, 1 / 2)), (64, 72, (63 / 64,))]
)
def test_links_by_domain(ep_size: int, domain_size: int, shares: tuple[float, ...]) -> None:
    links = links_of(H200, ep_size, domain_size)
    assert tuple(link.share for link in links) == shares
    assert all(link.flag_us >= NVLINK_FLAG_US for link in links)
