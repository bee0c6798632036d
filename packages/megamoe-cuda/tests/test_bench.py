"""The benchmark suite's list and rows; timing itself needs GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megamoe.bench.results import BenchRow, Machine
from megamoe.bench.suites import SuiteOptions, find_suite
from megamoe.errors import BackendUnavailableError
from megamoe.problem import Transport
from megamoe_cuda import backend as cuda_backend
from megamoe_cuda.bench import modes, seed_sm90, shapes, skew
from megamoe_cuda.bench.published import published
from megamoe_cuda.bench.rank import OURS, Measurement, RankResult

MACHINE = Machine(gpu="NVIDIA H200", num_gpus=2, driver="580.159.04", toolkit="NVRTC 13.0")


def all_measurements(options: SuiteOptions = SuiteOptions()) -> list[Measurement]:  # noqa: B008 - frozen
    return [each for setting in seed_sm90.settings(8) for each in seed_sm90._measurements(setting, options)]


def test_the_suite_is_found_by_name() -> None:
    assert find_suite("seed-sm90").backend == "cuda"


def test_every_token_count_is_measured_with_each_routing_and_transport() -> None:
    fitting = [each for each in all_measurements() if each.problem.num_max_tokens_per_rank == each.num_tokens]
    for transport in Transport:
        for ep_size, routing in ((2, "ep8-equivalent"), (8, "uniform"), (4, "uniform"), (2, "uniform"), (1, "uniform")):
            tokens = {
                each.num_tokens
                for each in fitting
                if (each.problem.transport, each.problem.ep_size, each.routing) == (transport, ep_size, routing)
            }
            assert tokens == {8, 128, 256, 512, 1024, 2048, 4096, 8192}


def test_small_calls_are_measured_in_a_large_session_too() -> None:
    roomy = {each.num_tokens for each in all_measurements() if each.problem.num_max_tokens_per_rank > each.num_tokens}
    assert roomy == {8, 128, 256, 512}


def test_a_rank_always_has_the_experts_of_ep8() -> None:
    assert {each.problem.num_local_experts for each in all_measurements()} == {32}


def test_a_machine_is_measured_at_the_ep_sizes_it_has_gpus_for() -> None:
    assert [each.ep_size for each in seed_sm90.settings(2) if each.routing == "uniform"] == [2, 1]
    assert [each.ep_size for each in seed_sm90.settings(8) if each.routing == "uniform"] == [8, 4, 2, 1]


def test_tokens_can_be_chosen() -> None:
    assert {each.num_tokens for each in all_measurements(SuiteOptions(tokens=(8, 2048)))} == {8, 2048}


def test_a_row_is_the_median_of_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "SEEN_RIGHT_ON", "under test")
    measurement = all_measurements(SuiteOptions(tokens=(8,)))[0]
    by_rank = (
        RankResult(seconds={OURS: [1e-6, 5e-6, 2e-6], "peer": [9e-6] * 3}, machine=MACHINE),
        RankResult(seconds={OURS: [3e-6, 4e-6, 4e-6], "peer": [8e-6] * 3}, machine=MACHINE),
    )
    row = seed_sm90._row(measurement, by_rank)
    assert isinstance(row, BenchRow)
    assert (row.us_min, row.us_median, row.us_max) == pytest.approx((3, 4, 5))
    assert row.peers["peer"] == pytest.approx(9)
    assert row.peers["seed kernel (published, 8 GPUs)"] == 265.9
    assert row.workspace_mib > 0


def test_each_mode_s_row_has_the_others_among_its_peers() -> None:
    problems = modes._problems(8, Transport.BF16)
    assert [str(problem.quant) for problem in problems] == ["a8w8", "bf16", "a8w4"]
    each = modes.Round(problems=problems, num_tokens=8, repeats=3, config=None)
    seconds = {"a8w8": [2e-6], "bf16": [4e-6], "a8w4": [1e-6], modes.GROUPED_GEMMS: [3e-6]}
    rows = {row.mode: row for row in modes._rows(each, MACHINE, seconds)}
    assert {mode: row.us_median for mode, row in rows.items()} == pytest.approx({"a8w8": 2, "bf16": 4, "a8w4": 1})
    assert rows["a8w4"].peers == pytest.approx({"a8w8": 2, "bf16": 4, modes.GROUPED_GEMMS: 3})


def test_published_figures_stand_beside_their_own_token_counts_only() -> None:
    assert published(8192)["seed kernel (published, 8 GPUs)"] == 4695.2
    assert len(published(8)) == 4
    assert len(published(4096)) == 3, "DeepEP V1 low-latency was not published there"
    assert published(100) == {}


@pytest.mark.parametrize("num_gpus, says", [(0, "needs a GPU; got 0; expected 1"), (1, "needs more GPUs; got 1")])
def test_too_few_gpus_end_the_suite_with_a_typed_error(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, says: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(seed_sm90, "run_ranks", lambda *args, **kwargs: [[]])  # one GPU has no rows of so many tokens
    with pytest.raises(BackendUnavailableError, match=says):
        list(find_suite("seed-sm90").run(SuiteOptions(tokens=(1 << 20,))))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_a_suite_for_one_gpu_is_refused_where_there_is_none() -> None:
    with pytest.raises(BackendUnavailableError, match="no GPU for rank 0; got 0 GPUs"):
        list(find_suite("sm90-modes").run(SuiteOptions(tokens=(8,))))


def test_other_shapes_are_measured_at_every_count_with_both_transports() -> None:
    for shape in shapes.SHAPES:
        found = list(shapes._measurements(shape, SuiteOptions()))
        assert {(each.num_tokens, each.problem.transport) for each in found} == {
            (num_tokens, transport) for num_tokens in (8, 128, 512, 2048, 8192) for transport in Transport
        }
        assert all(each.problem.num_local_experts == shape.num_local_experts for each in found)
        assert all(cuda_backend.CudaBackend().supports(each.problem).ok for each in found)


@pytest.mark.parametrize("routing, imbalance", [("uniform", 1.03), ("warm-rank", 1.5), ("zipf", 4.88)])
def test_the_busiest_rank_stands_alone_with_the_rows_it_receives(routing: str, imbalance: float) -> None:
    layer = skew._layer(256)
    picks = skew.busiest_rank_picks(layer, routing, seed=1)
    assert len(picks) / (256 * 8) == pytest.approx(imbalance, rel=0.05)
    rows = picks.bincount(minlength=32).float()
    assert len(rows) == 32
    # Zipf's first expert is in four of five tokens; the other routings spread rows evenly over a rank's experts.
    assert rows.max() / rows.mean() == pytest.approx(5.2 if routing == "zipf" else 1.2, rel=0.15)


def test_a_skewed_call_uses_the_tile_of_its_tokens() -> None:
    few = skew.Round(layer=skew._layer(128), routing="zipf", repeats=1, config=None)
    assert few.tile == "m64"
    assert skew.Round(layer=skew._layer(1024), routing="zipf", repeats=1, config=None).tile == "m128n64"
    assert skew.Round(layer=skew._layer(128), routing="zipf", repeats=1, config="n32").tile == "n32"


def test_a_skewed_row_has_balanced_routing_among_its_peers() -> None:
    each = skew.Round(layer=skew._layer(128), routing="zipf", repeats=1, config=None)
    problem = skew._layer(128)
    problem = replace(problem, num_experts=32, ep_size=1, num_max_tokens_per_rank=620)
    seconds = {OURS: [4e-6], skew.TILE_OF_THE_ROWS: [3e-6], skew.BALANCED: [2e-6]}
    row = skew._row(each, skew.Result(seconds=seconds, problem=problem, machine=MACHINE))
    assert (row.us_median, row.num_tokens, row.routing) == (pytest.approx(4), 620, "zipf")
    assert row.peers == pytest.approx({skew.TILE_OF_THE_ROWS: 3, skew.BALANCED: 2})
