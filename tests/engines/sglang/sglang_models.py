"""Tiny FP8 checkpoints in the naming that SGLang loads, and what their experts compute, in FP32."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INTER, EXPERTS, TOP_K, LAYERS, VOCAB, HEAD = 256, 128, 8, 2, 2, 256, 64
ATTENTION = {"q_proj": (4 * HEAD, HIDDEN), "k_proj": (2 * HEAD, HIDDEN), "v_proj": (2 * HEAD, HIDDEN)}
EXPERT = {"gate_proj": (INTER, HIDDEN), "up_proj": (INTER, HIDDEN), "down_proj": (HIDDEN, INTER)}

# On a CPU SGLang has no FP8 linear layers, so attention stays in BF16.
QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": [
        f"model.layers.{layer}.self_attn.{name}"
        for layer in range(LAYERS)
        for name in ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
    ],
}
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "moe_intermediate_size": INTER,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": QUANTIZATION,
}


def write_config(directory: Path, **changes: object) -> str:
    """A model's directory without weights; `changes` replace entries of `CONFIG`. Returns its path."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return str(directory)


def write_checkpoint(directory: Path) -> str:
    """A model of random weights. Returns its path."""
    save_file(_tensors(torch.Generator().manual_seed(0)), _made(directory) / "model.safetensors")
    return write_config(directory)


def write_exact(directory: Path) -> str:
    """The same model with its experts dequantised, in FP32, for another library to run. Returns its path."""
    stored = _tensors(torch.Generator().manual_seed(0))
    tensors = {
        name: _dequantized(stored, name.removesuffix(".weight")) if f"{name}_scale_inv" in stored else tensor.float()
        for name, tensor in stored.items()
        if not name.endswith("_scale_inv")
    }
    save_file(tensors, _made(directory) / "model.safetensors")
    config = {name: value for name, value in CONFIG.items() if name != "quantization_config"}
    (directory / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    return str(directory)


def _made(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory


def _tensors(generator: torch.Generator) -> dict[str, Tensor]:
    def random(*shape: int, scale: float = 0.06) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).bfloat16()

    ones = {
        "input_layernorm": HIDDEN,
        "post_attention_layernorm": HIDDEN,
        "self_attn.q_norm": HEAD,
        "self_attn.k_norm": HEAD,
    }
    tensors = {"model.embed_tokens": random(VOCAB, HIDDEN, scale=1.0), "lm_head": random(VOCAB, HIDDEN)}
    tensors["model.norm"] = torch.ones(HIDDEN).bfloat16()
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}": torch.ones(size).bfloat16() for name, size in ones.items()}
        tensors |= {f"{prefix}.self_attn.{name}": random(*shape) for name, shape in ATTENTION.items()}
        tensors[f"{prefix}.self_attn.o_proj"] = random(HIDDEN, 4 * HEAD)
        tensors[f"{prefix}.mlp.gate"] = random(EXPERTS, HIDDEN, scale=0.3)
    named = {f"{name}.weight": tensor for name, tensor in tensors.items()}
    for layer in range(LAYERS):
        for name, tensor in experts(seed=layer).items():
            named[f"model.layers.{layer}.mlp.experts.{name}"] = tensor
    return named


def experts(seed: int = 0) -> dict[str, Tensor]:
    """One layer's experts as a checkpoint names them: `0.gate_proj.weight`, `0.gate_proj.weight_scale_inv`, ..."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for expert in range(EXPERTS):
        for name, (rows, columns) in EXPERT.items():
            blocks = (rows // 128, columns // 128)
            tensors[f"{expert}.{name}.weight"] = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
            tensors[f"{expert}.{name}.weight_scale_inv"] = torch.rand(blocks, generator=generator) * 0.05 + 0.03
    return tensors


def exact(tensors: dict[str, Tensor], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """What experts compute for `x [T, H]`, in FP32 from the checkpoint's tensors, without SGLang or MegaMoE."""
    y = torch.zeros(x.shape, dtype=torch.float32)
    for token, slot in ((ids >= 0) & (ids < EXPERTS)).nonzero().tolist():
        gate, up, down = (_dequantized(tensors, f"{int(ids[token, slot])}.{name}") for name in EXPERT)
        row = x[token].float()
        y[token] += weights[token, slot] * (down @ (torch.nn.functional.silu(gate @ row) * (up @ row)))
    return y


def _dequantized(tensors: dict[str, Tensor], name: str) -> Tensor:
    scale = tensors[f"{name}.weight_scale_inv"]
    return tensors[f"{name}.weight"].float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
