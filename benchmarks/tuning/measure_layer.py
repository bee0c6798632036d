"""Measure a layer of any shape and routing beside its peers, as suite seed-sm90 measures the seed's.

    python measure_layer.py --hidden 7168 --experts-per-rank 32 --tokens 8,128,512
    python measure_layer.py --routing zipf --tokens 1024 --no-peers

Two GPUs, one rank each. Prints a JSON line per token count: median microseconds of the slower rank by contender, and
the rows that the busier rank and the busiest expert receive, of the mean in percent.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor

import torch

from megamoe.bench.results import Timing
from megamoe.bench.routing import routing
from megamoe.launch import run_ranks
from megamoe.problem import MoEProblem
from megamoe.testing.routings import Picks
from megamoe_cuda.aot import builds
from megamoe_cuda.bench.rank import NUM_ROUTINGS, Measurement, measure_rank
from megamoe_cuda.jit.store import load_or_compile

EP_SIZE = 2
TIME_LIMIT_S = 600.0


def measurement(arguments: argparse.Namespace, num_tokens: int) -> Measurement:
    problem = MoEProblem(
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        num_experts=EP_SIZE * arguments.experts_per_rank,
        top_k=arguments.top_k,
        num_max_tokens_per_rank=num_tokens,
        ep_size=EP_SIZE,
        transport=arguments.transport,
    )
    return Measurement(
        problem=problem,
        num_tokens=num_tokens,
        routing=arguments.routing,
        repeats=arguments.repeats,
        config=arguments.config,
        with_peers=not arguments.no_peers,
    )


def compile_kernels(each: Measurement) -> None:
    for build in builds(each.problem, config=each.config):
        load_or_compile(build.kernel)


def skew(each: Measurement) -> dict[str, int]:
    """Rows of the busier rank and of the busiest expert, in percent of the mean, over the inputs that are measured."""
    problem, counts = each.problem, torch.zeros(NUM_ROUTINGS, each.problem.num_experts)
    for seed in range(NUM_ROUTINGS):
        for rank in range(problem.ep_size):
            picks = Picks.of(problem, num_tokens=each.num_tokens, src_rank=rank)
            ids = routing(each.routing)(picks, torch.Generator().manual_seed(seed * 1000 + rank))
            counts[seed] += torch.bincount(ids.flatten(), minlength=problem.num_experts)
    ranks = counts.view(NUM_ROUTINGS, problem.ep_size, -1).sum(2)
    return {
        "busiest_rank_percent": round(100 * float((ranks.amax(1) / ranks.mean(1)).mean())),
        "busiest_expert_percent": round(100 * float((counts.amax(1) / counts.mean(1)).mean())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--experts-per-rank", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--transport", default="bf16")
    parser.add_argument("--routing", default="ep8-equivalent")
    parser.add_argument("--config")
    parser.add_argument("--tokens", default="8,128,512,2048,8192")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-peers", action="store_true")
    arguments = parser.parse_args()
    measurements = [measurement(arguments, int(tokens)) for tokens in arguments.tokens.split(",")]
    with ProcessPoolExecutor() as pool:
        list(pool.map(compile_kernels, measurements))
    by_rank = run_ranks(measure_rank, EP_SIZE, measurements, timeout_s=TIME_LIMIT_S)
    for each, ranks in zip(measurements, zip(*by_rank, strict=True), strict=True):
        medians = {name: Timing.of([rank.seconds[name] for rank in ranks]).us_median for name in ranks[0].seconds}
        row = {"num_tokens": each.num_tokens, "routing": each.routing, "us_median": medians}
        print(json.dumps(row | skew(each)), flush=True)


if __name__ == "__main__":
    main()
