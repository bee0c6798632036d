"""What stands between the stages, read back from a workspace whose ring held every block of the last call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megamoe.backend import StageTaps
from megamoe.formats import Quantized, activation_format
from megamoe.layouts import INTERLEAVED_8
from megamoe.problem import MoEProblem
from megamoe.schedule.tiles import round_up
from megamoe.schedule.workspace import META_BYTES, WorkspaceLayout
from megamoe_cuda.kernel_config import BLOCK_K


def read_taps(
    problem: MoEProblem,
    layout: WorkspaceLayout,
    workspace: Tensor,
    gate_up: Tensor,
    counts: Sequence[int],
    block_m: int,
) -> StageTaps | None:
    """One rank's taps; None where it received no rows. Copies.

    Args:
        problem: the layer.
        layout: of `workspace`.
        workspace: uint8, this rank's.
        gate_up: `[rows, 2I']` FP32, gate and up interleaved by 8 columns, I' = I rounded up to 128; the received rows
            without padding between experts, then whatever.
        counts: rows that each local expert received.
        block_m: rows of a block of the kernel that ran.
    """
    if not sum(counts):
        return None
    rows = pool_rows(counts, block_m).to(workspace.device)
    fmt = activation_format(problem.quant, problem.act_format)
    inter = problem.intermediate_size
    padded = round_up(inter, BLOCK_K)
    gate, up = INTERLEAVED_8.invert(gate_up[: len(rows)]).chunk(2, dim=1)
    meta = _array(layout, workspace, "pool_meta").view(torch.int32).view(-1, META_BYTES // 4)[rows]
    payload = _array(layout, workspace, "a2_payload").view(-1, padded * fmt.payload_dtype.itemsize)[rows]
    experts = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), torch.tensor(counts))
    return StageTaps(
        src_rank=meta[:, 0].clone(),
        src_pick=meta[:, 1].clone(),
        local_expert=experts.to(workspace.device),
        gate_up=torch.cat((gate[:, :inter], up[:, :inter]), dim=1),
        a2=Quantized(
            payload=payload.view(fmt.payload_dtype)[:, :inter].contiguous(),
            scales=None if fmt.scale_dtype is None else _scales(layout, workspace, padded // BLOCK_K, block_m)[rows],
            fmt=fmt,
        ),
    )


def pool_rows(counts: Sequence[int], block_m: int) -> Tensor:
    """Ring rows of all valid rows in order: an expert starts a block, and a block's last rows may be padding."""
    rows, first = [], 0
    for count in counts:
        rows.append(torch.arange(first, first + count))
        first += -(-count // block_m) * block_m
    return torch.cat(rows)


def _scales(layout: WorkspaceLayout, workspace: Tensor, k_blocks: int, block_m: int) -> Tensor:
    """`[ring rows, I / 128]` FP32; in memory, a block of rows is `[I / 128][block_m]`."""
    words = _array(layout, workspace, "a2_scales").view(torch.float32)
    num_blocks = words.numel() // (k_blocks * block_m)
    blocks = words[: num_blocks * k_blocks * block_m].view(num_blocks, k_blocks, block_m)
    return blocks.transpose(1, 2).reshape(num_blocks * block_m, k_blocks)


def _array(layout: WorkspaceLayout, workspace: Tensor, name: str) -> Tensor:
    array = layout[name]
    return workspace[array.offset : array.offset + array.num_bytes]
