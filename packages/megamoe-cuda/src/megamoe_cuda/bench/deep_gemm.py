"""Peer: the fused SM90 MoE of sgl-deep-gemm 0.1.5, where that wheel is installed (with apache-tvm-ffi 0.1.11).

It scales A2 per 64 channels, folds the router weight in before A2 and sends BF16 rows home.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.problem import Activation, MoEProblem
from megamoe.tensors import PreparedWeights
from megamoe_cuda.bench.inputs import Inputs

NAME = "sgl-deep-gemm fused"


def is_installed() -> bool:
    """Whether the package can be found; imports nothing."""
    return importlib.util.find_spec("deep_gemm") is not None


class DeepGemmPeer:
    """One rank.

    Args:
        problem: a8w8, SwiGLU.
        group: the ranks.
        weights: as `megamoe_cuda.weights` lays them out; DeepGEMM reads the same order.
    """

    def __init__(self, problem: MoEProblem, group: dist.ProcessGroup, weights: PreparedWeights) -> None:
        assert problem.activation is Activation.SWIGLU
        self._library: Any = importlib.import_module("deep_gemm")
        tensors = weights.tensors
        self._weights = (
            (tensors["w13_weight"], tensors["w13_weight_scale"]),
            (tensors["w2_weight"], tensors["w2_weight_scale"]),
        )
        self._clamp = problem.swiglu_limit
        self._buffer = self._library.get_symm_buffer_for_mega_moe(
            group,
            problem.num_experts,
            problem.num_max_tokens_per_rank,
            problem.top_k,
            problem.hidden_size,
            problem.intermediate_size,
        )
        self._out = torch.empty(
            problem.num_max_tokens_per_rank, problem.hidden_size, dtype=torch.bfloat16, device="cuda"
        )

    def load(self, inputs: Inputs) -> None:
        """Put quantised rows and picks where the kernel reads them."""
        num_tokens = inputs.payload.shape[0]
        self._y = self._out[:num_tokens]
        self._buffer.x[:num_tokens].copy_(inputs.payload)
        self._buffer.x_sf[:num_tokens].copy_(inputs.scales)
        self._buffer.topk_idx[:num_tokens].copy_(inputs.topk_ids)
        self._buffer.topk_weights[:num_tokens].copy_(inputs.topk_weights)

    def call(self) -> Tensor:
        """Run the layer; `[T, H]` BF16."""
        self._library.fp8_mega_moe(self._y, *self._weights, self._buffer, activation_clamp=self._clamp)
        return self._y

    def close(self) -> None:
        """Give the buffer back."""
        self._buffer.destroy()
