"""Suite `sm90-skew`: what skewed routing costs the busiest rank of EP8, on one GPU; the seed's shape.

The slowest rank sets the time of a call, and that is the one with the most rows. Here it stands alone: the picks that
it receives from all eight ranks under a skewed routing become the picks of an EP1 layer of its 32 experts, so that
every expert has the rows that it would have. As it would, it uses the tile that suits the tokens per rank, since no
rank knows before a call what it will receive. Beside it, in turns: the same rows with the tile that suits their number,
and balanced routing with as many rows.

Why not virtual ranks, or several processes on the GPU: idle ranks would leave their share of memory and power to the
busy one, and skew would seem to cost less than it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.bench.results import BenchRow, Machine, Timing
from megamoe.bench.routing import routing
from megamoe.bench.suites import Suite, SuiteOptions
from megamoe.launch import RankContext, run_ranks
from megamoe.problem import MoEProblem
from megamoe.tensors import PreparedWeights
from megamoe.testing.routings import Picks
from megamoe_cuda.backend import CudaBackend
from megamoe_cuda.bench.inputs import Inputs, make_experts, make_inputs
from megamoe_cuda.bench.rank import NUM_ROUTINGS, OURS, barrier, captured, this_machine
from megamoe_cuda.bench.timing import Contender, time_interleaved
from megamoe_cuda.heuristics import session_config
from megamoe_cuda.weights import prepare

NAME = "sm90-skew"
TOKENS = (8, 20, 32, 96, 128, 160, 512, 1024)  # around 20 and 96 another tile would suit skewed rows
ROUTINGS = ("warm-rank", "zipf")
UNIFORM = "uniform"
TILE_OF_THE_ROWS = "the same rows, tile for their number"
BALANCED = "balanced, as many rows"
TIME_LIMIT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Round:
    """What takes turns in one measurement.

    Args:
        layer: of EP8, whose busiest rank is measured; its capacity is the tokens of a rank.
        routing: of that layer, a name of `megamoe.bench.routing`.
        repeats: calls of each contender.
        config: a configuration by name for the skewed calls, or None: the tile that the layer's call picks.
    """

    layer: MoEProblem
    routing: str
    repeats: int
    config: str | None

    @property
    def tile(self) -> str:
        """Configuration of the skewed calls."""
        layer = self.layer
        return self.config or session_config(layer, None).tile_for(layer, layer.num_max_tokens_per_rank).name


@dataclass(frozen=True, kw_only=True)
class Result:
    """Seconds by contender, and the EP1 problem that they were measured with."""

    seconds: dict[str, list[float]]
    problem: MoEProblem
    machine: Machine


def run(options: SuiteOptions) -> Iterator[BenchRow]:
    """Measure.

    Raises:
        BackendUnavailableError: no usable GPU.
    """
    rounds = _rounds(options)
    (results,) = run_ranks(_measure_rank, 1, rounds, timeout_s=TIME_LIMIT_S)
    for each, result in zip(rounds, results, strict=True):
        yield _row(each, result)


def _rounds(options: SuiteOptions) -> list[Round]:
    return [
        Round(layer=_layer(num_tokens), routing=name, repeats=options.repeats, config=options.config)
        for name in ROUTINGS
        for num_tokens in options.tokens or TOKENS
    ]


def _layer(num_tokens: int) -> MoEProblem:
    return MoEProblem(
        hidden_size=4096,
        intermediate_size=2048,
        num_experts=256,
        top_k=8,
        num_max_tokens_per_rank=num_tokens,
        ep_size=8,
    )


def _row(each: Round, result: Result) -> BenchRow:
    medians = {name: Timing.of([times]).us_median for name, times in result.seconds.items()}
    return BenchRow.of(
        bench=NAME,
        machine=result.machine,
        problem=result.problem,
        routing=each.routing,
        num_tokens=result.problem.num_max_tokens_per_rank,
        timing=Timing.of([result.seconds[OURS]]),
        workspace_bytes=CudaBackend().plan(result.problem, config=each.tile).bytes,
        peers={name: median for name, median in medians.items() if name != OURS},
    )


def busiest_rank_picks(layer: MoEProblem, routing_name: str, seed: int) -> Tensor:
    """int64 `[rows]`: local ids of the picks that the rank with the most rows receives, by source and token."""
    rng = torch.Generator().manual_seed(seed)
    draw = routing(routing_name)
    capacity = layer.num_max_tokens_per_rank
    sources = [Picks.of(layer, num_tokens=capacity, src_rank=rank) for rank in range(layer.ep_size)]
    picks = torch.cat([draw(each, rng).flatten() for each in sources])
    owner = picks // layer.num_local_experts
    busiest = owner.bincount().argmax()
    return picks[owner == busiest] % layer.num_local_experts


def _measure_rank(context: RankContext, rounds: list[Round]) -> list[Result]:
    context.join_gpus(context.gpu)
    try:
        alone = replace(rounds[0].layer, num_experts=rounds[0].layer.num_local_experts, ep_size=1)
        weights = prepare(make_experts(alone, 0), alone, context.gpu)
        machine = this_machine(context.world_size)
        return [_measure(each, weights, machine) for each in rounds]
    finally:
        dist.destroy_process_group()


def _picks(each: Round) -> list[Tensor]:
    """Of the busiest rank, int64 `[rows]` each, for every routing that is drawn."""
    return [busiest_rank_picks(each.layer, each.routing, seed) for seed in range(NUM_ROUTINGS)]


def _alone(each: Round, picks: list[Tensor]) -> MoEProblem:
    """The EP1 layer that has the busiest rank's experts, and tokens for the fewest of its picks."""
    layer = each.layer
    num_tokens = min(map(len, picks)) // layer.top_k
    return replace(layer, num_experts=layer.num_local_experts, ep_size=1, num_max_tokens_per_rank=num_tokens)


def _measure(each: Round, weights: PreparedWeights, machine: Machine) -> Result:
    picks = _picks(each)
    problem = _alone(each, picks)
    num_tokens = problem.num_max_tokens_per_rank
    balanced = [
        make_inputs(problem, num_tokens=num_tokens, routing_name=UNIFORM, rank=0, seed=seed)
        for seed in range(NUM_ROUTINGS)
    ]
    skewed = [_with_picks(inputs, ids) for inputs, ids in zip(balanced, picks, strict=True)]
    tile = session_config(problem, None).tile_for(problem, num_tokens).name
    calls = {OURS: (each.tile, skewed), TILE_OF_THE_ROWS: (tile, skewed), BALANCED: (tile, balanced)}
    contenders: dict[str, Contender] = {}
    with ExitStack() as open_sessions:
        sessions = []
        for name, (config, inputs) in calls.items():
            session = open_sessions.enter_context(CudaBackend().open(CudaBackend().plan(problem, config=config)))
            session.warmup()
            contenders[name] = captured(session, weights, inputs, quantized=True)
            sessions.append(session)
        seconds = time_interleaved(contenders, repeats=each.repeats, barrier=barrier())
        for session in sessions:
            session.check()
    return Result(seconds=seconds, problem=problem, machine=machine)


def _with_picks(inputs: Inputs, ids: Tensor) -> Inputs:
    """`inputs` with as many of `ids` as fit; a token may then pick an expert twice, which rows don't notice."""
    shape = inputs.topk_ids.shape
    return replace(inputs, topk_ids=ids[: shape.numel()].view(shape).cuda())


def suites() -> list[Suite]:
    """What this module offers."""
    return [
        Suite(
            name=NAME,
            description="CUDA kernel: the busiest rank of EP8 under skewed routing beside balanced routing, one GPU",
            backend=CudaBackend.name,
            run=run,
        )
    ]
