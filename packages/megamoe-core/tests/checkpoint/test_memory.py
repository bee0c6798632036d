"""A rank's memory grows by its share of the file, not by the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

EP_SIZE = 4
MIB = 2**20


def _write(path: Path, naming: str, num_experts: int, hidden: int, inter: int) -> None:
    """A file whose bytes are noise: nothing here looks at values, but a file of zeros could be sparse."""

    def noise(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        rows = torch.randint(0, 255, (shape[-1] * dtype.itemsize,), dtype=torch.uint8)
        return rows.expand(*shape[:-1], -1).contiguous().view(dtype)

    prefix = "model.layers.0.mlp.experts"
    tensors = {}
    if naming == "fused":
        tensors[f"{prefix}.gate_up_proj"] = noise(num_experts, 2 * inter, hidden, dtype=torch.bfloat16)
        tensors[f"{prefix}.down_proj"] = noise(num_experts, hidden, inter, dtype=torch.bfloat16)
    else:
        for expert in range(num_experts):
            for name, (rows, columns) in {
                "gate": (inter, hidden),
                "up": (inter, hidden),
                "down": (hidden, inter),
            }.items():
                tensor = f"{prefix}.{expert}.{name}_proj.weight"
                tensors[tensor] = noise(rows, columns, dtype=torch.float8_e4m3fn)
                tensors[f"{tensor}_scale_inv"] = torch.ones(-(-rows // 128), -(-columns // 128))
    save_file(tensors, path)


def _measure(path: Path, first: int, count: int) -> tuple[int, int]:
    script = Path(__file__).with_name("load_and_measure.py")
    command = [sys.executable, str(script), str(path), str(first), str(count)]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    values = json.loads(result.stdout)
    return values["share_bytes"], values["peak_growth_bytes"]


@pytest.mark.parametrize("naming", ["deepseek", "fused"])
def test_a_rank_takes_at_most_its_share_and_a_half(naming: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    _write(path, naming, num_experts=64, hidden=1024, inter=1024)
    share, growth = _measure(path, first=16, count=16)
    assert share * EP_SIZE >= 0.99 * path.stat().st_size
    assert 0.9 * share < growth <= 1.5 * share


@pytest.mark.stress
@pytest.mark.parametrize("naming", ["deepseek", "fused"])
def test_a_rank_takes_at_most_its_share_and_a_half_of_two_gigabytes(naming: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    itemsize = 2 if naming == "fused" else 1
    _write(path, naming, num_experts=256 // itemsize, hidden=2048, inter=1408)
    assert path.stat().st_size >= 2e9
    share, growth = _measure(path, first=0, count=256 // itemsize // EP_SIZE)
    path.unlink()  # pytest keeps the last three temporary directories
    assert share > 500 * MIB
    assert growth <= 1.5 * share
