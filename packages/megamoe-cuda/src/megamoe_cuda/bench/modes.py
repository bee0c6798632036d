"""Suite `sm90-modes`: the kernel's modes beside each other, on the seed's shape, H=4096, I=2048, 32 experts, top-8.

EP1 on one GPU, whose experts receive as many rows as those of a rank of EP8 do. The modes take turns in one run, each
on its own experts, and each one's row has the others among its peers. Inputs are in the mode's activation format. One
more contender is no layer: the two grouped GEMMs alone, in BF16 by PyTorch, on rows that are sorted already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.bench.results import BenchRow, Machine, Timing
from megamoe.bench.suites import Suite, SuiteOptions
from megamoe.launch import RankContext, run_ranks
from megamoe.problem import ActFormat, MoEProblem, QuantMode, Transport
from megamoe.tensors import PreparedWeights
from megamoe_cuda.backend import CudaBackend
from megamoe_cuda.bench.inputs import Inputs, make_experts, make_inputs
from megamoe_cuda.bench.rank import NUM_ROUTINGS, Peer, barrier, captured, eager, this_machine
from megamoe_cuda.bench.timing import Contender, time_interleaved

NAME = "sm90-modes"
TOKENS = (8, 128, 512, 2048, 8192)
UNIFORM = "uniform"
GROUPED_GEMMS = "torch grouped GEMMs alone, BF16"
TIME_LIMIT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Round:
    """What takes turns in one measurement.

    Args:
        problems: the layer in each mode that the backend supports; equal but for the mode.
        num_tokens: tokens of each call.
        repeats: calls of each contender.
        config: a configuration by name, or None.
    """

    problems: tuple[MoEProblem, ...]
    num_tokens: int
    repeats: int
    config: str | None


def run(options: SuiteOptions) -> Iterator[BenchRow]:
    """Measure.

    Raises:
        BackendUnavailableError: no usable GPU.
    """
    rounds = [
        Round(problems=_problems(tokens, transport), num_tokens=tokens, repeats=options.repeats, config=options.config)
        for tokens in options.tokens or TOKENS
        for transport in Transport
    ]
    ((machine, results),) = run_ranks(_measure_rank, 1, rounds, timeout_s=TIME_LIMIT_S)
    for each, seconds in zip(rounds, results, strict=True):
        yield from _rows(each, machine, seconds)


def _rows(each: Round, machine: Machine, seconds: dict[str, list[float]]) -> Iterator[BenchRow]:
    medians = {name: Timing.of([times]).us_median for name, times in seconds.items()}
    for problem in each.problems:
        yield BenchRow.of(
            bench=NAME,
            machine=machine,
            problem=problem,
            routing=UNIFORM,
            num_tokens=each.num_tokens,
            timing=Timing.of([seconds[str(problem.quant)]]),
            workspace_bytes=CudaBackend().plan(problem, config=each.config).bytes,
            peers={name: median for name, median in medians.items() if name != problem.quant},
        )


def _problems(num_tokens: int, transport: Transport) -> tuple[MoEProblem, ...]:
    a8w8 = MoEProblem(
        hidden_size=4096,
        intermediate_size=2048,
        num_experts=32,
        top_k=8,
        num_max_tokens_per_rank=num_tokens,
        transport=transport,
    )
    modes = (
        a8w8,
        replace(a8w8, quant=QuantMode.BF16),
        replace(a8w8, quant=QuantMode.A8W4, act_format=ActFormat.FP8_1X128),
    )
    return tuple(problem for problem in modes if CudaBackend().supports(problem).ok)


def _measure_rank(context: RankContext, rounds: list[Round]) -> tuple[Machine, list[dict[str, list[float]]]]:
    context.join_gpus(context.gpu)
    try:
        layers: dict[str, PreparedWeights] = {}
        gemms = GroupedGemms(rounds[0].problems[0])
        return this_machine(context.world_size), [_measure(each, layers, gemms) for each in rounds]
    finally:
        dist.destroy_process_group()


def _measure(each: Round, layers: dict[str, PreparedWeights], gemms: GroupedGemms) -> dict[str, list[float]]:
    """Seconds of each mode, by its name, and of the GEMMs alone. `layers` keeps each mode's experts between rounds."""
    backend = CudaBackend()
    inputs = [
        make_inputs(each.problems[0], num_tokens=each.num_tokens, routing_name=UNIFORM, rank=0, seed=seed)
        for seed in range(NUM_ROUTINGS)
    ]
    contenders: dict[str, Contender] = {}
    with ExitStack() as open_sessions:
        sessions = []
        for problem in each.problems:
            session = open_sessions.enter_context(backend.open(backend.plan(problem, config=each.config)))
            mode = str(problem.quant)
            if mode not in layers:
                layers[mode] = session.prepare(make_experts(problem, 0))
            session.warmup()
            contenders[mode] = captured(session, layers[mode], inputs, quantized=problem.quant is not QuantMode.BF16)
            sessions.append(session)
        contenders[GROUPED_GEMMS] = eager(gemms, inputs)
        seconds = time_interleaved(contenders, repeats=each.repeats, barrier=barrier())
        for session in sessions:
            session.check()
    return seconds


class GroupedGemms(Peer):
    """GEMM1 and GEMM2 of all experts on BF16 rows that lie sorted by expert; nothing else of the layer."""

    def __init__(self, problem: MoEProblem) -> None:
        self._problem = problem
        experts = make_experts(replace(problem, quant=QuantMode.BF16), 0)
        tensors = dict(experts.tensors())
        self._w13, self._w2 = (tensors[name].transpose(1, 2) for name in ("w13_weight", "w2_weight"))

    def load(self, inputs: Inputs) -> None:
        """Sort the rows and find where each expert's end."""
        picks = inputs.topk_ids.flatten().long()
        order = picks.argsort(stable=True)
        self._rows = inputs.hidden_states[order // self._problem.top_k]
        self._a2 = self._rows[:, : self._problem.intermediate_size].contiguous()
        self._ends = torch.bincount(picks, minlength=self._problem.num_experts).cumsum(0).int()

    def call(self) -> Tensor:
        """Both products; the second one's rows stand in for the activation's."""
        torch._grouped_mm(self._rows, self._w13, offs=self._ends)
        return torch._grouped_mm(self._a2, self._w2, offs=self._ends)


def suites() -> list[Suite]:
    """What this module offers."""
    return [
        Suite(
            name=NAME,
            description="CUDA kernel: its modes beside each other, H=4096 I=2048 E=32 top-8, EP1, one GPU",
            backend=CudaBackend.name,
            run=run,
        )
    ]
