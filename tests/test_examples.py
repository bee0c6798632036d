"""Examples that no other test runs, and the README's, on CPU ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
EXAMPLES = REPOSITORY / "examples"


def test_the_code_of_the_readme_runs_as_it_is() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["torch.Size([100,", "1024])", "cpu"]


def test_an_engine_loop_on_two_ranks() -> None:
    """Eight steps of uneven batches; the busy expert gets a copy on the other rank, whose tokens go there then."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLES / "engine_loop.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "expert 1 gets a copy on rank 1" in done.stdout
    assert len(re.findall(r"step \d: \d+ tokens", done.stdout)) == 16
    found = re.findall(r"rank (\d): 8 calls since, rows per slot \[(.*?)\]", done.stdout)
    slots = {int(rank): numbers(rows) for rank, rows in found}
    assert slots[0][4] == 0, "rank 0's spare slot is still empty"
    assert slots[1][4] > 40, "rank 1's copy of expert 1 got its own tokens"
    assert slots[0][1] > 40, "rank 0 kept its own"


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def test_the_minimal_backend_passes_what_it_claims() -> None:
    """Found by its class, as its docstring says. Far fewer that pass would mean that it was not run."""
    matrix = [*("-m", "pytest", "-p", "megamoe.testing.plugin", "--pyargs", "megamoe.testing.conformance", "-q")]
    backend = ["--backend=minimal_backend:MinimalBackend", "--device=cpu"]
    options = [*backend, "-p", "no:cacheprovider", "-m", "smoke or edge"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *matrix, *options]
    done = subprocess.run(command, env=environment, cwd=EXAMPLES, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 80
