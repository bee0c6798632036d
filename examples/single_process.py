"""One MoE layer in one process: choose a backend, plan, prepare weights, call.

    python examples/single_process.py

With `VirtualRanks()` one session plays all ranks of an expert-parallel group; arguments are lists, one entry a rank.
"""

from __future__ import annotations

import torch

import megamoe
from megamoe.formats import FP8_128X128

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 512, 256, 16, 4, 32


def quantized_experts(count: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random experts `[count, rows, columns]` as (FP8 payload, FP32 scale of each 128x128 block)."""
    quantized = FP8_128X128.quantize(torch.randn(count, rows, columns) * columns**-0.5)
    assert quantized.scales is not None
    return quantized.payload, quantized.scales


def main() -> None:
    torch.manual_seed(0)
    problem = megamoe.MoEProblem(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        top_k=TOP_K,
        num_max_tokens_per_rank=TOKENS,
        ep_size=2,
        quant="a8w8",
        transport="fp8_blockwise_1x32",
    )
    backend = megamoe.select_backend("auto", problem)
    plan = backend.plan(problem)
    print(plan)
    device = "cpu" if plan.device.arch == "cpu" else "cuda"

    def to_device(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return pair[0].to(device), pair[1].to(device)

    ranks = range(problem.ep_size)
    hidden_states = [torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device) for _ in ranks]
    scores = [torch.randn(TOKENS, EXPERTS, device=device).softmax(-1).topk(TOP_K) for _ in ranks]
    with backend.open(plan, megamoe.VirtualRanks()) as moe:
        weights = [
            moe.prepare_weights(
                w13=to_device(quantized_experts(problem.num_local_experts, 2 * INTERMEDIATE, HIDDEN)),
                w2=to_device(quantized_experts(problem.num_local_experts, HIDDEN, INTERMEDIATE)),
                layout="packed",  # gate rows first, then up
            )
            for _ in ranks
        ]
        y = moe.forward(hidden_states, [score.indices for score in scores], [score.values for score in scores], weights)
        for rank in ranks:
            received = moe.receive_counts()[rank].tolist()
            print(
                f"rank {rank}: output {tuple(y[rank].shape)} {y[rank].dtype}, rows received by its experts {received}"
            )


if __name__ == "__main__":
    main()
