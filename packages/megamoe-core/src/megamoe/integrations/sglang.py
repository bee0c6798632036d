"""MegaMoE in SGLang: a runner for the experts of FP8-block checkpoints, chosen by `--moe-runner-backend megamoe_ep`.

    pip install "megamoe-core[sglang]"
    python -m sglang.launch_server --model-path PATH --tp-size 8 --attn-dp-size 8 --moe-runner-backend megamoe_ep

SGLang finds `register` through its plugin entry point. docs/sglang.md is the guide. Nothing changes for a server that
doesn't name the runner.
"""

from __future__ import annotations

import inspect
import pkgutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megamoe import env
from megamoe.errors import ConfigError
from megamoe.integrations.engine_layer import EngineOptions
from megamoe.integrations.versions import require_version

if TYPE_CHECKING:
    from megamoe.integrations.sglang_moe import Adapter
    from megamoe.meter import Metrics

SUPPORTED = ">=0.5.23,<0.5.24"  # as the extra `sglang` of megamoe-core says
RUNNER = "megamoe_ep"  # "megamoe" is one of SGLang's own names: an all-to-all mode that runs another library's kernel


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """A name of SGLang that the adapter relies on.

    Args:
        name: dotted, from the module on.
        parameters: of the function, by name and in order; None for a value or a class, which only has to be there.
    """

    name: str
    parameters: tuple[str, ...] | None = None


_FP8 = "sglang.srt.layers.quantization.fp8"
_MOE = "sglang.srt.layers.moe"
_ARGS = "sglang.srt.arg_groups"

# Replaced by a hook. SGLang has no other way to give a layer of an FP8 checkpoint another method.
HOOKED = (Upstream(name=f"{_FP8}.Fp8Config.get_quant_method", parameters=("self", "layer", "prefix")),)

# SGLang's own doors for plugins.
EXTENSION_POINTS = (
    Upstream(
        name="sglang.srt.plugins.hook_registry.HookRegistry.register",
        parameters=("target", "hook", "hook_type", "source"),
    ),
    Upstream(name="sglang.srt.plugins.hook_registry.HookType.AFTER"),
    Upstream(name=f"{_ARGS}.choices.add_moe_runner_backend_choices"),
    Upstream(name=f"{_ARGS}.resolution_hooks.register_resolution_hook", parameters=("name",)),
    Upstream(name=f"{_ARGS}.model_hook.handle_model_specific_adjustments", parameters=("server_args",)),
    Upstream(name=f"{_ARGS}.moe_hook.handle_a2a_moe", parameters=("server_args",)),
    Upstream(name=f"{_MOE}.moe_runner.runner.register_moe_runner_core", parameters=("backend_name", "factory")),
)

# Overridden, called or read.
RELIED_ON = (
    Upstream(name=f"{_FP8}.Fp8MoEMethod.__init__", parameters=("self", "quant_config")),
    Upstream(
        name=f"{_FP8}.Fp8MoEMethod.create_weights",
        parameters=(
            "self",
            "layer",
            "num_experts",
            "hidden_size",
            "intermediate_size_per_partition",
            "params_dtype",
            "with_bias",
            "extra_weight_attrs",
        ),
    ),
    Upstream(name=f"{_FP8}.Fp8MoEMethod.create_moe_runner", parameters=("self", "layer", "moe_runner_config")),
    Upstream(name=f"{_FP8}.Fp8MoEMethod.get_moe_runner_backend", parameters=("self", "layer")),
    Upstream(name=f"{_FP8}.Fp8MoEMethod.process_weights_after_loading", parameters=("self", "layer")),
    Upstream(name=f"{_FP8}.Fp8MoEMethod.restore_weights_before_loading", parameters=("self", "layer")),
    Upstream(name=f"{_FP8}.Fp8MoEMethod.apply", parameters=("self", "layer", "dispatch_output")),
    Upstream(
        name=f"{_MOE}.moe_runner.base.DispatchMoeRunnerCore.run_from_dispatch",
        parameters=("self", "dispatch_output", "quant_info", "runner_config", "hooks"),
    ),
    Upstream(
        name=f"{_MOE}.moe_runner.runner.MoeRunner.run",
        parameters=("self", "dispatch_output", "quant_info", "lora_info"),
    ),
    Upstream(name=f"{_MOE}.moe_runner.base.MoeQuantInfo", parameters=()),
    Upstream(name=f"{_MOE}.fused_moe_triton.layer.FusedMoE"),
    Upstream(name=f"{_MOE}.token_dispatcher.standard.StandardCombineInput", parameters=("hidden_states",)),
    Upstream(name=f"{_MOE}.topk.TopKOutputChecker.format_is_standard", parameters=("topk_output",)),
    Upstream(name=f"{_MOE}.utils.MoeA2ABackend.FLASHINFER_MEGAMOE"),
    Upstream(name=f"{_MOE}.utils.MoeRunnerBackend.FLASHINFER_MEGAMOE"),
    Upstream(name=f"{_MOE}.utils.get_moe_runner_backend", parameters=()),
    Upstream(name=f"{_MOE}.utils.resolve_moe_runner_backend", parameters=("backend",)),
    Upstream(name=f"{_MOE}.utils.is_moe_input_scattered_across_dp_ranks", parameters=()),
    Upstream(name=f"{_MOE}.utils.post_experts_output_is_complete", parameters=("is_tp_path",)),
    Upstream(name=f"{_ARGS}.cuda_graph_hook.apply_cuda_graph_compatibility", parameters=("server_args",)),
    Upstream(name=f"{_ARGS}.overrides.declare_resolution", parameters=("server_args", "source", "fields")),
    Upstream(name=f"{_ARGS}.overrides.resolving_view", parameters=("server_args",)),
    Upstream(name=f"{_ARGS}.overrides.model_config_of", parameters=("server_args",)),
    Upstream(name="sglang.srt.runtime_context.get_parallel", parameters=()),
    Upstream(name="sglang.srt.runtime_context.cutedsl_moe_max_num_tokens", parameters=()),
    Upstream(name="sglang.srt.utils.is_cuda", parameters=()),
)
UPSTREAM = (*HOOKED, *EXTENSION_POINTS, *RELIED_ON)


def require_upstream(names: Iterable[Upstream]) -> None:
    """Hold what the adapter relies on against the installed release.

    Raises:
        ConfigError: names the first name that is gone, or takes other parameters.
    """
    hint = "this release of SGLang is not the one that the adapter was written for; please report it"
    for upstream in names:
        try:
            found = pkgutil.resolve_name(upstream.name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"SGLang has no {upstream.name}", got=error, expected="the name", hint=hint) from error
        if upstream.parameters is None:
            continue
        parameters = tuple(inspect.signature(found).parameters)
        if parameters != upstream.parameters:
            raise ConfigError(
                f"{upstream.name} takes other parameters",
                got=f"({', '.join(parameters)})",
                expected=f"({', '.join(upstream.parameters)})",
                hint=hint,
            )


def options_from_environment() -> EngineOptions:
    """What the variables `MEGAMOE_SGLANG_*` of `megamoe.env` say: a plugin is given no arguments.

    Raises:
        ConfigError: a value that makes no sense.
    """
    return EngineOptions(
        unsupported=env.sglang_unsupported(),
        transport=env.sglang_transport(),
        num_max_tokens_per_rank=env.sglang_max_tokens(),
        metrics=env.sglang_metrics(),
    )


_lock = threading.Lock()
_adapter: Adapter | None = None


def register() -> None:
    """Offer the runner `megamoe_ep` to SGLang. Opens nothing; calling it again does nothing.

    SGLang calls it in each of its processes, through the entry point `megamoe` of the group `sglang.srt.plugins`, and
    applies the hook afterwards. An error is logged by SGLang, and the runner is no choice then.

    Raises:
        ConfigError: SGLang is missing, or another release than the supported ones; or a name that the adapter relies on
            has changed; or an option makes no sense. Nothing has been registered then.
    """
    global _adapter
    with _lock:
        if _adapter is not None:
            return
        require_version("sglang", SUPPORTED)
        require_upstream(UPSTREAM)
        options = options_from_environment()
        from megamoe.integrations import sglang_moe

        _adapter = sglang_moe.enter(options)


def metrics() -> list[Metrics]:
    """What each session's calls did in this process since this was asked last. Synchronises.

    Empty without `MEGAMOE_SGLANG_METRICS=1`, and in processes that hold no model: SGLang's schedulers do.
    """
    return [] if _adapter is None else _adapter.pool.metrics()
