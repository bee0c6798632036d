"""What the protocol costs; `megamoe bench --suite reference-v2-lite` measures it at a real layer's size."""

from __future__ import annotations

import time

import pytest
import torch
from layers import make_layer

from megamoe import VirtualRanks
from megamoe.reference.backend import ReferenceBackend

LIMIT = 2.0  # 1.3 is the goal at DeepSeek-V2-Lite's shape; this one is small, and the machine may be busy


def plain_loop(layer) -> torch.Tensor:
    """The same arithmetic without ranks: BF16 operands, FP32 products."""
    y = torch.zeros(layer.hidden_states.shape)
    for rank in range(layer.problem.ep_size):
        weights = layer.weights(rank)
        for local_expert_idx in range(layer.problem.num_local_experts):
            expert = layer.problem.first_expert(rank) + local_expert_idx
            token, slot = (layer.topk_ids == expert).nonzero(as_tuple=True)
            w13 = weights.w13_weight[local_expert_idx].float()
            gate, up = (layer.hidden_states[token].float() @ w13.T).chunk(2, dim=-1)
            a2 = (torch.nn.functional.silu(gate) * up).bfloat16().float()
            rows = (a2 @ weights.w2_weight[local_expert_idx].float().T) * layer.topk_weights[token, slot, None]
            y.index_add_(0, token, rows.bfloat16().float())
    return y.bfloat16()


def cpu_seconds(function, *arguments) -> float:
    """The least of a few runs, in processor time: other programs on the machine count less."""
    function(*arguments)
    seconds = []
    for _ in range(5):
        began = time.process_time()
        function(*arguments)
        seconds.append(time.process_time() - began)
    return min(seconds)


@pytest.mark.stress
def test_the_protocol_costs_little_beside_the_products() -> None:
    layer = make_layer(ep_size=4, num_tokens=1024, hidden_size=512, intermediate_size=384, num_experts=16, top_k=4)
    backend = ReferenceBackend()
    with backend.open(backend.plan(layer.problem), VirtualRanks()) as session:
        weights = [session.prepare(owned) for owned in layer.all_weights()]
        torch.testing.assert_close(
            torch.cat(session.forward(*layer.all_tokens(), weights)), plain_loop(layer), rtol=0.02, atol=0.02
        )
        reference_s = cpu_seconds(session.forward, *layer.all_tokens(), weights)
    assert reference_s < LIMIT * cpu_seconds(plain_loop, layer)
