"""The benchmark scripts run on a CPU: figures of it mean nothing, but what is written is what pages are made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megamoe.problem import QuantMode

pytest.importorskip("transformers", reason="the transformers extra is not installed")

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


def run(script: str, output: Path, *arguments: str) -> Any:
    command = [sys.executable, str(BENCHMARKS / script), "--output", str(output), *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text(encoding="utf-8")), done.stdout


def test_a_model_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MegaMoE's layers are within the mode's gate, the unfused block computes the layer, and the page can be made."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from end_to_end.report import markdown

    result, _ = run("end_to_end/run.py", tmp_path / "result.json", "--layers", "1", "--repeats", "1")
    layers, prefill, decode = result["rows"]
    assert [row["phase"] for row in result["rows"]] == ["layers", "prefill", "decode"]
    assert set(decode["ms"]) == {"megamoe", "unfused, all-gather", "without experts"}
    assert 0.01 < layers["rel_l2_from_exact"]["megamoe"] < layers["gate"]
    assert layers["rel_l2_from_exact"]["unfused, all-to-all"] < 1e-3  # sums in another order
    assert set(prefill["ms"]) == {"megamoe", "unfused, all-to-all", "unfused, all-gather", "without experts"}
    text = markdown([tmp_path / "result.json"])
    assert "**Time per output token, ms**" in text
    assert "**Time to first token, ms**" in text


def test_the_small_model(tmp_path: Path) -> None:
    """Two steps of training, then every mode."""
    report, said = run("small_model.py", tmp_path / "report.json", "--steps", "2", "--windows", "4")
    assert [row["experts"] for row in report["rows"]][1:] == [str(mode) for mode in QuantMode]
    assert report["bytes_held_out"] > 40_000
    changes = [abs(row["loss_change"]) for row in report["rows"]]
    assert changes[0] == 0
    assert max(changes) < 0.5
    assert said.count("| a8w8 |") == 1
