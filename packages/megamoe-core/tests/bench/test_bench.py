"""Benchmarks without a GPU: routings, floors against the published table, rows, tables, and the reference's suite."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from megamoe.bench.commit import current_commit
from megamoe.bench.reference_suite import _measure_all, loop_over_experts, reference_suites
from megamoe.bench.report import Series, grouped, markdown, plot
from megamoe.bench.results import BenchRow, Timing, layer_flops, read_rows, write_rows
from megamoe.bench.roofline import floor, touched_experts
from megamoe.bench.routing import EP8_REMOTE, router_weights, routing
from megamoe.bench.suites import SuiteOptions, find_suite, suites
from megamoe.cli import app
from megamoe.errors import BackendUnavailableError, ConfigError, InputError
from megamoe.problem import MoEProblem
from megamoe.reference.oracle import oracle
from megamoe.schedule.device_spec import H200
from megamoe.tensors import Bf16Weights
from megamoe.testing.routings import Picks

SEED_SHAPE = MoEProblem(
    hidden_size=4096, intermediate_size=2048, num_experts=256, top_k=8, num_max_tokens_per_rank=8192, ep_size=8
)
ROW = BenchRow(
    bench="seed-sm90",
    commit="abc",
    date="2026-11-30T12:00:00+00:00",
    command="megamoe bench --suite seed-sm90",
    gpu="NVIDIA H200",
    num_gpus=2,
    driver="580",
    toolkit="CUDA 13.0",
    mode="a8w8",
    transport="bf16",
    hidden_size=4096,
    intermediate_size=2048,
    num_experts=64,
    top_k=8,
    ep_size=2,
    routing="ep8-equivalent",
    capacity=512,
    num_tokens=512,
    us_median=400.0,
    us_min=390.0,
    us_max=420.0,
    tflops=515.4,
    workspace_mib=100.0,
    peers={"DeepGEMM": 324.0},
)


def _picks(num_tokens: int, src_rank: int = 0, ep_size: int = 2) -> Picks:
    return Picks(num_tokens=num_tokens, top_k=8, num_experts=64, ep_size=ep_size, src_rank=src_rank)


@pytest.mark.parametrize("name", ["uniform", "zipf", "zipf:0", "zipf:1.5", "warm-rank", "hot-rank", "ep8-equivalent"])
@pytest.mark.parametrize("num_tokens", [0, 500])
def test_picks_of_a_row_are_distinct_and_in_range(name: str, num_tokens: int) -> None:
    ids = routing(name)(_picks(num_tokens, src_rank=1), torch.Generator().manual_seed(0))
    assert ids.shape == (num_tokens, 8)
    assert ids.dtype == torch.int64
    assert ((ids >= 0) & (ids < 64)).all()
    assert (ids.sort(-1).values.diff() > 0).all()


@pytest.mark.parametrize("src_rank", [0, 1])
def test_ep8_equivalent_leaves_the_rank_as_often_as_at_ep8(src_rank: int) -> None:
    rng = torch.Generator().manual_seed(0)
    ids = routing("ep8-equivalent")(_picks(20_000, src_rank), rng)
    remote = (ids // 32 != src_rank).float().mean().item()
    assert remote == pytest.approx(EP8_REMOTE, abs=0.005)  # 160,000 picks: a standard error of 0.0008
    counts = ids.flatten().bincount(minlength=64).float()
    there = counts[32:] if src_rank == 0 else counts[:32]
    assert (there / there.mean() - 1).abs().max() < 0.1
    # The layer that it stands for touches 27.8 of a rank's 32 experts at 8 tokens per rank; distinct picks do here too.
    touched = [
        torch.cat([routing("ep8-equivalent")(_picks(8, rank), rng) for rank in (0, 1)]).unique().numel() / 2
        for _ in range(200)
    ]
    assert sum(touched) / len(touched) == pytest.approx(28.2, abs=0.7)


def test_zipf_prefers_low_experts() -> None:
    ids = routing("zipf:1.5")(_picks(2000), torch.Generator().manual_seed(0))
    counts = ids.flatten().bincount(minlength=64)
    assert counts[:4].sum() > 3 * counts[32:].sum()
    with pytest.raises(ConfigError, match="Zipf"):
        routing("zipf:-1")
    with pytest.raises(ConfigError, match="two ranks"):
        routing("ep8-equivalent")(_picks(4, ep_size=4), torch.Generator())


@pytest.mark.parametrize("ep_size", [2, 8])
def test_the_warm_rank_receives_half_as_much_again(ep_size: int) -> None:
    ids = routing("warm-rank")(_picks(4000, ep_size=ep_size), torch.Generator().manual_seed(0))
    rows = (ids // (64 // ep_size)).flatten().bincount(minlength=ep_size)
    assert rows[-1].item() / rows.float().mean().item() == pytest.approx(1.5, abs=0.06)
    assert rows[:-1].max() < 1.1 * rows[:-1].float().mean()


def test_router_weights_sum_to_one() -> None:
    weights = router_weights(7, 4, torch.Generator().manual_seed(0))
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(7))


@pytest.mark.parametrize("num_tokens, expected_us", [(8, 157), (128, 179), (512, 179), (1024, 303), (8192, 2429)])
def test_floors_are_those_of_the_published_table(num_tokens: int, expected_us: float) -> None:
    # 157 at 8 tokens: 28 of 32 experts, 705 MB of FP8 weights at 4.5 TB/s.
    assert floor(SEED_SHAPE, num_tokens, H200).us == pytest.approx(expected_us, rel=0.06)


def test_eight_tokens_a_rank_touch_28_of_32_experts() -> None:
    assert touched_experts(SEED_SHAPE, 8) == pytest.approx(27.8, abs=0.1)


def test_timing_takes_the_slowest_rank_of_each_repeat() -> None:
    timing = Timing.of([[1e-6, 5e-6, 2e-6], [2e-6, 1e-6, 3e-6]])
    assert (timing.us_min, timing.us_median, timing.us_max) == pytest.approx((2.0, 3.0, 5.0))


def test_flops_of_the_seed_shape() -> None:
    assert layer_flops(SEED_SHAPE, 8192) == 8192 * 8 * 2 * 3 * 4096 * 2048


def test_rows_survive_the_file_and_bad_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.json"
    rows = [ROW, replace(ROW, num_tokens=8, capacity=8)]
    write_rows(path, rows)
    assert read_rows(path) == rows
    entry = json.loads(path.read_text())[0]
    entry["speed"] = entry.pop("us_median")
    for content, message in (
        ("{", "can't be read"),
        ("{}", "is not a list of rows"),
        (json.dumps([entry]), r"row 0 .* missing \['us_median'\], unknown \['speed'\]"),
    ):
        path.write_text(content)
        with pytest.raises(InputError, match=message):
            read_rows(path)


def _results() -> list[BenchRow]:
    large = [replace(ROW, num_tokens=tokens, capacity=8192, peers={}) for tokens in (8, 512)]
    again = replace(ROW, us_median=410.0, date="2026-12-01T12:00:00+00:00")
    return [ROW, again, replace(ROW, num_tokens=8, capacity=8, us_median=200.0), *large, replace(ROW, mode="a8w4")]


def test_rows_are_grouped_and_measured_again_ones_replace_old_ones() -> None:
    groups = {(series.mode, series.capacity): rows for series, rows in grouped(_results()).items()}
    assert {key: [row.num_tokens for row in rows] for key, rows in groups.items()} == {
        ("a8w8", 0): [8, 512],
        ("a8w8", 8192): [8, 512],
        ("a8w4", 0): [512],
    }
    assert groups["a8w8", 0][1].us_median == 410.0


def test_the_table_holds_times_floors_and_peers() -> None:
    lines = markdown(_results()).splitlines()
    row = next(line for line in lines if line.startswith("| 512 | 410.0 "))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:5] == ["512", "410.0", "390.0 to 420.0", "515", "100.0"]
    # 32 experts of 25.2 MB at 4.5 TB/s; 512 tokens touch all of them.
    assert float(cells[5]) == pytest.approx(179, abs=1)
    assert float(cells[6]) == pytest.approx(410 / 179, abs=0.02)
    assert cells[7] == "324.0"
    assert any("EP2, ep8-equivalent routing" in line for line in lines)
    assert any("2 x NVIDIA H200, driver 580, CUDA 13.0, commit abc" in line for line in lines)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_plots(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plots extra is not installed")
    path = tmp_path / f"plot.{suffix}"
    rows = next(rows for series, rows in grouped(_results()).items() if series.mode == "a8w8" and series.fits)
    plot(rows, path)
    content = path.read_bytes()
    plot(rows, path)
    assert path.read_bytes() == content, "made again, it is another file"
    assert content.startswith(b"<?xml" if suffix == "svg" else b"\x89PNG")
    if suffix == "svg":
        assert all(text in content.decode() for text in (Series.of(ROW).title, "DeepGEMM", "floor", "tokens per rank"))


def test_the_commands_list_suites_and_report(tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["bench"])
    assert listed.exit_code == 0
    assert all(name in listed.stdout for name in ("reference", "reference-v2-lite"))
    unknown = CliRunner().invoke(app, ["bench", "--suite", "none"])
    assert unknown.exit_code == 2
    assert "no such benchmark suite" in unknown.stderr
    for tokens in ("8,x", "0", "8,"):
        refused = CliRunner().invoke(app, ["bench", "--suite", "reference", "--tokens", tokens])
        assert refused.exit_code == 2
        assert f"--tokens is not a list of numbers; got '{tokens}'" in refused.stderr
    write_rows(tmp_path / "rows.json", _results())
    report = CliRunner().invoke(app, ["bench", "report", str(tmp_path)])
    assert report.exit_code == 0
    assert report.stdout.strip() == markdown(_results()).strip()
    nowhere = CliRunner().invoke(app, ["bench", "--suite", "reference", "--output", str(tmp_path / "no" / "rows.json")])
    assert nowhere.exit_code == 2
    assert "--output can't be written" in nowhere.stderr
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no results" in CliRunner().invoke(app, ["bench", "report", str(empty)]).stderr
    for option, value in (
        ("--output", tmp_path),
        ("--output", tmp_path / "no/file"),
        ("--plots", tmp_path / "rows.json"),
    ):
        refused = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "rows.json"), option, str(value)])
        assert refused.exit_code == 2
        assert f"ConfigError: {option} can't be" in refused.stderr


def test_the_reference_is_measured_beside_the_loop() -> None:
    problem = MoEProblem(
        hidden_size=128,
        intermediate_size=128,
        num_experts=4,
        top_k=2,
        num_max_tokens_per_rank=1,
        ep_size=2,
        quant="bf16",
    )
    (row,) = _measure_all("test", problem, SuiteOptions(repeats=2), tokens=(3,))
    assert 0 < row.us_min <= row.us_median <= row.us_max
    assert list(row.peers) == ["torch loop over experts, FP32 products", "torch loop over experts, BF16 products"]
    assert min(row.peers.values()) > 0
    assert row.tflops == pytest.approx(3 * 2 * 6 * 128 * 128 / row.us_median / 1e6)
    assert (row.bench, row.ep_size, row.capacity, row.num_gpus) == ("test", 2, 3, 0)
    assert row.workspace_mib > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loop_computes_the_layer(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    problem = MoEProblem(
        hidden_size=64, intermediate_size=32, num_experts=4, top_k=2, num_max_tokens_per_rank=9, quant="bf16"
    )
    weights = Bf16Weights(
        layout="packed",
        w13_weight=torch.randn(4, 64, 64, generator=rng).mul(0.125).bfloat16(),
        w2_weight=torch.randn(4, 64, 32, generator=rng).mul(0.125).bfloat16(),
    )
    hidden = torch.randn(9, 64, generator=rng).bfloat16()
    ids, router = torch.randint(-1, 4, (9, 2), generator=rng), torch.rand(9, 2, generator=rng)
    got = loop_over_experts(hidden, ids, router, list(weights.w13_weight), list(weights.w2_weight), dtype)
    expected = oracle(problem, hidden, ids, router, [weights])
    assert (got.float() - expected).norm() < 0.01 * expected.norm()


def test_suites_are_found_through_the_entry_point() -> None:
    assert find_suite("reference").backend == "reference"
    assert {"reference", "reference-v2-lite"} <= suites().keys()


def test_two_packages_that_offer_one_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [SimpleNamespace(name=name, value=name, load=lambda: reference_suites) for name in ("core", "other")]
    monkeypatch.setattr("megamoe.bench.suites.entry_points", lambda group: entries)
    with pytest.raises(ConfigError, match="two benchmark suites have one name; got reference; see other"):
        suites()


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BackendUnavailableError, match=r"plots need matplotlib; pip install megamoe-core\[plots\]"):
        plot([ROW], tmp_path / "a.svg")


def test_packages_of_different_commits_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, commit in (("wheel_a", "aaa"), ("wheel_b", "aaa"), ("wheel_c", "ccc-dirty")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "_commit.py").write_text(f'commit = "{commit}"')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("megamoe.bench.commit.PACKAGES", ("wheel_a", "wheel_b", "not_installed"))
    assert current_commit() == "aaa"
    monkeypatch.setattr("megamoe.bench.commit.PACKAGES", ("wheel_a", "wheel_c"))
    assert current_commit() == "wheel_a aaa, wheel_c ccc-dirty"
