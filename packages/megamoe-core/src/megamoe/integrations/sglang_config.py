"""Which servers of SGLang can be run by MegaMoE, and what their configuration becomes then.

SGLang resolves its arguments once, in the process that starts the others, so this is decided before any rank exists and
is the same for all. Imports SGLang: go through `megamoe.integrations.sglang`, which checks its version first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.arg_groups.cuda_graph_hook import apply_cuda_graph_compatibility
from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view
from sglang.srt.layers.moe.utils import MoeA2ABackend

from megamoe.errors import BackendError, ConfigError, UnsupportedProblemError
from megamoe.integrations.engine_layer import EngineOptions, Unsupported
from megamoe.integrations.sessions import backend_for
from megamoe.integrations.sglang import RUNNER
from megamoe.problem import MoEProblem

logger = logging.getLogger("megamoe")

# The mode of SGLang that promises what MegaMoE does: each rank passes the tokens of its own requests with global expert
# ids, the operation brings them to their experts and back, and nobody sums the rows once more. SGLang has it for
# FlashInfer's kernel, whose runner is chosen apart from the mode.
MODE = MoeA2ABackend.FLASHINFER_MEGAMOE.value

# Models whose MoE blocks keep that promise, out of those that SGLang admits to the mode. On one rank there is no mode.
ARCHITECTURES = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeForCausalLM",
        "GlmMoeDsaForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)

# Fields of ServerArgs that must have this value, and what they turn on. None of it was tried with the adapter.
PLAIN = {
    "speculative_algorithm": (None, "speculative decoding"),
    "enable_two_batch_overlap": (False, "two-batch overlap"),
    "enable_single_batch_overlap": (False, "single-batch overlap"),
    "enable_lora": (None, "LoRA"),
    "lora_paths": (None, "LoRA"),
    "enable_waterfill": (False, "waterfill"),
    "enable_paged_experts": (False, "paged experts"),
    "kt_weight_path": (None, "experts on the CPU"),
    "elastic_ep_backend": (None, "elastic expert parallelism"),
    "dwdp_size": (1, "DWDP"),
    "enable_memory_saver": (False, "the memory saver"),
    "cpu_offload_gb": (0, "weights on the CPU"),
    "offload_group_size": (-1, "weights on the CPU"),
    "moe_dp_size": (1, "MoE data parallelism"),
    "attn_cp_size": (1, "context parallelism"),
    "pp_size": (1, "pipeline parallelism"),
}
READ = ("device", "tp_size", "attn_dp_size", "ep_num_redundant_experts", "max_prefill_tokens", "moe_runner_backend")
DECLARED = ("moe_a2a_backend", "ep_size", "disable_shared_experts_fusion")


def choose_runner(options: EngineOptions, server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution step `handle_model_specific_adjustments`: before SGLang picks a runner for the model.

    Raises:
        BackendError, ConfigError: MegaMoE can't run this server, and the option `unsupported` is "error".
    """
    if resolving_view(server_args).moe_runner_backend == RUNNER:
        _require_or_leave(options, server_args)
    previous(server_args)


def choose_mode(options: EngineOptions, server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution step `handle_a2a_moe`: SGLang settles who moves the tokens, after other steps have had their say.

    Raises:
        BackendError, ConfigError: as `choose_runner`.
    """
    config = resolving_view(server_args)
    ours = config.moe_runner_backend == RUNNER and _require_or_leave(options, server_args)
    previous(server_args)
    if ours and config.tp_size > 1:
        declare_resolution(
            server_args,
            RUNNER,
            moe_a2a_backend=MODE,
            ep_size=config.tp_size,
            disable_shared_experts_fusion=True,  # their slots are one per rank in this mode
        )
        apply_cuda_graph_compatibility(server_args)  # once more: its rules ask for the mode


def _require_or_leave(options: EngineOptions, server_args: Any) -> bool:
    """Whether MegaMoE runs the experts. If not, the runner is "auto" from here on, and the log says why."""
    try:
        require_supported(options, server_args)
    except (BackendError, ConfigError) as error:
        if options.unsupported is Unsupported.ERROR:
            raise
        logger.warning("SGLang runs the experts by itself, not by MegaMoE: %s", error)
        declare_resolution(server_args, RUNNER, moe_runner_backend="auto")
        return False
    return True


def require_supported(options: EngineOptions, server_args: Any) -> None:
    """Raise where MegaMoE can't run the experts of this server.

    Raises:
        UnsupportedProblemError: the model or an option of the server; names it.
        BackendError: no backend can run the problem, with the reason against each.
    """
    config, model = resolving_view(server_args), model_config_of(server_args)
    for what, got, expected in _obstacles(config, model):
        raise UnsupportedProblemError(f"MegaMoE can't run this server of SGLang: {what}", got=got, expected=expected)
    backend_for(torch.device(config.device), options.backend, problem_of_model(options, config, model))


def _obstacles(config: Any, model: Any) -> Iterator[tuple[str, object, object]]:
    """What is in the way: subject, found, expected."""
    for field, (value, what) in PLAIN.items():
        if getattr(config, field) not in (value, False, []):
            yield f"{what} was not tried", f"{field}={getattr(config, field)!r}", value
    if config.moe_a2a_backend != "none":
        yield "it moves the tokens itself", f"moe_a2a_backend={config.moe_a2a_backend!r}", "none"
    quantization = getattr(model.hf_config, "quantization_config", None) or {}
    form = (model.quantization, quantization.get("weight_block_size"), quantization.get("activation_scheme", "dynamic"))
    if form != ("fp8", [128, 128], "dynamic"):
        yield "the experts are in another format", form, "an fp8 checkpoint with a scale per [128, 128], dynamic"
    if config.tp_size > 1:
        architecture = (model.hf_config.architectures or ["none"])[0]
        if architecture not in ARCHITECTURES:
            yield "the model on several ranks", architecture, sorted(ARCHITECTURES)
        if config.attn_dp_size != config.tp_size:
            # Ranks that share their tokens would compute every row once each.
            yield "ranks that share their tokens", f"attn_dp_size={config.attn_dp_size}", f"tp_size={config.tp_size}"


def problem_of_model(options: EngineOptions, config: Any, model: Any) -> MoEProblem:
    """What the model's MoE layers compute, as far as its configuration says; a layer says the rest when it is built.

    Raises:
        UnsupportedProblemError: no such layers.
        ConfigError: experts that the ranks can't share evenly.
    """
    text = model.hf_text_config
    num_experts = getattr(text, "n_routed_experts", None) or getattr(text, "num_experts", None)
    if num_experts is None or getattr(text, "moe_intermediate_size", None) is None:
        raise UnsupportedProblemError(
            "this model has no MoE layers that MegaMoE knows",
            got=model.hf_config.architectures,
            expected="n_routed_experts or num_experts, and moe_intermediate_size in its configuration",
        )
    return MoEProblem(
        hidden_size=text.hidden_size,
        intermediate_size=text.moe_intermediate_size,
        num_experts=num_experts + config.ep_num_redundant_experts,
        top_k=text.num_experts_per_tok,
        num_max_tokens_per_rank=options.num_max_tokens_per_rank or config.max_prefill_tokens,
        ep_size=config.tp_size,
        quant="a8w8",
        transport=options.transport,
    )
