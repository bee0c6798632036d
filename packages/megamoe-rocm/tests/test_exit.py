"""The end of a process that has loaded and compiled kernels."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMPILE = """
from megamoe_rocm import code_store, standard
launches = {launch.kernel.__name__: launch for _, launch in standard.standard_launches()}
print(len(code_store.compile_launch(launches["plan_blocks"]).hsaco) > 0)
"""


@pytest.mark.usefixtures("toolchain")
def test_triton_finds_nothing_leaked_when_it_ends() -> None:
    """Its bindings print what is still alive at the end; kernels that hold their types would be."""
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert "nanobind" not in done.stderr
