"""Suite `seed-gfx950`: a rank's share of the seed's layer and of DeepSeek-R1's, in both modes over both transports.

Every rank has its experts of an EP8 layer and brings the same number of tokens, with uniform routing; as many ranks as
there are GPUs, up to 8. On a stand-in (MEGAMOE_ROCM_DEVICE) the layer is small and its times mean nothing: the suite
can be rehearsed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megamoe.backend import Session
from megamoe.bench.results import BenchRow, Machine, Timing
from megamoe.bench.suites import Suite, SuiteOptions
from megamoe.launch import RankContext, run_ranks
from megamoe.problem import MoEProblem, QuantMode, Transport
from megamoe.tensors import ExpertWeights, make_weights
from megamoe_rocm import rungs
from megamoe_rocm.backend import RocmBackend
from megamoe_rocm.planning import make_plan

NAME = "seed-gfx950"
TOKENS = (8, 128, 512, 2048, 8192)
MAX_RANKS = 8
TIME_LIMIT_S = 1800.0
WARM_CALLS = 3
SCALE_BYTE = 121  # 2^-6: activations of order 1 stay of order 1


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layer: sizes, experts of each rank, picks per token."""

    hidden_size: int
    intermediate_size: int
    experts_per_rank: int
    top_k: int


SHAPES = (
    Shape(hidden_size=7168, intermediate_size=3072, experts_per_rank=48, top_k=6),  # the seed's: 384 experts over 8
    Shape(hidden_size=7168, intermediate_size=2048, experts_per_rank=32, top_k=8),  # DeepSeek-R1's: 256 over 8
)
REHEARSAL = Shape(hidden_size=512, intermediate_size=256, experts_per_rank=4, top_k=2)
REHEARSAL_TOKENS = (8, 24)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What to measure: the layer, tokens of each rank in a call, calls."""

    problem: MoEProblem
    num_tokens: int
    repeats: int
    config: str | None


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """One rank's seconds per call, its workspace, and where that was measured."""

    seconds: list[float]
    workspace_bytes: int
    machine: Machine


def suites() -> list[Suite]:
    """What this package offers."""
    description = "ROCm kernels: a rank's share of the seed's layer and of DeepSeek-R1's, a4w4 and a8w4"
    return [Suite(name=NAME, description=description, backend=RocmBackend.name, run=run)]


def run(options: SuiteOptions) -> Iterator[BenchRow]:
    """Measure, one set of processes for each shape and mode."""
    on_gpu = not rungs.is_cpu(rungs.current())
    ep_size = min(torch.cuda.device_count(), MAX_RANKS) if on_gpu else 1
    for shape in SHAPES if on_gpu else (REHEARSAL,):
        for quant in (QuantMode.A4W4, QuantMode.A8W4):
            measurements = list(_measurements(shape, quant, ep_size, options))
            results = run_ranks(measure_rank, ep_size, measurements, timeout_s=TIME_LIMIT_S)
            for measurement, by_rank in zip(measurements, zip(*results, strict=True), strict=True):
                yield BenchRow.of(
                    bench=NAME,
                    machine=by_rank[0].machine,
                    problem=measurement.problem,
                    routing="uniform",
                    num_tokens=measurement.num_tokens,
                    timing=Timing.of([result.seconds for result in by_rank]),
                    workspace_bytes=by_rank[0].workspace_bytes,
                    peers={},
                )


def _measurements(shape: Shape, quant: QuantMode, ep_size: int, options: SuiteOptions) -> Iterator[Measurement]:
    default = REHEARSAL_TOKENS if shape is REHEARSAL else TOKENS
    for num_tokens in options.tokens or default:
        for transport in Transport:
            problem = MoEProblem(
                hidden_size=shape.hidden_size,
                intermediate_size=shape.intermediate_size,
                num_experts=shape.experts_per_rank * ep_size,
                top_k=shape.top_k,
                num_max_tokens_per_rank=num_tokens,
                ep_size=ep_size,
                quant=quant,
                transport=transport,
            )
            yield Measurement(problem=problem, num_tokens=num_tokens, repeats=options.repeats, config=options.config)


def measure_rank(context: RankContext, measurements: list[Measurement]) -> list[RankResult]:
    """COLLECTIVE. Body of a rank's process: measurements of one shape and mode."""
    device = torch.device("cpu")
    if not rungs.is_cpu(rungs.current()):
        device = torch.device("cuda", context.rank)
        context.join_gpus(device)
    try:
        experts = random_experts(measurements[0].problem, device)
        return [_measure(each, context.rank, experts, device) for each in measurements]
    finally:
        if device.type == "cuda":
            dist.destroy_process_group()


def _measure(measurement: Measurement, rank: int, experts: ExpertWeights, device: torch.device) -> RankResult:
    backend, problem = RocmBackend(), measurement.problem
    group = dist.group.WORLD if problem.ep_size > 1 else None
    generator = torch.Generator(device).manual_seed(rank)
    rows = (measurement.num_tokens, problem.top_k)
    hidden = torch.randn(measurement.num_tokens, problem.hidden_size, device=device, generator=generator).bfloat16()
    ids = torch.rand(measurement.num_tokens, problem.num_experts, device=device, generator=generator)
    ids = ids.topk(problem.top_k).indices.int()
    weights = torch.rand(rows, device=device, generator=generator)
    plan = make_plan(problem, rungs.PLANNED_FOR[rungs.current()], config=measurement.config)
    with backend.open(plan, group) as session:
        prepared = session.prepare(experts)
        session.warmup()
        seconds = _times(session, lambda: session.forward(hidden, ids, weights, prepared), measurement.repeats, device)
        session.check()
    return RankResult(seconds=seconds, workspace_bytes=plan.bytes, machine=_machine(device, problem.ep_size))


def _times(session: Session, call: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Seconds of each call, by the device's clock on a GPU; ranks meet in each call, so they wait for the slowest."""
    for _ in range(WARM_CALLS if device.type == "cuda" else 1):
        call()
    session.check()
    seconds = []
    for _ in range(repeats):
        if device.type == "cuda":
            start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            call()
            end.record()
            torch.cuda.synchronize(device)
            seconds.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
    return seconds


def random_experts(problem: MoEProblem, device: torch.device) -> ExpertWeights:
    """A rank's MXFP4 experts of random codes."""
    experts, hidden, inter = problem.num_local_experts, problem.hidden_size, problem.intermediate_size

    def matrix(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        payload = torch.randint(256, (experts, rows, columns // 2), dtype=torch.uint8, device=device)
        return payload, torch.full((experts, rows, columns // 32), SCALE_BYTE, dtype=torch.uint8, device=device)

    return make_weights(problem, matrix(2 * inter, hidden), matrix(hidden, inter), layout="packed")


def _machine(device: torch.device, num_gpus: int) -> Machine:
    if device.type == "cpu":
        return Machine(gpu=rungs.WHAT[rungs.current()], num_gpus=0, driver="", toolkit="")
    toolkit = torch.version.hip or torch.version.cuda or ""
    return Machine(gpu=torch.cuda.get_device_name(device), num_gpus=num_gpus, driver="", toolkit=toolkit)
