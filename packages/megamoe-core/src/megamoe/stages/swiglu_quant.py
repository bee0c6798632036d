"""SwiGLU and requantisation: what stands between the two GEMMs.

    gate_up  [rows, 2I] FP32, packed (gate columns first), biases already added
      -> activation(gate, up)     [rows, I] FP32
      -> A2: payload and scales in the quant mode's activation format

There is no BF16 rounding in between. The fused kernels do this in GEMM1's epilogue, on registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.formats import ActivationFormat, Quantized
from megamoe.problem import Activation, MoEProblem

GPT_OSS_ALPHA = 1.702  # openai/gpt-oss, torch reference, swiglu(); sigmoid(1.702 x) approximates the normal CDF
GPT_OSS_BETA = 1.0  # added to up


@dataclass(frozen=True, kw_only=True)
class SwiGLU:
    """gate * sigmoid(alpha * gate) * (up + beta), with an optional clamp; the defaults are silu(gate) * up.

    Args:
        limit: L bounds gate from above and up on both sides before the activation; DeepSeek-V4-Pro uses 10,
            gpt-oss 7.
        alpha: 1, or 1.702 for gpt-oss.
        beta: 0, or 1 for gpt-oss.
    """

    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0

    @classmethod
    def of(cls, problem: MoEProblem) -> SwiGLU:
        """The activation that `problem` names."""
        if problem.activation is Activation.SWIGLU_OAI:
            return cls(limit=problem.swiglu_limit, alpha=GPT_OSS_ALPHA, beta=GPT_OSS_BETA)
        return cls(limit=problem.swiglu_limit)

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """FP32 in, FP32 out, elementwise."""
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
            up = up.clamp(min=-self.limit, max=self.limit)
        if self.alpha == 1.0 and self.beta == 0.0:
            return torch.nn.functional.silu(gate) * up
        return gate * torch.sigmoid(gate * self.alpha) * (up + self.beta)


def swiglu_quant(gate_up: Tensor, activation: SwiGLU, fmt: ActivationFormat) -> Quantized:
    """Apply the activation and quantise the result row by row.

    Args:
        gate_up: `[rows, 2I]` FP32 accumulators of GEMM1, biases already added; gate in columns `[0, I)`.
        activation: the layer's variant.
        fmt: the mode's activation format; its granule must divide `I`.

    Returns:
        payload `[rows, I]` (packed two to a byte for e2m1) and scales `[rows, I / fmt.block]`, rounded up.

    A row never sees another row: a NaN stays where it was born.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return fmt.quantize(activation(gate, up))
