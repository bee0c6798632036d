"""Mori's own dispatch and combine (`mori.ops.EpDispatchCombineOp`) as the exchange of the unfused pipeline.

A token travels once to each rank that has one of its experts, packed, with its scales; what comes back is that rank's
sum, in BF16 or, over the FP8 transport, by Mori's blockwise FP8 combine (FP32 scales, here a block of 128 columns).

Facts, amd-mori 1.2.4 (mori/ops/dispatch_combine.py and src/ops/dispatch_combine/dispatch_combine.cpp in its wheel):

- `EpDispatchCombineOp(config)` is collective over torch's default process group, after Mori's initialisation; ranks per
  node are a power of two. Its buffers come from Mori's heap: two of max_num_inp_token_per_rank * world_size rows of
  `hidden_dim * max_token_type_size` bytes, one of max_num_inp_token_per_rank, and what belongs to a row.
- `dispatch(input, weights, scales, indices)` takes rows of a dtype whose kernel it has, MXFP4 as float4_e2m1fn_x2 of
  H / 2 items, int32 ids, and returns views of fixed buffers: rows, weights, scales, ids, and how many rows came.
- `combine(input, None, indices)` adds the rows of a token's ranks without weights; `indices` are those of this rank's
  own dispatch. `call_reset=True` is what Mori's guide asks for before the next dispatch; here it does nothing, and
  the ranks' barrier counts on the device, so a captured call can be replayed.
- The blockwise FP8 combine takes the blocks of a row from MORI_FP8_COMBINE_SCALE_DIM when the operator is made.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import Tensor

from megamoe.errors import BackendUnavailableError, ConfigError
from megamoe.problem import MoEProblem, QuantMode, Transport
from megamoe_rocm.unfused.exchange import Exchange, Received

MX_BLOCK = 32
COMBINE_BLOCK = 128  # columns under one scale of Mori's blockwise combine, of its specialised kernels
COMBINE_SCALES = "MORI_FP8_COMBINE_SCALE_DIM"
LAUNCH_CONFIG = "MORI_EP_LAUNCH_CONFIG_MODE"
BF16_BYTES, PICK_BYTES, NUMBER_BYTES = 2, 8, 4  # of an element; of a pick, id and weight; of a word of an order map
TOKEN_BUFFERS = 3  # of all ranks' rows, at most
SMALL_BUFFERS = 16 << 20  # flags, counters and alignment: about twenty allocations


class MoriExchange(Exchange):
    """One rank's operator; Mori is initialised already (`megamoe_rocm.symm_mori`).

    Args:
        problem: the layer.
        rank: this rank, Mori's number of it.

    Raises:
        BackendUnavailableError: Mori's operators are missing.
        ConfigError: a number of ranks that they do not take.
    """

    name = "unfused_mori"

    def __init__(self, problem: MoEProblem, rank: int) -> None:
        """COLLECTIVE over torch's default process group."""
        if problem.ep_size & (problem.ep_size - 1):
            raise ConfigError("Mori's dispatch takes a power of two of ranks", got=problem.ep_size)
        ops = load_ops()
        self._dtype = _row_dtype(problem.quant)
        self.max_rows = problem.ep_size * problem.num_max_tokens_per_rank
        fp8 = problem.transport is Transport.FP8_BLOCKWISE_1X32
        os.environ.setdefault(LAUNCH_CONFIG, "AUTO")  # launches as Mori's authors have tuned them
        os.environ[COMBINE_SCALES] = str(max(problem.hidden_size // COMBINE_BLOCK, 1))
        self._op: Any = ops.EpDispatchCombineOp(
            ops.EpDispatchCombineConfig(
                data_type=self._dtype,
                rank=rank,
                world_size=problem.ep_size,
                hidden_dim=problem.hidden_size,
                scale_dim=problem.hidden_size // MX_BLOCK,
                scale_type_size=1,
                max_token_type_size=BF16_BYTES,
                max_num_inp_token_per_rank=problem.num_max_tokens_per_rank,
                num_experts_per_rank=problem.num_local_experts,
                num_experts_per_token=problem.top_k,
                kernel_type=ops.EpDispatchCombineKernelType.IntraNode,
                gpu_per_node=problem.ep_size,
                quant_type="fp8_blockwise" if fp8 else "none",
            )
        )

    def dispatch(self, payload: Tensor, scales: Tensor, ids: Tensor, weights: Tensor) -> Received:
        """See `Exchange.dispatch`."""
        rows, row_weights, row_scales, row_ids, num_rows = self._op.dispatch(
            payload.view(self._dtype), weights, scales, ids
        )
        return Received(
            payload=rows.view(torch.uint8), scales=row_scales, ids=row_ids, weights=row_weights, num_rows=num_rows
        )

    def combine(self, sums: Tensor, ids: Tensor) -> Tensor:
        """See `Exchange.combine`."""
        out, _ = self._op.combine(sums, None, ids, call_reset=True)
        rows: Tensor = out[: len(ids)]
        return rows


def heap_bytes(problem: MoEProblem) -> int:
    """What an operator takes of Mori's heap."""
    max_rows = problem.ep_size * problem.num_max_tokens_per_rank
    row = problem.hidden_size * BF16_BYTES + problem.hidden_size // MX_BLOCK + problem.top_k * PICK_BYTES
    order_maps = max_rows * problem.num_local_experts * NUMBER_BYTES
    return max_rows * row * TOKEN_BUFFERS + order_maps + SMALL_BUFFERS


def load_ops() -> Any:
    """`mori.ops`.

    Raises:
        BackendUnavailableError: it can't be loaded.
    """
    try:
        return importlib.import_module("mori.ops")
    except (ImportError, OSError) as error:  # OSError where ROCm's libraries are missing
        raise BackendUnavailableError(
            f"Mori's operators can't be loaded: {type(error).__name__}: {error}",
            hint="pip install megamoe-rocm[mori]; an OSError means that it misses ROCm's libraries",
        ) from error


def _row_dtype(quant: QuantMode | str) -> torch.dtype:
    if quant != QuantMode.A4W4:
        return torch.float8_e4m3fn
    fp4: torch.dtype | None = getattr(torch, "float4_e2m1fn_x2", None)
    if fp4 is None:
        raise BackendUnavailableError(
            "this PyTorch has no float4_e2m1fn_x2, as which Mori moves MXFP4 rows",
            got=torch.__version__,
            hint="install PyTorch 2.8 or newer",
        )
    return fp4
