"""What stood between the stages of a call, read back from a rank's workspace, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.backend import StageTaps
from megamoe.formats import Quantized, activation_format
from megamoe.layouts import BLOCKS_16, SCALE_SHUFFLE
from megamoe.problem import MoEProblem
from megamoe.schedule.waves import Ring
from megamoe_rocm.kernels.workspace import RankMemory


def read_taps(problem: MoEProblem, memory: RankMemory, ring: Ring, gate_up: Tensor) -> StageTaps | None:
    """Taps of the last call, None if the rank received no rows.

    Args:
        problem: the layer.
        memory: the rank's workspace.
        ring: of the call; it held all blocks.
        gate_up: `[ring rows, 2I]` FP32, accumulators that the call stored, in the order BLOCKS_16.
    """
    num_blocks = int(memory.words("num_blocks").item())
    if not num_blocks:
        return None
    assert num_blocks <= ring.ring_blocks, "blocks have overwritten each other"
    fmt = activation_format(problem.quant, problem.act_format)
    inter = problem.intermediate_size
    table = memory.words("block_table").view(-1, 4)[:num_blocks].long().cpu()
    num_rows = table[:, 2]
    rows = torch.cat([torch.arange(int(num)) + slot * ring.block_m for slot, num in enumerate(num_rows)])
    rows = rows.to(gate_up.device)
    meta = memory.words("pool_meta").view(-1, 4)[rows]
    payload = memory.bytes("a2_payload")[rows][:, : fmt.payload_bytes(inter)]
    return StageTaps(
        src_rank=meta[:, 0].clone(),
        src_pick=meta[:, 1].clone(),
        local_expert=table[:, 0].repeat_interleave(num_rows).int().to(gate_up.device),
        gate_up=BLOCKS_16.invert(gate_up[rows].unsqueeze(-1))[..., 0],
        a2=Quantized(
            payload=payload.view(fmt.payload_dtype), scales=_scales(memory, ring, inter)[rows].contiguous(), fmt=fmt
        ),
    )


def _scales(memory: RankMemory, ring: Ring, columns: int) -> Tensor:
    """`[ring rows, columns / 32]` of slots whose scales are in operand order."""
    stored = memory.bytes("a2_scales")[: ring.num_rows].reshape(ring.ring_blocks, -1)
    slots = stored[:, : ring.block_m * columns // 32].reshape(ring.ring_blocks, ring.block_m, columns // 32)
    return SCALE_SHUFFLE.invert(slots).flatten(0, 1)
