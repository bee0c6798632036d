"""What `megamoe run` measures: distances that add up, exact values per rank that sum to the oracle, taps row by row."""

from __future__ import annotations

import io
import time
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from megamoe.backend import StageTaps
from megamoe.cli import console
from megamoe.cli.compare import Distance, compare_stages
from megamoe.problem import MoEProblem
from megamoe.reference.oracle import oracle
from megamoe.reference.staged import staged
from megamoe.testing.data import Call, make_weights, shard
from megamoe.testing.tolerances import calc_diff, rel_l2

PROBLEM = MoEProblem(
    hidden_size=128,
    intermediate_size=128,
    num_experts=4,
    top_k=3,
    num_max_tokens_per_rank=16,
    ep_size=2,
    quant="a8w8",
    expert_bias=True,
)


def _calls() -> list[Call]:
    rng = torch.Generator().manual_seed(0)
    return [
        Call(
            hidden_states=torch.randn(tokens, 128, generator=rng).bfloat16(),
            topk_ids=torch.randint(-1, 5, (tokens, 3), generator=rng),  # with ids that name no expert, and repeats
            topk_weights=torch.randn(tokens, 3, generator=rng),
        )
        for tokens in (16, 5)
    ]


def _compare(rank: int, taps: StageTaps | None) -> tuple[list[torch.Tensor], dict[str, Distance]]:
    weights = shard(make_weights(PROBLEM, torch.device("cpu")), 2)
    return compare_stages(PROBLEM, rank, weights[rank], _calls(), taps, on_expert=lambda done: None)


def _taps() -> list[StageTaps]:
    calls, weights = _calls(), shard(make_weights(PROBLEM, torch.device("cpu")), 2)
    columns = zip(*((call.hidden_states, call.topk_ids, call.topk_weights) for call in calls), strict=True)
    return staged(PROBLEM, *map(list, columns), weights).taps


def test_a_distance_is_that_of_the_tolerances_and_adds_up_over_parts() -> None:
    x, y = torch.randn(2, 10, 7, generator=torch.Generator().manual_seed(0))
    whole = Distance.between(x, y)
    assert whole.rel_l2 == pytest.approx(rel_l2(x, y))
    assert whole.calc_diff == pytest.approx(calc_diff(x, y))
    parts = Distance.between(x[:3], y[:3]) + Distance.between(x[3:], y[3:]) + Distance.between(x[:0], y[:0])
    assert parts.rel_l2 == pytest.approx(whole.rel_l2)
    assert parts.calc_diff == pytest.approx(whole.calc_diff)
    zero = torch.zeros(3)
    assert (Distance.between(zero, zero).rel_l2, Distance.between(zero, zero).calc_diff) == (0, 0)
    assert Distance.between(zero + 1, zero).rel_l2 == float("inf")
    assert Distance.between(zero + torch.nan, zero + 1).rel_l2 == float("inf")


def test_what_the_ranks_expect_sums_to_the_oracle() -> None:
    weights, parts = shard(make_weights(PROBLEM, torch.device("cpu")), 2), [_compare(rank, None)[0] for rank in (0, 1)]
    for src_rank, call in enumerate(_calls()):
        expected = oracle(PROBLEM, call.hidden_states, call.topk_ids, call.topk_weights, weights)
        torch.testing.assert_close(parts[0][src_rank] + parts[1][src_rank], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_taps_are_compared_row_by_row_in_any_order(rank: int) -> None:
    taps = _taps()[rank]
    distances = _compare(rank, taps)[1]
    assert list(distances) == ["gemm1", "swiglu_quant", "gemm2"]
    assert 0.01 < distances["gemm1"].rel_l2 < 0.04  # one FP8 rounding of the input
    assert distances["gemm1"].rel_l2 < distances["gemm2"].rel_l2 < 0.06
    order = torch.randperm(len(taps.src_rank), generator=torch.Generator().manual_seed(1))
    shuffled = _compare(rank, _pick(taps, order))[1]
    assert shuffled["gemm2"].rel_l2 == pytest.approx(distances["gemm2"].rel_l2)


def test_a_row_that_is_missing_or_swapped_shows() -> None:
    taps = _taps()[0]
    assert _compare(0, _pick(taps, torch.arange(1, len(taps.src_rank))))[1]["gemm1"].rel_l2 == float("inf")
    rows = taps.contribution
    assert rows is not None
    assert _compare(0, replace(taps, contribution=rows.roll(1, 0)))[1]["gemm2"].rel_l2 > 0.5


def _pick(taps: StageTaps, rows: torch.Tensor) -> StageTaps:
    assert taps.gate_up is not None
    assert taps.contribution is not None
    assert taps.a2.scales is not None
    return StageTaps(
        src_rank=taps.src_rank[rows],
        src_pick=taps.src_pick[rows],
        local_expert=taps.local_expert[rows],
        a2=replace(taps.a2, payload=taps.a2.payload[rows], scales=taps.a2.scales[rows]),
        gate_up=taps.gate_up[rows],
        contribution=taps.contribution[rows],
    )


def test_progress_shows_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(after_s: float) -> str:
        text = io.StringIO()
        monkeypatch.setattr(console, "err", Console(file=text, force_terminal=True, width=100))
        monkeypatch.setattr(console, "PROGRESS_AFTER_S", after_s)
        with console.RankProgress() as progress:
            progress.report(1, ("load", 3, 8))
            time.sleep(0.3)
        return text.getvalue()

    assert "rank 1 load" in shown(0.05)
    assert "3/8" in shown(0.05)
    assert shown(60.0) == ""


@pytest.mark.parametrize("value, text", [(0, "0 B"), (1536, "1.5 KiB"), (2**31, "2.0 GiB"), (3 * 2**40, "3.0 TiB")])
def test_bytes(value: int, text: str) -> None:
    assert console.bytes_text(value) == text


@pytest.mark.parametrize("value, text", [(0.0, "0 µs"), (2.5e-6, "2.5 µs"), (0.00123, "1.23 ms"), (61.2, "61.2 s")])
def test_seconds(value: float, text: str) -> None:
    assert console.seconds_text(value) == text
