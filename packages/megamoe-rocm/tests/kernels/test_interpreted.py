"""Rung 1: the kernels in Triton's interpreter, on the CPU.

Triton decides when a kernel is defined whether it is interpreted, from TRITON_INTERPRET. Other tests of this process
compile the same kernels, so each file of checks runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).parent / "interpreted"
TIMEOUT_S = 280  # of a file; each takes well under a minute on an idle machine


@pytest.mark.parametrize("file", sorted(CHECKS.glob("check_*.py")), ids=lambda file: file.stem)
def test_kernels_in_the_interpreter(file: Path) -> None:
    path = os.pathsep.join([str(CHECKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    options = ["-q", "-p", "no:cacheprovider", "--durations=3"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
