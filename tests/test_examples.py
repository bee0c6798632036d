"""The examples run as their docstrings say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def _run(*command: object) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MEGAMOE_BACKEND": "reference"}
    result = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=240, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_single_process() -> None:
    output = _run(EXAMPLES / "single_process.py")
    assert "plan of backend reference" in output
    assert output.count("output (32, 512) torch.bfloat16") == 2


def test_expert_parallel() -> None:
    output = _run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, EXAMPLES / "expert_parallel.py")
    assert "rank 0: 0 tokens" in output
    assert "rank 1: 32 tokens" in output


@pytest.mark.parametrize("style, top_k", [("deepseek-v3", 6), ("mixtral", 2), ("gpt-oss", 4)])
def test_make_checkpoint(style: str, top_k: int, tmp_path: Path) -> None:
    sizes = ("--hidden", 128, "--intermediate", 256, "--experts", 4, "--top-k", top_k)
    _run(EXAMPLES / "make_checkpoint.py", tmp_path / "one" / "moe.safetensors", "--style", style, *sizes)
    output = _run(EXAMPLES / "make_checkpoint.py", tmp_path / "many", "--style", style, *sizes, "--shards", 3)
    assert output.count(" MB") == 3
    assert json.loads((tmp_path / "one" / "config.json").read_text())["num_experts_per_tok"] == top_k
    assert (tmp_path / "many" / "model.safetensors.index.json").exists()
