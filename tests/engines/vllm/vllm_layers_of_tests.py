"""MoE layers of vLLM's own classes, small, in FP8 blocks; a module of its own, as spawned ranks import it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import get_ep_group, init_distributed_environment, initialize_model_parallel
from vllm.distributed.eplb.eplb_communicator import create_eplb_communicator
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import FusedMoEFactory

from megamoe.errors import MegaMoEError
from megamoe.formats import FP8_128X128
from megamoe.integrations import vllm_moe
from megamoe.launch import RankContext
from megamoe.tensors import Fp8BlockWeights, GateUpLayout

HIDDEN, INTER, EXPERTS, TOP_K, MAX_TOKENS = 256, 128, 8, 3, 24
PREFIX = "model.layers.0.mlp.experts"
PROJECTIONS = {"gate_proj": (INTER, HIDDEN), "up_proj": (INTER, HIDDEN), "down_proj": (HIDDEN, INTER)}


def checkpoint(seed: int = 0) -> dict[str, Tensor]:
    """One layer's experts as DeepSeek publishes them, under the names that vLLM's loader is handed."""
    g = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for expert in range(EXPERTS):
        for name, shape in PROJECTIONS.items():
            quantized = FP8_128X128.quantize(0.15 * torch.randn(shape, generator=g))
            assert quantized.scales is not None
            tensors[f"{expert}.{name}.weight"] = quantized.payload
            tensors[f"{expert}.{name}.weight_scale_inv"] = quantized.scales
    return tensors


def qwen3_moe_tensors(num_layers: int = 2) -> dict[str, Tensor]:
    """A whole model of the shape that the tests' config.json describes; layer l has the experts of `checkpoint(l)`."""
    g = torch.Generator().manual_seed(9)

    def random(*shape: int) -> Tensor:
        return (0.1 * torch.randn(shape, generator=g)).bfloat16()

    tensors = {"model.embed_tokens.weight": random(64, HIDDEN), "lm_head.weight": random(64, HIDDEN)}
    tensors["model.norm.weight"] = random(HIDDEN)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        shapes = {"q_proj": (128, HIDDEN), "k_proj": (128, HIDDEN), "v_proj": (128, HIDDEN), "o_proj": (HIDDEN, 128)}
        shapes |= {"q_norm": (64,), "k_norm": (64,)}
        tensors |= {f"{prefix}.self_attn.{name}.weight": random(*shape) for name, shape in shapes.items()}
        tensors |= {
            f"{prefix}.{name}.weight": random(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")
        }
        tensors[f"{prefix}.mlp.gate.weight"] = random(EXPERTS, HIDDEN)
        tensors |= {f"{prefix}.mlp.experts.{name}": tensor for name, tensor in checkpoint(layer).items()}
    return tensors


def stored(tensors: Mapping[str, Tensor]) -> Fp8BlockWeights:
    """All experts of a checkpoint as MegaMoE takes them, put together here and not by vLLM."""

    def of(suffix: str, *projections: str) -> Tensor:
        return torch.stack(
            [torch.cat([tensors[f"{expert}.{name}.{suffix}"] for name in projections]) for expert in range(EXPERTS)]
        )

    return Fp8BlockWeights(
        layout=GateUpLayout.PACKED,
        w13_weight=of("weight", "gate_proj", "up_proj"),
        w13_weight_scale=of("weight_scale_inv", "gate_proj", "up_proj"),
        w2_weight=of("weight", "down_proj"),
        w2_weight_scale=of("weight_scale_inv", "down_proj"),
    )


def config(**parallel: Any) -> VllmConfig:
    """An engine's configuration without a model."""
    made = VllmConfig(parallel_config=ParallelConfig(is_moe_model=True, **parallel))
    made.scheduler_config.max_num_batched_tokens = MAX_TOKENS
    return made


def quantization(**changes: Any) -> vllm_moe.MegaMoEConfig:
    """What vLLM makes of `"quantization_config"` of such a checkpoint."""
    return vllm_moe.MegaMoEConfig.from_config(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], **changes}
    )


def build(engine: VllmConfig, prefix: str = PREFIX, **changes: Any) -> Any:
    """The runner of one MoE layer, made by vLLM's factory; its weights are not loaded yet."""
    arguments: dict[str, Any] = {
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "params_dtype": torch.bfloat16,
        "quant_config": quantization(),
        "prefix": prefix,
    }
    engine.compilation_config.static_forward_context.pop(prefix, None)  # a name stands for one layer there
    with set_current_vllm_config(engine):
        return FusedMoEFactory(**arguments | changes)


def load(runner: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Load experts by vLLM's loader and have them processed, as its model loader does; returns the runner."""
    names = set(runner.load_weights(tensors.items()))
    assert names == {f"routed_experts.{name}" for name in vllm_moe.PARAMETERS.values()}
    runner.routed_experts.quant_method.process_weights_after_loading(runner.routed_experts)
    return runner


def tokens(num_tokens: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """`[T, H]` BF16 and router logits `[T, E]`."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, HIDDEN, generator=g).bfloat16(), torch.randn(num_tokens, EXPERTS, generator=g)


def run(engine: VllmConfig, runner: Any, x: Tensor, logits: Tensor, **context: Any) -> Tensor:
    """What the runner makes of a batch."""
    with torch.no_grad(), set_forward_context(None, engine, num_tokens=x.shape[0], **context):
        result: Tensor = runner(x.clone(), logits)  # it may write into its argument
    return result


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What vLLM's model loader sets while a model is built."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Model(nn.Module):
    """What vLLM's reloading walks over: a model of one MoE layer."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.experts = runner


# -- ranks -------------------------------------------------------------------------------------------------------------


@contextmanager
def joined(engine: VllmConfig, context: RankContext | SimpleNamespace) -> Iterator[None]:
    """vLLM's groups over the ranks of a launch."""
    store = dist.FileStore(str(context.directory / "store"), context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
    tp_size = engine.parallel_config.tensor_parallel_size
    with set_current_vllm_config(engine):
        init_distributed_environment(tp_size, context.rank % tp_size, local_rank=context.rank, backend="gloo")
        initialize_model_parallel(tp_size)
    try:
        yield
    finally:
        vllm_moe.close()


@dataclass(frozen=True)
class Case:
    """A batch for each rank, as (tokens, seed), and changes to the layer."""

    batches: tuple[tuple[int, int], tuple[int, int]]
    changes: dict[str, Any]
    num_padding: int = 0


@dataclass(frozen=True)
class Outcome:
    """What one rank has to say of a case."""

    output: Tensor
    experts: list[int]
    received: Tensor
    capacity: int
    error: str = ""


def run_rank(context: RankContext, parallel: dict[str, Any], cases: dict[str, Case]) -> dict[str, Outcome]:
    """One rank of two: the outcome of each case."""
    if parallel.get("data_parallel_size", 1) > 1:
        parallel = {**parallel, "data_parallel_rank": context.rank}
    engine = config(enable_expert_parallel=True, **parallel)
    with joined(engine, context):
        assert (get_ep_group().world_size, get_ep_group().rank_in_group) == (2, context.rank)
        return {name: _outcome(engine, context.rank, name, case) for name, case in cases.items()}


def _give_state(runner: Any) -> None:
    """What vLLM's balancer hands to a layer; on a CPU it maps each logical expert to its first copy."""
    num_physical = runner.routed_experts.global_num_experts
    first_copies = torch.arange(EXPERTS).unsqueeze(1)
    maps = (torch.zeros(num_physical), first_copies, torch.ones(EXPERTS, dtype=torch.int64))
    runner.set_eplb_state(0, *(one_layer.unsqueeze(0) for one_layer in maps))
    runner.eplb_state.should_record_tensor = torch.tensor(False)
    runner.eplb_state.num_unpadded_tokens_tensors = [torch.tensor(0)]


def _outcome(engine: VllmConfig, rank: int, name: str, case: Case) -> Outcome:
    runner = load(build(engine, prefix=f"model.layers.0.{name}.experts", **case.changes), checkpoint())
    experts = runner.routed_experts
    owned = [e for e in range(EXPERTS) if experts._map_global_expert_id_to_local_expert_id(e) >= 0]
    num_tokens, seed = case.batches[rank]
    x, logits = tokens(num_tokens, seed)
    extra: dict[str, Any] = {}
    if engine.parallel_config.data_parallel_size > 1:
        extra["num_tokens_across_dp"] = torch.tensor([batch[0] for batch in case.batches])
    if case.num_padding:
        extra["is_padding"] = torch.arange(num_tokens) >= num_tokens - case.num_padding
    if runner.moe_config.is_sequence_parallel:
        chunk = -(-num_tokens // 2)
        x, logits = (nn.functional.pad(t, (0, 0, 0, 2 * chunk - num_tokens)) for t in (x, logits))
        x, logits = (t[rank * chunk : (rank + 1) * chunk] for t in (x, logits))
    if runner.eplb_state is not None:
        _give_state(runner)
    session = experts.quant_method._opened.session
    try:
        output = run(engine, runner, x, logits, **extra)
    except MegaMoEError as error:
        session.reset()
        return Outcome(torch.empty(0), owned, torch.empty(0), 0, f"{type(error).__name__}: {error}")
    return Outcome(output, owned, session.receive_counts(), session.plan.problem.num_max_tokens_per_rank)


OLD_MAP, NEW_MAP = [0, 1, 2, 3, 4, 5, 6, 7, 0, 1], [7, 6, 3, 4, 3, 2, 1, 0, 5, 7]  # physical -> logical


def move_rank(context: RankContext) -> tuple[Tensor, Tensor, Tensor]:
    """One rank of two: outputs before vLLM's balancer moved experts between them, after, and without a new map."""
    engine = config(enable_expert_parallel=True, data_parallel_size=2, data_parallel_rank=context.rank)
    with joined(engine, context), torch.no_grad():
        experts = load(build(engine, enable_eplb=True, num_redundant_experts=2), checkpoint()).routed_experts
        x, _ = tokens(9, seed=context.rank)
        g = torch.Generator().manual_seed(context.rank)
        logical = torch.rand(9, EXPERTS, generator=g).argsort(-1)[:, :TOP_K]
        weights = torch.rand(9, TOP_K, generator=g)

        def call(physical_to_logical: list[int]) -> Tensor:
            physical = torch.tensor([physical_to_logical.index(expert) for expert in range(EXPERTS)])
            output: Tensor = experts.quant_method.apply(experts, x, weights, physical[logical].int(), None, None)
            return output

        before = call(OLD_MAP)
        views = [view.view(torch.uint8) for view in experts.get_expert_weights()]  # gloo does not send FP8
        buffers = [torch.empty_like(view) for view in views]
        communicator = create_eplb_communicator(get_ep_group(), "torch_nccl", [views], buffers)
        rearrange_expert_weights_inplace(
            torch.tensor([OLD_MAP]), torch.tensor([NEW_MAP]), [views], buffers, get_ep_group().cpu_group, communicator
        )
        return before, call(NEW_MAP), call(OLD_MAP)
