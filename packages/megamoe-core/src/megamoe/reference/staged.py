"""The staged reference: one process, no protocol, values rounded where the mode rounds.

It gives the bits of `ReferenceSession`, and it is what GPU backends are compared with: within the narrow bounds of
docs/numerics.md, also between the stages (taps).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.backend import HiddenStates, StageTaps
from megamoe.formats import ActivationFormat, Quantized, activation_format, transport_format
from megamoe.problem import MoEProblem
from megamoe.reference.weights import ExpertReader, named_tensors
from megamoe.stages.combine import combine_tokens
from megamoe.stages.gemm1 import gemm1
from megamoe.stages.gemm2 import gemm2
from megamoe.stages.multiply import fixed_arithmetic, pad_rows
from megamoe.stages.p2p import send_rows
from megamoe.stages.quantize_input import quantize_input
from megamoe.stages.route import Routing, is_expert, route
from megamoe.stages.swiglu_quant import SwiGLU, swiglu_quant
from megamoe.tensors import ExpertWeights


@dataclass(frozen=True, kw_only=True, eq=False)
class Staged:
    """Result of `staged`.

    Args:
        outputs: `[T, H]` BF16 of each rank.
        taps: of each rank as an owner; rows by local expert, then by home rank, then by pick.
    """

    outputs: list[Tensor]
    taps: list[StageTaps]


@torch.no_grad()
def staged(
    problem: MoEProblem,
    hidden_states: Sequence[HiddenStates],
    topk_ids: Sequence[Tensor],
    topk_weights: Sequence[Tensor],
    weights: Sequence[ExpertWeights],
) -> Staged:
    """Run the layer for all ranks; each argument is a list, one entry a rank.

    Args:
        problem: the layer; `ep_size` entries in each list.
        hidden_states: `[T, H]` BF16, or activations already in the mode's format, per rank.
        topk_ids: `[T, K]` per rank; ids outside [0, E) add nothing.
        topk_weights: `[T, K]` FP32 per rank.
        weights: the experts of each rank.
    """
    fmt = activation_format(problem.quant, problem.act_format)
    transport = transport_format(problem.transport)
    inputs = [as_quantized(x, fmt) for x in hidden_states]
    row_bytes = transport.row_bytes(problem.hidden_size)
    homes = [torch.zeros(problem.top_k, len(ids), row_bytes, dtype=torch.uint8) for ids in topk_ids]
    routings = [route(ids, w, problem.num_experts) for ids, w in zip(topk_ids, topk_weights, strict=True)]
    taps = []
    with fixed_arithmetic():
        for rank, owned in enumerate(weights):
            reader = ExpertReader.of(problem, named_tensors(owned))
            rows: list[StageTaps] = []
            for local_expert_idx in range(problem.num_local_experts):
                received = _receive(problem, problem.first_expert(rank) + local_expert_idx, routings, inputs)
                if len(received.picks) or not rows:  # one group of rows at least, if empty, so that taps have a shape
                    tap = _compute(problem, reader, local_expert_idx, received)
                    _send_home(problem, tap, homes)
                    rows.append(tap)
            taps.append(concatenate_taps(rows))
        outputs = [
            combine_tokens(home, is_expert(ids, problem.num_experts), transport, problem.hidden_size)
            for home, ids in zip(homes, topk_ids, strict=True)
        ]
    return Staged(outputs=outputs, taps=taps)


def as_quantized(hidden_states: HiddenStates, fmt: ActivationFormat) -> Quantized:
    """Activations in `fmt`, quantised here where they aren't yet."""
    if isinstance(hidden_states, Quantized):
        return hidden_states
    if isinstance(hidden_states, Tensor):
        return quantize_input(hidden_states, fmt)
    payload, scales = hidden_states
    return Quantized(payload=payload, scales=scales, fmt=fmt)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Received:
    """What one expert receives: activations `[n]`, home ranks, picks and router weights."""

    x: Quantized
    src_rank: Tensor
    picks: Tensor
    topk_weights: Tensor


def _receive(problem: MoEProblem, expert: int, routings: Sequence[Routing], inputs: Sequence[Quantized]) -> _Received:
    """Rows of one global expert, home ranks in order."""
    parts = []
    for home, (routing, x) in enumerate(zip(routings, inputs, strict=True)):
        first, num = int(routing.counts[:expert].sum()), int(routing.counts[expert])
        picks = routing.picks[first : first + num]
        parts.append(
            _Received(
                x=_take(x, picks.long() // problem.top_k),
                src_rank=torch.full_like(picks, home),
                picks=picks,
                topk_weights=routing.weights[first : first + num],
            )
        )
    return _Received(
        x=_concatenate([part.x for part in parts]),
        src_rank=torch.cat([part.src_rank for part in parts]),
        picks=torch.cat([part.picks for part in parts]),
        topk_weights=torch.cat([part.topk_weights for part in parts]),
    )


def _compute(problem: MoEProblem, reader: ExpertReader, local_expert_idx: int, received: _Received) -> StageTaps:
    """GEMM1 to the weighted rows of one expert."""
    num = len(received.picks)
    fmt = activation_format(problem.quant, problem.act_format)
    x = pad_rows(received.x.dequantize())
    gate_up = gemm1(x, reader.w13(local_expert_idx), reader.w13_bias(local_expert_idx))
    a2 = swiglu_quant(gate_up, SwiGLU.of(problem), fmt)
    router = pad_rows(received.topk_weights)
    contribution = gemm2(a2.dequantize(), reader.w2(local_expert_idx), reader.w2_bias(local_expert_idx), router)
    return StageTaps(
        src_rank=received.src_rank,
        src_pick=received.picks,
        local_expert=torch.full_like(received.picks, local_expert_idx),
        gate_up=gate_up[:num],
        a2=_take(a2, torch.arange(num)),
        contribution=contribution[:num],
    )


def _send_home(problem: MoEProblem, tap: StageTaps, homes: Sequence[Tensor]) -> None:
    assert tap.contribution is not None
    wire = transport_format(problem.transport).encode(tap.contribution)
    for rank, home in enumerate(homes):
        mine = tap.src_rank == rank
        send_rows(wire[mine], tap.src_pick[mine], home)


def _take(x: Quantized, rows: Tensor) -> Quantized:
    payload = x.payload.view(torch.uint8)[rows].view(x.payload.dtype)
    return Quantized(payload=payload, scales=None if x.scales is None else x.scales[rows], fmt=x.fmt)


def _concatenate(parts: Sequence[Quantized]) -> Quantized:
    scales = [part.scales for part in parts if part.scales is not None]
    payload = torch.cat([part.payload.view(torch.uint8) for part in parts])
    return Quantized(
        payload=payload.view(parts[0].payload.dtype), scales=torch.cat(scales) if scales else None, fmt=parts[0].fmt
    )


def concatenate_taps(taps: Sequence[StageTaps]) -> StageTaps:
    """Taps of several groups of rows as one; at least one group, with all taps present."""
    return StageTaps(
        src_rank=torch.cat([tap.src_rank for tap in taps]),
        src_pick=torch.cat([tap.src_pick for tap in taps]),
        local_expert=torch.cat([tap.local_expert for tap in taps]),
        a2=_concatenate([tap.a2 for tap in taps]),
        gate_up=torch.cat([tap.gate_up for tap in taps if tap.gate_up is not None]),
        contribution=torch.cat([tap.contribution for tap in taps if tap.contribution is not None]),
    )
