"""A rank's experts over the tokens that it received, kernel by kernel; nothing waits for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon

from megamoe.formats import activation_format
from megamoe.problem import Activation, MoEProblem, QuantMode
from megamoe.schedule.tiles import ceil_div
from megamoe_rocm.heuristics import SCALE_BLOCK_COLUMNS, TileConfig
from megamoe_rocm.kernels.launch import COLUMNS, EXPERTS, PICKS, ROWS, Launch, MainLoop, Target
from megamoe_rocm.kernels.unfused import (
    expert_gemm1,
    expert_gemm2,
    gather_rows,
    place_picks,
    plan_experts,
    sum_picks,
)
from megamoe_rocm.unfused.exchange import Received

BLOCKS = 64  # blocks that planning handles at a time
SCALES = 256  # bytes of scales of a row that a program of the gather moves, with the payload of as many blocks of 32


class Experts:
    """The experts of one rank.

    Args:
        problem: the layer; without expert biases, which no pipeline that this stands for has.
        rank: whose experts.
        max_rows: tokens received at most.
        tile: of the GEMMs: rows, columns and waves of GEMM1's and GEMM2's tiles.
        num_programs: of a GEMM's persistent launch.
        target: what runs the launches.
        device: where tensors are.
    """

    def __init__(
        self,
        problem: MoEProblem,
        *,
        rank: int,
        max_rows: int,
        tile: TileConfig,
        num_programs: int,
        target: Target,
        device: torch.device,
    ) -> None:
        self._problem = problem
        self._first_expert = rank * problem.num_local_experts
        self._max_rows = max_rows
        self._tile = tile
        self._num_programs = num_programs
        self._target = target
        fmt = activation_format(problem.quant, problem.act_format)
        num_picks, experts = max_rows * problem.top_k, problem.num_local_experts
        self._max_blocks = num_picks // tile.gemm1_block_m + experts
        rows = self._max_blocks * tile.gemm1_block_m

        def tensor(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        hidden, inter = problem.hidden_size, problem.intermediate_size
        self._counts = tensor(experts, dtype=torch.int32)
        self._first_blocks = tensor(experts, dtype=torch.int32)
        self._num_blocks = tensor(1, dtype=torch.int32)
        self._block_experts = tensor(self._max_blocks, dtype=torch.int32)
        self._within = tensor(num_picks, dtype=torch.int32)
        self._places = tensor(num_picks, dtype=torch.int32)
        self._pool_payload = tensor(rows, fmt.payload_bytes(hidden), dtype=torch.uint8)
        self._pool_scales = tensor(rows, hidden // fmt.block, dtype=torch.uint8)
        self._pool_weights = tensor(rows, dtype=torch.float32)
        self._a2_payload = tensor(rows, fmt.payload_bytes(inter), dtype=torch.uint8)
        self._a2_scales = tensor(rows, inter // fmt.block, dtype=torch.uint8)
        self._rows = tensor(rows, hidden, dtype=torch.bfloat16)
        self.sums = tensor(max_rows, hidden, dtype=torch.bfloat16)

    def run(self, received: Received, weights: Mapping[str, Tensor], launch: Callable[[Launch], None]) -> Tensor:
        """Each received token's sum over this rank's experts, `[max_rows, H]` BF16; the next call overwrites it.

        Args:
            received: what the exchange brought.
            weights: tensors of `weights.prepare`.
            launch: queues a launch behind the earlier ones.
        """
        self._counts.zero_()
        for each in self._launches(received, weights):
            launch(each)
        return self.sums

    def _launches(self, received: Received, weights: Mapping[str, Tensor]) -> Iterator[Launch]:
        yield from self._sort(received)
        yield self._gemm1(weights)
        yield self._gemm2(weights)
        yield Launch(
            kernel=sum_picks,
            grid=(ceil_div(self._max_rows, ROWS), ceil_div(self._problem.hidden_size, COLUMNS)),
            arguments={
                "rows": self._rows,
                "places": self._places,
                "num_received": received.num_rows,
                "sums": self.sums,
                "top_k": self._problem.top_k,
                "hidden_size": self._problem.hidden_size,
            },
            constants={"ROWS": ROWS, "COLUMNS": COLUMNS},
        )

    def _sort(self, received: Received) -> Iterator[Launch]:
        """Received rows into blocks of one expert each."""
        problem, num_picks = self._problem, self._max_rows * self._problem.top_k
        experts = {"first_expert": self._first_expert, "num_local_experts": problem.num_local_experts}
        yield Launch(
            kernel=place_picks,
            grid=(ceil_div(num_picks, PICKS),),
            arguments={
                "received_ids": received.ids,
                "num_received": received.num_rows,
                "counts": self._counts,
                "within": self._within,
                **experts,
                "top_k": problem.top_k,
            },
            constants={"PICKS": PICKS},
        )
        yield Launch(
            kernel=plan_experts,
            grid=(1,),
            arguments={
                "counts": self._counts,
                "first_blocks": self._first_blocks,
                "block_experts": self._block_experts,
                "num_blocks": self._num_blocks,
                "num_local_experts": problem.num_local_experts,
            },
            constants={"BLOCK_M": self._tile.gemm1_block_m, "EXPERTS": EXPERTS, "BLOCKS": BLOCKS},
        )
        yield Launch(
            kernel=gather_rows,
            grid=(ceil_div(num_picks, ROWS), ceil_div(problem.hidden_size, SCALES * 32)),
            arguments={
                "received_payload": received.payload,
                "received_scales": received.scales,
                "received_ids": received.ids,
                "received_weights": received.weights,
                "num_received": received.num_rows,
                "within": self._within,
                "first_blocks": self._first_blocks,
                "pool_payload": self._pool_payload,
                "pool_scales": self._pool_scales,
                "pool_weights": self._pool_weights,
                "places": self._places,
                "first_expert": self._first_expert,
                "top_k": problem.top_k,
                "hidden_size": problem.hidden_size,
            },
            constants={
                "FP4": self._fp4,
                "BLOCK_M": self._tile.gemm1_block_m,
                "ROWS": ROWS,
                "WORDS": SCALES * (4 if self._fp4 else 8),
                "SCALES": SCALES,
            },
        )

    def _gemm1(self, weights: Mapping[str, Tensor]) -> Launch:
        problem = self._problem
        return Launch(
            kernel=self._in_language(expert_gemm1),
            grid=(self._num_programs,),
            num_warps=self._tile.num_warps,
            arguments={
                "pool_payload": self._pool_payload,
                "pool_scales": self._pool_scales,
                "block_experts": self._block_experts,
                "num_blocks": self._num_blocks,
                "w13": weights["w13_weight"],
                "w13_scale": weights["w13_weight_scale"],
                "a2_payload": self._a2_payload,
                "a2_scales": self._a2_scales,
                "hidden_size": problem.hidden_size,
                "intermediate_size": problem.intermediate_size,
                "hidden_payload_stride": self._pool_payload.stride(0),
                "a2_payload_stride": self._a2_payload.stride(0),
                "limit": float("inf") if problem.swiglu_limit is None else problem.swiglu_limit,
            },
            constants={
                "FP4": self._fp4,
                "OAI": problem.activation is Activation.SWIGLU_OAI,
                "BLOCK_M": self._tile.gemm1_block_m,
                "BLOCK_N": self._tile.gemm1_block_n,
                **self._loop,
            },
        )

    def _gemm2(self, weights: Mapping[str, Tensor]) -> Launch:
        problem = self._problem
        return Launch(
            kernel=self._in_language(expert_gemm2),
            grid=(self._num_programs,),
            num_warps=self._tile.num_warps,
            arguments={
                "a2_payload": self._a2_payload,
                "a2_scales": self._a2_scales,
                "block_experts": self._block_experts,
                "num_blocks": self._num_blocks,
                "w2": weights["w2_weight"],
                "w2_scale": weights["w2_weight_scale"],
                "pool_weights": self._pool_weights,
                "rows": self._rows,
                "hidden_size": problem.hidden_size,
                "intermediate_size": problem.intermediate_size,
                "a2_payload_stride": self._a2_payload.stride(0),
            },
            constants={
                "FP4": self._fp4,
                "BLOCK_M": self._tile.gemm1_block_m,  # that of the blocks
                "BLOCK_N": self._tile.gemm2_block_n,
                **self._loop,
            },
        )

    @property
    def _loop(self) -> dict[str, Any]:
        return {
            "BLOCK_K": SCALE_BLOCK_COLUMNS,
            "WAVES": self._tile.num_warps,
            "WEIGHT_CACHE": self._tile.weight_cache,
            "MAIN_LOOP": str(self._target.main_loop),
        }

    def _in_language(self, kernel: Any) -> Any:
        return gluon.jit(kernel.fn) if self._target.main_loop is MainLoop.CDNA4 else kernel

    @property
    def _fp4(self) -> bool:
        return self._problem.quant is QuantMode.A4W4
