"""Whatever is wrong with a checkpoint is one typed error that names the file, the tensor and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megamoe.checkpoint import TensorFiles, find_layer
from megamoe.errors import CheckpointError, ConfigError, FormatError

E, H, INTER = 2, 128, 128
PREFIX = "model.layers.0.mlp.experts"


def _tensors() -> dict[str, Tensor]:
    shapes = {"gate_proj": (INTER, H), "up_proj": (INTER, H), "down_proj": (H, INTER)}
    return {
        f"{PREFIX}.{expert}.{name}.weight": torch.ones(shape, dtype=torch.bfloat16)
        for expert in range(E)
        for name, shape in shapes.items()
    }


def _load(path: Path, layer: int = 0, quant: str | None = None) -> None:
    find_layer(TensorFiles.find([path]), layer).load_experts(range(E), quant)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(_tensors(), path)
    _load(path)
    return path


def _expect(path: Path, *words: str, **load: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        _load(path, **load)  # type: ignore[arg-type]
    message = str(caught.value)
    for word in words:
        assert word in message, message
    assert "Traceback" not in message


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_truncated(file: Path, keep: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content)) if keep < 1 else int(keep)])
    _expect(file, str(file), "not a whole safetensors file", "copy it again")


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: b"\xff" * 8 + content[8:], id="header length"),
        pytest.param(lambda content: content[:8] + b"#" + content[9:], id="header"),
        pytest.param(lambda content: content + b"\0" * 64, id="trailing bytes"),
        pytest.param(lambda content: b"PK\x03\x04" + content, id="another format"),
    ],
)
def test_corrupt(file: Path, damage: Callable[[bytes], bytes]) -> None:
    file.write_bytes(damage(file.read_bytes()))
    _expect(file, str(file), "not a whole safetensors file")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    _expect(tmp_path / "no.safetensors", "no.safetensors", "does not exist")
    _expect(tmp_path / "no.safetensors.index.json", "index.json", "does not exist")
    _expect(tmp_path, str(tmp_path), "holds no checkpoint")
    with pytest.raises(CheckpointError, match="no checkpoint was named"):
        TensorFiles.find([])


def test_a_missing_layer_lists_what_was_looked_for_and_what_is_there(file: Path) -> None:
    _expect(
        file,
        "layer 7",
        "MoE layers 0",
        "layers.7.mlp.experts.E.gate_proj.weight_scale_inv",
        "layers.7.block_sparse_moe.experts.E.w1.weight",
        "layers.7.mlp.experts.gate_up_proj_blocks",
        layer=7,
    )


def test_a_file_without_experts(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    _expect(tmp_path, "no MoE layer among 1 tensors", "index file")


def _damage(file: Path, name: str, tensor: Tensor | None) -> str:
    tensors = _tensors()
    full = f"{PREFIX}.{name}.weight"
    tensors.pop(full)
    if tensor is not None:
        tensors[full] = tensor
    save_file(tensors, file)
    return full


def test_a_missing_tensor(file: Path) -> None:
    name = _damage(file, "1.up_proj", None)
    _expect(file, name, str(file), "name all files")


def test_an_expert_that_config_json_promises(file: Path) -> None:
    file.with_name("config.json").write_text(json.dumps({"num_experts": 3}))
    layer = find_layer(TensorFiles.find([file]), 0)
    assert layer.stored.num_experts == 3
    with pytest.raises(CheckpointError, match=r"experts\.2\.gate_proj\.weight is not in the checkpoint"):
        layer.load_experts(range(3))


def test_a_wrong_shape(file: Path) -> None:
    name = _damage(file, "1.down_proj", torch.ones(H, INTER + 1, dtype=torch.bfloat16))
    _expect(file, name, str(file), "wrong shape", f"({H}, {INTER + 1})", f"({H}, {INTER})")


def test_a_wrong_dtype(file: Path) -> None:
    name = _damage(file, "1.down_proj", torch.ones(H, INTER, dtype=torch.int8))
    _expect(file, name, str(file), "wrong dtype", "I8", "BF16")


def test_an_fp8_layer_without_the_scales_of_one_expert(tmp_path: Path) -> None:
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in _tensors().items()}
    scales = {f"{name}_scale_inv": torch.ones(1, 1) for name in tensors}
    scales.pop(f"{PREFIX}.1.up_proj.weight_scale_inv")
    save_file(tensors | scales, tmp_path / "model.safetensors")
    _expect(tmp_path, f"{PREFIX}.1.up_proj.weight_scale_inv is not in the checkpoint")


def test_fp8_weights_without_any_scales_are_not_taken_for_bf16(tmp_path: Path) -> None:
    save_file({name: t.to(torch.float8_e4m3fn) for name, t in _tensors().items()}, tmp_path / "model.safetensors")
    _expect(tmp_path, "gate_proj.weight", "wrong dtype", "F8_E4M3")


def test_scales_of_other_blocks(tmp_path: Path) -> None:
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in _tensors().items()}
    scales = {f"{name}_scale_inv": torch.ones(2, 2) for name in tensors}
    save_file(tensors | scales, tmp_path / "model.safetensors")
    _expect(tmp_path, "gate_proj.weight_scale_inv", "wrong shape", "(2, 2)", "(1, 1)")


def test_an_index_that_is_wrong(file: Path) -> None:
    index = file.with_name("model.safetensors.index.json")
    index.write_text("{")
    _expect(index, str(index), "can't be read")
    index.write_text(json.dumps({"weights": {}}))
    _expect(index, str(index), "weight_map")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(_tensors(), "missing.safetensors")}))
    _expect(index, "missing.safetensors", "does not exist")
    stale = f"{PREFIX}.1.down_proj.weight"
    content = dict.fromkeys(_tensors(), file.name)
    save_file({name: tensor for name, tensor in _tensors().items() if name != stale}, file)
    index.write_text(json.dumps({"weight_map": content}))
    _expect(index, stale, str(file), "stale")


def test_a_tensor_in_two_files(file: Path) -> None:
    save_file(_tensors(), file.with_name("other.safetensors"))
    _expect(file.parent, "is in two files", "other.safetensors", file.name)


def test_two_checkpoints_that_both_hold_the_layer(file: Path) -> None:
    """Of other names, so that no tensor is there twice: neither is taken without a word."""
    stacked = {f"{PREFIX}.gate_up_proj": torch.ones(E, 2 * INTER, H, dtype=torch.bfloat16)}
    elsewhere = {name.replace("model.", "language_model."): tensor for name, tensor in _tensors().items()}
    mixtral = {"model.layers.0.block_sparse_moe.experts.0.w1.weight": torch.ones(INTER, H, dtype=torch.bfloat16)}
    for other in (stacked, elsewhere, mixtral):
        path = file.with_name("other.safetensors")
        save_file(other, path)
        _expect(file.parent, "layer 0 is there several times", "one ", "model.layers.0.mlp")
        path.unlink()


def test_experts_that_the_layer_does_not_have(file: Path) -> None:
    layer = find_layer(TensorFiles.find([file]), 0)
    for experts in (range(0), range(1, 3), range(-1, 1)):
        with pytest.raises(ConfigError, match="does not have"):
            layer.load_experts(experts)
    with pytest.raises(ConfigError, match="unknown quant; got 'fp8'; expected bf16 or a8w8"):
        layer.load_experts(range(1), "fp8")


def test_sizes_that_the_mode_can_not_hold(tmp_path: Path) -> None:
    tensors = {name: torch.ones(64, 64, dtype=torch.bfloat16) for name in _tensors()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match="fp8_128x128 needs whole blocks"):
        _load(tmp_path, quant="a8w8")


LAYER = "model.layers.0.mlp"
GPT_OSS = {
    f"{LAYER}.experts.gate_up_proj_bias": torch.ones(E, 2 * INTER),
    f"{LAYER}.experts.down_proj_bias": torch.ones(E, H),
}
ODD_SHAPES: dict[str, tuple[dict[str, Tensor], str]] = {
    "per expert": ({f"{PREFIX}.0.gate_proj.weight": torch.ones(1, INTER, H)}, "is not a matrix; got (1, 128, 128)"),
    "fused": ({f"{LAYER}.experts.gate_up_proj": torch.ones(E, 2 * INTER - 1, H)}, "expected [E, 2I, H]"),
    "gpt-oss": (GPT_OSS | {f"{LAYER}.experts.gate_up_proj": torch.ones(E, H)}, "expected [E, H, 2I]"),
    "gpt-oss MXFP4": (
        GPT_OSS | {f"{LAYER}.experts.gate_up_proj_blocks": torch.ones(E, 2 * INTER, H // 32, 15)},
        "expected [E, 2I, H/32, 16]",
    ),
}


@pytest.mark.parametrize("naming", ODD_SHAPES)
def test_a_layer_whose_first_tensor_has_another_shape(tmp_path: Path, naming: str) -> None:
    tensors, message = ODD_SHAPES[naming]
    save_file(tensors, tmp_path / "model.safetensors")
    _expect(tmp_path, f"{LAYER}.experts", "model.safetensors", message)


def test_fp8_blocks_that_hold_gate_and_up_rows(tmp_path: Path) -> None:
    shapes = {"gate_proj": (INTER // 2, H), "up_proj": (INTER // 2, H), "down_proj": (H, INTER // 2)}
    tensors = {f"{PREFIX}.0.{name}.weight": torch.ones(shape).to(torch.float8_e4m3fn) for name, shape in shapes.items()}
    save_file(tensors | {f"{name}_scale_inv": torch.ones(1, 1) for name in tensors}, tmp_path / "model.safetensors")
    _expect(tmp_path, "would straddle gate and up", "intermediate size 64", "BF16 form")


@pytest.mark.parametrize(
    ("config", "message"),
    [("[]", "is not a JSON object; got list"), ("{", "can't be read"), ('{"swiglu_alpha": 1}', "1.702")],
)
def test_a_config_json_that_can_not_be(tmp_path: Path, config: str, message: str) -> None:
    save_file(
        GPT_OSS | {f"{LAYER}.experts.gate_up_proj": torch.ones(E, H, 2 * INTER).bfloat16()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(config)
    _expect(tmp_path, "config.json", message)
