"""The unfused pipeline: quantise, exchange, experts, exchange."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megamoe.formats import activation_format
from megamoe.problem import MoEProblem, QuantMode
from megamoe.schedule.tiles import ceil_div
from megamoe_rocm.heuristics import TileConfig
from megamoe_rocm.kernels.launch import COLUMNS, ROWS, Launch
from megamoe_rocm.kernels.quantize import quantize_input
from megamoe_rocm.runtime.launcher import Launcher
from megamoe_rocm.unfused.exchange import Exchange
from megamoe_rocm.unfused.experts import Experts


class UnfusedPipeline:
    """One rank's calls of the unfused pipeline.

    Args:
        problem: the layer; every call brings num_max_tokens_per_rank tokens.
        rank: this rank.
        exchange: between the ranks.
        tile: of the GEMMs.
        num_programs: of a GEMM's persistent launch.
        launcher: runs the launches.
    """

    def __init__(
        self,
        problem: MoEProblem,
        *,
        rank: int,
        exchange: Exchange,
        tile: TileConfig,
        num_programs: int,
        launcher: Launcher,
    ) -> None:
        self.name = exchange.name
        self._problem = problem
        self._rank = rank
        self._exchange = exchange
        self._launcher = launcher
        device = launcher.device
        fmt = activation_format(problem.quant, problem.act_format)
        capacity, hidden = problem.num_max_tokens_per_rank, problem.hidden_size
        self._payload = torch.empty(capacity, fmt.payload_bytes(hidden), dtype=torch.uint8, device=device)
        self._scales = torch.empty(capacity, hidden // fmt.block, dtype=torch.uint8, device=device)
        self._num_tokens = torch.full((1,), capacity, dtype=torch.int32, device=device)
        self._experts = Experts(
            problem,
            rank=rank,
            max_rows=exchange.max_rows,
            tile=tile,
            num_programs=num_programs,
            target=launcher.target,
            device=device,
        )

    def forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, weights: Mapping[str, Tensor]
    ) -> Tensor:
        """COLLECTIVE, stream-ordered. `[T, H]` BF16; the next call may overwrite it.

        Args:
            hidden_states: `[T, H]` BF16, contiguous.
            topk_ids: `[T, top_k]` int32, global ids.
            topk_weights: `[T, top_k]` FP32.
            weights: this rank's, tensors of `weights.prepare`.
        """
        self._launch(self._quantize(hidden_states))
        received = self._exchange.dispatch(self._payload, self._scales, topk_ids, topk_weights)
        sums = self._experts.run(received, weights, self._launch)
        return self._exchange.combine(sums, topk_ids)

    def _quantize(self, hidden_states: Tensor) -> Launch:
        num_rows, hidden = hidden_states.shape
        return Launch(
            kernel=quantize_input,
            grid=(ceil_div(num_rows, ROWS), ceil_div(hidden, COLUMNS)),
            arguments={
                "hidden_states": hidden_states,
                "payload": self._payload,
                "scales": self._scales,
                "device_num_tokens": self._num_tokens,
                "num_rows": num_rows,
                "hidden_size": hidden,
                "hidden_stride": hidden_states.stride(0),
                "payload_stride": self._payload.stride(0),
                "scales_stride": self._scales.stride(0),
            },
            constants={"FP4": self._problem.quant is QuantMode.A4W4, "ROWS": ROWS, "COLUMNS": COLUMNS},
        )

    def _launch(self, launch: Launch) -> None:
        self._launcher.launch(launch, rank=self._rank)
        self._launcher.flush()
