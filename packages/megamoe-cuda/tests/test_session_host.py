"""The host side of sessions under the conformance matrix, with a stand-in for the kernel (tests/stand_in)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

STAND_IN = Path(__file__).parent / "stand_in"


@pytest.mark.parametrize(
    "selection, least_passed",  # of tests that are not refused; far fewer would mean that they were not run
    [("test_case", 120), ("not test_case", 160)],
    ids=["the-table-of-cases", "everything-else"],
)
def test_the_matrix_passes_with_a_stand_in_for_the_kernel(selection: str, least_passed: int, tmp_path: Path) -> None:
    """Nearly all of its time is the staged reference, once in the stand-in's place and once to compare with."""
    command = [
        *(sys.executable, "-m", "pytest", "-p", "cpu_kernel", "-p", "megamoe.testing.plugin"),
        *("--backend=cuda", "--device=cpu", "--ranks=virtual", "--pyargs", "megamoe.testing.conformance"),
        *("-q", "--tb=short", "--timeout=120", "-p", "no:cacheprovider", "-m", "not stress", "-k", selection),
        str(STAND_IN / "life.py"),
    ]
    path = os.pathsep.join(filter(None, [str(STAND_IN), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= least_passed, run.stdout[-2000:]
