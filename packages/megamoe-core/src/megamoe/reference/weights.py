"""Experts as FP32 operands.

The reference keeps experts as the checkpoint has them, quantised and in the checkpoint's row order, and dequantises one
matrix at a time: a copy of the whole layer would double a rank's memory.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from megamoe.formats import BlockFormat, Quantized, weight_format
from megamoe.layouts import ALTERNATING, PACKED, Layout
from megamoe.problem import MoEProblem
from megamoe.tensors import ExpertWeights, GateUpLayout

_ORDER: Mapping[GateUpLayout, Layout] = {GateUpLayout.PACKED: PACKED, GateUpLayout.INTERLEAVED: ALTERNATING}
_W13_NAMES = ("w13_weight", "w13_weight_scale", "w13_bias")


def named_tensors(weights: ExpertWeights) -> dict[str, Tensor]:
    """The tensors of `weights`, not copied; names of w13's say its row order, as in "w13_weight.alternating"."""
    order = _ORDER[GateUpLayout(weights.layout)].name
    return {f"{name}.{order}" if name in _W13_NAMES else name: tensor for name, tensor in weights.tensors()}


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertReader:
    """Reads single experts of a rank as FP32, gate rows first.

    Args:
        fmt: the weights' format.
        tensors: made by `named_tensors`.
    """

    fmt: BlockFormat
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, problem: MoEProblem, tensors: Mapping[str, Tensor]) -> ExpertReader:
        """A reader of weights in the mode of `problem`."""
        return cls(fmt=weight_format(problem.quant), tensors=tensors)

    def w13(self, local_expert_idx: int) -> Tensor:
        """`[2I, H]` FP32. Dequantised before its rows are ordered: a scale may cover several rows."""
        order = self._order()
        weight = self._dequantize(f"w13_weight.{order.name}", f"w13_weight_scale.{order.name}", local_expert_idx)
        return order.invert(weight.unsqueeze(0)).squeeze(0)

    def w2(self, local_expert_idx: int) -> Tensor:
        """`[H, I]` FP32."""
        return self._dequantize("w2_weight", "w2_weight_scale", local_expert_idx)

    def w13_bias(self, local_expert_idx: int) -> Tensor | None:
        """`[2I]` FP32, or None."""
        order = self._order()
        bias = self.tensors.get(f"w13_bias.{order.name}")
        return None if bias is None else order.invert(bias[local_expert_idx].unsqueeze(0)).squeeze(0)

    def w2_bias(self, local_expert_idx: int) -> Tensor | None:
        """`[H]` FP32, or None."""
        bias = self.tensors.get("w2_bias")
        return None if bias is None else bias[local_expert_idx]

    def _order(self) -> Layout:
        return next(order for order in _ORDER.values() if f"w13_weight.{order.name}" in self.tensors)

    def _dequantize(self, payload: str, scales: str, local_expert_idx: int) -> Tensor:
        scale = self.tensors.get(scales)
        return Quantized(
            payload=self.tensors[payload][local_expert_idx],
            scales=None if scale is None else scale[local_expert_idx],
            fmt=self.fmt,
        ).dequantize()


class MatrixCache:
    """The matrices that were used last, so that an expert is dequantised once per call and not once per block.

    Workers go through a rank's blocks in nearly the same order, so a few matrices are enough.

    Args:
        size: matrices to keep: one per thread, and one more for the step to the next expert.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._matrices: OrderedDict[tuple[str, int, int], Tensor] = OrderedDict()

    def get(self, name: str, rank: int, local_expert_idx: int, read: Callable[[int], Tensor]) -> Tensor:
        """The matrix, from the cache or by `read(local_expert_idx)`; others wait, they often want the same."""
        key = (name, rank, local_expert_idx)
        with self._lock:
            matrix = self._matrices.pop(key, None)
            if matrix is None:
                while len(self._matrices) >= self._size:
                    self._matrices.popitem(last=False)
                matrix = read(local_expert_idx)
            self._matrices[key] = matrix
            return matrix
