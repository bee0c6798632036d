"""FP8 experts of the unfused block on a GPU: grouped GEMMs of DeepGEMM or of PyTorch, the rest in Triton.

`DeepGemm` rounds where MegaMoE's `a8w8` rounds, but for a BF16 rounding between GEMM1 and the activation.
`TorchGroupedMm` has one scale a row and one an output channel: its weights are rounded once more.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from unfused_block import Layout

from megamoe.formats import FP8_128X128

FP8_MAX = 448.0


class Fp8Math:
    """What both GEMMs share; see `unfused_block.ExpertMath`."""

    alignment: int
    group: int | None  # columns of an activation scale, None: all

    def __init__(self, experts: Any) -> None:
        """Args: `experts`: `FP8Experts` of one rank."""
        self.num_experts: int = experts.gate_up_proj.shape[0]

    def gemm1(self, columns: tuple[Tensor, ...], layout: Layout) -> Tensor:
        """BF16 `[capacity, 2I]`, gates first."""
        raise NotImplementedError

    def gemm2(self, columns: tuple[Tensor, ...], layout: Layout) -> Tensor:
        """BF16 `[capacity, H]`."""
        raise NotImplementedError

    def quantize(self, x: Tensor) -> tuple[Tensor, ...]:
        """e4m3fn payload and FP32 scales."""
        return self._quantize(x, x.shape[1], None, gated=False)

    def arrange(self, columns: tuple[Tensor, ...], source: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        """See `ExpertMath`. Padding is left as it is: no result of it is read."""
        payload, scales = columns
        capacity, num_picks = layout.expert_of_row.shape[0], source.shape[0]
        rows = payload.new_empty(capacity, payload.shape[1])
        row_scales = scales.new_ones(capacity, scales.shape[1])
        if num_picks:
            _arrange_kernel[(num_picks,)](
                payload.view(torch.uint8), scales, source, layout.place, rows.view(torch.uint8), row_scales,
                payload.shape[1], scales.shape[1],
                PAYLOAD=triton.next_power_of_2(payload.shape[1]), SCALES=triton.next_power_of_2(scales.shape[1]),
            )  # fmt: skip
        return rows, row_scales

    def experts(self, columns: tuple[Tensor, ...], layout: Layout) -> Tensor:
        """See `ExpertMath`."""
        gate_up = self.gemm1(columns, layout)
        a2 = self._quantize(gate_up, gate_up.shape[1] // 2, layout.expert_of_row, gated=True)
        return self.gemm2(a2, layout)

    def combine(self, y: Tensor, place: Tensor, weights: Tensor) -> Tensor:
        """See `ExpertMath`; FP32 sums, BF16 results."""
        (num_tokens, top_k), hidden_size, block = place.shape, y.shape[1], 1024
        out = y.new_empty(num_tokens, hidden_size)
        _combine_kernel[(num_tokens, triton.cdiv(hidden_size, block))](
            y, place, weights, out, hidden_size, TOP_K=top_k, BLOCK=block
        )
        return out

    def _quantize(self, x: Tensor, columns: int, expert_of_row: Tensor | None, *, gated: bool) -> tuple[Tensor, Tensor]:
        group = self.group or columns
        payload = torch.empty(x.shape[0], columns, dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty(x.shape[0], columns // group, device=x.device)
        if x.shape[0]:
            _quantize_kernel[(x.shape[0],)](
                x, payload, scales, x if expert_of_row is None else expert_of_row, columns, columns // group, group,
                GROUPS=triton.next_power_of_2(columns // group), GROUP=triton.next_power_of_2(group),
                GATED=gated, PADDED=expert_of_row is not None, num_warps=8,
            )  # fmt: skip
        return payload, scales


class DeepGemm(Fp8Math):
    """`m_grouped_fp8_gemm_nt_contiguous` of the wheel sgl-deep-gemm 0.1.5; scales per 1x128 and 128x128."""

    name = "DeepGEMM"
    group = 128

    def __init__(self, experts: Any) -> None:
        """See `Fp8Math`."""
        super().__init__(experts)
        self._library: Any = importlib.import_module("deep_gemm")
        self.alignment = int(self._library.get_mk_alignment_for_contiguous_layout())
        self._w13 = (experts.gate_up_proj.data, experts.gate_up_proj_scale_inv.data)
        self._w2 = (experts.down_proj.data, experts.down_proj_scale_inv.data)

    def gemm1(self, columns: tuple[Tensor, ...], layout: Layout) -> Tensor:
        """See `Fp8Math`."""
        return self._gemm(columns, self._w13, layout)

    def gemm2(self, columns: tuple[Tensor, ...], layout: Layout) -> Tensor:
        """See `Fp8Math`."""
        return self._gemm(columns, self._w2, layout)

    def _gemm(self, columns: tuple[Tensor, ...], weights: tuple[Tensor, Tensor], layout: Layout) -> Tensor:
        out = torch.empty(columns[0].shape[0], weights[0].shape[1], dtype=torch.bfloat16, device=columns[0].device)
        self._library.m_grouped_fp8_gemm_nt_contiguous(columns, weights, out, layout.expert_of_row)
        return out


class TorchGroupedMm(Fp8Math):
    """`torch._scaled_grouped_mm`; scales per row and per output channel."""

    name = "torch grouped GEMM"
    alignment = 16  # rows: each group's operand has to start at a multiple of 16 bytes
    group = None

    def __init__(self, experts: Any) -> None:
        """See `Fp8Math`."""
        super().__init__(experts)
        self._w13 = _per_channel(experts.gate_up_proj.data, experts.gate_up_proj_scale_inv.data)
        self._w2 = _per_channel(experts.down_proj.data, experts.down_proj_scale_inv.data)

    def gemm1(self, columns: tuple[Tensor, ...], layout: Layout) -> Tensor:
        """See `Fp8Math`."""
        return _scaled_grouped_mm(columns, self._w13, layout)

    def gemm2(self, columns: tuple[Tensor, ...], layout: Layout) -> Tensor:
        """See `Fp8Math`."""
        return _scaled_grouped_mm(columns, self._w2, layout)


def _scaled_grouped_mm(columns: tuple[Tensor, ...], weights: tuple[Tensor, Tensor], layout: Layout) -> Tensor:
    return torch._scaled_grouped_mm(
        columns[0], weights[0].transpose(1, 2), columns[1].flatten(), weights[1],
        offs=layout.ends, out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip


def _per_channel(payload: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Experts rounded again, one scale an output channel: e4m3fn `[E, N, K]` and FP32 `[E, N]`."""
    channels, channel_scales = torch.empty_like(payload), scales.new_empty(payload.shape[:2])
    for expert in range(payload.shape[0]):
        values = FP8_128X128.dequantize(payload[expert], scales[expert])
        scale = values.abs().amax(-1).clamp(min=1e-10) / FP8_MAX
        channels[expert], channel_scales[expert] = (values / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale
    return channels, channel_scales


@triton.jit
def _quantize_kernel(
    x, payload, scales, expert_of_row, columns, groups, group,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    g, c = tl.arange(0, GROUPS)[:, None], tl.arange(0, GROUP)[None, :]
    num_groups = groups
    if PADDED:
        num_groups = tl.where(tl.load(expert_of_row + row) >= 0, groups, 0)
    inside = (g < num_groups) & (c < group)
    column = g * group + c
    if GATED:
        gate = tl.load(x + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * columns + columns + column, mask=inside, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up
    else:
        value = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), axis=1), 1e-10) / 448.0
    which = tl.arange(0, GROUPS)
    tl.store(scales + row * groups + which, scale, mask=which < num_groups)
    tl.store(payload + row * columns + column, (value / scale[:, None]).to(tl.float8e4nv), mask=inside)


@triton.jit
def _arrange_kernel(
    payload, scales, source, place, rows, row_scales, columns, groups, PAYLOAD: tl.constexpr, SCALES: tl.constexpr
):
    pick = tl.program_id(0).to(tl.int64)
    to, row = tl.load(place + pick), tl.load(source + pick)
    c, s = tl.arange(0, PAYLOAD), tl.arange(0, SCALES)
    here = c < tl.where(to >= 0, columns, 0)
    tl.store(rows + to * columns + c, tl.load(payload + row * columns + c, mask=here, other=0), mask=here)
    here = s < tl.where(to >= 0, groups, 0)
    tl.store(row_scales + to * groups + s, tl.load(scales + row * groups + s, mask=here, other=1.0), mask=here)


@triton.jit
def _combine_kernel(y, place, weights, out, hidden_size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in range(TOP_K):
        row = tl.load(place + token * TOP_K + k)
        weight = tl.load(weights + token * TOP_K + k)
        here = c < tl.where(row >= 0, hidden_size, 0)
        total += weight * tl.load(y + row * hidden_size + c, mask=here, other=0.0).to(tl.float32)
    tl.store(out + token * hidden_size + c, total.to(tl.bfloat16), mask=c < hidden_size)
