"""Suite `seed-gfx950`: a rank's share of the seed's layer and of DeepSeek-R1's, in both modes over both transports.

Every rank has its experts of an EP8 layer and brings the same number of tokens, with uniform routing; as many ranks as
there are GPUs, up to 8. Beside the fused kernels stands the same layer unfused (`megamoe_rocm.unfused`), with Mori's
dispatch and combine on an MI355X: a row's peer. Both are captured in a graph and replayed, and their outputs compared.
On a stand-in (MEGAMOE_ROCM_DEVICE) the layer is small and its times mean nothing: the suite can be rehearsed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.bench.results import BenchRow, Machine, Timing
from megamoe.bench.suites import Suite, SuiteOptions
from megamoe.errors import BackendUnavailableError, MegaMoEError, ProtocolError
from megamoe.launch import RankContext, run_ranks
from megamoe.problem import MoEProblem, QuantMode, Transport
from megamoe.symm.agreement import ProcessGroupRanks, agree
from megamoe.tensors import ExpertWeights, make_weights
from megamoe_rocm import rungs
from megamoe_rocm.backend import RocmBackend
from megamoe_rocm.heuristics import SessionConfig
from megamoe_rocm.planning import make_plan
from megamoe_rocm.rungs import Rung
from megamoe_rocm.symm_mori import HEAP_SIZE, heap_size

if TYPE_CHECKING:  # these need Triton
    from megamoe_rocm.runtime.launcher import Launcher
    from megamoe_rocm.unfused.pipeline import UnfusedPipeline

NAME = "seed-gfx950"
TOKENS = (8, 128, 512, 2048, 8192)
MAX_RANKS = 8
TIME_LIMIT_S = 1800.0
SESSION_TIMEOUT_S = 60.0  # for ranks to agree on what they make
WARM_CALLS = 3
# The two differ by roundings: rows and their sums to BF16, and over FP8 by scales of another granularity, 0.026 each.
SAME_OUTPUT_REL_L2 = 0.08
CODE_RMS = 2.93  # of e2m1 codes that are all equally likely


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layer: sizes, experts of each rank, picks per token."""

    hidden_size: int
    intermediate_size: int
    experts_per_rank: int
    top_k: int

    def problem(self, quant: QuantMode, transport: Transport, *, ep_size: int, capacity: int) -> MoEProblem:
        """The layer in a mode, over `ep_size` ranks with up to `capacity` tokens each."""
        return MoEProblem(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_experts=self.experts_per_rank * ep_size,
            top_k=self.top_k,
            num_max_tokens_per_rank=capacity,
            ep_size=ep_size,
            quant=quant,
            transport=transport,
        )


SHAPES = (
    Shape(hidden_size=7168, intermediate_size=3072, experts_per_rank=48, top_k=6),  # the seed's: 384 experts over 8
    Shape(hidden_size=7168, intermediate_size=2048, experts_per_rank=32, top_k=8),  # DeepSeek-R1's: 256 over 8
)
REHEARSAL = Shape(hidden_size=512, intermediate_size=256, experts_per_rank=4, top_k=2)
REHEARSAL_TOKENS = (8, 24)
REHEARSAL_RANKS = {Rung.INTERPRETER: 2, Rung.ISA: 1}  # the instruction interpreter has all ranks in one process


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What to measure: the layer, tokens of each rank in a call, calls."""

    problem: MoEProblem
    num_tokens: int
    repeats: int
    config: str | None


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one rank found.

    Args:
        seconds: of each call of the fused kernels.
        unfused: name of the unfused pipeline, and the seconds of each of its calls; empty where it could not run.
        unfused_error: why it could not, or empty.
        workspace_bytes: of the session.
        machine: where that was measured.
    """

    seconds: list[float]
    unfused: dict[str, list[float]]
    unfused_error: str
    workspace_bytes: int
    machine: Machine


def suites() -> list[Suite]:
    """What this package offers."""
    description = "ROCm kernels: a rank's share of DeepSeek-V4-Pro's layer and of DeepSeek-R1's, a4w4 and a8w4"
    return [Suite(name=NAME, description=description, backend=RocmBackend.name, run=run)]


def run(options: SuiteOptions) -> Iterator[BenchRow]:
    """Measure, one set of processes for each shape and mode.

    Raises:
        BackendUnavailableError: no GPU; after all rows, where the unfused pipeline could not run beside the kernels.
    """
    on_gpu = not rungs.is_cpu(rungs.current())
    ep_size = min(torch.cuda.device_count(), MAX_RANKS) if on_gpu else REHEARSAL_RANKS[rungs.current()]
    if ep_size == 0:
        raise BackendUnavailableError(
            f"suite {NAME} needs a GPU",
            got=0,
            expected="1 or more",
            hint="MEGAMOE_ROCM_DEVICE=interpreter or isa rehearses it without one",
        )
    errors: list[str] = []
    for shape in SHAPES if rungs.current() is Rung.GFX950 else (REHEARSAL,):
        for quant in (QuantMode.A4W4, QuantMode.A8W4):
            measurements = list(_measurements(shape, quant, ep_size, options))
            results = run_ranks(measure_rank, ep_size, measurements, timeout_s=TIME_LIMIT_S)
            for measurement, by_rank in zip(measurements, zip(*results, strict=True), strict=True):
                errors += [by_rank[0].unfused_error] if by_rank[0].unfused_error else []
                yield _row(measurement, by_rank)
    if errors:
        raise BackendUnavailableError(f"nothing to compare with: {errors[0]}", got=f"{len(errors)} rows without a peer")


def _row(measurement: Measurement, by_rank: Sequence[RankResult]) -> BenchRow:
    return BenchRow.of(
        bench=NAME,
        machine=by_rank[0].machine,
        problem=measurement.problem,
        routing="uniform",
        num_tokens=measurement.num_tokens,
        timing=Timing.of([result.seconds for result in by_rank]),
        workspace_bytes=by_rank[0].workspace_bytes,
        peers={name: Timing.of([result.unfused[name] for result in by_rank]).us_median for name in by_rank[0].unfused},
    )


def _measurements(shape: Shape, quant: QuantMode, ep_size: int, options: SuiteOptions) -> Iterator[Measurement]:
    default = REHEARSAL_TOKENS if shape is REHEARSAL else TOKENS
    for num_tokens in options.tokens or default:
        for transport in Transport:
            problem = shape.problem(quant, transport, ep_size=ep_size, capacity=num_tokens)
            yield Measurement(problem=problem, num_tokens=num_tokens, repeats=options.repeats, config=options.config)


def measure_rank(context: RankContext, measurements: list[Measurement]) -> list[RankResult]:
    """COLLECTIVE. Body of a rank's process: measurements of one shape and mode."""
    device = torch.device("cpu")
    if not rungs.is_cpu(rungs.current()):
        device = context.gpu
        context.join_gpus(device)
    elif context.world_size > 1:
        store = f"file://{context.directory / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=context.rank, world_size=context.world_size)
    if rungs.current() is Rung.GFX950 and context.world_size > 1:
        _make_room(measurements)
    try:
        experts = random_experts(measurements[0].problem, device, seed=context.rank)
        return [_measure(each, context.rank, experts, device) for each in measurements]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _make_room(measurements: Sequence[Measurement]) -> None:
    """Have Mori's heap hold the largest session and the largest operator: it can't grow."""
    from megamoe_rocm.unfused.mori_exchange import heap_bytes

    sessions = max(make_plan(each.problem, config=each.config).workspace.symmetric_bytes for each in measurements)
    operators = max(heap_bytes(each.problem) for each in measurements)
    os.environ.setdefault(HEAP_SIZE, str(heap_size(sessions) + heap_size(operators)))


@dataclass(frozen=True, kw_only=True)
class CallArguments:
    """One rank's tokens of a call, with their picks."""

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


def _measure(measurement: Measurement, rank: int, experts: ExpertWeights, device: torch.device) -> RankResult:
    backend, problem = RocmBackend(), measurement.problem
    group = dist.group.WORLD if problem.ep_size > 1 else None
    call = call_arguments(problem, measurement.num_tokens, device, seed=rank)
    arguments = (call.hidden_states, call.topk_ids, call.topk_weights)
    plan = make_plan(problem, rungs.PLANNED_FOR[rungs.current()], config=measurement.config)
    with backend.open(plan, group) as session:
        prepared = session.prepare(experts)
        session.warmup()
        fused = session.forward(*arguments, prepared).clone()
        seconds = _times(lambda: session.forward(*arguments, prepared), measurement.repeats, device)
        session.check()
    unfused, error = {}, ""
    try:
        pipeline = agree(
            None if group is None else ProcessGroupRanks(group),
            "make the unfused pipeline",
            lambda: _unfused(measurement, rank),
            timeout_s=SESSION_TIMEOUT_S,
        )
    except MegaMoEError as raised:
        error = str(raised)
    else:
        _require_same(pipeline.forward(*arguments, prepared.tensors), fused, pipeline.name)
        unfused = {
            pipeline.name: _times(lambda: pipeline.forward(*arguments, prepared.tensors), measurement.repeats, device)
        }
    return RankResult(
        seconds=seconds,
        unfused=unfused,
        unfused_error=error,
        workspace_bytes=plan.bytes,
        machine=_machine(device, problem.ep_size),
    )


def call_arguments(problem: MoEProblem, num_tokens: int, device: torch.device, *, seed: int) -> CallArguments:
    """Gaussian tokens of a rank, picked uniformly without repetition."""
    generator = torch.Generator(device).manual_seed(seed)
    hidden_states = torch.randn(num_tokens, problem.hidden_size, device=device, generator=generator).bfloat16()
    scores = torch.rand(num_tokens, problem.num_experts, device=device, generator=generator)
    weights = torch.rand(num_tokens, problem.top_k, device=device, generator=generator)
    return CallArguments(
        hidden_states=hidden_states, topk_ids=scores.topk(problem.top_k).indices.int(), topk_weights=weights
    )


def _unfused(measurement: Measurement, rank: int) -> UnfusedPipeline:
    """COLLECTIVE. The unfused pipeline with the tile that the session picks for as many tokens."""
    from megamoe_rocm.unfused.exchange import CollectiveExchange, Exchange
    from megamoe_rocm.unfused.mori_exchange import MoriExchange
    from megamoe_rocm.unfused.pipeline import UnfusedPipeline

    problem = measurement.problem
    plan = make_plan(problem, rungs.PLANNED_FOR[rungs.current()], config=measurement.config)
    assert isinstance(plan.config, SessionConfig)
    tile, _ = plan.config.pick(problem, measurement.num_tokens)
    exchange: Exchange
    if rungs.current() is Rung.GFX950 and problem.ep_size > 1:
        exchange = MoriExchange(problem, rank)
    else:
        exchange = CollectiveExchange(problem, dist.group.WORLD if problem.ep_size > 1 else None)
    return UnfusedPipeline(
        problem,
        rank=rank,
        exchange=exchange,
        tile=tile,
        num_programs=plan.device.num_sms * tile.programs_per_cu,
        launcher=_launcher(),
    )


def _launcher() -> Launcher:
    """What runs the unfused pipeline's launches on the current rung."""
    if rungs.current() is Rung.ISA:
        from megamoe_rocm.isa.session import EmulatedLauncher

        return EmulatedLauncher(REHEARSAL_RANKS[Rung.ISA])
    from megamoe_rocm.opening import make_launcher

    return make_launcher(rungs.current())


def _require_same(got: Tensor, fused: Tensor, name: str) -> None:
    """A pipeline that computes something else is no peer.

    Raises:
        ProtocolError: it does.
    """
    difference = ((got.float() - fused.float()).norm() / fused.float().norm()).item()
    if not difference < SAME_OUTPUT_REL_L2:
        raise ProtocolError(
            f"{name} computes something else than the fused kernels",
            got=f"relL2 {difference:.4f} between them",
            expected=f"below {SAME_OUTPUT_REL_L2}",
        )


def _times(call: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Seconds of each call; on a GPU those of a captured graph, by the device's clock.

    Ranks meet in each call, so they wait for the slowest.
    """
    if device.type != "cuda":
        return [_elapsed(call) for _ in range(repeats)]
    for _ in range(WARM_CALLS):
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    seconds = []
    for _ in range(WARM_CALLS + repeats):
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        seconds.append(start.elapsed_time(end) / 1e3)
    graph.reset()  # before its process group goes
    return seconds[WARM_CALLS:]


def _elapsed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def random_experts(problem: MoEProblem, device: torch.device, *, seed: int = 0) -> ExpertWeights:
    """A rank's MXFP4 experts of random codes; their scale keeps activations of order 1 so."""
    experts, hidden, inter = problem.num_local_experts, problem.hidden_size, problem.intermediate_size
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        shape = (experts, rows, columns // 2)
        payload = torch.randint(256, shape, dtype=torch.uint8, device=device, generator=generator)
        scale = 127 - round(math.log2(CODE_RMS * math.sqrt(columns)))
        return payload, torch.full((experts, rows, columns // 32), scale, dtype=torch.uint8, device=device)

    return make_weights(problem, matrix(2 * inter, hidden), matrix(hidden, inter), layout="packed")


def _machine(device: torch.device, num_gpus: int) -> Machine:
    if device.type == "cpu":
        return Machine(gpu=rungs.WHAT[rungs.current()], num_gpus=0, driver="", toolkit="")
    toolkit = torch.version.hip or torch.version.cuda or ""
    return Machine(gpu=torch.cuda.get_device_name(device), num_gpus=num_gpus, driver="", toolkit=toolkit)
