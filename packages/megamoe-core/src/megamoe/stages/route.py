"""Sort a rank's picks by expert, so that each owner receives its entries grouped.

    topk_ids [T, K] int32 or int64, topk_weights [T, K] FP32
      -> entries, sorted by global expert id, then by pick:   pick [n] int32, weight [n] FP32
      -> counts [E] int32

A pick is token * K + slot. An id of -1 means "no expert": it makes no entry, so that nothing of that pick moves. An id
outside [-1, E) makes no entry either; `out_of_range` finds those, to be counted. Duplicate ids in a row are two picks
and two entries.

Entries of one expert are sorted by pick here; their order never changes a result, since every row is computed alone and
lands in its own (slot, token) place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What one rank sends.

    Args:
        picks: `[n]` int32, token * K + slot, sorted by expert, then by pick.
        weights: `[n]` FP32 router weight of each.
        counts: `[E]` int32 entries per global expert.
    """

    picks: Tensor
    weights: Tensor
    counts: Tensor


def is_expert(topk_ids: Tensor, num_experts: int) -> Tensor:
    """Bool tensor of `topk_ids`' shape: which picks are computed, sent and combined."""
    return (topk_ids >= 0) & (topk_ids < num_experts)


def out_of_range(topk_ids: Tensor, num_experts: int) -> Tensor:
    """Bool tensor of `topk_ids`' shape: ids outside [-1, E); skipped and counted, in debug mode an error."""
    return (topk_ids < -1) | (topk_ids >= num_experts)


def route(topk_ids: Tensor, topk_weights: Tensor, num_experts: int) -> Routing:
    """Sort all picks of one rank by expert; see the file's docstring for shapes."""
    ids = topk_ids.flatten()
    picks = is_expert(ids, num_experts).nonzero().flatten()
    experts = ids[picks].long()
    order = experts.sort(stable=True).indices
    return Routing(
        picks=picks[order].int(),
        weights=topk_weights.flatten()[picks[order]],
        counts=torch.bincount(experts, minlength=num_experts).int(),
    )
