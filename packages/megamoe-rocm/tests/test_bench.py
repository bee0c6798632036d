"""The benchmark around its measurements: room in Mori's heap, rows without a peer, and what is no peer."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from megamoe.bench.results import Machine
from megamoe.bench.suites import SuiteOptions
from megamoe.errors import BackendUnavailableError, ProtocolError
from megamoe.problem import MoEProblem
from megamoe_rocm import bench
from megamoe_rocm.bench import Measurement, RankResult
from megamoe_rocm.planning import make_plan
from megamoe_rocm.symm_mori import HEAP_SIZE
from megamoe_rocm.unfused.mori_exchange import heap_bytes

RESULT = RankResult(
    seconds=[2e-3, 4e-3],
    unfused={"unfused_mori": [5e-3, 7e-3]},
    unfused_error="",
    workspace_bytes=1 << 20,
    machine=Machine(gpu="a GPU", num_gpus=2, driver="", toolkit=""),
)


def measurement(num_tokens: int) -> Measurement:
    problem = MoEProblem(
        hidden_size=7168,
        intermediate_size=3072,
        num_experts=384,
        top_k=6,
        num_max_tokens_per_rank=num_tokens,
        ep_size=8,
        quant="a4w4",
    )
    return Measurement(problem=problem, num_tokens=num_tokens, repeats=1, config=None)


def test_the_heap_holds_the_largest_session_and_the_largest_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made by the first session, which is the smallest, and can't grow."""
    monkeypatch.setenv(HEAP_SIZE, "")
    monkeypatch.delenv(HEAP_SIZE)
    measurements = [measurement(8), measurement(8192)]
    bench._make_room(measurements)
    largest = measurements[1].problem
    assert int(os.environ[HEAP_SIZE]) > make_plan(largest).workspace.symmetric_bytes + heap_bytes(largest)
    monkeypatch.setenv(HEAP_SIZE, "1G")
    bench._make_room(measurements)
    assert os.environ[HEAP_SIZE] == "1G"


def test_rows_have_the_slowest_ranks_median_and_that_of_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_ROCM_DEVICE", "interpreter")
    slower = replace(RESULT, seconds=[3e-3, 3e-3])
    monkeypatch.setattr(bench, "run_ranks", lambda *_, **__: [[RESULT] * 4, [slower] * 4])
    rows = list(bench.run(SuiteOptions(repeats=2)))
    assert len(rows) == 8  # two modes, two token counts, two transports
    assert {row.us_median for row in rows} == {3500.0}
    assert {name: value for row in rows for name, value in row.peers.items()} == {"unfused_mori": 6000.0}


def test_a_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_ROCM_DEVICE", "gfx950")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(BackendUnavailableError, match="suite seed-gfx950 needs a GPU"):
        list(bench.run(SuiteOptions()))


def test_rows_without_a_peer_come_before_the_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_ROCM_DEVICE", "interpreter")
    alone = replace(RESULT, unfused={}, unfused_error="Mori's operators can't be loaded")
    monkeypatch.setattr(bench, "run_ranks", lambda *_, **__: [[RESULT, alone, alone, alone]] * 2)
    rows = []
    with pytest.raises(BackendUnavailableError, match="Mori's operators can't be loaded; got 6 rows without a peer"):
        rows.extend(bench.run(SuiteOptions(repeats=2)))
    assert len(rows) == 8


def test_a_pipeline_that_computes_something_else_is_no_peer() -> None:
    fused = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    bench._require_same(fused.clone(), fused, "unfused_mori")
    for wrong in (1.1 * fused, torch.full_like(fused, float("nan"))):
        with pytest.raises(ProtocolError, match="unfused_mori computes something else"):
            bench._require_same(wrong, fused, "unfused_mori")
