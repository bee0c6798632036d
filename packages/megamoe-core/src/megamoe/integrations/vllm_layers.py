"""What one `RoutedExperts` layer of vLLM computes, and whether MegaMoE can compute it.

Imports vLLM: go through `megamoe.integrations.vllm`, which checks its version first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.fused_moe import MoEActivation
from vllm.model_executor.layers.fused_moe.expert_substitution import SubstitutedRoutedExperts

from megamoe.errors import ConfigError, UnsupportedProblemError
from megamoe.integrations.engine_layer import EngineOptions
from megamoe.problem import MoEProblem, QuantMode

BLOCK = 128
FP8_BLOCKS = [BLOCK, BLOCK]
OWN_ALL2ALL = "allgather_reducescatter"  # vLLM's default, which stands for no choice


def read_options(additional_config: Any) -> EngineOptions:
    """The options of `--additional-config '{"megamoe": {...}}'`.

    Raises:
        ConfigError: an option that there isn't.
    """
    given = additional_config.get("megamoe", {}) if isinstance(additional_config, dict) else {}
    known = [field.name for field in fields(EngineOptions)]
    if not isinstance(given, dict) or not given.keys() <= set(known):
        raise ConfigError("unknown option of megamoe in vLLM's additional_config", got=given, expected=known)
    return EngineOptions(**given)


def num_token_shares(moe: Any) -> int:
    """How many ranks hold the same tokens, of which each brings its share: those of a tensor-parallel group.

    Args:
        moe: vLLM's `FusedMoEConfig`. Where it is sequence parallel, the model has shared the tokens out already.
    """
    if not moe.use_ep or moe.is_sequence_parallel:
        return 1
    shares: int = moe.ep_size // moe.dp_size
    return shares


def read_problem(layer: Any, quant_config: Any, vllm_config: Any, options: EngineOptions) -> MoEProblem:
    """What `layer` computes.

    Args:
        layer: a `RoutedExperts`, as its constructor hands it to a quantisation configuration.
        quant_config: vLLM's `Fp8Config` of the checkpoint.
        vllm_config: the engine's `VllmConfig`.
        options: of the adapter.

    Raises:
        UnsupportedProblemError: something that MegaMoE does not do in vLLM; names all of it.
    """
    reasons = [*_format(layer, quant_config), *_placement(layer), *_engine(layer, vllm_config)]
    if reasons:
        raise _unsupported(layer, "; ".join(reasons))
    moe = layer.moe_config
    num_ranks_per_batch = moe.sp_size if moe.is_sequence_parallel else num_token_shares(moe)
    try:
        return MoEProblem(
            hidden_size=moe.hidden_dim,
            intermediate_size=moe.intermediate_size,
            num_experts=moe.num_experts,
            top_k=moe.experts_per_token,
            num_max_tokens_per_rank=options.num_max_tokens_per_rank or -(-moe.max_num_tokens // num_ranks_per_batch),
            ep_size=moe.ep_size,
            quant=QuantMode.A8W8,
            transport=options.transport,
            swiglu_limit=moe.swiglu_limit,
        )
    except ConfigError as error:
        raise _unsupported(layer, str(error)) from error


def _format(layer: Any, quant_config: Any) -> Iterator[str]:
    """What speaks against the experts as they are stored."""
    moe = layer.moe_config
    if quant_config.store_dtype is not None:
        yield f"experts stored as {quant_config.store_dtype}"
    if moe.in_dtype != torch.bfloat16:
        yield f"activations in {moe.in_dtype}: start vLLM with --dtype bfloat16"
    if moe.activation is not MoEActivation.SILU or moe.swiglu_alpha is not None or moe.swiglu_beta is not None:
        yield f"the activation {moe.activation.value} (alpha {moe.swiglu_alpha}, beta {moe.swiglu_beta})"
    if moe.has_bias:
        yield "experts with biases"
    if moe.intermediate_size % BLOCK or moe.intermediate_pad:
        yield f"an intermediate size that is no multiple of {BLOCK}: {moe.intermediate_size}"
    if layer.apply_router_weight_on_input:
        yield "router weights that are applied to the input"
    if isinstance(layer, SubstitutedRoutedExperts):
        yield "experts that constants stand for"


def _placement(layer: Any) -> Iterator[str]:
    """What speaks against where the experts and the tokens are."""
    moe, experts = layer.moe_config, layer.expert_map_manager
    if moe.tp_size > 1:
        yield f"each expert cut over {moe.tp_size} ranks: start vLLM with --enable-expert-parallel"
    if moe.pcp_size > 1:
        yield "prefill context parallelism"
    if moe.num_experts % moe.ep_size:
        yield f"{moe.num_experts} experts over {moe.ep_size} ranks, where each rank has to own as many"
    if experts.placement_strategy != "linear":
        yield f"experts placed {experts.placement_strategy}: leave --expert-placement-strategy alone"
    if experts.num_fused_shared_experts:
        yield "shared experts among the routed ones"
    backend = moe.moe_parallel_config.all2all_backend
    if moe.use_ep and backend != OWN_ALL2ALL:
        yield f"--all2all-backend {backend}: MegaMoE moves the tokens itself, leave it unset"
    if num_token_shares(moe) not in (1, get_tensor_model_parallel_world_size()):
        yield f"tokens that {num_token_shares(moe)} ranks hold, which are no tensor-parallel group"


def _engine(layer: Any, vllm_config: Any) -> Iterator[str]:
    """What speaks against how the engine was started."""
    moe, parallel, offload = layer.moe_config, vllm_config.parallel_config, vllm_config.offload_config
    if moe.skip_final_all_reduce:
        yield "a model that reduces the experts' output itself"
    if moe.is_lora_enabled:
        yield "LoRA"
    if parallel.enable_dbo or parallel.ubatch_size > 1:
        yield "micro-batches that run side by side"
    if parallel.enable_elastic_ep:
        yield "elastic expert parallelism"
    if offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0:
        yield "weights offloaded to the CPU"
    if vllm_config.model_config is not None and vllm_config.model_config.enable_sleep_mode:
        yield "sleep mode"


def _unsupported(layer: Any, got: str) -> UnsupportedProblemError:
    return UnsupportedProblemError(
        f"MegaMoE can't run {layer.layer_name} in vLLM",
        got=got,
        hint="leave --quantization out, or set unsupported to engine in --additional-config",
    )
