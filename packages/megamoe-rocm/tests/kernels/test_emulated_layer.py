"""Rung 5: the whole layer over emulated ranks, from code objects compiled for gfx950, against the staged reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megamoe.backend import Plan
from megamoe.formats import MXFP4
from megamoe.problem import MoEProblem
from megamoe.reference.staged import staged
from megamoe.tensors import ExpertWeights, make_weights
from megamoe_rocm.emulation import EmulatedRanks
from megamoe_rocm.heuristics import TileConfig, config_of
from megamoe_rocm.planning import make_plan
from megamoe_rocm.weights import prepare

pytestmark = pytest.mark.usefixtures("toolchain")

TILE = TileConfig(
    name="narrow",
    block_m=32,
    gemm1_block_n=128,
    gemm2_block_m=32,
    gemm2_block_n=128,
    pull_rows=16,
    lead_blocks=1,
    provenance="small enough for the interpreter",
)
CASES = [
    ("a4w4", "bf16", 0),
    ("a4w4", "bf16", 1),
    ("a4w4", "fp8_blockwise_1x32", 2),
    ("a8w4", "bf16", 3),
    ("a8w4", "fp8_blockwise_1x32", 4),
    ("a8w4", "fp8_blockwise_1x32", 5),
]
BOUND = 1e-2


def make_problem(quant: str, transport: str, ep_size: int) -> MoEProblem:
    return MoEProblem(
        hidden_size=512,
        intermediate_size=256,
        num_experts=4,
        top_k=2,
        num_max_tokens_per_rank=4,
        ep_size=ep_size,
        quant=quant,
        transport=transport,
        swiglu_limit=2.0,
    )


def make_experts(problem: MoEProblem) -> list[ExpertWeights]:
    generator = torch.Generator().manual_seed(0)
    experts, hidden, inter = problem.num_local_experts, problem.hidden_size, problem.intermediate_size
    of_ranks = []
    for _ in range(problem.ep_size):
        w13 = MXFP4.quantize(torch.randn(experts, 2 * inter, hidden, generator=generator) * hidden**-0.5 * 2)
        w2 = MXFP4.quantize(torch.randn(experts, hidden, inter, generator=generator) * inter**-0.5)
        of_ranks.append(make_weights(problem, (w13.payload, w13.scales), (w2.payload, w2.scales), layout="packed"))
    return of_ranks


def make_call(problem: MoEProblem, tokens: list[int], seed: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(count, problem.hidden_size, generator=generator).bfloat16() for count in tokens]
    ids = [torch.randint(-1, 4, (count, problem.top_k), generator=generator, dtype=torch.int32) for count in tokens]
    return x, ids, [torch.randn(count, problem.top_k, generator=generator) for count in tokens]


def plan_of(problem: MoEProblem) -> Plan:
    return make_plan(problem, config=config_of(problem, TILE.name, (TILE,)))


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("quant, transport, seed", CASES)
def test_two_ranks_two_calls(quant: str, transport: str, seed: int) -> None:
    problem = make_problem(quant, transport, 2)
    experts = make_experts(problem)
    ranks = EmulatedRanks(plan_of(problem), [prepare(w, problem) for w in experts], seed=seed, last_epoch=2**32 - 2)
    for call, tokens in enumerate([[3, 2], [0, 4]]):
        arguments = make_call(problem, tokens, seed=10 * seed + call)
        expected = staged(problem, *arguments, experts).outputs
        for rank, out in enumerate(ranks.forward(*arguments)):
            assert len(out) == 0 or distance(out, expected[rank]) < BOUND
            assert ranks.words(rank, "status").tolist() == [0] * 8
            assert ranks.words(rank, "epoch").item() == call - 1


def test_four_ranks() -> None:
    problem = make_problem("a4w4", "fp8_blockwise_1x32", 4)
    experts = make_experts(problem)
    ranks = EmulatedRanks(plan_of(problem), [prepare(w, problem) for w in experts], seed=3)
    arguments = make_call(problem, [2, 0, 4, 1], seed=5)
    expected = staged(problem, *arguments, experts).outputs
    for out, reference in zip(ranks.forward(*arguments), expected, strict=True):
        assert len(out) == 0 or distance(out, reference) < BOUND


def test_another_router_weight_would_be_seen() -> None:
    """A control of the bound and of the harness."""
    problem = make_problem("a8w4", "bf16", 2)
    experts = make_experts(problem)
    ranks = EmulatedRanks(plan_of(problem), [prepare(w, problem) for w in experts])
    x, ids, weights = make_call(problem, [3, 2], seed=0)
    expected = staged(problem, x, ids, [w * 1.05 for w in weights], experts).outputs
    assert distance(ranks.forward(x, ids, weights)[0], expected[0]) > 2 * BOUND


@pytest.mark.parametrize("transport, row_bytes", [("bf16", 1024), ("fp8_blockwise_1x32", 528)])
def test_a_row_on_its_way_home_takes_as_many_bytes_as_its_transport_says(transport: str, row_bytes: int) -> None:
    """H + H / 32 instead of 2 H, counted from the bytes that rank 1 stored into rank 0's memory."""
    problem = make_problem("a4w4", transport, 2)
    experts = make_experts(problem)
    ranks = EmulatedRanks(plan_of(problem), [prepare(w, problem) for w in experts])
    x, ids, weights = make_call(problem, [4, 0], seed=0)
    ids[0][:, 0], ids[0][:, 1] = 0, torch.tensor([2, 3, 3, -1])  # one pick here, three in all on rank 1
    ranks.forward(x, ids, weights)
    counts = problem.num_local_experts * 4  # rank 1's own: of no entry, since it has no token; flags are atomics
    assert ranks.machine.stored_bytes[1, 0] == 3 * row_bytes + counts
