"""Layers of transformers' own models, saved by it and run by `megamoe run`, give what its MoE block gives.

Quantised checkpoints are loaded back by transformers, which dequantises them by its own code: so the comparison covers
our reading of the formats, of the namings and of the routers, and not only our arithmetic.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from megamoe.cli import app
from megamoe.formats import FP8_128X128, MXFP4
from megamoe.problem import QuantMode
from megamoe.testing.tolerances import ORACLE_GATES

pytest.importorskip("transformers", reason="the transformers extra is not installed")

import tiny_models
import transformers
from tiny_models import EXPERTS, HIDDEN

pytestmark = pytest.mark.transformers

LAYER, NUM_TOKENS = 1, 41


def _save(config: Any, directory: Path) -> None:
    """A model with random weights in BF16, in shards, its gates wide enough for clamps to bite."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "mlp" in name:
                is_bias = name.endswith(("_bias", "router.bias"))
                tensor.normal_(std=0.5 if is_bias else 0.15)
    model.save_pretrained(directory, max_shard_size="1MB")


def _quantize(directory: Path, change: Callable[[str, Tensor], dict[str, Tensor]], config: dict[str, object]) -> None:
    """Rewrite every shard with `change` of each tensor, its index, and the quantisation in config.json."""
    index_file = directory / "model.safetensors.index.json"
    weight_map: dict[str, str] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors: dict[str, Tensor] = {}
        for name, tensor in load_file(file).items():
            tensors |= change(name, tensor)
        save_file(tensors, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def _to_fp8(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """FP8 blocks for every linear layer of the MLPs, as DeepSeek publishes them."""
    if not (".mlp." in name and name.endswith("_proj.weight")):
        return {name: tensor}
    quantized = FP8_128X128.quantize(tensor)
    assert quantized.scales is not None
    return {name: quantized.payload, f"{name}_scale_inv": quantized.scales}


def _to_mxfp4(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """gpt-oss's blocks: rows of the transposed matrix, 32 values in 16 bytes."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    quantized = MXFP4.quantize(tensor.mT)
    assert quantized.scales is not None
    blocks = quantized.payload.unflatten(-1, (-1, 16))
    return {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": quantized.scales}


def _load(directory: Path, **options: Any) -> Any:
    """The MoE block of the layer, as transformers reads it, in FP32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **options)
    return model.model.layers[LAYER].mlp.float()


def _routed(block: Any, hidden_states: Tensor) -> Tensor:
    """The block's output `[T, H]` without its shared experts."""
    with torch.no_grad():
        x = hidden_states.float().unsqueeze(0)
        y = block(x)
        y = (y[0] if isinstance(y, tuple) else y).squeeze(0)
        if hasattr(block, "shared_experts"):
            y = y - block.shared_experts(x).squeeze(0)
        return y  # type: ignore[no-any-return]


def _run(directory: Path, tmp_path: Path, hidden_states: Tensor, *args: str) -> tuple[dict[str, Tensor], Any]:
    save_file({"hidden_states": hidden_states}, tmp_path / "input.safetensors")
    command = ["run", "--checkpoint", directory, "--layer", LAYER, "--ep", 2, "--backend", "reference"]
    command += ["--input", tmp_path / "input.safetensors", "--output", tmp_path / "output.safetensors"]
    command += ["--routing", "router", "--repeats", 1, "--json", *args]
    result = CliRunner().invoke(app, [str(part) for part in command])
    assert result.exit_code == 0, (result.output, result.exception)
    return load_file(tmp_path / "output.safetensors"), json.loads(result.stdout)


CASES = {
    "deepseek-v3 bf16": ("deepseek_v3", None, None, QuantMode.BF16),
    "deepseek-v3 fp8": ("deepseek_v3", _to_fp8, "fp8", QuantMode.A8W8),
    "qwen3-moe": ("qwen3_moe", None, None, QuantMode.BF16),
    "mixtral": ("mixtral", None, None, QuantMode.BF16),
    "gpt-oss bf16": ("gpt_oss", None, None, QuantMode.BF16),
    "gpt-oss mxfp4": ("gpt_oss", _to_mxfp4, "mxfp4", QuantMode.A8W4),
}


@pytest.mark.parametrize("case", CASES)
def test_the_layer_equals_the_models_own_block(case: str, tmp_path: Path) -> None:
    family, change, method, mode = CASES[case]
    directory = tmp_path / "model"
    _save(tiny_models.config(family), directory)
    options: dict[str, Any] = {}
    if method == "fp8":
        _quantize(directory, change, {"quant_method": "fp8", "weight_block_size": [128, 128]})
        options["quantization_config"] = transformers.FineGrainedFP8Config(dequantize=True)
    elif method == "mxfp4":
        _quantize(directory, change, {"quant_method": "mxfp4"})
        options["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    block = _load(directory, **options)
    hidden_states = torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected = _routed(block, hidden_states)

    output, report = _run(directory, tmp_path, hidden_states)

    assert report["problem"]["quant"] == mode
    assert report["weights"].startswith("as stored")
    gate = ORACLE_GATES[mode]
    got = output["output"].float()
    assert (got - expected).norm() < gate.rel_l2 * expected.norm()
    row_error = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert row_error.max() < gate.row_rel_l2
    # Not a coincidence of small numbers: every token was routed, and routing it elsewhere would show.
    assert expected.norm(dim=-1).min() > 0.1
    assert output["topk_ids"].unique().numel() > EXPERTS // 2
