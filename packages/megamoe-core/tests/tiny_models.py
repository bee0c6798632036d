"""Models of transformers' own classes, small and random. On the path of core tests and of processes they spawn."""

from __future__ import annotations

from typing import Any

import torch
import transformers

HIDDEN, INTER, EXPERTS, TOP_K, VOCAB = 256, 128, 8, 3, 64
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": TOP_K,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def config(family: str, **changes: Any) -> Any:
    """A configuration of `deepseek_v3`, `qwen3_moe`, `mixtral` or `gpt_oss`."""
    if family == "deepseek_v3":
        return transformers.DeepseekV3Config(
            **COMMON,
            intermediate_size=INTER,
            moe_intermediate_size=INTER,
            n_routed_experts=EXPERTS,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            qk_nope_head_dim=16,
            **changes,
        )
    if family == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **COMMON, intermediate_size=INTER, moe_intermediate_size=INTER, num_experts=EXPERTS, head_dim=32, **changes
        )
    if family == "mixtral":
        return transformers.MixtralConfig(**COMMON, intermediate_size=INTER, num_local_experts=EXPERTS, **changes)
    assert family == "gpt_oss"
    return transformers.GptOssConfig(
        **COMMON, intermediate_size=INTER, num_local_experts=EXPERTS, head_dim=32, **changes
    )


def model(family: str, **changes: Any) -> Any:
    """A model in BF16, its experts wide enough that they matter and that clamps bite."""
    torch.manual_seed(0)
    built = transformers.AutoModelForCausalLM.from_config(config(family, **changes), dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if ".experts." in name:
                parameter.normal_(std=0.5 if name.endswith("_bias") else 0.1)
    return built


def experts_modules(built: Any) -> list[Any]:
    """The experts module of each MoE layer."""
    return [module for name, module in built.named_modules() if name.endswith(".experts")]


def tokens(num_tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments of an experts module: `[T, H]` BF16, ids `[T, K]` int64, weights `[T, K]` FP32."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_tokens, EXPERTS, generator=g).argsort(-1)[:, :TOP_K]
    return torch.randn(num_tokens, HIDDEN, generator=g).bfloat16(), ids, torch.rand(num_tokens, TOP_K, generator=g)
