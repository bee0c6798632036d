"""The `megamoe-rocm` command: what it sets before Triton is loaded, and errors as one message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megamoe.cli.run import check_rehearsal
from megamoe.errors import ConfigError
from megamoe.problem import MoEProblem
from megamoe_rocm.cli import app
from megamoe_rocm.planning import make_plan
from megamoe_rocm.rungs import PLANNED_FOR, Rung

REHEARSE = """
import sys
from megamoe_rocm import cli, validate
validate.code_objects = validate.gates = validate.bench = lambda: {}
validate.matrix = lambda ranks: {}
sys.argv = ["megamoe-rocm", "validate", "--device", "interpreter", "--output", sys.argv[1]]
cli.main()
"""


def test_a_rehearsal_in_the_interpreter_needs_no_variable_set_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET once."""
    pytest.importorskip("triton")
    for name in ("TRITON_INTERPRET", "MEGAMOE_ROCM_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-c", REHEARSE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed   machine" in done.stdout


@pytest.mark.parametrize(
    "args, message",
    [
        pytest.param(["compile", "--output", "/proc/x"], "--output can't be made", id="compile"),
        pytest.param(["validate", "--output", "/proc/x"], "--output can't be made", id="validate"),
        pytest.param(["validate", "--device", "mi355x"], "--device is no device of megamoe-rocm", id="device"),
        pytest.param(["validate", "--step", "speed"], "--step is no step of validate; got speed", id="step"),
        pytest.param(["validate", "--serving", "/no/plan"], "the serving plan can't be read", id="serving"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGAMOE_ROCM_DEVICE", "isa")  # what --device sets is put back
    result = CliRunner().invoke(app, args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("name", ["compile", "model"])
def test_without_triton_one_message_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    result = CliRunner().invoke(app, [name])
    assert result.exit_code == 1
    assert "pip install megamoe-rocm[triton]" in result.stderr


def test_the_instruction_interpreter_asks_for_virtual_ranks_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = MoEProblem(
        hidden_size=512, intermediate_size=256, num_experts=4, top_k=2, num_max_tokens_per_rank=24, quant="a4w4"
    )
    plan = make_plan(problem, PLANNED_FOR[Rung.ISA])
    monkeypatch.setenv("MEGAMOE_ROCM_DEVICE", "isa")
    check_rehearsal(plan, True)
    with pytest.raises(ConfigError, match="--virtual-ranks"):
        check_rehearsal(plan, False)
    monkeypatch.setenv("MEGAMOE_ROCM_DEVICE", "interpreter")
    check_rehearsal(plan, False)
