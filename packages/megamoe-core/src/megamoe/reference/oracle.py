"""The oracle: what the layer is, with nothing rounded but the weights.

    y[t] = sum over k of topk_weights[t, k] * Expert_{topk_ids[t, k]}(x[t])

FP32 throughout: dequantised weights, unquantised activations, no transport. A plain loop over experts that shares no
code with the stages but the activation's formula. The gates of docs/numerics.md are distances from this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megamoe.problem import MoEProblem
from megamoe.reference.weights import ExpertReader, named_tensors
from megamoe.stages.swiglu_quant import SwiGLU
from megamoe.tensors import ExpertWeights


def oracle(
    problem: MoEProblem,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: Sequence[ExpertWeights],
) -> Tensor:
    """The layer of one rank's tokens, exactly.

    Args:
        problem: the layer.
        hidden_states: `[T, H]`, any float type.
        topk_ids: `[T, K]`; ids outside [0, E) add nothing.
        topk_weights: `[T, K]` FP32.
        weights: the experts of every rank, in rank order.

    Returns:
        `[T, H]` FP32, not rounded to BF16.
    """
    x = hidden_states.float()
    activation = SwiGLU.of(problem)
    y = torch.zeros(x.shape[0], problem.hidden_size, dtype=torch.float32, device=x.device)
    for rank, owned in enumerate(weights):
        reader = ExpertReader.of(problem, named_tensors(owned))
        for local_expert_idx in range(problem.num_local_experts):
            token, slot = (topk_ids == problem.first_expert(rank) + local_expert_idx).nonzero(as_tuple=True)
            if not len(token):
                continue
            gate_up = x[token] @ reader.w13(local_expert_idx).T
            w13_bias, w2_bias = reader.w13_bias(local_expert_idx), reader.w2_bias(local_expert_idx)
            if w13_bias is not None:
                gate_up += w13_bias
            gate, up = gate_up.chunk(2, dim=-1)
            rows = activation(gate, up) @ reader.w2(local_expert_idx).T
            if w2_bias is not None:
                rows += w2_bias
            y.index_add_(0, token, rows * topk_weights[token, slot].unsqueeze(1))
    return y
