"""SGLang's runtime around single layers: its configuration and process groups, as its scheduler sets them up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import sglang_without_kernels  # noqa: F401  # before SGLang
import torch
import torch.distributed as dist
from sglang.srt import runtime_context
from sglang.srt.distributed import parallel_state
from sglang.srt.eplb.expert_distribution import _SelectExpertsSinglePassGatherer
from sglang.srt.eplb.expert_location_updater import create_temp_buffers, update_expert_weights_single_layer
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import (
    MoeA2ABackend,
    initialize_moe_config,
    post_experts_all_reduce,
    reduce_moe_output,
    sum_post_experts_output,
)
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.models.deepseek_v2 import DeepseekV2MoE
from sglang.srt.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from sglang_models import EXPERTS, HIDDEN, INTER, QUANTIZATION, TOP_K, experts
from torch import Tensor
from transformers import AutoConfig, DeepseekV3Config

from megamoe.errors import ConfigError
from megamoe.expert_map import ExpertMap
from megamoe.launch import RankContext

TOKENS = (7, 3)  # of each rank


def server_args(path: str, **arguments: Any) -> ServerArgs:
    """A server on the CPU that asks for MegaMoE, not resolved yet."""
    settings = {"moe_runner_backend": "megamoe_ep", "max_prefill_tokens": 32, "load_format": "dummy", **arguments}
    return ServerArgs(model_path=path, device="cpu", skip_tokenizer_init=True, **settings)


def start(args: ServerArgs, init_method: str, rank: int = 0) -> None:
    """Publish the configuration and make the process groups."""
    runtime_context.publish(args, role="test", ranks=runtime_context.SpawnRanks(world_rank=rank))
    parallel_state.init_distributed_environment(
        world_size=args.tp_size, rank=rank, local_rank=rank, backend="gloo", distributed_init_method=init_method
    )
    parallel_state.initialize_model_parallel(backend="gloo")
    initialize_moe_config()
    initialize_dp_attention(server_args=args)


def stop() -> None:
    """Undo `start`."""
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    runtime_context.reset_context()


def fp8_config(**changes: Any) -> Fp8Config:
    """The checkpoint's quantisation."""
    return Fp8Config.from_config({**QUANTIZATION, **changes})


@contextmanager
def bf16() -> Iterator[None]:
    """Layers are made in BF16, as SGLang's loader does."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def make_experts(config: Fp8Config | None = None, **changes: Any) -> FusedMoE:
    """SGLang's layer for the experts of the tiny checkpoint."""
    settings = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": INTER, **changes}
    with bf16():
        return FusedMoE(
            layer_id=0, quant_config=config or fp8_config(), prefix="model.layers.0.mlp.experts", **settings
        )


def load(layer: FusedMoE, tensors: dict[str, Tensor]) -> None:
    """Load by SGLang's mapping and loader, then let the method prepare what was loaded."""
    mapping = FusedMoE.make_expert_params_mapping(
        ckpt_gate_proj_name="gate_proj",
        ckpt_down_proj_name="down_proj",
        ckpt_up_proj_name="up_proj",
        num_experts=EXPERTS,
    )
    parameters = dict(layer.named_parameters())
    for parameter_name, weight_name, expert, shard in mapping:
        for name, tensor in tensors.items():
            if f"experts.{name}".startswith(weight_name):
                full_name = f"experts.{name}".replace(weight_name, parameter_name).removeprefix("experts.")
                parameter = parameters[full_name]
                parameter.weight_loader(parameter, tensor, full_name, shard_id=shard, expert_id=expert)
    layer.quant_method.process_weights_after_loading(layer)


def routing(num_tokens: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's own rows, global ids of experts of all ranks, and weights that don't sum to one."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(num_tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K].int()
    return x, ids, torch.rand(num_tokens, TOP_K, generator=generator) + 0.1


def call(layer: FusedMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The layer's forward, with a router's result that is given."""
    with torch.inference_mode():
        result: Tensor = layer(x.clone(), StandardTopKOutput(weights, ids, torch.zeros(len(x), EXPERTS)))
    return result.clone()


def run_rank(context: RankContext, path: str) -> dict[str, Any]:
    """What one of two ranks of a server with data-parallel attention computes."""
    load_plugins()
    args = server_args(path, tp_size=context.world_size, attn_dp_size=context.world_size)
    start(args, f"file://{context.directory}/store", context.rank)
    layer = make_experts()
    load(layer, experts())
    results: dict[str, Any] = {"local_experts": layer.num_local_experts}
    own = routing(TOKENS[context.rank], context.rank)
    results["own_tokens"] = call(layer, *own)
    results["idle"] = call(layer, *routing(4 if context.rank == 0 else 0, context.rank))
    results |= _sums(results["own_tokens"])
    results["counts"] = _counts(layer, own, context)
    results["block"] = _qwen_block(path, context.rank)
    results["deepseek"] = _deepseek_block(context.rank)
    results["moved"] = _move_experts(layer, own, context)
    results["broken_promise"] = _broken_promise(layer)
    with_too_many = routing(33 if context.rank == 0 else 1, context.rank)
    try:
        call(layer, *with_too_many)
        results["too_many"] = ""
    except Exception as error:
        results["too_many"] = type(error).__name__
    dist.barrier()
    return results


def _broken_promise(layer: FusedMoE) -> str:
    """What preparing a layer says where SGLang would gather tokens and add up rows."""
    with _without_mode():
        try:
            load(layer, {})
        except ConfigError as error:
            return str(error)
    return ""


@contextmanager
def _without_mode() -> Iterator[None]:
    flags = runtime_context.get_flags().moe
    mode, flags.a2a_backend = flags.a2a_backend, MoeA2ABackend.NONE
    try:
        yield
    finally:
        flags.a2a_backend = mode


def _sums(y: Tensor) -> dict[str, Tensor]:
    """The three places where SGLang adds up the outputs of ranks, and one of them under a mode that needs it."""
    summed = {
        "in_block": post_experts_all_reduce(y.clone()),
        "at_boundary": sum_post_experts_output(y.clone()),
        "over_tp": reduce_moe_output(y.clone()),
    }
    with _without_mode():
        summed["without_mode"] = post_experts_all_reduce(torch.ones(2, HIDDEN))
    return summed


def _counts(layer: FusedMoE, own: tuple[Tensor, Tensor, Tensor], context: RankContext) -> dict[str, list[int]]:
    """Rows per physical expert over all ranks: as SGLang's recorder counts them, and as MegaMoE received them."""

    # Its constructor asks for the accelerator's name; what it counts into is all that it needs.
    recorder = SimpleNamespace(
        _expert_location_metadata=SimpleNamespace(num_physical_experts=EXPERTS),
        _data=torch.zeros(1, EXPERTS, dtype=torch.int32),
    )
    _SelectExpertsSinglePassGatherer.on_select_experts(recorder, 0, own[1])
    chosen = recorder._data[0]
    call(layer, *own)
    everywhere = ExpertMap(
        torch.arange(EXPERTS), num_logical_experts=EXPERTS, ep_rank=context.rank, ep_size=context.world_size
    )
    received = everywhere.physical_counts(layer.quant_method.opened.session.receive_counts())
    for counts in (received, chosen):
        dist.all_reduce(counts)
    return {"received": received.tolist(), "chosen": chosen.tolist()}


def _qwen_block(path: str, rank: int) -> dict[str, Tensor]:
    """A model's MoE block, router and all."""
    with bf16():
        block = Qwen3MoeSparseMoeBlock(0, AutoConfig.from_pretrained(path), fp8_config(), prefix="model.layers.0.mlp")
    gate = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(5)).mul(0.3).bfloat16()
    block.gate.weight.data.copy_(gate)
    load(block.experts, experts())
    x = routing(TOKENS[rank], rank)[0]
    with torch.inference_mode():
        return {"x": x, "gate": gate, "y": block(x.clone()).clone()}


def _deepseek_block(rank: int) -> dict[str, Tensor]:
    """Another model's, with a scaling factor, and a shared expert that every rank has whole."""
    config = DeepseekV3Config(
        hidden_size=HIDDEN, moe_intermediate_size=INTER, n_routed_experts=EXPERTS, num_experts_per_tok=TOP_K,
        n_group=1, topk_group=1, n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    config.topk_method, config.scoring_func = "noaux_tc", "sigmoid"  # the checkpoint's own, which SGLang reads
    shared = [
        f"model.layers.0.mlp.shared_experts.{name}" for name in ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
    ]
    with bf16():
        block = DeepseekV2MoE(config, 0, fp8_config(modules_to_not_convert=shared), prefix="model.layers.0.mlp")
    generator = torch.Generator().manual_seed(7)
    for parameter in (
        block.gate.weight,
        block.shared_experts.gate_up_proj.weight,
        block.shared_experts.down_proj.weight,
    ):
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.06)
    block.gate.e_score_correction_bias.data.zero_()
    load(block.experts, experts())
    x = routing(TOKENS[rank], rank)[0]
    with torch.inference_mode():
        y = block(x.clone()).clone()
    weights = {name: p.data.clone() for name, p in block.named_parameters() if not name.startswith("experts.")}
    return {"x": x, "y": y, **weights}


def _move_experts(layer: FusedMoE, own: tuple[Tensor, Tensor, Tensor], context: RankContext) -> Tensor:
    """SGLang's balancer exchanges experts between the ranks; the same logical experts are called where they are now."""
    x, ids, weights = own
    new = [4, 1, 2, 7, 0, 5, 6, 3]  # physical slot -> logical expert: 0 and 4, and 3 and 7, change places
    tensors = [parameter.data for _, parameter in layer.named_parameters()]
    update_expert_weights_single_layer(
        routed_experts_weights=tensors,
        temp_buffers=create_temp_buffers(tensors),
        old_physical_to_logical_map=list(range(EXPERTS)),
        new_physical_to_logical_map=new,
        num_local_physical_experts=layer.num_local_experts,
        num_gpu_per_node=context.world_size,
        rank=context.rank,
        world_size=context.world_size,
    )
    slots = torch.tensor(new).argsort()
    return call(layer, x, slots[ids.long()].int(), weights)
