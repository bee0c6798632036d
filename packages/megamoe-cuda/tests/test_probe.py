"""What the probe says about machines."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megamoe.backend import Reason
from megamoe.cli.console import EXIT_BAD_INPUT
from megamoe_cuda.cli import app
from megamoe_cuda.probe import BINDINGS, CUDA_CORE, NVRTC, TORCH_CUDA, Gpu, Machine, judge, look

H200 = Gpu(name="NVIDIA H200", capability=(9, 0))
GOOD = Machine(driver_version=(13, 0), gpus=(H200,) * 2, nvrtc_version=(13, 0))


def test_a_whole_machine_is_usable() -> None:
    assert judge(GOOD).ok


def test_one_hopper_among_others_is_enough_here() -> None:
    """Which device a rank uses is known at open(), not before."""
    assert judge(replace(GOOD, gpus=(Gpu(name="NVIDIA T4", capability=(7, 5)), H200))).ok


def test_an_older_driver_of_the_same_major_version_is_fine() -> None:
    assert judge(replace(GOOD, driver_version=(12, 2), nvrtc_version=(12, 9))).ok


@pytest.mark.parametrize(
    "machine, reason, says",
    [
        (Machine(driver_failure="libcuda.so.1: not found"), Reason.NO_DEVICE, "no NVIDIA driver: libcuda.so.1"),
        (Machine(driver_failure="x", amd=True), Reason.NO_DEVICE, "megamoe-rocm"),
        (replace(GOOD, gpus=()), Reason.NO_DEVICE, "CUDA_VISIBLE_DEVICES"),
        (replace(GOOD, gpus=(Gpu(name="NVIDIA B200", capability=(10, 0)),)), Reason.WRONG_DEVICE, "B200 (sm_100)"),
        (replace(GOOD, failures={TORCH_CUDA: "no CUDA"}), Reason.MISSING_LIBRARY, "CUDA build of PyTorch"),
        (replace(GOOD, failures={BINDINGS: "no module"}), Reason.MISSING_LIBRARY, "cuda-bindings"),
        (replace(GOOD, failures={CUDA_CORE: "no module"}), Reason.MISSING_LIBRARY, "cuda-core"),
        (replace(GOOD, failures={NVRTC: "dlopen"}), Reason.MISSING_LIBRARY, "NVRTC is not found"),
        (replace(GOOD, driver_version=(12, 8)), Reason.DRIVER_TOO_OLD, "megamoe-cuda[cu12]"),
    ],
    ids=lambda value: str(value) if isinstance(value, Reason) else "",
)
def test_each_lack_has_its_own_reason(machine: Machine, reason: Reason, says: str) -> None:
    verdict = judge(machine)
    assert (verdict.ok, verdict.reason) == (False, reason)
    assert says in verdict.detail


@pytest.mark.parametrize("module", ["cuda.bindings.nvrtc", CUDA_CORE])
def test_a_missing_compiler_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str
) -> None:
    """As where megamoe-cuda was installed without its dependencies, or without an extra that brings NVRTC."""
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    result = CliRunner().invoke(app, ["compile"])
    assert result.exit_code == EXIT_BAD_INPUT
    assert "BackendUnavailableError: no compiler for CUDA kernels here" in result.output
    assert "megamoe-cuda[compile-cu13]" in result.output


def test_looking_raises_nothing_and_makes_no_context() -> None:
    """In a fresh process: torch must not have been initialised by it, or workers could not be forked afterwards."""
    program = (
        "from megamoe_cuda.probe import judge, look\n"
        "print(judge(look()))\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_what_is_found_here_is_judged() -> None:
    verdict = judge(look())
    assert verdict.detail
    assert verdict.ok == (verdict.reason is Reason.OK)
