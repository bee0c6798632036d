"""`megamoe-rocm validate` says what it ran, what it could not, and what that means."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megamoe_rocm import validate as module
from megamoe_rocm.validate import Step, StepFailedError, Validation, report, validate

ROW = {
    "mode": "a4w4",
    "transport": "bf16",
    "hidden_size": 7168,
    "intermediate_size": 3072,
    "ep_size": 8,
    "num_tokens": 512,
    "us_median": 123.4,
    "tflops": 567.8,
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

    for name in ("machine", "code_objects", "matrix", "bench"):
        monkeypatch.setattr(module, name, step(name))


def outcomes(result: Validation) -> list[str]:
    return [step.outcome for step in result.steps]


def test_a_run_in_which_everything_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(monkeypatch, matrix={"passed": 7}, bench={"rows": [ROW]})
    told: list[Step] = []
    result = validate(tmp_path, on_step=told.append)
    assert result.passed
    assert told == result.steps
    assert json.loads((tmp_path / "validation.json").read_text())["passed"] is True
    text = (tmp_path / "validation.md").read_text()
    assert "Everything passed" in text
    assert "A rehearsal on Triton's interpreter on the CPU: no gfx950 ran." in text
    assert "| a4w4 | bf16 | 7168 | 3072 | 8 | 512 | 123 | 567.8 |" in text


def test_a_machine_that_lacks_something_is_not_asked_to_run_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(monkeypatch, machine=StepFailedError("no_device: no AMD GPU", {"gpus": []}))
    result = validate(tmp_path, on_step=lambda step: None)
    assert outcomes(result) == ["failed", "passed", "not run", "not run", "not run"]
    assert not result.passed


def test_a_failed_matrix_leaves_its_output_and_the_benchmark_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(monkeypatch, matrix=StepFailedError("pytest ended with status 1", {"failed": 1, "output": "rank 1 differs"}))
    result = validate(tmp_path, on_step=lambda step: None)
    assert outcomes(result) == ["passed", "passed", "failed", "failed", "passed"]
    assert "rank 1 differs" in (tmp_path / "validation.md").read_text()


def test_an_error_of_a_step_ends_that_step_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(monkeypatch, bench=ValueError("boom"))
    result = validate(tmp_path, on_step=lambda step: None)
    assert (result.steps[-1].outcome, result.steps[-1].why) == ("failed", "ValueError: boom")


def test_ranks_as_processes_are_left_out_where_there_can_be_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAMOE_ROCM_DEVICE", "isa")
    steps(monkeypatch)
    result = validate(tmp_path, on_step=lambda step: None)
    assert outcomes(result)[3] == "not run"
    assert "instruction interpreter" in report(result)


def test_what_this_machine_lacks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_ROCM_DEVICE", "nvidia")
    with pytest.raises(StepFailedError, match="no_device") as raised:
        module.machine()
    assert raised.value.details["versions"]["megamoe-rocm"]


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
    listed = {"kernel": "k", "sha256": "0", "vgpr_spills": 0, "scratch_bytes": 0, "lds_bytes": 0}
    for reproduced in (True, None, False):
        done = subprocess.CompletedProcess([], 0, stdout=json.dumps([{**listed, "reproduced": reproduced}]), stderr="")
        monkeypatch.setattr(module.subprocess, "run", lambda *_, done=done, **__: done)
        if reproduced is False:
            with pytest.raises(StepFailedError, match="not as packaged"):
                module.code_objects()
        else:
            assert len(module.code_objects()["kernels"]) == 1
