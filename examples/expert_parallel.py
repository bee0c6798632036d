"""One MoE layer over several processes, each with its own experts and tokens, under torchrun.

    torchrun --nproc-per-node 4 examples/expert_parallel.py          # CPU reference, or one GPU a rank

Ranks bring different numbers of tokens; rank 0 brings none, and takes part all the same.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import megamoe

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, MAX_TOKENS = 512, 256, 16, 4, 64


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit("start it with torchrun: torchrun --nproc-per-node 4 examples/expert_parallel.py")
    rank, ep_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    problem = megamoe.MoEProblem(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        top_k=TOP_K,
        num_max_tokens_per_rank=MAX_TOKENS,
        ep_size=ep_size,
        quant="bf16",
    )
    backend = megamoe.select_backend("auto", problem)
    plan = backend.plan(problem)  # the same on every rank
    on_cpu = plan.device.arch == "cpu"
    device = torch.device("cpu") if on_cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not on_cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if on_cpu else "cpu:gloo,cuda:nccl")

    rng = torch.Generator().manual_seed(rank)
    num_tokens = rank * MAX_TOKENS // ep_size
    hidden_states = torch.randn(num_tokens, HIDDEN, generator=rng).bfloat16().to(device)
    router = torch.randn(num_tokens, EXPERTS, generator=rng).softmax(-1).topk(TOP_K)
    experts = problem.num_local_experts
    w13 = torch.randn(experts, 2 * INTERMEDIATE, HIDDEN, generator=rng).mul_(HIDDEN**-0.5).bfloat16().to(device)
    w2 = torch.randn(experts, HIDDEN, INTERMEDIATE, generator=rng).mul_(INTERMEDIATE**-0.5).bfloat16().to(device)

    with backend.open(plan, dist.group.WORLD) as moe:  # COLLECTIVE
        weights = moe.prepare_weights(w13, w2, layout="packed")
        y = moe.forward(hidden_states, router.indices.to(device), router.values.to(device), weights)  # COLLECTIVE
        received = int(moe.receive_counts().sum())
        print(f"rank {rank}: {num_tokens} tokens, {received} rows received, output {tuple(y.shape)} {y.dtype}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
