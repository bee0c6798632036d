"""Weights, tokens and routings of a case, made from its seed.

Weights of a layer are global, `[E, ...]`, and each rank is handed its contiguous share: the same layer at another EP
size has the same experts, which is what the tests of equal bits need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megamoe.backend import HiddenStates
from megamoe.formats import activation_format, weight_format
from megamoe.problem import MoEProblem, QuantMode
from megamoe.tensors import WEIGHT_TYPE, ExpertWeights, GateUpLayout
from megamoe.testing.cases import Case, InputKind
from megamoe.testing.routings import ROUTINGS, Picks

OUTLIER_FACTOR = 8.0  # gate and up are about N(0, 1); times 8, a third of a row is beyond a clamp of 7 or 10


@dataclass(frozen=True, kw_only=True)
class Call:
    """One rank's arguments of one `forward`.

    Args:
        hidden_states: `[T, H]` BF16, or payload and scales.
        topk_ids: `[T, K]` int64 or int32.
        topk_weights: `[T, K]` FP32.
        num_tokens: rows past it are padding; None means all are tokens. A tensor is moved to the device.
        give_out: whether a tensor to write into is handed in.
        in_place: whether that tensor is `hidden_states` itself.
        strided: whether every second row of a larger tensor is handed in, of hidden states, ids and weights alike.
        delay_s: how long the rank sleeps before it calls.
    """

    hidden_states: HiddenStates
    topk_ids: Tensor
    topk_weights: Tensor
    num_tokens: int | Tensor | None = None
    give_out: bool = False
    in_place: bool = False
    strided: bool = False
    delay_s: float = 0.0

    @property
    def num_rows(self) -> int:
        """Rows that are handed in, padding included."""
        return self.topk_ids.shape[0]

    @property
    def bf16(self) -> Tensor:
        """The hidden states of a call whose rows are not quantised."""
        assert isinstance(self.hidden_states, Tensor)
        return self.hidden_states

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Payload and scales of a call whose rows are quantised."""
        assert isinstance(self.hidden_states, tuple)
        return self.hidden_states

    def rows(self, index: Any) -> Call:
        """The same call with only some rows: a slice, or a list of row numbers."""
        return replace(
            self,
            hidden_states=self.bf16[index],
            topk_ids=self.topk_ids[index],
            topk_weights=self.topk_weights[index],
        )


def concatenate(calls: Sequence[Call]) -> Call:
    """One call with the BF16 rows of several, in order."""
    return Call(
        hidden_states=torch.cat([call.bf16 for call in calls]),
        topk_ids=torch.cat([call.topk_ids for call in calls]),
        topk_weights=torch.cat([call.topk_weights for call in calls]),
    )


def make_calls(case: Case, device: torch.device, *, round_: int = 0) -> list[Call]:
    """Every rank's BF16 call. `round_` gives other tokens of the same kind, for repeated calls."""
    return [_make_call(case, rank, device, round_) for rank in range(case.problem.ep_size)]


def _make_call(case: Case, rank: int, device: torch.device, round_: int) -> Call:
    problem, num_tokens = case.problem, case.tokens[rank]
    # Made on the CPU, so that a case is the same on every device.
    rng = torch.Generator().manual_seed(case.seed * 1000 + rank * 100_003 + round_ * 7)
    picks = Picks.of(problem, num_tokens=num_tokens, src_rank=rank)
    ids = ROUTINGS[case.routing](picks, rng)
    weights = torch.rand(picks.shape, generator=rng) + 0.05
    weights /= weights.sum(-1, keepdim=True)
    if case.signed_weights:
        weights *= torch.where(torch.rand(picks.shape, generator=rng) < 0.5, -1.0, 1.0)
    hidden = _hidden_states(case.inputs, num_tokens, problem.hidden_size, rng)
    return Call(hidden_states=hidden.to(device), topk_ids=ids.to(device), topk_weights=weights.to(device))


def _hidden_states(kind: InputKind, num_tokens: int, hidden_size: int, rng: torch.Generator) -> Tensor:
    rows = torch.randn(num_tokens, hidden_size, generator=rng)
    if kind is InputKind.OUTLIERS:
        rows[::3] *= OUTLIER_FACTOR
    elif kind is InputKind.HEAVY_TAIL:
        # Student's t: a normal over the root of a chi-square over its degrees of freedom.
        chi = torch.randn(3, num_tokens, hidden_size, generator=rng).square().mean(0)
        rows = rows / chi.sqrt().clamp(min=1e-3)
    elif kind is InputKind.ZERO_BLOCKS:
        rows[::4] = 0
        rows[1::4, :128] = 0
    return rows.bfloat16()


def quantize_call(call: Call, problem: MoEProblem) -> Call:
    """The same call with its rows already in the mode's activation format."""
    fmt = activation_format(problem.quant, problem.act_format)
    quantized = fmt.quantize(call.bf16)
    assert quantized.scales is not None, "bf16 has no scales: its input can't be given as a pair"
    return replace(call, hidden_states=(quantized.payload, quantized.scales))


def make_weights(problem: MoEProblem, device: torch.device, *, redundant: bool = False, seed: int = 0) -> ExpertWeights:
    """All experts of a layer, packed, quantised in the mode's weight format.

    Entries are N(0, 1 / fan-in), so that gate, up and the output are about N(0, 1) on Gaussian input, biases N(0, 1/4).

    Args:
        problem: sizes, mode, biases.
        device: where to make them.
        redundant: experts e and e + ceil(E / 2) are copies of each other.
        seed: of all of them.
    """
    return _cached_weights(
        problem.num_experts,
        problem.hidden_size,
        problem.intermediate_size,
        QuantMode(problem.quant),
        problem.expert_bias,
        redundant,
        seed,
        str(device),
    )


@lru_cache(maxsize=2)
def _cached_weights(
    experts: int, hidden: int, inter: int, quant: QuantMode, bias: bool, redundant: bool, seed: int, device: str
) -> ExpertWeights:
    # Made on the device: a large layer would take minutes on a host. CPU and GPU therefore have different weights.
    rng = torch.Generator(device).manual_seed(seed)
    fmt = weight_format(quant)
    tensors: dict[str, Tensor] = {}
    for name, (rows, columns) in {"w13_weight": (2 * inter, hidden), "w2_weight": (hidden, inter)}.items():
        parts = []
        for _ in range(experts):  # one at a time: FP32 of a whole layer would not fit beside it
            expert = torch.randn(rows, columns, generator=rng, device=device) * columns**-0.5
            parts.append(fmt.quantize(expert))
        tensors[name] = torch.stack([part.payload for part in parts])
        if parts[0].scales is not None:
            tensors[f"{name}_scale"] = torch.stack([part.scales for part in parts if part.scales is not None])
    if bias:
        tensors["w13_bias"] = torch.randn(experts, 2 * inter, generator=rng, device=device) / 2
        tensors["w2_bias"] = torch.randn(experts, hidden, generator=rng, device=device) / 2
    if redundant:
        half = experts // 2
        for tensor in tensors.values():
            tensor.view(torch.uint8)[experts - half :] = tensor.view(torch.uint8)[:half]
    return WEIGHT_TYPE[quant](layout=GateUpLayout.PACKED, **tensors)


def shard(weights: ExpertWeights, ep_size: int) -> list[ExpertWeights]:
    """Each rank's contiguous share, copied so that one rank's is sent without the others'."""
    tensors = dict(weights.tensors())
    share = next(iter(tensors.values())).shape[0] // ep_size
    return [
        with_tensors(
            weights, {name: tensor[rank * share : (rank + 1) * share].clone() for name, tensor in tensors.items()}
        )
        for rank in range(ep_size)
    ]


def with_tensors(weights: ExpertWeights, tensors: Mapping[str, Tensor]) -> ExpertWeights:
    """`weights` with some tensors replaced by name."""
    changes: dict[str, Any] = dict(tensors)
    return replace(weights, **changes)


def interleave(weights: ExpertWeights) -> ExpertWeights:
    """The same experts with w13's rows ordered gate0, up0, gate1, up1, ..., as gpt-oss stores them.

    Block scales that span 128 rows can't be interleaved with their rows: only bf16 and MXFP4 weights can.
    """
    tensors = dict(weights.tensors())
    names = [name for name in tensors if name.startswith("w13")]
    for name in names:
        gate, up = tensors[name].chunk(2, dim=1)
        tensors[name] = torch.stack((gate, up), dim=2).flatten(1, 2)
    return replace(with_tensors(weights, tensors), layout=GateUpLayout.INTERLEAVED)


def swap_gate_and_up(weights: ExpertWeights) -> ExpertWeights:
    """Packed experts with w3 before w1: what a wrong layout tag, or a loader that mixes them up, makes of them."""

    def swapped(tensor: Tensor) -> Tensor:
        gate, up = tensor.view(torch.uint8).chunk(2, dim=1)
        return torch.cat((up, gate), dim=1).view(tensor.dtype)

    return with_tensors(
        weights,
        {name: swapped(tensor) if name.startswith("w13_w") else tensor for name, tensor in weights.tensors()},
    )
