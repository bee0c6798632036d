"""Suites of the CPU reference: how its time goes with mode and ranks, and beside a plain loop over experts.

The reference is there for its bits, not for speed. What is watched here is that the protocol around its multiplications
costs little: DeepSeek-V2-Lite's layer in bf16 over four ranks should take at most 1.3x of a loop that makes the same
FP32 products of BF16 operands. The other loop multiplies in BF16, which some processors have instructions for.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megamoe import env
from megamoe.bench.results import BenchRow, Machine, Timing
from megamoe.bench.routing import router_weights, routing
from megamoe.bench.suites import Suite, SuiteOptions
from megamoe.launch import RankContext, run_ranks
from megamoe.problem import MoEProblem, QuantMode
from megamoe.registry import REFERENCE, select_backend
from megamoe.symm import ShmGroup
from megamoe.tensors import Bf16Weights
from megamoe.testing.data import Call, make_weights
from megamoe.testing.routings import Picks

TIME_LIMIT_S = 1800.0
ROUTING = "uniform"
LOOPS = {
    "torch loop over experts, FP32 products": torch.float32,
    "torch loop over experts, BF16 products": torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True)
class _Measurement:
    problem: MoEProblem
    num_tokens: int
    repeats: int
    config: str | None


def reference_suites() -> list[Suite]:
    """What this package offers."""
    return [
        Suite(
            name="reference",
            description="CPU reference: a small layer in every mode over 1 and 4 ranks",
            backend=REFERENCE,
            run=_run_modes,
        ),
        Suite(
            name="reference-v2-lite",
            description="CPU reference: DeepSeek-V2-Lite's layer in bf16 over 4 ranks, beside a loop over experts",
            backend=REFERENCE,
            run=_run_v2_lite,
        ),
    ]


def _run_modes(options: SuiteOptions) -> Iterator[BenchRow]:
    for mode in QuantMode:
        for ep_size in (1, 4):
            problem = MoEProblem(
                hidden_size=1024,
                intermediate_size=512,
                num_experts=32,
                top_k=4,
                num_max_tokens_per_rank=1,
                ep_size=ep_size,
                quant=mode,
            )
            yield from _measure_all("reference", problem, options, tokens=(8, 128))


def _run_v2_lite(options: SuiteOptions) -> Iterator[BenchRow]:
    problem = MoEProblem(
        hidden_size=2048,
        intermediate_size=1408,
        num_experts=64,
        top_k=6,
        num_max_tokens_per_rank=1,
        ep_size=4,
        quant=QuantMode.BF16,
    )
    yield from _measure_all("reference-v2-lite", problem, options, tokens=(512,))


def _measure_all(bench: str, problem: MoEProblem, options: SuiteOptions, tokens: tuple[int, ...]) -> Iterator[BenchRow]:
    for num_tokens in options.tokens or tokens:
        fitting = replace(problem, num_max_tokens_per_rank=max(1, num_tokens))
        measurement = _Measurement(
            problem=fitting, num_tokens=num_tokens, repeats=options.repeats, config=options.config
        )
        seconds = run_ranks(_time_rank, problem.ep_size, measurement, timeout_s=TIME_LIMIT_S)
        peers: dict[str, float] = {}
        if problem.quant is QuantMode.BF16:
            # One process with all threads and the rows of all ranks.
            for name, dtype in LOOPS.items():
                loop = run_ranks(_time_loop, 1, measurement, dtype, timeout_s=TIME_LIMIT_S)
                peers[name] = Timing.of(loop).us_median
        yield BenchRow.of(
            bench=bench,
            machine=this_machine(),
            problem=fitting,
            routing=ROUTING,
            num_tokens=num_tokens,
            timing=Timing.of(seconds),
            workspace_bytes=select_backend(REFERENCE).plan(fitting, config=options.config).bytes,
            peers=peers,
        )


def _time_rank(context: RankContext, measurement: _Measurement) -> list[float]:
    """One rank's seconds of each call, after one to warm up."""
    problem, rank = measurement.problem, context.rank
    backend = select_backend(REFERENCE, problem)
    plan = backend.plan(problem, config=measurement.config)
    call = _call(problem, measurement.num_tokens, rank)
    group = None
    if problem.ep_size > 1:
        group = ShmGroup.connect(context.name, rank, problem.ep_size, timeout_s=env.timeout_s())
    with backend.open(plan, group) as session:
        weights = session.prepare(_local_weights(problem, rank))
        seconds = []
        for _ in range(measurement.repeats + 1):
            started = time.perf_counter()
            session.forward(call.hidden_states, call.topk_ids, call.topk_weights, weights)
            seconds.append(time.perf_counter() - started)
    return seconds[1:]


def _time_loop(context: RankContext, measurement: _Measurement, dtype: torch.dtype) -> list[float]:
    """Seconds of a plain loop over all experts with the rows of all ranks."""
    problem = measurement.problem
    calls = [_call(problem, measurement.num_tokens, rank) for rank in range(problem.ep_size)]
    weights = [_local_weights(problem, rank) for rank in range(problem.ep_size)]
    w13 = [expert for share in weights for expert in share.w13_weight]
    w2 = [expert for share in weights for expert in share.w2_weight]
    hidden = torch.cat([call.hidden_states for call in calls if isinstance(call.hidden_states, Tensor)])
    ids, router = torch.cat([call.topk_ids for call in calls]), torch.cat([call.topk_weights for call in calls])
    seconds = []
    for _ in range(measurement.repeats + 1):
        started = time.perf_counter()
        loop_over_experts(hidden, ids, router, w13, w2, dtype)
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


@torch.no_grad()
def loop_over_experts(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: list[Tensor],
    w2: list[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """The layer as models write it when nothing is fused: `[T, H]` BF16, rows gathered and scattered per expert.

    Products are made in `dtype`; the activation is rounded to BF16 in both.
    """
    y = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in range(len(w13)):
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        if len(token):
            x = hidden_states[token].to(dtype)
            gate, up = torch.nn.functional.linear(x, w13[expert].to(dtype)).chunk(2, dim=-1)
            a2 = (torch.nn.functional.silu(gate) * up).bfloat16().to(dtype)
            rows = torch.nn.functional.linear(a2, w2[expert].to(dtype))
            y.index_add_(0, token, rows.float() * topk_weights[token, slot].unsqueeze(1))
    return y.bfloat16()


def _call(problem: MoEProblem, num_tokens: int, rank: int) -> Call:
    rng = torch.Generator().manual_seed(rank)
    picks = Picks.of(problem, num_tokens=num_tokens, src_rank=rank)
    return Call(
        hidden_states=torch.randn(num_tokens, problem.hidden_size, generator=rng).bfloat16(),
        topk_ids=routing(ROUTING)(picks, rng),
        topk_weights=router_weights(num_tokens, problem.top_k, rng),
    )


def _local_weights(problem: MoEProblem, rank: int) -> Bf16Weights:
    """A rank's experts, made on that rank only."""
    local = replace(problem, num_experts=problem.num_local_experts, ep_size=1)
    weights = make_weights(local, torch.device("cpu"), seed=rank)
    assert isinstance(weights, Bf16Weights)
    return weights


def this_machine() -> Machine:
    """The processor, and how many of its cores are ours."""
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    name = names[0] if names else platform.machine()
    cores = len(os.sched_getaffinity(0))
    return Machine(gpu=f"{name}, {cores} cores", num_gpus=0, driver="", toolkit=f"torch {torch.__version__}")


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
