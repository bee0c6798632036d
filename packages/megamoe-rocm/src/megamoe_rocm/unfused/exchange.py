"""Who moves tokens between ranks for the unfused pipeline, and collectives of PyTorch as the plainest of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.problem import MoEProblem


@dataclass(frozen=True, kw_only=True)
class Received:
    """What an exchange has brought to a rank; rows from `num_rows` on hold anything.

    Args:
        payload: `[max_rows, H / 2]` or `[max_rows, H]` bytes of rows in the mode's format, contiguous.
        scales: `[max_rows, H / 32]` bytes.
        ids: `[max_rows, top_k]` int32, global ids: those of other ranks' experts, too.
        weights: `[max_rows, top_k]` FP32.
        num_rows: int32, how many there are.
    """

    payload: Tensor
    scales: Tensor
    ids: Tensor
    weights: Tensor
    num_rows: Tensor


class Exchange(ABC):
    """Moves a call's tokens to the ranks of their experts, and the sums back.

    Attributes:
        name: names it in results.
        max_rows: tokens that a rank can receive.
    """

    name: ClassVar[str]
    max_rows: int

    @abstractmethod
    def dispatch(self, payload: Tensor, scales: Tensor, ids: Tensor, weights: Tensor) -> Received:
        """COLLECTIVE, stream-ordered. Hand this rank's tokens out.

        Args:
            payload: `[T, H / 2]` or `[T, H]` bytes of rows in the mode's format.
            scales: `[T, H / 32]` bytes.
            ids: `[T, top_k]` int32, global.
            weights: `[T, top_k]` FP32.
        """

    @abstractmethod
    def combine(self, sums: Tensor, ids: Tensor) -> Tensor:
        """COLLECTIVE, stream-ordered. `[T, H]` BF16: for each token of this rank, the sum over the ranks.

        Args:
            sums: `[max_rows, H]` BF16, a row for each token received.
            ids: those of `dispatch`.
        """


class CollectiveExchange(Exchange):
    """Everybody's tokens to everybody, and everybody's sums back: what any process group can do, and no more.

    Args:
        problem: the layer; every call brings num_max_tokens_per_rank tokens.
        group: the ranks; None for one rank.
    """

    name = "unfused_collectives"

    def __init__(self, problem: MoEProblem, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._size = problem.ep_size
        self._rank = 0 if group is None else dist.get_rank(group)
        self.max_rows = problem.ep_size * problem.num_max_tokens_per_rank

    def dispatch(self, payload: Tensor, scales: Tensor, ids: Tensor, weights: Tensor) -> Received:
        """See `Exchange.dispatch`."""
        return Received(
            payload=self._gather(payload),
            scales=self._gather(scales),
            ids=self._gather(ids),
            weights=self._gather(weights),
            num_rows=torch.full((1,), self._size * len(ids), dtype=torch.int32, device=ids.device),
        )

    def combine(self, sums: Tensor, ids: Tensor) -> Tensor:
        """See `Exchange.combine`."""
        if self._group is None:
            return sums
        own = slice(self._rank * len(ids), (self._rank + 1) * len(ids))
        by_rank = self._gather(sums).view(self._size, -1, sums.shape[1])[:, own]
        return by_rank.float().sum(dim=0).bfloat16()

    def _gather(self, tensor: Tensor) -> Tensor:
        """Everybody's tensor, one behind the other."""
        if self._group is None:
            return tensor
        gathered = tensor.new_empty(self._size * len(tensor), *tensor.shape[1:])
        dist.all_gather(list(gathered.chunk(self._size)), tensor.contiguous(), group=self._group)
        return gathered
