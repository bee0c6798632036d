"""Mori's dispatch and combine as megamoe_rocm calls them, on plain memory: signatures and behaviour of amd-mori 1.2.4.

Ranks are threads. What comes back are views of fixed buffers, which the next call overwrites, with garbage behind the
rows that there are; a token comes once to a rank, whatever the number of its experts there.
"""

import enum
import threading
from dataclasses import dataclass
from typing import Any

import torch


class EpDispatchCombineKernelType(enum.Enum):
    IntraNode = 0


@dataclass
class EpDispatchCombineConfig:
    data_type: torch.dtype
    rank: int
    world_size: int
    hidden_dim: int
    scale_dim: int
    scale_type_size: int
    max_token_type_size: int
    max_num_inp_token_per_rank: int
    num_experts_per_rank: int
    num_experts_per_token: int
    warp_num_per_block: int = 8
    block_num: int = 80
    max_total_recv_tokens: int = 0
    use_external_inp_buf: bool = True
    kernel_type: EpDispatchCombineKernelType = EpDispatchCombineKernelType.IntraNode
    gpu_per_node: int = 8
    rdma_block_num: int = 0
    num_qp_per_pe: int = 1
    quant_type: str = "none"


class _World:
    """What the ranks of one operator share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.board: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.board[rank] = value
        self.barrier.wait()
        values = list(self.board)
        self.barrier.wait()
        return values


_lock = threading.Lock()
_worlds: list[tuple[_World, set[int]]] = []


def _join(rank: int, size: int) -> _World:
    """The n-th operator of each rank is the same."""
    with _lock:
        for world, ranks in _worlds:
            if rank not in ranks:
                ranks.add(rank)
                return world
        world = _World(size)
        _worlds.append((world, {rank}))
        return world


class EpDispatchCombineOp:
    def __init__(self, config):
        assert config.gpu_per_node & (config.gpu_per_node - 1) == 0
        assert config.world_size % config.gpu_per_node == 0
        self.config = config
        self._world = _join(config.rank, config.world_size)
        self._ready = True
        rows = config.world_size * config.max_num_inp_token_per_rank
        self._rows = torch.full((rows, config.hidden_dim * config.max_token_type_size), 0xAB, dtype=torch.uint8)
        self._scales = torch.full((rows, config.scale_dim), 0xAB, dtype=torch.uint8)
        self._weights = torch.full((rows, config.num_experts_per_token), float("nan"))
        self._ids = torch.full((rows, config.num_experts_per_token), 0, dtype=torch.int32)
        self._num_rows = torch.zeros(1, dtype=torch.int32)
        self._out = torch.full((config.max_num_inp_token_per_rank, config.hidden_dim), 7.0, dtype=torch.bfloat16)

    def dispatch(
        self,
        input,
        weights,
        scales,
        indices,
        block_num=-1,
        rdma_block_num=-1,
        warp_per_block=-1,
        call_local_expert_count=False,
        *,
        routing=None,
        return_routing=False,
    ):
        assert self._ready, "no reset since the last dispatch"
        assert (indices.dtype, weights.dtype) == (torch.int32, torch.float32)
        assert input.dtype in (torch.float8_e4m3fn, torch.float4_e2m1fn_x2), "no kernel of this dtype"
        self._ready = False
        rank, experts = self.config.rank, self.config.num_experts_per_rank
        everybodys = self._world.exchange(rank, (input.view(torch.uint8), weights, scales, indices))
        width = input.shape[1]
        self._sources, place = [], 0
        rows = self._rows.flatten()[: len(self._rows) * width].view(-1, width)
        for source, (payload, row_weights, row_scales, ids) in enumerate(everybodys):
            for token in range(len(ids)):
                if not ((ids[token] >= 0) & (ids[token] // experts == rank)).any():
                    continue
                rows[place], self._scales[place] = payload[token], row_scales[token]
                self._weights[place], self._ids[place] = row_weights[token], ids[token]
                self._sources.append((source, token))
                place += 1
        self._num_rows[0] = place
        return rows.view(input.dtype), self._weights, self._scales, self._ids, self._num_rows

    def combine(
        self,
        input,
        weights,
        indices,
        block_num=-1,
        rdma_block_num=-1,
        warp_per_block=-1,
        use_external_inp_buf=-1,
        call_reset=False,
        *,
        routing=None,
    ):
        assert (input.dtype, weights) == (torch.bfloat16, None)
        total = torch.zeros(len(indices), input.shape[1])
        for sources, rows in self._world.exchange(self.config.rank, (self._sources, input)):
            for place, (source, token) in enumerate(sources):
                if source == self.config.rank:
                    total[token] += rows[place].float()
        self._world.exchange(self.config.rank, None)  # nobody overwrites rows that are being read
        self._out[: len(indices)] = total.bfloat16()
        self._ready = call_reset
        return self._out, None
