"""Time kernels from several trees of headers, or several tiles, in one run, taking turns, so that the GPU's clock hits
them alike.

    python compare_headers.py now=path/to/include other=path/to/include --tokens 8,1024,8192
    python compare_headers.py n32 m64 m128 m128n64 --tokens 8,128,1024

An `include` is `megamoe_cuda/include` of some version of the package; host code is the installed one's, so their
constants and arguments must agree. A name without one is that of a configuration, of the installed headers. Two GPUs
measure the EP8-equivalent routing of suite seed-sm90, one measures EP1. Prints a JSON line per token count and
transport: microseconds by name, medians of the slower rank.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megamoe.bench.results import Timing
from megamoe.bench.suites import SuiteOptions
from megamoe.launch import RankContext, run_ranks
from megamoe.tensors import ExpertWeights
from megamoe_cuda.aot import builds
from megamoe_cuda.backend import CudaBackend
from megamoe_cuda.bench.inputs import make_experts, make_inputs
from megamoe_cuda.bench.rank import NUM_ROUTINGS, Measurement, barrier, captured
from megamoe_cuda.bench.seed_sm90 import EP8_EQUIVALENT, UNIFORM, Setting, _measurements
from megamoe_cuda.bench.timing import time_interleaved
from megamoe_cuda.jit import codegen, compiler, store

TIME_LIMIT_S = 300.0
INSTALLED = codegen.INCLUDE_DIR


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What one contender runs: headers, and a configuration by name or None."""

    headers: Path
    config: str | None = None

    @classmethod
    def parse(cls, text: str) -> tuple[str, Kernels]:
        """NAME=DIR, or the name of a configuration."""
        name, _, headers = text.partition("=")
        return (name, cls(headers=Path(headers))) if headers else (name, cls(headers=INSTALLED, config=name))


Contenders = dict[str, Kernels]


def use_headers(tree: Path) -> None:
    """Compile from `tree` from now on, in this process."""
    for module in (codegen, compiler, store):
        module.INCLUDE_DIR = tree.resolve()  # type: ignore[attr-defined]
    store.headers.cache_clear()


def compile_one(kernels: Kernels, measurement: Measurement) -> None:
    use_headers(kernels.headers)
    for build in builds(measurement.problem, config=kernels.config):
        store.load_or_compile(build.kernel)


def measure(context: RankContext, kernels: Contenders, measurements: list[Measurement]) -> list[dict[str, list[float]]]:
    """COLLECTIVE. Seconds by name, for each measurement."""
    context.join_gpus(torch.device("cuda", context.rank))
    try:
        experts = make_experts(measurements[0].problem, context.rank)
        return [measure_one(context.rank, kernels, each, experts) for each in measurements]
    finally:
        dist.destroy_process_group()


def measure_one(
    rank: int, kernels: Contenders, measurement: Measurement, experts: ExpertWeights
) -> dict[str, list[float]]:
    backend, problem = CudaBackend(), measurement.problem
    group = dist.group.WORLD if problem.ep_size > 1 else None
    rounds = [
        make_inputs(problem, num_tokens=measurement.num_tokens, routing_name=measurement.routing, rank=rank, seed=seed)
        for seed in range(NUM_ROUTINGS)
    ]
    sessions, contenders = [], {}
    for name, each in kernels.items():
        use_headers(each.headers)
        session = backend.open(backend.plan(problem, config=each.config), group)
        sessions.append(session)
        weights = session.prepare(experts)
        session.warmup()
        contenders[name] = captured(session, weights, rounds, quantized=True)
    seconds = time_interleaved(contenders, repeats=measurement.repeats, barrier=barrier())
    for session in sessions:
        session.check()
        session.close()
    return seconds


def results(kernels: Contenders, options: SuiteOptions) -> Iterator[dict[str, object]]:
    ep_size = min(torch.cuda.device_count(), 2)
    routing = EP8_EQUIVALENT if ep_size == 2 else UNIFORM
    measurements = list(_measurements(Setting(ep_size=ep_size, routing=routing), options))
    wanted = [(each, measurement) for each in kernels.values() for measurement in measurements]
    with ProcessPoolExecutor() as pool:
        list(pool.map(compile_one, *zip(*wanted, strict=True)))
    by_rank = run_ranks(measure, ep_size, kernels, measurements, timeout_s=TIME_LIMIT_S)
    for measurement, ranks in zip(measurements, zip(*by_rank, strict=True), strict=True):
        medians = {name: Timing.of([rank[name] for rank in ranks]).us_median for name in kernels}
        yield {
            "num_tokens": measurement.num_tokens,
            "transport": str(measurement.problem.transport),
            "routing": routing,
            "us_median": medians,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="+", metavar="NAME=DIR|CONFIG")
    parser.add_argument("--tokens", default="8,1024,8192")
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args()
    kernels = dict(map(Kernels.parse, arguments.kernels))
    options = SuiteOptions(tokens=tuple(map(int, arguments.tokens.split(","))), repeats=arguments.repeats)
    for row in results(kernels, options):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
