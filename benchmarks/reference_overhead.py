"""What the protocol costs on CPU: the reference backend against a plain torch loop over the same experts.

    python benchmarks/reference_overhead.py            # DeepSeek-V2-Lite's shape, EP4 as virtual ranks
    python benchmarks/reference_overhead.py --ranks processes

Both compute the same rows in the same arithmetic: BF16 operands, converted to FP32 expert by expert, FP32 products,
SwiGLU, a BF16 rounding of the activation, FP32 products, the router weight. The loop does it for all ranks' tokens at
once, without a protocol. Process start, loading and preparing weights are excluded.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import megamoe
from megamoe.backend import VirtualRanks
from megamoe.launch import RankContext, run_ranks
from megamoe.reference.backend import ReferenceBackend
from megamoe.symm import ShmGroup
from megamoe.tensors import Bf16Weights


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The experts and tokens of all ranks."""

    problem: megamoe.MoEProblem
    w13: Tensor
    w2: Tensor
    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor

    def weights(self, rank: int) -> Bf16Weights:
        """Experts of one rank."""
        first = self.problem.first_expert(rank)
        owned = slice(first, first + self.problem.num_local_experts)
        return Bf16Weights(layout="packed", w13_weight=self.w13[owned], w2_weight=self.w2[owned])

    def tokens(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states, topk_ids and topk_weights of one rank."""
        capacity = self.problem.num_max_tokens_per_rank
        mine = slice(rank * capacity, (rank + 1) * capacity)
        return self.hidden_states[mine], self.topk_ids[mine], self.topk_weights[mine]


def make_layer(
    *,
    hidden_size: int = 2048,
    intermediate_size: int = 1408,
    num_experts: int = 64,
    top_k: int = 6,
    num_tokens: int = 512,
    ep_size: int = 4,
) -> Layer:
    """A layer in mode bf16 with uniform routing; the defaults are DeepSeek-V2-Lite's."""
    problem = megamoe.MoEProblem(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        num_max_tokens_per_rank=num_tokens,
        ep_size=ep_size,
        quant="bf16",
    )
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        values: Tensor = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
        return values.bfloat16()

    tokens = num_tokens * ep_size
    return Layer(
        problem=problem,
        w13=torch.stack([normal(2 * intermediate_size, hidden_size) for _ in range(num_experts)]),
        w2=torch.stack([normal(hidden_size, intermediate_size) for _ in range(num_experts)]),
        hidden_states=torch.randn(tokens, hidden_size, generator=generator).bfloat16(),
        topk_ids=torch.rand(tokens, num_experts, generator=generator).argsort(1)[:, :top_k].int(),
        topk_weights=torch.rand(tokens, top_k, generator=generator),
    )


@torch.no_grad()
def plain_loop(layer: Layer) -> Tensor:
    """`[T, H]` BF16 of all ranks' tokens, by a loop over experts."""
    y = torch.zeros(layer.hidden_states.shape, dtype=torch.float32)
    for expert in range(layer.problem.num_experts):
        token, slot = (layer.topk_ids == expert).nonzero(as_tuple=True)
        gate, up = (layer.hidden_states[token].float() @ layer.w13[expert].float().T).chunk(2, dim=-1)
        a2 = (torch.nn.functional.silu(gate) * up).bfloat16().float()
        rows = (a2 @ layer.w2[expert].float().T) * layer.topk_weights[token, slot].unsqueeze(1)
        y.index_add_(0, token, rows.bfloat16().float())
    return y.bfloat16()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The fastest of several runs: seconds on the clock, seconds of processor time, and what the last run returned."""

    wall_s: float
    cpu_s: float
    output: Tensor


def measure(repeats: int, run: Callable[[], Tensor]) -> Measured:
    """Run once to warm up, then `repeats` times."""
    output = run()
    wall_s, cpu_s = [], []
    for _ in range(repeats):
        began, cpu_began = time.perf_counter(), time.process_time()
        output = run()
        wall_s.append(time.perf_counter() - began)
        cpu_s.append(time.process_time() - cpu_began)
    return Measured(wall_s=min(wall_s), cpu_s=min(cpu_s), output=output)


def virtual_ranks(layer: Layer, repeats: int) -> Measured:
    """A forward of all ranks in this process."""
    backend = ReferenceBackend()
    ranks = range(layer.problem.ep_size)
    x, ids, topk_weights = zip(*(layer.tokens(rank) for rank in ranks), strict=True)
    with backend.open(backend.plan(layer.problem), VirtualRanks()) as session:
        session.warmup()
        weights = [session.prepare(layer.weights(rank)) for rank in ranks]
        return measure(repeats, lambda: torch.cat(session.forward(x, ids, topk_weights, weights)))


def processes(layer: Layer, repeats: int) -> Measured:
    """A process per rank, one thread in each: the slowest rank's clock, and the processor time of all."""
    ranks = run_ranks(_rank, layer.problem.ep_size, layer.problem, repeats, timeout_s=600.0, num_threads=1)
    return Measured(
        wall_s=max(rank.wall_s for rank in ranks),
        cpu_s=sum(rank.cpu_s for rank in ranks),
        output=torch.cat([rank.output for rank in ranks]),
    )


def _rank(context: RankContext, problem: megamoe.MoEProblem, repeats: int) -> Measured:
    layer = make_layer(
        hidden_size=problem.hidden_size,
        intermediate_size=problem.intermediate_size,
        num_experts=problem.num_experts,
        top_k=problem.top_k,
        num_tokens=problem.num_max_tokens_per_rank,
        ep_size=problem.ep_size,
    )
    backend = ReferenceBackend()
    group = ShmGroup.connect(context.name, context.rank, context.world_size, timeout_s=300.0)
    with backend.open(backend.plan(problem), group) as session:
        session.warmup()
        weights = session.prepare(layer.weights(context.rank))
        tokens = layer.tokens(context.rank)
        group.barrier(timeout_s=300.0, phase="benchmark")
        return measure(repeats, lambda: session.forward(*tokens, weights))


def main() -> None:
    """Print both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", choices=["virtual", "processes"], default="virtual")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-tokens", type=int, default=512, help="per rank")
    parser.add_argument("--num-experts", type=int, default=64)
    parser.add_argument("--ep-size", type=int, default=4)
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads(), help="loop and virtual ranks")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    layer = make_layer(num_tokens=arguments.num_tokens, num_experts=arguments.num_experts, ep_size=arguments.ep_size)
    plain = measure(arguments.repeats, lambda: plain_loop(layer))
    run = virtual_ranks if arguments.ranks == "virtual" else processes
    reference = run(layer, arguments.repeats)
    error = (reference.output.float() - plain.output.float()).norm() / plain.output.float().norm()
    print(f"{layer.topk_ids.numel()} rows, {arguments.num_threads} threads, EP{arguments.ep_size} as {arguments.ranks}")
    print(f"plain loop  {plain.wall_s:7.3f} s   {plain.cpu_s:7.3f} s of processor time")
    print(f"reference   {reference.wall_s:7.3f} s   {reference.cpu_s:7.3f} s   relL2 to the loop {error:.1e}")
    print(f"ratio       {reference.wall_s / plain.wall_s:7.2f}     {reference.cpu_s / plain.cpu_s:7.2f}")


if __name__ == "__main__":
    main()
