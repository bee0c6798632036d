"""Experts in the order in which gfx950's MFMA reads them.

w13  gate/up in 16-row blocks, preshuffled 16x16; scales in operand order
w2   preshuffled 16x16; scales in operand order
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megamoe.formats import e8m0
from megamoe.layouts import ALTERNATING, BLOCKS_16, PACKED, PRESHUFFLE_16X16, SCALE_SHUFFLE, Composed, Layout
from megamoe.problem import MoEProblem
from megamoe.tensors import GateUpLayout, Mxfp4Weights, PreparedWeights

BACKEND = "rocm"
LAYOUT = "gfx950-1"

_CHECKPOINT: Mapping[GateUpLayout, Layout] = {GateUpLayout.PACKED: PACKED, GateUpLayout.INTERLEAVED: ALTERNATING}
_KERNEL: Mapping[str, Layout] = {
    "w13_weight": Composed(layouts=(BLOCKS_16, PRESHUFFLE_16X16)),
    "w13_weight_scale": Composed(layouts=(BLOCKS_16, SCALE_SHUFFLE)),
    "w13_bias": BLOCKS_16,
    "w2_weight": PRESHUFFLE_16X16,
    "w2_weight_scale": SCALE_SHUFFLE,
}


def prepare(weights: Mxfp4Weights, problem: MoEProblem) -> PreparedWeights:
    """Lay out the experts of one rank, on the device that they are on. All of it is copied: experts may be moved in
    place, and that must not reach the checkpoint's tensors.

    Raises:
        LayoutError: a size that the layouts can't hold: H and I must be multiples of 256.
    """
    tensors = {}
    for name, tensor in weights.tensors():
        if name.endswith("_scale"):
            tensor = e8m0.as_bytes(tensor)
        if name.startswith("w13"):
            tensor = _CHECKPOINT[GateUpLayout(weights.layout)].invert(tensor)
        if name in _KERNEL:  # no tensor stays in the order that it is in
            tensors[name] = _KERNEL[name].apply(tensor).contiguous()
        else:
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
    return PreparedWeights.of(problem, backend=BACKEND, layout=LAYOUT, tensors=tensors)
