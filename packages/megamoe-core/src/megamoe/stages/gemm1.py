"""GEMM1: gate and up of one expert.

    x [rows, H] FP32 (dequantised activations), w13 [2I, H] FP32 (dequantised, gate rows first)
      -> gate_up [rows, 2I] FP32, gate in columns [0, I)

    gate_up = x @ w13^T + w13_bias

FP32 accumulation (see multiply.py for what that stands for); the bias is FP32 and comes before the activation.
"""

from __future__ import annotations

from torch import Tensor

from megamoe.stages.multiply import multiply


def gemm1(x: Tensor, w13: Tensor, w13_bias: Tensor | None) -> Tensor:
    """Gate and up of one expert's rows; `w13_bias` is `[2I]` FP32 or None. Rows are padded (`multiply.pad_rows`)."""
    gate_up = multiply(x, w13)
    return gate_up if w13_bias is None else gate_up.add_(w13_bias)
