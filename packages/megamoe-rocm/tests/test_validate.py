"""`megamoe-rocm validate` says what it ran, what it could not, and what that means."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from megamoe.bench.results import BenchRow
from megamoe.errors import BackendUnavailableError
from megamoe_rocm import bench, gates
from megamoe_rocm import validate as module
from megamoe_rocm.serving import Client, ServingError, ServingPlan, ServingRow
from megamoe_rocm.validate import CHOICES, Step, StepFailedError, Validation, report, validate

ROW = {
    "mode": "a4w4",
    "transport": "bf16",
    "hidden_size": 7168,
    "intermediate_size": 3072,
    "ep_size": 8,
    "num_tokens": 512,
    "us_median": 123.4,
    "tflops": 567.8,
    "peers": {"unfused_mori": 456.7},
}
GATE = {**ROW, "rel_l2": 0.2219, "limit": 0.25, "calc_diff": 0.0248}
SERVED = {
    "server": "fused",
    "balancing": "r64",
    "workload": "c512",
    "total_throughput": 45583.18,
    "output_throughput": 5064.8,
    "request_throughput": 4.946,
    **{name: {"mean": 2.0, "median": 1.5, "p99": 3.0} for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")},
}


@pytest.fixture(autouse=True)
def _a_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_ROCM_DEVICE", "interpreter")


def steps(monkeypatch: pytest.MonkeyPatch, **results: Any) -> None:
    """Each step returns or raises what is given for it; the others return nothing."""

    def step(name: str) -> Any:
        def act(*_: object) -> dict[str, Any]:
            result = results.get(name, {})
            if isinstance(result, Exception):
                raise result
            return result

        return act

    for name in ("machine", "code_objects", "gates", "matrix", "bench", "serve"):
        monkeypatch.setattr(module, name, step(name))


def outcomes(result: Validation) -> list[str]:
    return [step.outcome for step in result.steps]


def test_a_run_in_which_everything_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(monkeypatch, gates={"gates": [GATE]}, matrix={"passed": 7}, bench={"rows": [ROW]})
    told: list[Step] = []
    result = validate(tmp_path, on_step=told.append)
    assert result.passed
    assert told == result.steps[:-1]
    assert (result.steps[-1].name, result.steps[-1].outcome) == ("serving", "not asked for")
    assert json.loads((tmp_path / "validation.json").read_text())["passed"] is True
    text = (tmp_path / "validation.md").read_text()
    assert "Everything passed" in text
    assert "A rehearsal on Triton's interpreter on the CPU: no gfx950 ran." in text
    assert "| a4w4 | bf16 | 7168 | 3072 | 8 | 512 | 123 | 567.8 | 457 | unfused_mori |" in text
    assert "| a4w4 | bf16 | 7168 | 3072 | 8 | 512 | 0.2219 | 0.25 | 0.02480 |" in text


def test_one_step_alone_runs_after_a_look_at_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(monkeypatch, code_objects=ValueError("run"), gates=ValueError("run"), matrix={"passed": 7})
    result = validate(tmp_path, only=["matrix"], on_step=lambda step: None)
    ran = [step.name for step in result.steps if step.outcome == "passed"]
    assert ran == ["machine", "matrix, virtual ranks", "matrix, processes"]
    assert result.passed
    assert "Passed, with code objects; gates; bench left out." in (tmp_path / "validation.md").read_text()


@pytest.mark.parametrize("choice", CHOICES)
def test_each_choice_is_a_step(choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(monkeypatch, gates={"gates": [GATE]}, matrix={"passed": 7}, bench={"rows": [ROW]})
    result = validate(tmp_path, only=[choice], on_step=lambda step: None)
    ran = [step.name for step in result.steps if step.outcome == "passed"]
    assert ran[0] == "machine"
    assert len(ran) > 1
    assert all(name.replace(" ", "-").startswith(choice) for name in ran[1:])


def test_a_serving_run_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ServingPlan(model="m", client=Client.SGLANG, servers={"fused": "serve"}, balancing={}, workloads=())
    steps(monkeypatch, serve={"serving": [SERVED], "accuracy": []})
    result = validate(tmp_path, serving=plan, on_step=lambda step: None)
    assert outcomes(result)[-1] == "passed"
    assert (
        "| fused | r64 | c512 | 45,583 | 5,065 | 4.946 | 2.0 / 1.5 / 3.0 |" in (tmp_path / "validation.md").read_text()
    )


def test_what_a_serving_run_measured_before_it_failed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(plan: ServingPlan, folder: Path, *, on_row: Any) -> None:
        on_row(ServingRow(command="", completed=1, **SERVED))
        raise ServingError("the server has ended by itself")

    monkeypatch.setattr(module, "run_serving", fail)
    with pytest.raises(StepFailedError, match="ended by itself") as raised:
        module.serve(None, tmp_path)  # type: ignore[arg-type]
    assert raised.value.details["serving"][0]["workload"] == "c512"


def test_layers_beyond_their_gate_fail_and_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name: GATE[name] for name in GATE if name not in ("us_median", "tflops", "peers")}
    right = gates.GateRow(**names, num_experts=8, top_k=2)
    monkeypatch.setattr(gates, "measure", lambda: iter([right, replace(right, rel_l2=float("nan"))]))
    with pytest.raises(StepFailedError, match="1 of 2 layers") as raised:
        module.gates()
    assert len(raised.value.details["gates"]) == 2


def test_rows_without_a_peer_are_kept_and_fail_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(options: object) -> Iterator[BenchRow]:
        yield measured
        raise BackendUnavailableError("nothing to compare with: Mori's operators can't be loaded")

    measured = BenchRow(**{each.name: ROW.get(each.name, 0) for each in fields(BenchRow)})
    monkeypatch.setattr(bench, "run", rows)
    with pytest.raises(StepFailedError, match="Mori's operators") as raised:
        module.bench()
    assert raised.value.details["rows"][0]["us_median"] == 123.4


def test_a_machine_that_lacks_something_is_not_asked_to_run_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(monkeypatch, machine=StepFailedError("no_device: no AMD GPU", {"gpus": []}))
    result = validate(tmp_path, on_step=lambda step: None)
    assert outcomes(result) == ["failed", "passed", "not run", "not run", "not run", "not run", "not asked for"]
    assert not result.passed


def test_a_failed_matrix_leaves_its_output_and_the_benchmark_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(monkeypatch, matrix=StepFailedError("pytest ended with status 1", {"failed": 1, "output": "rank 1 differs"}))
    result = validate(tmp_path, on_step=lambda step: None)
    assert outcomes(result)[:-1] == ["passed", "passed", "passed", "failed", "failed", "passed"]
    assert "rank 1 differs" in (tmp_path / "validation.md").read_text()


def test_an_error_of_a_step_ends_that_step_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(monkeypatch, bench=ValueError("boom"))
    result = validate(tmp_path, on_step=lambda step: None)
    assert (result.steps[-2].outcome, result.steps[-2].why) == ("failed", "ValueError: boom")


def test_ranks_as_processes_are_left_out_where_there_can_be_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAMOE_ROCM_DEVICE", "isa")
    steps(monkeypatch)
    result = validate(tmp_path, on_step=lambda step: None)
    assert outcomes(result)[4] == "not run"
    assert "instruction interpreter" in report(result)


def test_what_this_machine_lacks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_ROCM_DEVICE", "nvidia")
    with pytest.raises(StepFailedError, match="no_device") as raised:
        module.machine()
    assert raised.value.details["versions"]["megamoe-rocm"]


def test_without_triton_what_is_missing_is_named_by_both_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine to which the wheel alone has come: no ROCm, no Triton, no packaged code objects."""
    monkeypatch.setenv("MEGAMOE_ROCM_DEVICE", "gfx950")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(StepFailedError, match="no AMD GPU"):
        module.machine()
    with pytest.raises(StepFailedError, match=r"pip install megamoe-rocm\[triton\]"):
        module.code_objects()


def test_kernels_that_are_not_packaged_and_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback\nToolchainError: another Triton\n")
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(StepFailedError, match="neither packaged nor can they be compiled: ToolchainError: another"):
        module.code_objects()


def test_without_pytest_the_matrix_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytest", None)
    with pytest.raises(StepFailedError, match=r"megamoe-rocm\[validate\]"):
        module.matrix("--ranks=virtual")


@pytest.mark.usefixtures("toolchain")
def test_packaged_code_objects_are_compared_with_what_compiles_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megamoe_rocm import code_store, standard

    name, launch = next(each for each in standard.standard_launches() if each[0].startswith("copy_input"))
    monkeypatch.setattr(standard, "standard_launches", lambda: iter([(name, launch)]))
    open_packaged = code_store.CodeStore.open
    monkeypatch.setattr(code_store.CodeStore, "open", lambda: open_packaged(tmp_path))
    (alone,) = module.list_code_objects()
    assert (alone["kernel"], alone["reproduced"]) == (name, None)
    code_store.build(tmp_path, [launch])
    (same,) = module.list_code_objects()
    assert (same["sha256"], same["reproduced"]) == (alone["sha256"], True)


def test_code_objects_that_are_not_as_packaged_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # wherever this runs
    listed = {"kernel": "k", "sha256": "0", "vgpr_spills": 0, "scratch_bytes": 0, "lds_bytes": 0}
    for reproduced in (True, None, False):
        done = subprocess.CompletedProcess([], 0, stdout=json.dumps([{**listed, "reproduced": reproduced}]), stderr="")
        monkeypatch.setattr(module.subprocess, "run", lambda *_, done=done, **__: done)
        if reproduced is False:
            with pytest.raises(StepFailedError, match="not as packaged"):
                module.code_objects()
        else:
            assert len(module.code_objects()["kernels"]) == 1
