"""The quantisation configuration that `megamoe.integrations.vllm` registers, and the MoE method that it returns.

    vLLM's runner -> router -> MegaMoEMethod.apply -> Session.forward

The runner asks the method's kernel what is left to do around it. That kernel says: no tokens to gather before, nothing
to reduce after. Imports vLLM: go through `megamoe.integrations.vllm`, which checks its version first.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.distributed import (
    get_ep_group,
    get_tensor_model_parallel_rank,
    tensor_model_parallel_all_gather,
)
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe import (
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    FusedMoEMethodBase,
    FusedMoeWeightScaleSupported,
    RoutedExperts,
)
from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.prepare_finalize.passthrough import PassThroughPrepareAndFinalize
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    get_quantization_config,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

from megamoe.errors import BackendError, ConfigError, SessionError
from megamoe.integrations.engine_layer import EngineLayer, EngineOptions, Unsupported
from megamoe.integrations.sessions import SessionPool, backend_for
from megamoe.integrations.vllm import NAME
from megamoe.integrations.vllm_layers import BLOCK, FP8_BLOCKS, num_token_shares, read_options, read_problem
from megamoe.meter import Metrics
from megamoe.problem import MoEProblem
from megamoe.tensors import Fp8BlockWeights, GateUpLayout

logger = logging.getLogger("megamoe")

PARAMETERS: Mapping[str, str] = {  # of `Fp8BlockWeights` -> of a layer, as vLLM's loader finds them
    "w13_weight": "w13_weight",
    "w13_weight_scale": "w13_weight_scale_inv",
    "w2_weight": "w2_weight",
    "w2_weight_scale": "w2_weight_scale_inv",
}

_pool = SessionPool()
_require_backend = functools.cache(backend_for)  # asked for each layer, and the machine stays what it is


def enter() -> None:
    """Put the configuration into vLLM's registry.

    Raises:
        ConfigError: the name stands for something else there.
    """
    if NAME not in QUANTIZATION_METHODS:
        register_quantization_config(NAME)(MegaMoEConfig)
    elif get_quantization_config(NAME) is not MegaMoEConfig:
        raise ConfigError(f'"{NAME}" already is a quantization of vLLM', got=get_quantization_config(NAME))


def close() -> None:
    """COLLECTIVE where experts are spread over ranks. Close all sessions."""
    global _pool
    _pool.close()
    _pool = SessionPool()


def metrics() -> list[Metrics]:
    """Of all sessions with counters, since it was asked last. Synchronises."""
    return _pool.metrics()


class MegaMoEConfig(Fp8Config):  # type: ignore[misc]
    """vLLM's FP8 configuration, but for routed experts, which MegaMoE runs.

    Raises:
        ConfigError: without blocks of 128x128, as vLLM makes one for a checkpoint that is not quantised.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _require_blocks("fp8", self.weight_block_size)

    @classmethod
    def get_name(cls) -> str:
        """What `--quantization` says."""
        return NAME

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take a checkpoint whose configuration says "fp8", if the user asked for it.

        Raises:
            ConfigError: the user asked for it, and the checkpoint is not in FP8 blocks.
        """
        if user_quant != NAME:
            return None
        _require_blocks(hf_quant_cfg.get("quant_method"), hf_quant_cfg.get("weight_block_size"))
        return NAME

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """`MegaMoEMethod` for routed experts that a backend can run, and vLLM's own methods for all else.

        Raises:
            BackendError: no backend can run them, and the option `unsupported` is "error".
        """
        if not isinstance(layer, RoutedExperts) or is_layer_skipped(
            prefix=prefix,
            ignored_layers=self.ignored_layers,
            fused_mapping=self.packed_modules_mapping,
            match_mode=self.ignored_layers_match_mode,
        ):
            return super().get_quant_method(layer, prefix)
        vllm_config = get_current_vllm_config()
        options = read_options(vllm_config.additional_config)
        try:
            problem = read_problem(layer, self, vllm_config, options)
            _require_backend(torch.device(layer.moe_config.device), options.backend, problem)
        except BackendError as error:
            if options.unsupported is Unsupported.ERROR:
                raise
            logger.warning("%s runs vLLM's own experts, not MegaMoE's: %s", prefix, error)
            return super().get_quant_method(layer, prefix)
        return MegaMoEMethod(layer, problem, options)


class MegaMoEMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """One layer's routed experts: FP8 blocks as vLLM loads them, and then as the session reads them.

    Ranks of a tensor-parallel group hold the same tokens unless the model has shared them out: each brings its share
    of the rows, so that none is computed twice, and the results are gathered.
    """

    def __init__(self, layer: Any, problem: MoEProblem, options: EngineOptions) -> None:
        super().__init__(layer.moe_config)
        self.problem = problem
        self._backend = options.backend
        self._counted = options.metrics
        self._num_shares = num_token_shares(layer.moe_config)
        self._opened: EngineLayer | None = None

    @property
    def supports_eplb(self) -> bool:
        """Experts can be moved: what is read are the layer's parameters, expert first."""
        return True

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        """Sizes stay what they are."""
        return hidden_size, intermediate_size_per_partition

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Parameters for one rank's experts as the checkpoint has them: FP8 with an FP32 scale per 128x128."""
        hidden, inter = hidden_size, intermediate_size_per_partition
        for name, rows, columns in (("w13_weight", 2 * inter, hidden), ("w2_weight", hidden, inter)):
            weight = torch.empty(num_experts, rows, columns, dtype=torch.float8_e4m3fn)
            scale = torch.ones(num_experts, -(-rows // BLOCK), -(-columns // BLOCK), dtype=torch.float32)
            block = {"quant_method": FusedMoeWeightScaleSupported.BLOCK.value}
            for parameter, tensor, attrs in ((name, weight, {}), (PARAMETERS[f"{name}_scale"], scale, block)):
                layer.register_parameter(parameter, nn.Parameter(tensor, requires_grad=False))
                set_weight_attrs(getattr(layer, parameter), extra_weight_attrs | attrs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """COLLECTIVE for the first layer of a kind. Open its session, and lay the parameters out as that reads them."""
        experts = Fp8BlockWeights(
            layout=GateUpLayout.PACKED,
            **{name: tensor.detach() for name, tensor in _parameters(layer).items()},
        )
        group = get_ep_group().device_group if self.problem.ep_size > 1 else None
        device = layer.w13_weight.device
        opened = EngineLayer.open(
            _pool, self.problem, experts, backend=self._backend, device=device, group=group,
            counted_as=layer.layer_name if self._counted else None,
        )  # fmt: skip
        for name, tensor in opened.expert_tensors().items():
            replace_parameter(layer, PARAMETERS[name], tensor)
        self._opened = opened.reading(_parameters(layer))
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        self.moe_kernel = FusedMoEKernel(
            PassThroughPrepareAndFinalize(),
            MegaMoEExperts(self.moe, self.moe_quant_config, functools.partial(self._run, layer)),
        )

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """vLLM's words for the format."""
        return fp8_w8a8_moe_quant_config(
            w1_scale=layer.w13_weight_scale_inv, w2_scale=layer.w2_weight_scale_inv, block_shape=FP8_BLOCKS
        )

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """COLLECTIVE, stream-ordered, graph-safe. `[T, H]` BF16, global physical ids `[T, K]` -> `[T, H]`, all summed.

        vLLM's kernel object is passed by: it returns before its experts are reached where a rank has no tokens, and the
        other ranks would wait for this one. Shared experts are the runner's.

        Raises:
            CapacityError: more tokens than vLLM said there would be.
        """
        return self._run(layer, x, topk_ids, topk_weights)

    def _run(self, layer: Any, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        opened = self._current(layer)
        padding = _padding_mask(self.moe, x.shape[0])
        if padding is not None:
            topk_ids = topk_ids.masked_fill(padding.unsqueeze(1), -1)
        if self._num_shares == 1:
            return opened(x, topk_ids, topk_weights)
        num_rows = -(-x.shape[0] // self._num_shares)
        first = get_tensor_model_parallel_rank() * num_rows
        rows = slice(first, first + num_rows)
        share = opened(x[rows], topk_ids[rows], topk_weights[rows])
        share = nn.functional.pad(share, (0, 0, 0, num_rows - share.shape[0]))
        return tensor_model_parallel_all_gather(share, dim=0)[: x.shape[0]]  # type: ignore[no-any-return]

    def _current(self, layer: Any) -> EngineLayer:
        """The layer, reading what its parameters are now: vLLM exchanges them when weights are loaded again."""
        if self._opened is None:
            raise SessionError(f"{layer.layer_name} has no weights yet", hint="load the model first")
        now, read = _parameters(layer), self._opened.expert_tensors()
        if any(now[name] is not read[name] for name in PARAMETERS):
            self._opened = self._opened.reading(now)
        return self._opened


class MegaMoEExperts(FusedMoEExpertsModular):  # type: ignore[misc]
    """The operation where vLLM asks for a kernel's experts: unquantised tokens in, combined rows out."""

    def __init__(self, moe_config: Any, quant_config: Any, run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        """`run` takes tokens, ids and router weights."""
        super().__init__(moe_config, quant_config)
        self._run = run

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Rows are quantised on their way."""
        return True

    @staticmethod
    def activation_format() -> Any:
        """`[T, H]`."""
        return FusedMoEActivationFormat.Standard

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Only the output: the session has its own workspace."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Rows come back weighted and summed."""
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """COLLECTIVE. `MegaMoEMethod.apply` into `output`."""
        output.copy_(self._run(hidden_states, topk_ids, topk_weights))

    # vLLM asks these when it chooses among its own kernels; this one is chosen by `read_problem`.

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True


def _require_blocks(quant_method: str | None, weight_block_size: list[int] | None) -> None:
    if quant_method != "fp8" or list(weight_block_size or ()) != FP8_BLOCKS:
        raise ConfigError(
            f"--quantization {NAME} does not take this checkpoint",
            got=f"quant_method {quant_method} with weight_block_size {weight_block_size}",
            expected=f"quant_method fp8 with weight_block_size {FP8_BLOCKS}",
            hint="leave --quantization out",
        )


def _parameters(layer: Any) -> dict[str, Tensor]:
    """The layer's parameters under the names of `Fp8BlockWeights`."""
    return {name: getattr(layer, parameter) for name, parameter in PARAMETERS.items()}


def _padding_mask(moe: Any, num_rows: int) -> Tensor | None:
    """`[num_rows]` bool, true for rows that only fill a graph's size; None where vLLM does not say.

    Args:
        moe: vLLM's `FusedMoEConfig`.
        num_rows: this rank's. Where it is sequence parallel, they are its share of the batch that the mask is for.
    """
    if not (envs.VLLM_MOE_SKIP_PADDING and is_forward_context_available()):
        return None
    mask: Tensor | None = get_forward_context().is_padding
    if mask is None:
        return None
    num_ranks = moe.sp_size if moe.is_sequence_parallel else 1
    num_missing = num_rows * num_ranks - mask.shape[0]
    if not 0 <= num_missing < num_ranks:
        return None  # of another batch than these rows: a model may compute on some of its tokens only
    if num_ranks == 1:
        return mask
    first = get_tensor_model_parallel_rank() * num_rows
    return nn.functional.pad(mask, (0, num_missing), value=True)[first : first + num_rows]
