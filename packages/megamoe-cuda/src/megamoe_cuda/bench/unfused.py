"""Peer: the layer from public parts, one after the other, as an engine would write it without a fused kernel.

    count and sort picks by expert -> all-to-all of counts (the host waits for them) -> all-to-all of FP8 rows and
    scales -> sort by local expert -> scaled grouped GEMM -> SwiGLU and quantise (Triton) -> scaled grouped GEMM
    -> all-to-all of BF16 rows back -> weighted sum over slots

PyTorch's grouped GEMM takes one scale per row and per output channel, not per block of 128: rows and weights are
quantised so here, outside of the timed part. Bytes and FLOPs are the layer's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from megamoe.formats import FP8_128X128
from megamoe.problem import MoEProblem
from megamoe.tensors import Fp8BlockWeights
from megamoe_cuda.bench.inputs import Inputs

NAME = "unfused: NCCL, torch grouped GEMM, Triton"
ROW_ALIGNMENT = 16  # rows; torch._scaled_grouped_mm wants each group's operand to start at a multiple of 16 bytes
FP8_MAX = 448.0


class UnfusedPeer:
    """One rank.

    Args:
        problem: a8w8, SwiGLU without a limit.
        group: the ranks.
        experts: of this rank, packed.
    """

    def __init__(self, problem: MoEProblem, group: dist.ProcessGroup, experts: Fp8BlockWeights) -> None:
        self._problem = problem
        self._group = group
        w13, self._w13_scale = _per_channel(experts.w13_weight, experts.w13_weight_scale)
        w2, self._w2_scale = _per_channel(experts.w2_weight, experts.w2_weight_scale)
        self._w13, self._w2 = w13.transpose(1, 2), w2.transpose(1, 2)

    def load(self, inputs: Inputs) -> None:
        """Quantise the rows, one scale each, and keep the picks."""
        self._payload, self._row_scale = _quantize_rows(inputs.hidden_states.float())
        self._ids, self._weights = inputs.topk_ids, inputs.topk_weights

    def call(self) -> Tensor:
        """Run the layer; `[T, H]` BF16."""
        problem, num_tokens = self._problem, self._ids.shape[0]
        picks = self._ids.flatten()
        order = picks.argsort(stable=True)
        sent_per_expert = torch.bincount(picks, minlength=problem.num_experts)
        received_per_expert = torch.empty_like(sent_per_expert)
        dist.all_to_all_single(received_per_expert, sent_per_expert, group=self._group)
        by_rank = torch.stack((sent_per_expert, received_per_expert)).view(2, problem.ep_size, -1)
        sent, received = by_rank.sum(-1).tolist()  # the host waits here

        token = order // problem.top_k
        rows = self._exchange(self._payload[token].view(torch.uint8), sent, received).view(torch.float8_e4m3fn)
        scales = self._exchange(self._row_scale[token], sent, received)
        contributions = self._experts(rows, scales, by_rank[1])
        returned = self._exchange(contributions, received, sent)

        by_pick = torch.empty_like(returned)
        by_pick[order] = returned
        by_pick = by_pick.view(num_tokens, problem.top_k, -1).float()
        return (by_pick * self._weights.unsqueeze(-1)).sum(1).bfloat16()

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self._group)
        return out

    def _experts(self, rows: Tensor, scales: Tensor, counts: Tensor) -> Tensor:
        """BF16 `[rows, H]` of received rows, which come by source rank and then by expert; `counts` `[R, E_local]`."""
        num_rows, num_experts = rows.shape[0], counts.shape[1]
        expert = torch.arange(num_experts, device=rows.device).repeat(counts.shape[0])
        expert_of_row = torch.repeat_interleave(expert, counts.flatten(), output_size=num_rows)
        per_expert = (counts.sum(0) + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT
        ends = per_expert.cumsum(0)
        order = expert_of_row.argsort(stable=True)
        sorted_expert = expert_of_row[order]
        rank_in_expert = (
            torch.arange(num_rows, device=rows.device) - (counts.sum(0).cumsum(0) - counts.sum(0))[sorted_expert]
        )
        place = (ends - per_expert)[sorted_expert] + rank_in_expert
        capacity = num_rows + num_experts * ROW_ALIGNMENT  # known to the host without another wait

        x = rows.new_zeros(capacity, rows.shape[1], dtype=torch.uint8)
        x[place] = rows.view(torch.uint8)[order]
        x_scale = scales.new_zeros(capacity)
        x_scale[place] = scales[order]
        offsets = ends.int()
        gate_up = _grouped_gemm(x.view(torch.float8_e4m3fn), self._w13, x_scale, self._w13_scale, offsets)
        a2, a2_scale = swiglu_quantize(gate_up)
        y = _grouped_gemm(a2, self._w2, a2_scale, self._w2_scale, offsets)
        contributions = y.new_empty(num_rows, y.shape[1])
        contributions[order] = y[place]
        return contributions


def _quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3fn and one FP32 scale per row of FP32 `[..., K]`."""
    scale = values.abs().amax(-1).clamp(min=1e-10) / FP8_MAX
    return (values / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale


def _per_channel(payload: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Experts quantised again: e4m3fn `[E, N, K]` and FP32 `[E, N]`."""
    channels = [
        _quantize_rows(FP8_128X128.dequantize(one, its_scale)) for one, its_scale in zip(payload, scale, strict=True)
    ]
    return torch.stack([one for one, _ in channels]), torch.stack([its_scale for _, its_scale in channels])


def _grouped_gemm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor) -> Tensor:
    return torch._scaled_grouped_mm(a, b, a_scale, b_scale, offs=offsets, out_dtype=torch.bfloat16, use_fast_accum=True)


def swiglu_quantize(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3fn `[rows, I]` and FP32 `[rows]` of packed BF16 `[rows, 2I]`: silu(gate) * up, one scale per row."""
    num_rows, inter = gate_up.shape[0], gate_up.shape[1] // 2
    payload = torch.empty(num_rows, inter, dtype=torch.float8_e4m3fn, device=gate_up.device)
    scale = torch.empty(num_rows, device=gate_up.device)
    _swiglu_quantize_kernel[(num_rows,)](gate_up, payload, scale, inter, BLOCK=triton.next_power_of_2(inter))
    return payload, scale


@triton.jit
def _swiglu_quantize_kernel(gate_up, payload, scale, inter, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < inter
    gate = tl.load(gate_up + row * 2 * inter + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inter + inter + column, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    row_scale = tl.maximum(tl.max(tl.abs(value), axis=0), 1e-10) / 448.0
    tl.store(scale + row, row_scale)
    tl.store(payload + row * inter + column, (value / row_scale).to(tl.float8e4nv), mask=inside)
