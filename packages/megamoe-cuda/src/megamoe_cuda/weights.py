"""Experts in the order that the SM90 kernel reads.

    w13_weight        [E_local, 2I, H]  e4m3fn, gate and up interleaved by 8 rows: 256 columns of a GEMM1 tile are 128
                                        finished channels
    w13_weight_scale  [E_local, 2I / 128, H / 128]  FP32, gate blocks first
    w2_weight         [E_local, H, I]   e4m3fn
    w2_weight_scale   [E_local, H / 128, I / 128]  FP32
    w13_bias          [E_local, 2I]     FP32, interleaved as w13_weight; only where the layer has biases
    w2_bias           [E_local, H]      FP32

Every tensor has the expert first and is contiguous, so a slot can be overwritten in place by copying a slice of each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megamoe.errors import LayoutError
from megamoe.layouts import INTERLEAVED_8
from megamoe.problem import MoEProblem, QuantMode
from megamoe.tensors import Fp8BlockWeights, GateUpLayout, PreparedWeights

BACKEND = "cuda"
LAYOUT = "sm90_interleaved_8_v1"


def prepare(weights: Fp8BlockWeights, problem: MoEProblem, device: torch.device) -> PreparedWeights:
    """Lay out one rank's checked a8w8 experts on `device`. All of it is copied.

    Raises:
        LayoutError: w13 alternates gate and up rows. One scale per 128 rows then covers 64 gates and 64 ups, and the
            kernel has one scale per 128 gates and one per 128 ups.
    """
    if weights.layout is not GateUpLayout.PACKED:
        raise LayoutError(
            "128x128 scales of alternating gate and up rows do not fit the kernel's blocks",
            got=f'layout "{weights.layout}" with quant mode {problem.quant}',
            expected='layout "packed"',
            hint="reorder the rows before quantising (megamoe.layouts.ALTERNATING.invert), then prepare them as packed",
        )
    return PreparedWeights(
        backend=BACKEND,
        layout=LAYOUT,
        quant=QuantMode(problem.quant),
        num_local_experts=problem.num_local_experts,
        tensors=dict(_laid_out(weights, device)),
    )


def _laid_out(weights: Fp8BlockWeights, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights.tensors():
        if name in ("w13_weight", "w13_bias"):
            yield name, INTERLEAVED_8.apply(tensor.to(device)).contiguous()
        else:
            # A copy: experts may be moved in place, and that must not reach the checkpoint's tensors.
            yield name, tensor.to(device, copy=True, memory_format=torch.contiguous_format)


def restore(prepared: PreparedWeights) -> dict[str, Tensor]:
    """The inverse of `prepare`: tensors in the checkpoint's packed order, for tests and for saving moved experts."""
    return {
        name: INTERLEAVED_8.invert(tensor) if name in ("w13_weight", "w13_bias") else tensor
        for name, tensor in prepared.tensors.items()
    }
