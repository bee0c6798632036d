"""One rank of a measurement: the session and its peers on the same weights, inputs that differ from round to round."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.backend import Session
from megamoe.bench.results import BenchRow, Machine, Timing
from megamoe.launch import RankContext
from megamoe.problem import MoEProblem
from megamoe.tensors import Fp8BlockWeights, PreparedWeights
from megamoe_cuda.backend import CudaBackend
from megamoe_cuda.bench import deep_gemm
from megamoe_cuda.bench.inputs import Inputs, make_experts, make_inputs
from megamoe_cuda.bench.timing import Contender, time_interleaved
from megamoe_cuda.probe import compiler_version

logger = logging.getLogger("megamoe.cuda")

OURS = "ours"
OURS_FROM_BF16 = "ours, from BF16 input"
NUM_ROUTINGS = 8  # sets of inputs that rounds take in turn


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What to measure.

    Args:
        problem: the layer; its capacity is the session's.
        num_tokens: tokens per rank in each call.
        routing: a name of `megamoe.bench.routing`.
        repeats: calls of each contender.
        config: a configuration by name, or None.
        with_peers: whether peers are measured beside it.
    """

    problem: MoEProblem
    num_tokens: int
    routing: str
    repeats: int
    config: str | None
    with_peers: bool


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """One rank's seconds by contender, and where they were measured."""

    seconds: dict[str, list[float]]
    machine: Machine


def measure_rank(context: RankContext, measurements: list[Measurement]) -> list[RankResult]:
    """COLLECTIVE. Body of a rank's process: all measurements of one EP size, on its GPU."""
    context.join_gpus(context.gpu)
    try:
        experts = make_experts(measurements[0].problem, context.rank)
        assert isinstance(experts, Fp8BlockWeights)
        machine = this_machine(context.world_size)
        return [RankResult(seconds=_measure(each, context.rank, experts), machine=machine) for each in measurements]
    finally:
        dist.destroy_process_group()


def _measure(measurement: Measurement, rank: int, experts: Fp8BlockWeights) -> dict[str, list[float]]:
    backend, problem = CudaBackend(), measurement.problem
    group = dist.group.WORLD if problem.ep_size > 1 else None
    rounds = [
        make_inputs(problem, num_tokens=measurement.num_tokens, routing_name=measurement.routing, rank=rank, seed=seed)
        for seed in range(NUM_ROUTINGS)
    ]
    with backend.open(backend.plan(problem, config=measurement.config), group) as session:
        weights = session.prepare(experts)
        session.warmup()
        contenders = {
            OURS: captured(session, weights, rounds, quantized=True),
            OURS_FROM_BF16: captured(session, weights, rounds, quantized=False),
        }
        peers, close_peers = _peers(measurement, rounds, experts, weights)
        seconds = time_interleaved(contenders | peers, repeats=measurement.repeats, barrier=barrier())
        session.check()
        close_peers()
    return seconds


def row_of(bench: str, measurement: Measurement, by_rank: Sequence[RankResult]) -> BenchRow:
    """The result: our time of the slowest rank, and the other contenders' as peers."""
    seconds = {name: [result.seconds[name] for result in by_rank] for name in by_rank[0].seconds}
    return BenchRow.of(
        bench=bench,
        machine=by_rank[0].machine,
        problem=measurement.problem,
        routing=measurement.routing,
        num_tokens=measurement.num_tokens,
        timing=Timing.of(seconds[OURS]),
        workspace_bytes=CudaBackend().plan(measurement.problem, config=measurement.config).bytes,
        peers={name: Timing.of(of_ranks).us_median for name, of_ranks in seconds.items() if name != OURS},
    )


def captured(session: Session, weights: PreparedWeights, rounds: list[Inputs], *, quantized: bool) -> Contender:
    """The session's call in a graph that reads static tensors; `load` fills them."""
    static = Inputs(**{name: tensor.clone() for name, tensor in vars(rounds[0]).items()})
    hidden = (static.payload, static.scales) if quantized else static.hidden_states
    out = torch.empty_like(static.hidden_states)
    call = partial(session.forward, hidden, static.topk_ids, static.topk_weights, weights, out=out)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog thread may look at its events meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    replay = partial(_replay, graph, call)  # keeps what the graph reads: the graph itself does not

    def load(round_: int) -> None:
        for name, tensor in vars(rounds[round_ % len(rounds)]).items():
            getattr(static, name).copy_(tensor)

    return Contender(load=load, call=replay)


def _replay(graph: torch.cuda.CUDAGraph, captured_call: Callable[[], Tensor]) -> None:
    """`captured_call` holds the tensors whose addresses the graph has."""
    graph.replay()


def _peers(
    measurement: Measurement, rounds: list[Inputs], experts: Fp8BlockWeights, weights: PreparedWeights
) -> tuple[dict[str, Contender], Callable[[], None]]:
    """Contenders by name, and what ends them. A peer that does not run here is left out, with a warning."""
    if not measurement.with_peers:
        return {}, lambda: None
    from megamoe_cuda.bench import unfused  # imports Triton

    problem, group = measurement.problem, dist.group.WORLD
    assert group is not None
    found: dict[str, Contender] = {}
    plain = _try_on_all_ranks(unfused.NAME, lambda: unfused.UnfusedPeer(problem, group, experts), rounds[0])
    if plain is not None:
        found[unfused.NAME] = eager(plain, rounds)
    fused = None
    if deep_gemm.is_installed():
        fused = _try_on_all_ranks(deep_gemm.NAME, lambda: deep_gemm.DeepGemmPeer(problem, group, weights), rounds[0])
    if fused is None:
        return found, lambda: None
    # Not replayed from a graph: on two H200s that ended in an illegal memory access (sgl-deep-gemm 0.1.5, 2026-11-30).
    found[deep_gemm.NAME] = eager(fused, rounds)
    return found, fused.close


class Peer(Protocol):
    """Another implementation of the layer."""

    def load(self, inputs: Inputs) -> None: ...

    def call(self) -> Tensor: ...


P = TypeVar("P", bound=Peer)


def _try_on_all_ranks(name: str, make: Callable[[], P], inputs: Inputs) -> P | None:
    """COLLECTIVE. The peer after its first call, or None where it fails on any rank."""
    made: list[P] = []
    steps: tuple[Callable[[], object], ...] = (
        lambda: made.append(make()),
        lambda: made[0].load(inputs),
        lambda: made[0].call(),
    )
    for step in steps:
        failure = _failure_on_any_rank(step)
        if failure:
            logger.warning("peer %s is left out: %s", name, failure)
            return None
    return made[0]


def _failure_on_any_rank(step: Callable[[], object]) -> str:
    """COLLECTIVE. Do `step`; what the first rank on which it failed says of it, or nothing."""
    failure = ""
    try:
        step()
        torch.cuda.synchronize()
    except Exception as error:  # whatever a foreign library raises
        failure = f"{type(error).__name__}: {error}"
    failures: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    return next(filter(None, failures), "")


def eager(peer: Peer, rounds: list[Inputs]) -> Contender:
    """A peer's calls, launched one by one."""
    return Contender(load=lambda round_: peer.load(rounds[round_ % len(rounds)]), call=lambda: void(peer.call()))


def void(_: object) -> None:
    """Drop a result."""


def barrier() -> Callable[[], None]:
    """All ranks meet on the stream: a reduction of one number."""
    word = torch.zeros(1, device="cuda")
    return lambda: void(dist.all_reduce(word))


def this_machine(num_gpus: int) -> Machine:
    """The GPU, its driver and the compiler."""
    text = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text.read_text()) if text.exists() else None
    major, minor = compiler_version()
    return Machine(
        gpu=torch.cuda.get_device_name(),
        num_gpus=num_gpus,
        driver=found[0] if found else "",
        toolkit=f"NVRTC {major}.{minor}, torch {torch.__version__}",
    )
