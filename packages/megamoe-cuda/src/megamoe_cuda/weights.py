"""Experts in the order that the SM90 kernel reads. I' is I rounded up to 128, H' is H rounded up to 256.

    w13_weight        [E_local, 2I', H]  gate and up interleaved by 8 rows: 256 columns of a GEMM1 tile are 128 finished
                                         channels; e4m3fn, or BF16 in mode bf16
    w13_weight_scale  [E_local, 2I / 128, H / 128]  FP32, gate blocks first; a8w8
    w2_weight         [E_local, H, I']
    w2_weight_scale   [E_local, H / 128, I / 128]  FP32; a8w8
    w13_bias          [E_local, 2I']     FP32, interleaved as w13_weight; only where the layer has biases
    w2_bias           [E_local, H']      FP32

What lies past I and H is zero: such channels come out of the activation as 0, and such columns are not sent home.
Every tensor has the expert first and is contiguous, so a slot can be overwritten in place by copying a slice of each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megamoe.errors import LayoutError
from megamoe.layouts import ALTERNATING, INTERLEAVED_8
from megamoe.problem import MoEProblem, QuantMode
from megamoe.schedule.tiles import round_up
from megamoe.tensors import ExpertWeights, Fp8BlockWeights, GateUpLayout, PreparedWeights
from megamoe_cuda.kernel_config import BLOCK_K, BLOCK_N

BACKEND = "cuda"
LAYOUT = "sm90_interleaved_8_v1"
_W13_ROWS = ("w13_weight", "w13_bias")  # tensors with a row per gate and per up


def prepare(weights: ExpertWeights, problem: MoEProblem, device: torch.device) -> PreparedWeights:
    """Lay out one rank's checked experts on `device`. All of it is copied.

    Raises:
        LayoutError: w13 of a8w8 alternates gate and up rows. One scale per 128 rows then covers 64 gates and 64 ups, and
            the kernel has one scale per 128 gates and one per 128 ups.
    """
    if isinstance(weights, Fp8BlockWeights) and weights.layout is not GateUpLayout.PACKED:
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


def _laid_out(weights: ExpertWeights, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights.tensors():
        if name in _W13_ROWS:
            yield name, _interleaved(tensor.to(device), GateUpLayout(weights.layout))
            continue
        # A copy: experts may be moved in place, and that must not reach the checkpoint's tensors.
        copy = tensor.to(device, copy=True, memory_format=torch.contiguous_format)
        if name == "w2_weight":
            copy = _padded(copy, 2, BLOCK_K)
        elif name == "w2_bias":
            copy = _padded(copy, 1, BLOCK_N)
        yield name, copy


def _interleaved(tensor: Tensor, layout: GateUpLayout) -> Tensor:
    """`[E, 2I, ...]` in a checkpoint's order as `[E, 2I', ...]`, gates and ups interleaved by 8 rows."""
    if layout is GateUpLayout.INTERLEAVED:
        tensor = ALTERNATING.invert(tensor)
    if tensor.shape[1] % (2 * BLOCK_K):
        gate, up = tensor.chunk(2, dim=1)
        tensor = torch.cat((_padded(gate, 1, BLOCK_K), _padded(up, 1, BLOCK_K)), dim=1)
    return INTERLEAVED_8.apply(tensor).contiguous()


def _padded(tensor: Tensor, dim: int, multiple: int) -> Tensor:
    """`tensor` with zeros at the end of `dim`, up to a multiple."""
    missing = round_up(tensor.shape[dim], multiple) - tensor.shape[dim]
    if not missing:
        return tensor
    shape = (*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :])
    return torch.cat((tensor, tensor.new_zeros(shape)), dim=dim)


def restore(prepared: PreparedWeights, problem: MoEProblem) -> dict[str, Tensor]:
    """The inverse of `prepare`: tensors in the checkpoint's packed order, for tests and for saving moved experts."""
    hidden, inter = problem.hidden_size, problem.intermediate_size
    tensors = dict(prepared.tensors)
    for name in tensors.keys() & set(_W13_ROWS):
        gate, up = INTERLEAVED_8.invert(tensors[name]).chunk(2, dim=1)
        tensors[name] = torch.cat((gate[:, :inter], up[:, :inter]), dim=1)
    tensors["w2_weight"] = tensors["w2_weight"][..., :inter]
    if "w2_bias" in tensors:
        tensors["w2_bias"] = tensors["w2_bias"][:, :hidden]
    return tensors
