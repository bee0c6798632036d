"""The peer: an expert-parallel block from public parts, one after the other, as an engine would write it.

Entered into transformers as MegaMoE's adapter is, as an `EPImplementation`: the code around the experts is the same.
How tokens reach their experts is one of two ways:

    all-to-all    each pick's row goes to its expert's rank and its result comes back; the host waits for the counts, so
                  it can't be captured in a CUDA graph
    all-gather    every rank gets all rows and runs its own experts on them; partial sums are reduced and scattered. On
                  two ranks, with eight picks a token, this sends fewer bytes.

On one rank nothing is sent, and no collective is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.distributed.expert_parallel import EPImplementation

from megamoe.formats import FP8_128X128


class Dispatch(StrEnum):
    """How tokens travel."""

    ALL_TO_ALL = "all-to-all"
    ALL_GATHER = "all-gather"


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Where rows stand while the experts work: by expert, each expert's rows from a multiple of the alignment on.

    Args:
        place: `[N]` int64 row of each pick, -1 for picks of other ranks.
        expert_of_row: `[capacity]` int32, -1 for padding.
        ends: `[E]` int32 end of each expert's rows, padding included.
    """

    place: Tensor
    expert_of_row: Tensor
    ends: Tensor


class ExpertMath(Protocol):
    """One rank's experts, and the number format of the rows that travel to them."""

    num_experts: int
    alignment: int

    def quantize(self, x: Tensor) -> tuple[Tensor, ...]:
        """Rows `[T, H]` as they travel: payload, and scales where there are some."""

    def arrange(self, columns: tuple[Tensor, ...], source: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        """Rows at their places: row `source[n]` at `layout.place[n]`."""

    def experts(self, columns: tuple[Tensor, ...], layout: Layout) -> Tensor:
        """`[capacity, H]`: each row through its expert."""

    def combine(self, y: Tensor, place: Tensor, weights: Tensor) -> Tensor:
        """`[T, H]`: for each token the weighted sum of its picks' rows; `place`, `weights` `[T, K]`."""


def lay_out(expert: Tensor, num_experts: int, alignment: int) -> Layout:
    """Places by expert; fixed shapes and no wait for the host.

    Args:
        expert: `[N]` int64 local expert of each pick, `num_experts` for picks of other ranks.
        num_experts: of this rank.
        alignment: rows.
    """
    num_picks, device = expert.shape[0], expert.device
    capacity = -(-num_picks // alignment) * alignment + num_experts * alignment
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    padded = (counts[:-1] + alignment - 1) // alignment * alignment
    ends = padded.cumsum(0)
    order = expert.argsort(stable=True)
    sorted_expert = expert[order]
    within = torch.arange(num_picks, device=device) - (counts.cumsum(0) - counts)[sorted_expert]
    start = torch.nn.functional.pad(ends - padded, (0, 1))
    sorted_place = torch.where(sorted_expert < num_experts, start[sorted_expert] + within, capacity)
    place = torch.empty_like(order).scatter_(0, order, sorted_place)
    expert_of_row = torch.full((capacity + 1,), -1, dtype=torch.int32, device=device)
    expert_of_row.scatter_(0, place, expert.int())
    return Layout(
        place=torch.where(place < capacity, place, -1), expert_of_row=expert_of_row[:capacity], ends=ends.int()
    )


class UnfusedExpertParallel(EPImplementation):  # type: ignore[misc]
    """The block of one layer. Every rank brings equally many tokens.

    Args:
        dispatch: how tokens travel.
        math: this rank's experts.
        experts, ep_mesh, tp_mesh: see `EPImplementation`.
    """

    def __init__(self, dispatch: Dispatch, math: ExpertMath, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._dispatch = dispatch
        self._math = math
        self._group = ep_mesh.get_group()
        self._rank, self._size = dist.get_rank(self._group), dist.get_world_size(self._group)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[T, H]`, global ids and weights `[T, K]` -> `[T, H]`."""
        columns = self._math.quantize(hidden_states)
        if self._dispatch is Dispatch.ALL_GATHER:
            return self._gathered(columns, top_k_index, top_k_weights.float())
        return self._exchanged(columns, top_k_index, top_k_weights.float())

    def _gathered(self, columns: tuple[Tensor, ...], ids: Tensor, weights: Tensor) -> Tensor:
        num_experts, top_k = self._math.num_experts, ids.shape[1]
        columns, ids, weights = tuple(map(self._gather, columns)), self._gather(ids), self._gather(weights)
        mine = ids // num_experts == self._rank
        expert = torch.where(mine, ids % num_experts, num_experts).flatten()
        layout = lay_out(expert, num_experts, self._math.alignment)
        source = torch.arange(expert.shape[0], device=ids.device) // top_k
        y = self._math.experts(self._math.arrange(columns, source, layout), layout)
        partial = self._math.combine(y, layout.place.view_as(ids), weights)
        return self._reduce_scatter(partial)

    def _exchanged(self, columns: tuple[Tensor, ...], ids: Tensor, weights: Tensor) -> Tensor:
        num_experts, picks = self._math.num_experts, ids.flatten()
        order = picks.argsort(stable=True)
        sent_per_expert = torch.zeros(num_experts * self._size, dtype=torch.int64, device=ids.device)
        sent_per_expert.scatter_add_(0, picks, torch.ones_like(picks))
        received_per_expert = torch.empty_like(sent_per_expert)
        dist.all_to_all_single(received_per_expert, sent_per_expert, group=self._group)
        counts = torch.stack((sent_per_expert, received_per_expert)).view(2, self._size, -1)
        sent, received = counts.sum(-1).tolist()  # the host waits here
        columns = tuple(self._exchange(column[order // ids.shape[1]], sent, received) for column in columns)
        local = torch.arange(num_experts, device=ids.device).repeat(self._size)
        expert = local.repeat_interleave(counts[1].flatten(), output_size=sum(received))
        layout = lay_out(expert, num_experts, self._math.alignment)
        source = torch.arange(len(expert), device=ids.device)
        y = self._math.experts(self._math.arrange(columns, source, layout), layout)
        returned = self._exchange(y[layout.place], received, sent)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
        return self._math.combine(returned, place.view_as(ids), weights)

    def _gather(self, rows: Tensor) -> Tensor:
        if self._size == 1:
            return rows
        source = _as_bytes(rows.contiguous())
        gathered = source.new_empty(self._size * source.shape[0], *source.shape[1:])
        dist.all_gather_into_tensor(gathered, source, group=self._group)
        return gathered.view(rows.dtype)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        if self._size == 1:
            return rows
        source = _as_bytes(rows.contiguous())
        out = source.new_empty(sum(received), *source.shape[1:])
        dist.all_to_all_single(out, source, received, sent, group=self._group)
        return out.view(rows.dtype)

    def _reduce_scatter(self, partial: Tensor) -> Tensor:
        if self._size == 1:
            return partial
        own = partial.new_empty(partial.shape[0] // self._size, partial.shape[1])
        dist.reduce_scatter_tensor(own, partial, group=self._group)
        return own


def _as_bytes(rows: Tensor) -> Tensor:
    """FP8 as bytes, which collectives carry; other types as they are."""
    return rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows


class ExactMath:
    """FP32 with dequantised weights and unquantised rows, an expert at a time: what the others are held to.

    Args:
        experts: `FP8Experts` of one rank.
    """

    alignment = 1

    def __init__(self, experts: Any) -> None:
        self._experts = experts
        self.num_experts: int = experts.gate_up_proj.shape[0]

    def quantize(self, x: Tensor) -> tuple[Tensor, ...]:
        """As they are."""
        return (x.float(),)

    def arrange(self, columns: tuple[Tensor, ...], source: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        """See `ExpertMath`."""
        (x,) = columns
        rows = x.new_zeros(layout.expert_of_row.shape[0], x.shape[1])
        here = layout.place >= 0
        rows[layout.place[here]] = x[source[here]]
        return (rows,)

    def experts(self, columns: tuple[Tensor, ...], layout: Layout) -> Tensor:
        """See `ExpertMath`."""
        (x,) = columns
        y, layer = torch.zeros_like(x), self._experts
        for expert in range(self.num_experts):
            rows = (layout.expert_of_row == expert).nonzero().flatten()
            if len(rows):
                w13 = FP8_128X128.dequantize(layer.gate_up_proj[expert], layer.gate_up_proj_scale_inv[expert])
                w2 = FP8_128X128.dequantize(layer.down_proj[expert], layer.down_proj_scale_inv[expert])
                gate, up = (x[rows] @ w13.T).chunk(2, dim=-1)
                y[rows] = (nn.functional.silu(gate) * up) @ w2.T
        return y

    def combine(self, y: Tensor, place: Tensor, weights: Tensor) -> Tensor:
        """See `ExpertMath`."""
        here = place >= 0
        return (y[place.clamp(min=0)] * (weights * here).unsqueeze(-1)).sum(1)
