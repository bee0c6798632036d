"""A DeepSeek-V3-style model of random weights, its experts spread over ranks, every other layer on each.

The same seed gives every rank the same model. Routed experts are FP8 in blocks of 128x128, all else is BF16. Each rank
brings tokens of its own, as engines do with data-parallel attention. Experts are reached through transformers' own
`EpDispatchExpertsParallel`, with the implementation that is named: MegaMoE's adapter or another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EpDispatchExpertsParallel, EPImplementationInterface
from transformers.integrations import finegrained_fp8

from megamoe.formats import FP8_128X128

SEED = 0


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a model and of what is asked of it.

    Args:
        config: of `DeepseekV3Config`, but for the number of layers: the first is dense, the others are MoE layers.
        prompt: tokens of each rank's prompt.
        batches: sequences that each rank decodes together.
        context: tokens that a sequence has when the decoded one comes.
    """

    config: dict[str, Any]
    prompt: int
    batches: tuple[int, ...]
    context: int


DEEPSEEK_V3 = Size(config={"max_position_embeddings": 16384}, prompt=16384, batches=(8, 16, 36, 64), context=256)
TINY = Size(
    config={
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128,
        "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 16, "n_group": 4, "topk_group": 2,
        "num_experts_per_tok": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "qk_nope_head_dim": 16,
    },
    prompt=48, batches=(5,), context=16,
)  # fmt: skip


def build(size: Size, *, num_moe_layers: int, rank: int, world_size: int, device: torch.device) -> Any:
    """The model on `device`, with this rank's share of the experts; memory is taken for what stays only."""
    config = transformers.DeepseekV3Config(
        **size.config, num_hidden_layers=1 + num_moe_layers, first_k_dense_replace=1, num_mtp_layers=0
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="eager"
        ).eval()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    fp8 = transformers.FineGrainedFP8Config(weight_block_size=[128, 128])
    finegrained_fp8.replace_with_fp8_linear(model, linear, fp8)
    layers = experts_modules(model)
    for experts in layers:
        _keep_share(experts, world_size)
    model.to_empty(device=device)
    torch.manual_seed(SEED)
    model.init_weights()
    for name, module in model.named_modules():
        if name.endswith(".gate"):
            nn.init.normal_(module.weight, std=module.weight.shape[-1] ** -0.5)
    for layer, experts in enumerate(layers):
        _fill(experts, layer, rank)
    return model.requires_grad_(False)


def _keep_share(experts: Any, world_size: int) -> None:
    """Give the FP8 module, which is on no device yet, as many experts as a rank has."""
    experts.num_experts //= world_size
    experts._is_expert_parallel = True
    for name, parameter in experts._parameters.items():
        if parameter is not None:
            experts._parameters[name] = nn.Parameter(parameter[: experts.num_experts], requires_grad=False)


def _fill(experts: Any, layer: int, rank: int) -> None:
    """Draw this rank's experts, the same whatever the number of ranks."""
    for local in range(experts.num_experts):
        expert = rank * experts.num_experts + local
        rng = torch.Generator(experts.down_proj.device).manual_seed(1000 * (1 + layer) + expert)
        for name in ("gate_up_proj", "down_proj"):
            payload, scales = getattr(experts, name)[local], getattr(experts, f"{name}_scale_inv")[local]
            # As wide as trained ones: an expert's output has the size of its input.
            drawn = torch.empty(payload.shape, dtype=torch.bfloat16, device=payload.device)
            quantized = FP8_128X128.quantize(drawn.normal_(std=payload.shape[-1] ** -0.5, generator=rng))
            payload.view(torch.uint8).copy_(quantized.payload.view(torch.uint8))
            scales.copy_(quantized.scales)


def experts_modules(model: Any) -> list[Any]:
    """The experts module of each MoE layer."""
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


class Implementations:
    """The experts of one model under several expert-parallel implementations, one of them in use.

    Args:
        model: made by `build`.
        ep_mesh, tp_mesh: of the ranks; the latter of one rank.
    """

    def __init__(self, model: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        self._modules = experts_modules(model)
        self._meshes = (ep_mesh, tp_mesh)
        self._forwards: dict[str, list[Callable[..., torch.Tensor]]] = {}

    def add(self, name: str) -> None:
        """One that transformers knows by `name`."""
        ep_mesh, tp_mesh = self._meshes
        forwards = []
        for module in self._modules:
            module.__dict__.pop("forward", None)
            EpDispatchExpertsParallel().install_forward(module, ep_mesh, tp_mesh=tp_mesh, ep_implementation=name)
            forwards.append(module.forward)
        self._forwards[name] = forwards

    def register(self, name: str, make: Callable[..., Any], per_module: Iterable[Any]) -> None:
        """Enter `make(argument, experts, ep_mesh, tp_mesh)` into transformers, `per_module` giving its arguments."""
        arguments = iter(per_module)
        EPImplementationInterface.register(name, lambda *args: partial(make, next(arguments))(*args))
        self.add(name)

    def use(self, name: str) -> None:
        """From now on the model's experts run by `name`."""
        for module, forward in zip(self._modules, self._forwards[name], strict=True):
            module.forward = forward
