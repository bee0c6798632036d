"""Small layers for the tests of the reference: experts and tokens of all ranks from one seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megamoe import MoEProblem
from megamoe.formats import BF16, weight_format
from megamoe.tensors import ExpertWeights, make_weights

MODES: list[tuple[str, str | None]] = [
    ("bf16", None),
    ("a8w8", None),
    ("a8w4", None),
    ("a8w4", "fp8_1x128"),
    ("a4w4", None),
]
TRANSPORTS = ["bf16", "fp8_blockwise_1x32"]


def mode_id(mode: tuple[str, str | None]) -> str:
    return "-".join(filter(None, mode))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Tokens are held together; `tokens` deals them out to the ranks of any EP size."""

    problem: MoEProblem
    w13: Tensor
    w2: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor

    def over(self, ep_size: int, **changes: Any) -> Layer:
        """The same layer and tokens on another number of ranks."""
        capacity = -(-len(self.hidden_states) // ep_size)
        problem = replace(self.problem, ep_size=ep_size, num_max_tokens_per_rank=capacity, **changes)
        return replace(self, problem=problem)

    def weights(self, rank: int) -> ExpertWeights:
        first = self.problem.first_expert(rank)
        mine = slice(first, first + self.problem.num_local_experts)
        return make_weights(
            self.problem,
            self._in_format(self.w13[mine]),
            self._in_format(self.w2[mine]),
            layout="packed",
            w13_bias=None if self.w13_bias is None else self.w13_bias[mine],
            w2_bias=None if self.w2_bias is None else self.w2_bias[mine],
        )

    def all_weights(self) -> list[ExpertWeights]:
        return [self.weights(rank) for rank in range(self.problem.ep_size)]

    def tokens(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        capacity = self.problem.num_max_tokens_per_rank
        mine = slice(rank * capacity, (rank + 1) * capacity)
        return self.hidden_states[mine], self.topk_ids[mine], self.topk_weights[mine]

    def all_tokens(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        columns = zip(*(self.tokens(rank) for rank in range(self.problem.ep_size)), strict=True)
        x, ids, topk_weights = (list(column) for column in columns)
        return x, ids, topk_weights

    def _in_format(self, weight: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        fmt = weight_format(self.problem.quant)
        if fmt is BF16:
            return weight.bfloat16()
        quantized = fmt.quantize(weight)
        assert quantized.scales is not None
        return quantized.payload, quantized.scales


def make_layer(
    *,
    quant: str = "bf16",
    act_format: str | None = None,
    transport: str = "bf16",
    ep_size: int = 1,
    num_tokens: int = 24,
    hidden_size: int = 128,
    intermediate_size: int = 128,
    num_experts: int = 8,
    top_k: int = 3,
    seed: int = 0,
    **fields: Any,
) -> Layer:
    """A layer with Gaussian weights and activations and uniform routing; `num_tokens` is of all ranks together."""
    problem = MoEProblem(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        num_max_tokens_per_rank=-(-num_tokens // ep_size),
        ep_size=ep_size,
        quant=quant,
        act_format=act_format,
        transport=transport,
        **fields,
    )
    g = torch.Generator().manual_seed(seed)
    bias = problem.expert_bias
    return Layer(
        problem=problem,
        w13=torch.randn(num_experts, 2 * intermediate_size, hidden_size, generator=g) * hidden_size**-0.5,
        w2=torch.randn(num_experts, hidden_size, intermediate_size, generator=g) * intermediate_size**-0.5,
        w13_bias=torch.randn(num_experts, 2 * intermediate_size, generator=g) if bias else None,
        w2_bias=torch.randn(num_experts, hidden_size, generator=g) if bias else None,
        hidden_states=torch.randn(num_tokens, hidden_size, generator=g).bfloat16(),
        topk_ids=torch.rand(num_tokens, num_experts, generator=g).argsort(1)[:, :top_k].int(),
        topk_weights=torch.randn(num_tokens, top_k, generator=g),
    )


def rel_l2(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())
