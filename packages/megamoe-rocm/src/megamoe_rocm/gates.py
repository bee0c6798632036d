"""The seed's operator gates: the kernels' output against the FP32 oracle, on the shapes that the seed names.

All ranks of the layer are virtual ranks of one GPU, so that the oracle has everybody's experts at hand. On a stand-in
the layer is the small one of the benchmark's rehearsal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from megamoe.backend import VirtualRanks
from megamoe.problem import MoEProblem, QuantMode, Transport
from megamoe.reference.oracle import oracle
from megamoe.testing.tolerances import calc_diff, rel_l2
from megamoe_rocm import rungs
from megamoe_rocm.backend import RocmBackend
from megamoe_rocm.bench import REHEARSAL, REHEARSAL_TOKENS, SHAPES, call_arguments, random_experts
from megamoe_rocm.planning import make_plan
from megamoe_rocm.rungs import Rung

GATES: Mapping[QuantMode, float] = {QuantMode.A4W4: 0.25, QuantMode.A8W4: 0.10}
"""Largest relL2 of an output that an operator may have to be of use. docs/numerics.md has tighter bounds, to which the
conformance matrix holds a backend."""
RANKS, TOKENS = 8, 64  # of the seed's layers
REHEARSAL_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class GateRow:
    """One layer's distance from the oracle, over the outputs of all ranks.

    Args:
        mode, transport, hidden_size, intermediate_size, num_experts, top_k, ep_size, num_tokens: what was called.
        rel_l2: ||got - oracle|| / ||oracle||.
        limit: what it may be at most.
        calc_diff: 1 - 2 (x·y) / (x·x + y·y).
    """

    mode: str
    transport: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    ep_size: int
    num_tokens: int
    rel_l2: float
    limit: float
    calc_diff: float

    @property
    def passed(self) -> bool:
        """Whether it is within its gate; a NaN is not."""
        return self.rel_l2 < self.limit


def measure() -> Iterator[GateRow]:
    """Each shape in both modes over both transports."""
    rehearsal = rungs.current() is not Rung.GFX950
    for shape in (REHEARSAL,) if rehearsal else SHAPES:
        for quant in GATES:
            for transport in Transport:
                ep_size = REHEARSAL_RANKS if rehearsal else RANKS
                problem = shape.problem(quant, transport, ep_size=ep_size, capacity=TOKENS)
                yield measure_layer(problem, REHEARSAL_TOKENS[0] if rehearsal else TOKENS)


def measure_layer(problem: MoEProblem, num_tokens: int) -> GateRow:
    """One call of all ranks, `num_tokens` each."""
    rung = rungs.current()
    device = torch.device("cpu") if rungs.is_cpu(rung) else torch.device("cuda", torch.cuda.current_device())
    ranks = range(problem.ep_size)
    experts = [random_experts(problem, device, seed=rank) for rank in ranks]
    calls = [call_arguments(problem, num_tokens, device, seed=rank) for rank in ranks]
    with RocmBackend().open(make_plan(problem, rungs.PLANNED_FOR[rung]), VirtualRanks()) as session:
        outputs = session.forward(
            [call.hidden_states for call in calls],
            [call.topk_ids for call in calls],
            [call.topk_weights for call in calls],
            [session.prepare(of_rank) for of_rank in experts],
        )
        session.check()
        got = torch.cat(outputs)
    expected = torch.cat(
        [oracle(problem, call.hidden_states, call.topk_ids, call.topk_weights, experts) for call in calls]
    )
    return GateRow(
        mode=str(problem.quant),
        transport=str(problem.transport),
        hidden_size=problem.hidden_size,
        intermediate_size=problem.intermediate_size,
        num_experts=problem.num_experts,
        top_k=problem.top_k,
        ep_size=problem.ep_size,
        num_tokens=num_tokens,
        rel_l2=rel_l2(got, expected),
        limit=GATES[QuantMode(problem.quant)],
        calc_diff=calc_diff(got, expected),
    )
