"""What a round of a measurement feeds to every contender, and the experts that all of them use."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megamoe.bench.routing import router_weights, routing
from megamoe.formats import FP8_1X128
from megamoe.problem import MoEProblem
from megamoe.tensors import ExpertWeights
from megamoe.testing.data import make_weights
from megamoe.testing.routings import Picks


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One round's tokens of one rank, on the GPU: BF16 rows, the same rows quantised per 1x128, and picks."""

    hidden_states: Tensor
    payload: Tensor
    scales: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


def make_inputs(problem: MoEProblem, *, num_tokens: int, routing_name: str, rank: int, seed: int) -> Inputs:
    """Gaussian tokens and picks of `rank`; the same for the same seed."""
    rng = torch.Generator().manual_seed(seed * 1000 + rank)
    picks = Picks.of(problem, num_tokens=num_tokens, src_rank=rank)
    on_gpu = torch.Generator(device="cuda").manual_seed(seed * 1000 + rank)
    hidden = torch.randn(num_tokens, problem.hidden_size, device="cuda", generator=on_gpu).bfloat16()
    quantized = FP8_1X128.quantize(hidden)
    assert quantized.scales is not None
    return Inputs(
        hidden_states=hidden,
        payload=quantized.payload,
        scales=quantized.scales,
        topk_ids=routing(routing_name)(picks, rng).cuda(),
        topk_weights=router_weights(num_tokens, problem.top_k, rng).cuda(),
    )


def make_experts(problem: MoEProblem, rank: int) -> ExpertWeights:
    """One rank's experts in the problem's mode, made on its GPU."""
    local = replace(problem, num_experts=problem.num_local_experts, ep_size=1)
    return make_weights(local, torch.device("cuda"), seed=rank)
