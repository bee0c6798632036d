"""A whole engine of SGLang on the CPU, with its scheduler in a process of its own, generates tokens with MegaMoE.

`nox -s engines-sglang` runs this. Attention is SGLang's own for CPUs; one rank, since its data-parallel attention needs
a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang", reason="`nox -s engines-sglang` installs it and runs these")

from sglang_models import write_checkpoint, write_exact
from transformers import AutoModelForCausalLM

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9]]
NEW_TOKENS = 6
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Output of an engine that runs both prompts together, and then one by one."""
    path = write_checkpoint(tmp_path_factory.mktemp("model"))
    program = HERE / "sglang_generate.py"
    environment = {**os.environ, "PYTHONPATH": str(HERE / "cpu_site"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(program), path, json.dumps(PROMPTS), str(NEW_TOKENS)],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return {"out": done.stdout, "err": done.stderr}


def _tokens(logs: dict[str, str], name: str) -> list[list[int]]:
    line = next(line for line in logs["out"].splitlines() if line.startswith(f"{name} "))
    tokens: list[list[int]] = json.loads(line.removeprefix(f"{name} "))
    return tokens


def test_tokens_are_those_of_the_model_in_fp32(logs: dict[str, str], tmp_path: Path) -> None:
    """transformers runs the same weights in FP32; a token may differ where two are about as likely."""
    model = AutoModelForCausalLM.from_pretrained(write_exact(tmp_path), dtype=torch.float32).eval()
    for prompt, tokens in zip(PROMPTS, _tokens(logs, "together"), strict=True):
        assert len(tokens) == NEW_TOKENS
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        behind = logits.max(dim=-1).values - logits[range(NEW_TOKENS), tokens]
        assert (behind <= 0.1).all(), (tokens, behind)


def test_a_request_does_not_depend_on_its_neighbours(logs: dict[str, str]) -> None:
    assert _tokens(logs, "together") == _tokens(logs, "alone")


def test_megamoe_ran_them(logs: dict[str, str]) -> None:
    assert "MegaMoE opens backend reference" in logs["out"] + logs["err"]
