"""Experts in the order that the SM90 kernel reads. I' is I rounded up to 128, H' is H rounded up to 256.

    w13_weight        [E_local, 2I', H]  gate and up interleaved by 8 rows: 256 columns of a GEMM1 tile are 128 finished
                                         channels; e4m3fn, or BF16 in mode bf16
    w13_weight_scale  [E_local, 2I / 128, H / 128]  FP32, gate blocks first; not in mode bf16
    w2_weight         [E_local, H, I']
    w2_weight_scale   [E_local, H / 128, I / 128]  FP32; not in mode bf16
    w13_bias          [E_local, 2I']     FP32, interleaved as w13_weight; only where the layer has biases
    w2_bias           [E_local, H']      FP32

In mode a8w4 the weights are uint8 stages, `[E_local, 2I' / 256, H / 128, 17408]` and `[E_local, H' / 256, I' / 128,
17408]`, and the scales are the base scales of their 128 x 128 blocks (fp4_stages.py).

What lies past I and H is zero: such channels come out of the activation as 0, and such columns are not sent home.
Every tensor has the expert first and is contiguous, so a slot can be overwritten in place by copying a slice of each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megamoe.errors import LayoutError
from megamoe.formats import e8m0
from megamoe.formats.mxfp8 import MX_BLOCK
from megamoe.layouts import ALTERNATING, INTERLEAVED_8
from megamoe.problem import MoEProblem, QuantMode
from megamoe.schedule.tiles import ceil_div, round_up
from megamoe.tensors import ExpertWeights, Fp8BlockWeights, GateUpLayout, Mxfp4Weights, PreparedWeights
from megamoe_cuda import fp4_stages
from megamoe_cuda.kernel_config import BLOCK_K, BLOCK_N

BACKEND = "cuda"
LAYOUT = "sm90_interleaved_8_v2"
_W13_ROWS = ("w13_weight", "w13_bias")  # tensors with a row per gate and per up


def prepare(weights: ExpertWeights, problem: MoEProblem, device: torch.device) -> PreparedWeights:
    """Lay out one rank's checked experts on `device`. All of it is copied.

    Raises:
        LayoutError: w13 of a8w8 alternates gate and up rows. One scale per 128 rows then covers 64 gates and 64 ups,
            and the kernel has one scale per 128 gates and one per 128 ups.
        FormatError: MXFP4 scales that are too far apart (fp4_stages.py).
    """
    if isinstance(weights, Fp8BlockWeights) and weights.layout is not GateUpLayout.PACKED:
        raise LayoutError(
            "128x128 scales of alternating gate and up rows do not fit the kernel's blocks",
            got=f'layout "{weights.layout}" with quant mode {problem.quant}',
            expected='layout "packed"',
            hint="reorder the rows before quantising (megamoe.layouts.ALTERNATING.invert), then prepare them as packed",
        )
    return PreparedWeights.of(
        problem,
        backend=BACKEND,
        layout=LAYOUT,
        tensors=dict(_packed(weights, device) if isinstance(weights, Mxfp4Weights) else _laid_out(weights, device)),
    )


def _laid_out(weights: ExpertWeights, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights.tensors():
        yield name, _laid_out_tensor(name, tensor, weights, device)


def _laid_out_tensor(name: str, tensor: Tensor, weights: ExpertWeights, device: torch.device) -> Tensor:
    if name in _W13_ROWS:
        return INTERLEAVED_8.apply(_packed_rows(tensor.to(device), weights)).contiguous()
    # A copy: experts may be moved in place, and that must not reach the checkpoint's tensors.
    copy = tensor.to(device, copy=True, memory_format=torch.contiguous_format)
    if name == "w2_weight":
        return _padded(copy, 2, BLOCK_K)
    return _padded(copy, 1, BLOCK_N) if name == "w2_bias" else copy


def _packed(weights: Mxfp4Weights, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """MXFP4 experts as stages, one expert at a time: what lies between takes eight times the memory of its codes."""
    w13 = _packed_rows(weights.w13_weight.to(device), weights)
    w13_scale = _packed_rows(weights.w13_weight_scale.view(torch.uint8).to(device), weights)
    for name, codes, scales in (
        ("w13_weight", w13, w13_scale),
        ("w2_weight", weights.w2_weight.to(device), weights.w2_weight_scale.view(torch.uint8).to(device)),
    ):
        experts = [
            _packed_expert(expert, its_scales, f"{name} of local expert {index}")
            for index, (expert, its_scales) in enumerate(zip(codes, scales, strict=True))
        ]
        yield name, torch.stack([stages for stages, _ in experts])
        yield f"{name}_scale", torch.stack([base for _, base in experts])
    for name, tensor in weights.tensors():
        if name.endswith("_bias"):
            yield name, _laid_out_tensor(name, tensor, weights, device)


def _packed_expert(codes: Tensor, scales: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Stages and FP32 base scales of one matrix `[N, K]`, in packed order if it is w13."""
    base_rows = ceil_div(codes.shape[0], fp4_stages.HALF_ROWS)
    codes = _padded(_padded(codes, 1, BLOCK_K // 2), 0, BLOCK_N)
    scales = _padded(_padded(scales, 1, fp4_stages.BLOCKS), 0, BLOCK_N)
    base = fp4_stages.base_bytes(codes, scales, what)
    entries = fp4_stages.table_entries(codes, scales, base)
    if what.startswith("w13"):
        codes, entries = (INTERLEAVED_8.apply(tensor.unsqueeze(0)).squeeze(0) for tensor in (codes, entries))
    return fp4_stages.pack_stages(codes, entries), e8m0.decode(base[:base_rows].to(torch.uint8))


def _packed_rows(tensor: Tensor, weights: ExpertWeights) -> Tensor:
    """`[E, 2I, ...]` in the checkpoint's order as `[E, 2I', ...]`, gates first."""
    if weights.layout is GateUpLayout.INTERLEAVED:
        tensor = ALTERNATING.invert(tensor)
    if tensor.shape[1] % (2 * BLOCK_K):
        gate, up = tensor.chunk(2, dim=1)
        tensor = torch.cat((_padded(gate, 1, BLOCK_K), _padded(up, 1, BLOCK_K)), dim=1)
    return tensor


def _padded(tensor: Tensor, dim: int, multiple: int) -> Tensor:
    """`tensor` with zeros at the end of `dim`, up to a multiple."""
    missing = round_up(tensor.shape[dim], multiple) - tensor.shape[dim]
    if not missing:
        return tensor
    shape = (*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :])
    return torch.cat((tensor, tensor.new_zeros(shape)), dim=dim)


def restore(prepared: PreparedWeights, problem: MoEProblem) -> dict[str, Tensor]:
    """The inverse of `prepare`: tensors in the checkpoint's packed order, for tests and for saving moved experts.

    Of MXFP4 weights, the scale of a block of 32 zeros is lost: it comes back as another.
    """
    hidden, inter = problem.hidden_size, problem.intermediate_size
    tensors = dict(prepared.tensors)
    if prepared.quant is QuantMode.A8W4:
        for name, columns in (("w13_weight", hidden), ("w2_weight", inter)):
            tensors |= _unpacked(name, prepared, columns)
        for name in ("w2_weight", "w2_weight_scale"):
            tensors[name] = tensors[name][:, :hidden]
    else:
        tensors["w13_weight"] = INTERLEAVED_8.invert(tensors["w13_weight"])
        tensors["w2_weight"] = tensors["w2_weight"][..., :inter]
    if problem.expert_bias:
        tensors["w13_bias"] = INTERLEAVED_8.invert(tensors["w13_bias"])
        tensors["w2_bias"] = tensors["w2_bias"][:, :hidden]
    if inter % BLOCK_K:
        for name in tensors.keys() & {"w13_weight", "w13_weight_scale", "w13_bias"}:
            gate, up = tensors[name].chunk(2, dim=1)
            tensors[name] = torch.cat((gate[:, :inter], up[:, :inter]), dim=1)
    return tensors


def _unpacked(name: str, prepared: PreparedWeights, columns: int) -> dict[str, Tensor]:
    """MXFP4 codes and scales of one matrix of every expert; w13's rows with gates first."""
    experts = []
    for stages, base in zip(prepared.tensors[name], prepared.tensors[f"{name}_scale"], strict=True):
        codes, entries = fp4_stages.unpack_stages(stages)
        if name == "w13_weight":
            codes, entries = (INTERLEAVED_8.invert(tensor.unsqueeze(0)).squeeze(0) for tensor in (codes, entries))
        scales = fp4_stages.own_bytes(entries[: len(base) * fp4_stages.HALF_ROWS], base)
        experts.append((codes[:, : columns // 2], scales[:, : columns // MX_BLOCK]))
    codes, scales = (torch.stack(parts) for parts in zip(*experts, strict=True))
    return {name: codes, f"{name}_scale": scales}
