"""GEMM2: one expert's output rows, weighted.

    a2 [rows, I] FP32 (dequantised), w2 [H, I] FP32 (dequantised), router weight [rows] FP32
      -> contribution [rows, H] FP32

    contribution = (a2 @ w2^T + w2_bias) * topk_weight

The router weight is applied exactly once, here, to the FP32 accumulator: after the bias, before the transport rounds.
"""

from __future__ import annotations

from torch import Tensor

from megamoe.stages.multiply import multiply


def gemm2(a2: Tensor, w2: Tensor, w2_bias: Tensor | None, topk_weights: Tensor) -> Tensor:
    """Weighted rows of one expert; `w2_bias` is `[H]` FP32 or None, `topk_weights` `[rows]` FP32. Rows are padded."""
    y = multiply(a2, w2)
    if w2_bias is not None:
        y.add_(w2_bias)
    return y.mul_(topk_weights.unsqueeze(1))
