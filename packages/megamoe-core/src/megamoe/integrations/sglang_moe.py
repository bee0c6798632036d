"""The method and the runner of SGLang's MoE layers that run under `megamoe_ep`.

Imports SGLang: go through `megamoe.integrations.sglang`, which checks its version first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang.srt.arg_groups.choices import add_moe_runner_backend_choices
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeQuantInfo, MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.runner import MoeRunner, register_moe_runner_core
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.layers.moe.utils import (
    MoeRunnerBackend,
    get_moe_runner_backend,
    is_moe_input_scattered_across_dp_ranks,
    post_experts_output_is_complete,
    resolve_moe_runner_backend,
)
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import cutedsl_moe_max_num_tokens, get_parallel
from sglang.srt.utils import is_cuda
from torch import nn

from megamoe.errors import ConfigError, SessionError, UnsupportedProblemError
from megamoe.integrations import sglang_config
from megamoe.integrations.engine_layer import EngineLayer, EngineOptions
from megamoe.integrations.sessions import SessionPool
from megamoe.integrations.sglang import HOOKED, RUNNER
from megamoe.problem import MoEProblem
from megamoe.tensors import Fp8BlockWeights, GateUpLayout

# What MegaMoE calls a tensor -> the layer's parameter.
PARAMETERS = {
    "w13_weight": "w13_weight",
    "w13_weight_scale": "w13_weight_scale_inv",
    "w2_weight": "w2_weight",
    "w2_weight_scale": "w2_weight_scale_inv",
}

# Fields of MoeRunnerConfig that must have this value: what the experts compute besides silu(gate) * up.
PLAIN_EXPERTS = {
    "activation": "silu",
    "is_gated": True,
    "apply_router_weight_on_input": False,
    "no_combine": False,
    "gemm1_alpha": None,
    "gemm1_beta": None,
    "gemm1_clamp_limit": None,
}


class Adapter:
    """The options and sessions of this process."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.pool = SessionPool()

    def method_of(self, method: Any, config: Fp8Config, layer: nn.Module, prefix: str) -> Any:
        """Hook after `Fp8Config.get_quant_method`: its result, or ours for the experts of a server that asked for it.

        Raises:
            UnsupportedProblemError: experts that the checkpoint leaves unquantised. SGLang's own method would run them
                on each rank's tokens with that rank's experts only, and nobody would add up the rest.
        """
        if not isinstance(layer, FusedMoE) or get_moe_runner_backend().value != RUNNER:
            return method
        if type(method) is not Fp8MoEMethod:
            raise UnsupportedProblemError(
                f"MegaMoE can't run the experts of {prefix}",
                got=type(method).__name__,
                expected="Fp8MoEMethod, for experts in FP8 blocks",
                hint="choose another --moe-runner-backend",
            )
        return MegaMoEMethod(config, self)


class MegaMoEMethod(Fp8MoEMethod):  # type: ignore[misc]
    """FP8-block experts whose parameters SGLang makes and loads, and MegaMoE prepares and runs. One for each layer."""

    def __init__(self, config: Fp8Config, adapter: Adapter) -> None:
        super().__init__(config)
        self._adapter = adapter
        self._problem: MoEProblem | None = None
        self.opened: EngineLayer | None = None

    def create_weights(self, layer: nn.Module, *args: Any, with_bias: bool = False, **kwargs: Any) -> None:
        """Make the layer's parameters, as SGLang does.

        Raises:
            UnsupportedProblemError: experts that MegaMoE has no name for; says what.
        """
        self._problem = self._problem_of(layer, with_bias)
        super().create_weights(layer, *args, with_bias=with_bias, **kwargs)

    def _problem_of(self, layer: Any, with_bias: bool) -> MoEProblem:
        config, options = layer.moe_runner_config, self._adapter.options
        for field, expected in PLAIN_EXPERTS.items():
            if getattr(config, field) != expected:
                raise UnsupportedProblemError(
                    f"MegaMoE can't run the experts of {layer.layer_name}",
                    got=f"{field}={getattr(config, field)!r}",
                    expected=expected,
                )
        if with_bias or list(self.weight_block_size or ()) != [128, 128] or layer.moe_tp_size != 1:
            raise UnsupportedProblemError(
                f"MegaMoE can't run the experts of {layer.layer_name}",
                got=f"with_bias={with_bias}, scales per {self.weight_block_size}, moe_tp_size={layer.moe_tp_size}",
                expected="no biases, a scale per [128, 128], whole experts on each rank",
            )
        return MoEProblem(
            hidden_size=layer.hidden_size,
            intermediate_size=layer.intermediate_size_per_partition,
            num_experts=layer.num_experts,
            top_k=layer.top_k,
            num_max_tokens_per_rank=options.num_max_tokens_per_rank or cutedsl_moe_max_num_tokens(),
            ep_size=layer.moe_ep_size,
            quant="a8w8",
            transport=options.transport,
            swiglu_limit=config.swiglu_limit,
        )

    def create_moe_runner(self, layer: nn.Module, moe_runner_config: MoeRunnerConfig) -> None:
        """Make SGLang's runner around our core."""
        self.moe_runner_config = moe_runner_config
        self.runner = MoeRunner(resolve_moe_runner_backend(RUNNER), moe_runner_config)

    def get_moe_runner_backend(self, layer: nn.Module) -> MoeRunnerBackend:
        """Whose conventions the layer's router and dispatcher follow: ids stay global, -1 for rows of padding."""
        return MoeRunnerBackend.FLASHINFER_MEGAMOE

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """COLLECTIVE for the first layer on several ranks. Open the session, and put what it reads into the parameters.

        SGLang's expert load balancer moves slices of the parameters, so these are the memory that MegaMoE reads.

        Raises:
            BackendError: no backend can run the layer, with the reason against each.
        """
        assert self._problem is not None  # SGLang makes a layer's parameters before it loads them
        group = _group_of(layer)
        stored = {name: getattr(layer, parameter) for name, parameter in PARAMETERS.items()}
        opened = EngineLayer.open(
            self._adapter.pool,
            self._problem,
            Fp8BlockWeights(layout=GateUpLayout.PACKED, **{name: p.data for name, p in stored.items()}),
            backend=self._adapter.options.backend,
            device=stored["w13_weight"].device,
            group=group,
            counted_as=str(layer.layer_name) if self._adapter.options.metrics else None,
        )
        for name, tensor in opened.expert_tensors().items():
            stored[name].data = tensor
        self.opened = opened.reading(stored)

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        """Refuse: the parameters may hold other rows in other places than a checkpoint.

        Raises:
            SessionError: always, once the weights are prepared.
        """
        if self.opened is not None:
            raise SessionError(
                "experts that MegaMoE has prepared can't be loaded again",
                hint="restart the server with the new weights, or choose another --moe-runner-backend",
            )

    def apply(self, layer: nn.Module, dispatch_output: Any) -> StandardCombineInput:
        """COLLECTIVE, stream-ordered. This rank's rows `[T, H]`, combined.

        Raises:
            CapacityError: more tokens than the capacity.
            SessionError: the weights are not loaded.
        """
        if self.opened is None:
            raise SessionError("the experts are not prepared", hint="load the model's weights first")
        return self.runner.run(dispatch_output, QuantInfo(experts=self.opened))


@dataclass
class QuantInfo(MoeQuantInfo):  # type: ignore[misc]
    """What a call needs of its layer."""

    experts: EngineLayer


class RunnerCore(DispatchMoeRunnerCore):  # type: ignore[misc]
    """Passes what SGLang's dispatcher left as it was to MegaMoE, and the combined rows back."""

    @property
    def runner_backend(self) -> Any:
        """The name that this core is registered under."""
        return resolve_moe_runner_backend(RUNNER)

    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: QuantInfo, runner_config: MoeRunnerConfig, hooks: Any = None
    ) -> StandardCombineInput:
        """COLLECTIVE, stream-ordered. Rows `[T, H]` BF16 with global ids and weights `[T, K]` -> rows `[T, H]` BF16.

        Raises:
            UnsupportedProblemError: LoRA, or a router that leaves the choice of experts to the kernel.
        """
        routing = dispatch_output.topk_output
        if hooks is not None or not TopKOutputChecker.format_is_standard(routing):
            raise UnsupportedProblemError(
                "MegaMoE can't run this layer of SGLang",
                got=f"routing {type(routing).__name__}, LoRA {hooks is not None}",
                expected="StandardTopKOutput without LoRA",
            )
        weights = routing.topk_weights.float()
        factor = runner_config.routed_scaling_factor
        if factor is not None and _runner_scales():
            weights = weights * factor
        return StandardCombineInput(
            hidden_states=quant_info.experts(dispatch_output.hidden_states, routing.topk_ids, weights)
        )


def _runner_scales() -> bool:
    """Whether SGLang leaves the model's `routed_scaling_factor` to the runner: on CUDA. Elsewhere its models do it."""
    return bool(is_cuda())


def _group_of(layer: Any) -> Any:
    """The layer's ranks, after a look at whether SGLang keeps the promise that `sglang_config.MODE` makes.

    Raises:
        ConfigError: it would gather the tokens, map the ids, or sum the rows once more.
    """
    if layer.moe_ep_size == 1:
        return None
    keeps = {
        "tokens stay on their rank": is_moe_input_scattered_across_dp_ranks(),
        "ids stay global": layer.dispatcher.skip_local_expert_mapping,
        "no sum over the MoE-TP group": post_experts_output_is_complete(is_tp_path=True) and not layer.reduce_results,
        "no sum over the EP group": post_experts_output_is_complete(is_tp_path=False),
    }
    if not all(keeps.values()):
        raise ConfigError(
            f"SGLang would not leave the tokens of {layer.layer_name} to MegaMoE",
            got=", ".join(f"{what}: {bool(kept)}" for what, kept in keeps.items()),
            hint="start the server with --moe-runner-backend megamoe_ep, so that its mode is resolved with it",
        )
    return get_parallel().moe_ep_group.device_group


def enter(options: EngineOptions) -> Adapter:
    """Put the adapter into SGLang: the choice, the two steps of resolution, the runner, the hook."""
    adapter = Adapter(options)
    register_moe_runner_core(RUNNER, RunnerCore)
    add_moe_runner_backend_choices([RUNNER])
    steps = {
        "handle_model_specific_adjustments": sglang_config.choose_runner,
        "handle_a2a_moe": sglang_config.choose_mode,
    }
    for step, choose in steps.items():
        register_resolution_hook(step)(partial(choose, options))
    HookRegistry.register(HOOKED[0].name, adapter.method_of, HookType.AFTER)
    return adapter
