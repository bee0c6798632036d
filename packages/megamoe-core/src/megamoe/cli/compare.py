"""How far a layer's values are from exact ones, stage by stage.

The exact values are the oracle's: FP32 throughout, dequantised weights, unquantised activations. Each rank computes
them for its own experts and for the rows that these receive, from all ranks: so the experts of the others are needed
nowhere, and the sum over ranks is the layer's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.backend import StageTaps
from megamoe.formats import Quantized
from megamoe.problem import MoEProblem
from megamoe.reference.weights import ExpertReader, named_tensors
from megamoe.stages.swiglu_quant import SwiGLU
from megamoe.tensors import ExpertWeights
from megamoe.testing.data import Call


@dataclass(frozen=True)
class Distance:
    """Sums over elements of got x and expected y, in FP64: (x - y)², x², y² and x·y. They add up over parts."""

    difference: float = 0.0
    got: float = 0.0
    expected: float = 0.0
    product: float = 0.0

    @classmethod
    def between(cls, got: Tensor, expected: Tensor) -> Distance:
        """Of two tensors of one shape."""
        x, y = got.double().flatten(), expected.double().flatten()
        return cls(*(float(value) for value in ((x - y).square().sum(), x @ x, y @ y, x @ y)))

    def __add__(self, other: Distance) -> Distance:
        return Distance(
            self.difference + other.difference,
            self.got + other.got,
            self.expected + other.expected,
            self.product + other.product,
        )

    @property
    def rel_l2(self) -> float:
        """||x - y|| / ||y||; 0 for two zeros, inf for NaN."""
        if self.difference != self.difference:
            return float("inf")
        if self.expected == 0:
            return 0.0 if self.difference == 0 else float("inf")
        return float((self.difference / self.expected) ** 0.5)

    @property
    def calc_diff(self) -> float:
        """1 - 2 (x·y) / (x·x + y·y), DeepGEMM's measure; 0 for two zeros."""
        total = self.got + self.expected
        return 1 - 2 * self.product / total if total else 0.0


@dataclass(frozen=True, kw_only=True)
class _ExpertRows:
    """Exact values of the rows of one expert, ordered by home rank, then by pick.

    Args:
        src_rank: `[rows]`.
        pick: `[rows]` token * top_k + slot.
        gate_up: `[rows, 2I]` FP32, packed.
        activation: `[rows, I]` FP32.
        contribution: `[rows, H]` FP32, weighted.
    """

    src_rank: Tensor
    pick: Tensor
    gate_up: Tensor
    activation: Tensor
    contribution: Tensor


def compare_stages(
    problem: MoEProblem,
    rank: int,
    weights: ExpertWeights,
    calls: Sequence[Call],
    taps: StageTaps | None,
    *,
    on_expert: Callable[[int], None],
) -> tuple[list[Tensor], dict[str, Distance]]:
    """Exact values for one rank's experts, and how far the taps are from them.

    Args:
        problem: the layer.
        rank: whose experts these are.
        weights: of the rank.
        calls: of all ranks.
        taps: what the rank's session shows of its last call, or None.
        on_expert: called with the number of experts done.

    Returns:
        What these experts add to each rank's output, `[T, H]` FP32 a rank; and the distance of each stage's values,
        empty without taps.
    """
    expected = [torch.zeros_like(_hidden(call), dtype=torch.float32) for call in calls]
    distances: dict[str, Distance] = {}
    for done, rows in enumerate(_exact_rows(problem, rank, weights, calls)):
        for src_rank, y in enumerate(expected):
            mine = rows.src_rank == src_rank
            y.index_add_(0, rows.pick[mine] // problem.top_k, rows.contribution[mine])
        if taps is not None:
            for stage, distance in _tap_distances(taps, done, rows):
                distances[stage] = distances.get(stage, Distance()) + distance
        on_expert(done + 1)
    return expected, distances


def _exact_rows(problem: MoEProblem, rank: int, weights: ExpertWeights, calls: Sequence[Call]) -> Iterator[_ExpertRows]:
    """Every local expert's rows, also where there are none."""
    reader = ExpertReader.of(problem, named_tensors(weights))
    activation = SwiGLU.of(problem)
    for local_expert in range(problem.num_local_experts):
        expert = problem.first_expert(rank) + local_expert
        picks = [(call.topk_ids.flatten() == expert).nonzero().squeeze(1) for call in calls]
        x = torch.cat([_hidden(call)[pick // problem.top_k] for call, pick in zip(calls, picks)]).float()
        router = torch.cat([call.topk_weights.flatten()[pick] for call, pick in zip(calls, picks)])
        gate_up = x @ reader.w13(local_expert).T
        w13_bias, w2_bias = reader.w13_bias(local_expert), reader.w2_bias(local_expert)
        if w13_bias is not None:
            gate_up += w13_bias
        hidden = activation(*gate_up.chunk(2, dim=-1))
        rows = hidden @ reader.w2(local_expert).T
        if w2_bias is not None:
            rows += w2_bias
        yield _ExpertRows(
            src_rank=torch.cat([torch.full_like(pick, src_rank) for src_rank, pick in enumerate(picks)]),
            pick=torch.cat(picks),
            gate_up=gate_up,
            activation=hidden,
            contribution=rows * router.unsqueeze(1),
        )


def _tap_distances(taps: StageTaps, local_expert: int, rows: _ExpertRows) -> Iterator[tuple[str, Distance]]:
    """Distance of each tap from the exact values of one expert; infinite if the rows are not the same."""
    mine = (taps.local_expert == local_expert).nonzero().squeeze(1)
    keys, exact_keys = _keys(taps.src_rank[mine], taps.src_pick[mine]), _keys(rows.src_rank, rows.pick)
    mine = mine[keys.argsort()]
    shown = {
        "gemm1": (taps.gate_up, rows.gate_up),
        "swiglu_quant": (taps.a2, rows.activation),
        "gemm2": (taps.contribution, rows.contribution),
    }
    for stage, (values, exact) in shown.items():
        if not torch.equal(keys.sort().values, exact_keys):
            yield stage, Distance(float("nan"))
        elif isinstance(values, Quantized):
            scales = None if values.scales is None else values.scales[mine]
            part = Quantized(payload=values.payload[mine], scales=scales, fmt=values.fmt)
            yield stage, Distance.between(part.dequantize(), exact)
        elif values is not None:
            yield stage, Distance.between(values[mine], exact)


def _keys(src_rank: Tensor, pick: Tensor) -> Tensor:
    return src_rank.long() * 2**32 + pick.long()


def _hidden(call: Call) -> Tensor:
    assert isinstance(call.hidden_states, Tensor)
    return call.hidden_states
