"""Every naming, read back from files written here by hand, tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megamoe.checkpoint import NAMINGS, LayerCheckpoint, TensorFiles, find_layer, moe_layers
from megamoe.errors import CheckpointError
from megamoe.formats import FP8_128X128, MXFP4
from megamoe.problem import Activation
from megamoe.tensors import Bf16Weights, ExpertWeights, Fp8BlockWeights, GateUpLayout, Mxfp4Weights

E, H, I = 4, 256, 128  # noqa: E741 - the field's letters
Files = dict[str, Tensor]


def _matrices(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """gate and up `[E, I, H]`, down `[E, H, I]`, BF16."""
    rng = torch.Generator().manual_seed(seed)
    gate, up = torch.randn(2, E, I, H, generator=rng).bfloat16()
    return gate, up, torch.randn(E, H, I, generator=rng).bfloat16()


def _per_expert(prefix: str, names: tuple[str, str, str], matrices: tuple[Tensor, ...]) -> Files:
    return {
        f"{prefix}.experts.{expert}.{name}.weight": matrix[expert].clone()
        for name, matrix in zip(names, matrices, strict=True)
        for expert in range(E)
    }


def _deepseek() -> tuple[Files, ExpertWeights]:
    prefix, names = "model.layers.1.mlp", ("gate_proj", "up_proj", "down_proj")
    quantized = [FP8_128X128.quantize(matrix) for matrix in _matrices()]
    tensors = _per_expert(prefix, names, tuple(q.payload for q in quantized))
    for name, q in zip(names, quantized, strict=True):
        for expert in range(E):
            tensors[f"{prefix}.experts.{expert}.{name}.weight_scale_inv"] = q.scales[expert].clone()
    gate, up, down = quantized
    return tensors, Fp8BlockWeights(
        layout="packed",
        w13_weight=torch.cat([gate.payload.view(torch.uint8), up.payload.view(torch.uint8)], 1).view(
            torch.float8_e4m3fn
        ),
        w13_weight_scale=torch.cat([gate.scales, up.scales], 1),
        w2_weight=down.payload,
        w2_weight_scale=down.scales,
    )


def _bf16(prefix: str, names: tuple[str, str, str]) -> tuple[Files, ExpertWeights]:
    gate, up, down = _matrices()
    expected = Bf16Weights(layout="packed", w13_weight=torch.cat([gate, up], 1), w2_weight=down)
    return _per_expert(prefix, names, (gate, up, down)), expected


def _fused() -> tuple[Files, ExpertWeights]:
    gate, up, down = _matrices()
    w13 = torch.cat([gate, up], 1)
    prefix = "model.language_model.layers.1.mlp.experts"
    tensors = {f"{prefix}.gate_up_proj": w13, f"{prefix}.down_proj": down}
    return tensors, Bf16Weights(layout="packed", w13_weight=w13, w2_weight=down)


def _interleaved() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w13 `[E, 2I, H]` in gpt-oss's order, w2, and BF16 biases."""
    gate, up, down = _matrices()
    w13 = torch.stack([gate, up], 2).flatten(1, 2)
    rng = torch.Generator().manual_seed(1)
    return w13, down, torch.randn(E, 2 * I, generator=rng).bfloat16(), torch.randn(E, H, generator=rng).bfloat16()


def _gpt_oss_bf16() -> tuple[Files, ExpertWeights]:
    w13, w2, w13_bias, w2_bias = _interleaved()
    prefix = "model.layers.1.mlp.experts"
    tensors = {
        f"{prefix}.gate_up_proj": w13.mT.contiguous(),
        f"{prefix}.gate_up_proj_bias": w13_bias,
        f"{prefix}.down_proj": w2.mT.contiguous(),
        f"{prefix}.down_proj_bias": w2_bias,
    }
    expected = Bf16Weights(
        layout="interleaved", w13_weight=w13, w2_weight=w2, w13_bias=w13_bias.float(), w2_bias=w2_bias.float()
    )
    return tensors, expected


def _gpt_oss_mxfp4() -> tuple[Files, ExpertWeights]:
    w13, w2, w13_bias, w2_bias = _interleaved()
    prefix = "model.layers.1.mlp.experts"
    first, second = MXFP4.quantize(w13), MXFP4.quantize(w2)
    tensors = {
        f"{prefix}.gate_up_proj_blocks": first.payload.unflatten(-1, (H // 32, 16)),
        f"{prefix}.gate_up_proj_scales": first.scales,
        f"{prefix}.gate_up_proj_bias": w13_bias,
        f"{prefix}.down_proj_blocks": second.payload.unflatten(-1, (I // 32, 16)),
        f"{prefix}.down_proj_scales": second.scales,
        f"{prefix}.down_proj_bias": w2_bias,
    }
    expected = Mxfp4Weights(
        layout="interleaved",
        w13_weight=first.payload,
        w13_weight_scale=first.scales,
        w2_weight=second.payload,
        w2_weight_scale=second.scales,
        w13_bias=w13_bias.float(),
        w2_bias=w2_bias.float(),
    )
    return tensors, expected


CASES = {
    "DeepSeek-V3 FP8 blocks": _deepseek,
    "Qwen-MoE / DeepSeek BF16": lambda: _bf16("model.layers.1.mlp", ("gate_proj", "up_proj", "down_proj")),
    "Mixtral BF16": lambda: _bf16("model.layers.1.block_sparse_moe", ("w1", "w3", "w2")),
    "fused BF16": _fused,
    "gpt-oss BF16": _gpt_oss_bf16,
    "gpt-oss MXFP4": _gpt_oss_mxfp4,
}


def test_every_naming_has_a_case() -> None:
    assert CASES.keys() == {naming.name for naming in NAMINGS}


def _equal(got: ExpertWeights, expected: ExpertWeights, rows: slice) -> None:
    assert type(got) is type(expected)
    assert got.layout == expected.layout
    wanted = dict(expected.tensors())
    tensors = dict(got.tensors())
    assert tensors.keys() == wanted.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert tensor.is_contiguous(), name
        assert torch.equal(tensor.float(), wanted[name][rows].float()), name


@pytest.mark.parametrize("name", CASES)
def test_a_naming_is_detected_and_its_experts_are_read(name: str, tmp_path: Path) -> None:
    tensors, expected = CASES[name]()
    tensors["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(2, 2)  # a dense layer, as real models begin with
    save_file(tensors, tmp_path / "model.safetensors")
    layer = find_layer(TensorFiles.find([tmp_path / "model.safetensors"]), 1)
    stored = layer.stored
    assert stored.naming == name
    assert (stored.num_experts, stored.hidden_size, stored.intermediate_size) == (E, H, I)
    assert stored.weights is type(expected)
    is_gpt_oss = name.startswith("gpt-oss")
    assert stored.expert_bias == is_gpt_oss
    assert stored.activation is (Activation.SWIGLU_OAI if is_gpt_oss else Activation.SWIGLU)
    assert stored.layout is (GateUpLayout.INTERLEAVED if is_gpt_oss else GateUpLayout.PACKED)
    _equal(layer.load_experts(range(E)), expected, slice(0, E))
    _equal(layer.load_experts(range(1, 3)), expected, slice(1, 3))
    assert find_layer(TensorFiles.find(str(tmp_path)), 1).stored == stored  # one path need not be a list
    assert moe_layers(layer.files) == [1]


def _save_sharded(tensors: Files, directory: Path, num_shards: int) -> None:
    names = sorted(tensors)
    weight_map = {name: f"model-{i % num_shards}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, directory / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("given", ["directory", "index", "files"])
def test_a_sharded_checkpoint_is_read_however_it_is_named(given: str, tmp_path: Path) -> None:
    tensors, expected = _deepseek()
    _save_sharded(tensors, tmp_path, 3)
    paths = {
        "directory": [tmp_path],
        "index": [tmp_path / "model.safetensors.index.json"],
        "files": sorted(tmp_path.glob("*.safetensors")),
    }[given]
    layer = find_layer(TensorFiles.find(paths), 1)
    _equal(layer.load_experts(range(2, 4)), expected, slice(2, 4))


def test_sizes_come_from_config_json(tmp_path: Path) -> None:
    tensors, _ = _gpt_oss_mxfp4()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"swiglu_limit": 5.0, "num_experts_per_tok": 2}))
    layer = find_layer(TensorFiles.find([tmp_path]), 1)
    assert layer.stored.swiglu_limit == 5.0
    (tmp_path / "config.json").unlink()
    assert find_layer(TensorFiles.find([tmp_path]), 1).stored.swiglu_limit == 7.0


@pytest.mark.parametrize("limit", ['"x"', "[1]", "true", "-1", "NaN", "Infinity"])
@pytest.mark.parametrize("is_oss", [True, False], ids=["gpt-oss", "deepseek"])
def test_a_limit_that_is_no_number_is_refused(is_oss: bool, limit: str, tmp_path: Path) -> None:
    tensors, _ = _gpt_oss_mxfp4() if is_oss else _deepseek()
    (tmp_path / "config.json").write_text(f'{{"swiglu_limit": {limit}}}')
    with pytest.raises(CheckpointError, match="config.json's swiglu_limit is no number above 0"):
        _find(tensors, tmp_path)


def _find(tensors: Files, path: Path) -> LayerCheckpoint:
    save_file(tensors, path / "model.safetensors")
    return find_layer(TensorFiles.find([path]), 1)


def test_bf16_scales_are_taken_as_fp32(tmp_path: Path) -> None:
    tensors, _ = _deepseek()
    tensors = {name: t.bfloat16() if name.endswith("scale_inv") else t for name, t in tensors.items()}
    weights = _find(tensors, tmp_path).load_experts(range(E))
    assert isinstance(weights, Fp8BlockWeights)
    scale = tensors["model.layers.1.mlp.experts.3.down_proj.weight_scale_inv"]
    assert weights.w2_weight_scale.dtype == torch.float32
    assert torch.equal(weights.w2_weight_scale[3], scale.float())
