"""One call of one rank as a list of launches: kernel, grid, arguments by name, compile-time constants.

The list depends on the plan and on the caller's tensors only, never on their contents, so a captured graph of it can be
replayed. Whoever runs it does so in order, on one stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon

from megamoe.problem import Activation, MoEProblem, QuantMode, Transport
from megamoe.schedule.protocol import Phase
from megamoe.schedule.tiles import ceil_div
from megamoe.schedule.waves import Ring
from megamoe_rocm.heuristics import SCALE_BLOCK_COLUMNS, TileConfig
from megamoe_rocm.kernels.combine import combine_rows
from megamoe_rocm.kernels.gemm1_swiglu_quant import dispatch_gemm1
from megamoe_rocm.kernels.gemm2_p2p import gemm2_p2p
from megamoe_rocm.kernels.plan import plan_blocks
from megamoe_rocm.kernels.quantize import copy_input, quantize_input
from megamoe_rocm.kernels.route import count_picks, push_entries
from megamoe_rocm.kernels.workspace import LaunchCounter, RankMemory, counter_words, launch_words, num_rounds

PHASES = tuple(Phase)
"""Phases by the numbers that kernels write into `status`."""

WAVES = 4  # of the launches other than the persistent stages
PICKS = 256  # picks of one program of the routing kernels
EXPERTS = 64  # experts that routing and planning handle at a time; more take several turns
RANKS = 8  # ranks at most: GPUs of one node
BLOCKS = 64  # blocks that planning handles at a time
ROWS, COLUMNS = 8, 1024  # tokens and columns of one program of quantisation and combine
COPY_CHUNKS = 32  # times 8 bytes of each of ROWS rows, that one program copies
PULL_WORDS, PULL_SCALES = 256, 256  # words and scale bytes of a row that one step of a pull moves


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel launch.

    Args:
        kernel: a function under `triton.jit`.
        grid: programs, up to two dimensions.
        arguments: run-time parameters by name: tensors, ints, floats.
        constants: compile-time parameters by name.
        num_warps: waves of a program.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    num_warps: int = WAVES

    def run(self) -> None:
        """Launch it through Triton: on the current device's stream, or in the interpreter."""
        self.kernel[self.grid](**self.arguments, **self.constants, num_warps=self.num_warps)


@cache
def _as_gluon(kernel: Any) -> Any:
    return gluon.jit(kernel.fn)


class MainLoop(StrEnum):
    """The GEMMs' main loops."""

    PORTABLE = "portable"  # plain Triton, for every target
    CDNA4 = "cdna4"  # Gluon, for gfx950


@dataclass(frozen=True, kw_only=True)
class Target:
    """What of the kernels' constants is the device's.

    Args:
        lanes: of a wave.
        clock: by which waits are timed: "memrealtime", "globaltimer", or "host" in Triton's interpreter.
        units_per_s: units in which waits are timed, 1024 ticks of the clock, in a second.
        main_loop: of both GEMMs; results are equal but for the order in which an MFMA sums.
    """

    lanes: int
    clock: str
    units_per_s: float
    main_loop: MainLoop = MainLoop.PORTABLE

    def patience(self, timeout_s: float) -> int:
        """A time-out in the kernels' units, at least one."""
        return min(int(timeout_s * self.units_per_s) + 1, 2**31 - 1)


GFX950 = Target(lanes=64, clock="memrealtime", units_per_s=100e6 / 1024, main_loop=MainLoop.CDNA4)
"""The clock has 100 MHz: AMD's CDNA 3 ISA document, S_MEMREALTIME."""
SM90 = Target(lanes=32, clock="globaltimer", units_per_s=1e9 / 1024)
INTERPRETER = Target(lanes=64, clock="host", units_per_s=1e9 / 1024)


@dataclass(frozen=True, kw_only=True)
class CallTensors:
    """One rank's tensors of one call, checked.

    Args:
        hidden_states: `[T, H]` BF16, rows a multiple of 16 apart, or the payload of rows in the mode's format, as
            uint8.
        hidden_scales: uint8 scales of such rows, or None. Their rows, and the payload's, are a multiple of 8 apart.
        topk_ids: `[T, K]` int32 or int64, contiguous.
        topk_weights: `[T, K]` FP32, contiguous.
        weights: tensors of `weights.prepare`.
        out: `[T, H]` BF16, contiguous.
        num_tokens: int32 scalar on the device; rows from there on are padding.
        report: int32 `[STATUS_WORDS]` that the host can read; receives what a wait that timed out waited for.
        gate_up_tap: `[ring rows, 2I]` FP32 to keep GEMM1's accumulators in, or None.
    """

    hidden_states: Tensor
    hidden_scales: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor
    weights: Mapping[str, Tensor]
    out: Tensor
    num_tokens: Tensor
    report: Tensor
    gate_up_tap: Tensor | None = None


class Stage1Parameter(IntEnum):
    """Words of `stage1_parameters`: addresses of own arrays, offsets on any rank, and sizes."""

    ROUTE_COUNTS = 0
    FIRST_ENTRIES = 1
    ROUTE_ENTRIES = 2
    POOL_PAYLOAD = 3
    POOL_SCALES = 4
    POOL_META = 5
    HOME_ROWS = 6
    INPUT_PAYLOAD_OFFSET = 7
    INPUT_SCALES_OFFSET = 8
    COMBINE_OFFSET = 9
    COMBINE_ROW_BYTES = 10
    PAYLOAD_STRIDE = 11
    SCALES_STRIDE = 12
    HIDDEN_SIZE = 13
    TOP_K = 14
    CAPACITY = 15
    NUM_LOCAL_EXPERTS = 16
    EP_SIZE = 17
    RANK = 18
    A2_PAYLOAD = 19
    A2_SCALES = 20
    A2_PAYLOAD_STRIDE = 21
    A2_SCALES_STRIDE = 22


def stage1_parameters(problem: MoEProblem, rank: int, memory: RankMemory) -> Tensor:
    """Int64 `[len(Stage1Parameter)]` beside `memory`: what stage 1 needs to know, the same in every call."""
    layout = memory.layout
    values = {
        Stage1Parameter[name.upper()]: memory.bytes(name).data_ptr()
        for name in (
            "route_counts",
            "first_entries",
            "route_entries",
            "pool_payload",
            "pool_scales",
            "pool_meta",
            "home_rows",
            "a2_payload",
            "a2_scales",
        )
    }
    values |= {
        Stage1Parameter.INPUT_PAYLOAD_OFFSET: layout.offset("input_payload"),
        Stage1Parameter.INPUT_SCALES_OFFSET: layout.offset("input_scales"),
        Stage1Parameter.COMBINE_OFFSET: layout.offset("combine"),
        Stage1Parameter.COMBINE_ROW_BYTES: layout["combine"].row_bytes,
        Stage1Parameter.PAYLOAD_STRIDE: layout["pool_payload"].row_bytes,
        Stage1Parameter.SCALES_STRIDE: layout["pool_scales"].row_bytes,
        Stage1Parameter.HIDDEN_SIZE: problem.hidden_size,
        Stage1Parameter.TOP_K: problem.top_k,
        Stage1Parameter.CAPACITY: problem.num_max_tokens_per_rank,
        Stage1Parameter.NUM_LOCAL_EXPERTS: problem.num_local_experts,
        Stage1Parameter.EP_SIZE: problem.ep_size,
        Stage1Parameter.RANK: rank,
        Stage1Parameter.A2_PAYLOAD_STRIDE: layout["a2_payload"].row_bytes,
        Stage1Parameter.A2_SCALES_STRIDE: layout["a2_scales"].row_bytes,
    }
    return torch.tensor([values[word] for word in Stage1Parameter], dtype=torch.int64, device=memory.workspace.device)


@dataclass(frozen=True, kw_only=True)
class RankCall:
    """One call of one rank.

    Args:
        problem: the layer.
        rank: which rank.
        tile: the tile; its `block_m` is that of `ring`.
        ring: blocks that the pool holds at a time.
        rings: of all tiles of the session.
        memory: the rank's workspace.
        peers: `[ep_size]` int64 on the device: base addresses of all ranks' workspaces.
        stage1_parameters: made by `stage1_parameters` of the same problem, rank and memory.
        num_programs: programs of a persistent launch; any number gives the same result.
        patience: how long a wait takes before it gives up, in the units of `target`.
        target: what runs the launches.
    """

    problem: MoEProblem
    rank: int
    tile: TileConfig
    ring: Ring
    rings: Sequence[Ring]
    memory: RankMemory
    peers: Tensor
    stage1_parameters: Tensor
    num_programs: int
    patience: int
    target: Target

    def phases(self, call: CallTensors) -> Iterator[list[Launch]]:
        """The launches of one call, in order. Ranks on one stream take turns, phase by phase."""
        yield [*self.stage(call), self.count(call)]
        yield [self.push(call)]
        yield [self.plan()]
        rounds = num_rounds(self.ring)
        for index in range(rounds):
            yield [self.stage1(call, index)]
            yield [self.stage2(call, index, is_last=index == rounds - 1)]
        yield [self.combine(call)]

    # -- the launches -------------------------------------------------------------------------------------------

    def stage(self, call: CallTensors) -> Iterator[Launch]:
        """Quantise the tokens, or copy what is quantised already; nothing for a call without rows."""
        num_rows, hidden = len(call.topk_ids), self.problem.hidden_size
        if not num_rows:
            return
        if call.hidden_scales is None:
            yield Launch(
                kernel=quantize_input,
                grid=(ceil_div(num_rows, ROWS), ceil_div(hidden, COLUMNS)),
                arguments={
                    "hidden_states": call.hidden_states,
                    "payload": self.memory.bytes("input_payload"),
                    "scales": self.memory.bytes("input_scales"),
                    "device_num_tokens": call.num_tokens,
                    "num_rows": num_rows,
                    "hidden_size": hidden,
                    "hidden_stride": call.hidden_states.stride(0),
                    "payload_stride": self._row_bytes("input_payload"),
                    "scales_stride": self._row_bytes("input_scales"),
                },
                constants={"FP4": self._fp4, "ROWS": ROWS, "COLUMNS": COLUMNS},
            )
            return
        for name, source in (("input_payload", call.hidden_states), ("input_scales", call.hidden_scales)):
            yield Launch(
                kernel=copy_input,
                grid=(ceil_div(num_rows, ROWS), ceil_div(source.shape[1], 8 * COPY_CHUNKS)),
                arguments={
                    "source": source,
                    "target": self.memory.bytes(name),
                    "device_num_tokens": call.num_tokens,
                    "num_rows": num_rows,
                    "row_bytes": source.shape[1],
                    "source_stride": source.stride(0),
                    "target_stride": self._row_bytes(name),
                },
                constants={"ROWS": ROWS, "CHUNKS": COPY_CHUNKS},
            )

    def count(self, call: CallTensors) -> Launch:
        """Count picks; clear what the last call counted."""
        names = ("route_totals", "counters", "launch_counters", "pick_places", "route_bases", "dropped_ids")
        return Launch(
            kernel=count_picks,
            grid=self._pick_grid(call),
            arguments={
                "topk_ids": call.topk_ids,
                "epoch": self.memory.words("epoch"),
                **self._words(*names),
                "device_num_tokens": call.num_tokens,
                "num_rows": len(call.topk_ids),
                "top_k": self.problem.top_k,
                "ep_size": self.problem.ep_size,
                "num_local_experts": self.problem.num_local_experts,
                "counter_words": counter_words(self.rings),
                "launch_words": launch_words(self.rings),
                "join": int(LaunchCounter.COUNTED),
            },
            constants={"TILE": PICKS, "EXPERTS": EXPERTS, "WAVES": WAVES, "LANES": self.target.lanes},
        )

    def push(self, call: CallTensors) -> Launch:
        """Push entries and counts to the owners and publish them."""
        return Launch(
            kernel=self._in_language(push_entries),
            grid=self._pick_grid(call),
            arguments={
                "topk_ids": call.topk_ids,
                "topk_weights": call.topk_weights,
                **self._words("epoch", "route_totals", "launch_counters", "pick_places", "route_bases"),
                "device_num_tokens": call.num_tokens,
                "peers": self.peers,
                "entries_offset": self.memory.layout.offset("route_entries"),
                "counts_offset": self.memory.layout.offset("route_counts"),
                "published_offset": self.memory.layout.offset("counts_published"),
                "rank": self.rank,
                "num_rows": len(call.topk_ids),
                "capacity": self.problem.num_max_tokens_per_rank,
                "top_k": self.problem.top_k,
                "ep_size": self.problem.ep_size,
                "num_local_experts": self.problem.num_local_experts,
                "launch_words": launch_words(self.rings),
                "join": int(LaunchCounter.ROUTED),
            },
            constants={"TILE": PICKS, "RANKS": RANKS, "WAVES": WAVES, "LANES": self.target.lanes},
        )

    def plan(self) -> Launch:
        """Wait for all counts; cut the rows into blocks."""
        names = (
            "counts_published",
            "abort",
            "route_counts",
            "first_entries",
            "block_table",
            "num_blocks",
            "receive_counts",
        )
        return Launch(
            kernel=plan_blocks,
            grid=(1,),
            arguments={
                **self._words(*names, "epoch", "status"),
                "rank": self.rank,
                "ep_size": self.problem.ep_size,
                "num_local_experts": self.problem.num_local_experts,
                "patience": self.patience,
            },
            constants={
                "BLOCK_M": self.tile.block_m,
                "EXPERTS": EXPERTS,
                "RANKS": RANKS,
                "TILE": BLOCKS,
                "CLOCK": self.target.clock,
                "WAVES": WAVES,
                "LANES": self.target.lanes,
            },
        )

    def stage1(self, call: CallTensors, index: int) -> Launch:
        """Pull and multiply the blocks of round `index`."""
        problem, tile = self.problem, self.tile
        names = ("counts_published", "launch_counters", "epoch", "status", "block_table", "num_blocks")
        limit = problem.swiglu_limit
        return Launch(
            kernel=self._in_language(dispatch_gemm1),
            grid=(self.num_programs,),
            num_warps=tile.num_warps,
            arguments={
                **self._words(*names),
                "rows_arrived": self.memory.words("counters"),
                "peers": self.peers,
                "stage1_parameters": self.stage1_parameters,
                "w13": call.weights["w13_weight"],
                "w13_scale": call.weights["w13_weight_scale"],
                "w13_bias": call.weights.get("w13_bias", call.topk_weights),
                "gate_up_tap": call.topk_weights if call.gate_up_tap is None else call.gate_up_tap,
                "ep_size": problem.ep_size,
                "hidden_size": problem.hidden_size,
                "intermediate_size": problem.intermediate_size,
                "counter_words": counter_words(self.rings),
                "launch_words": launch_words(self.rings),
                "ticket": len(LaunchCounter) + 2 * index,
                "first_block": index * self.ring.ring_blocks,
                "ring_blocks": self.ring.ring_blocks,
                "lead_blocks": tile.lead_blocks,
                "limit": float("inf") if limit is None else limit,
                "patience": self.patience,
            },
            constants={
                "FP4": self._fp4,
                "OAI": problem.activation is Activation.SWIGLU_OAI,
                "HAS_BIAS": problem.expert_bias,
                "TAP": call.gate_up_tap is not None,
                "BLOCK_M": tile.block_m,
                "TILE_M": tile.gemm1_block_m,
                "BLOCK_N": tile.gemm1_block_n,
                "BLOCK_K": SCALE_BLOCK_COLUMNS,
                "PULL_ROWS": tile.pull_rows,
                "PULL_WORDS": PULL_WORDS,
                "PULL_SCALES": PULL_SCALES,
                "RANKS": RANKS,
                "UNITS_PER_TICKET": tile.units_per_ticket,
                "WAVES": tile.num_warps,
                "LANES": self.target.lanes,
                "CLOCK": self.target.clock,
                "WEIGHT_CACHE": tile.weight_cache,
                "STORE_CACHE": tile.a2_cache,
                "MAIN_LOOP": str(self.target.main_loop),
            },
        )

    def stage2(self, call: CallTensors, index: int, *, is_last: bool) -> Launch:
        """Multiply the blocks of round `index` by w2 and send the rows home."""
        problem, tile = self.problem, self.tile
        names = ("launch_counters", "epoch", "status", "block_table", "num_blocks", "pool_meta")
        return Launch(
            kernel=self._in_language(gemm2_p2p),
            grid=(self.num_programs,),
            num_warps=tile.num_warps,
            arguments={
                **self._words(*names),
                "peers": self.peers,
                "a2_payload": self.memory.bytes("a2_payload"),
                "a2_scales": self.memory.bytes("a2_scales"),
                "w2": call.weights["w2_weight"],
                "w2_scale": call.weights["w2_weight_scale"],
                "w2_bias": call.weights.get("w2_bias", call.topk_weights),
                "home_rows": self.memory.addresses("home_rows"),
                "finished_offset": self.memory.layout.offset("rank_finished"),
                "rank": self.rank,
                "ep_size": problem.ep_size,
                "hidden_size": problem.hidden_size,
                "intermediate_size": problem.intermediate_size,
                "a2_payload_stride": self._row_bytes("a2_payload"),
                "a2_scales_stride": self._row_bytes("a2_scales"),
                "launch_words": launch_words(self.rings),
                "ticket": len(LaunchCounter) + 2 * index + 1,
                "join": int(LaunchCounter.FINISHED),
                "is_last": int(is_last),
                "first_block": index * self.ring.ring_blocks,
                "ring_blocks": self.ring.ring_blocks,
            },
            constants={
                "FP4": self._fp4,
                "FP8_TRANSPORT": self._fp8_transport,
                "HAS_BIAS": problem.expert_bias,
                "BLOCK_M": tile.block_m,
                "TILE_M": tile.gemm2_block_m,
                "BLOCK_N": tile.gemm2_block_n,
                "BLOCK_K": SCALE_BLOCK_COLUMNS,
                "RANKS": RANKS,
                "UNITS_PER_TICKET": tile.units_per_ticket,
                "WAVES": tile.num_warps,
                "LANES": self.target.lanes,
                "WEIGHT_CACHE": tile.weight_cache,
                "MAIN_LOOP": str(self.target.main_loop),
            },
        )

    def combine(self, call: CallTensors) -> Launch:
        """Wait for all ranks and sum; ends the call."""
        problem = self.problem
        num_rows = len(call.topk_ids)
        return Launch(
            kernel=combine_rows,
            grid=(max(ceil_div(num_rows, ROWS), 1), ceil_div(problem.hidden_size, COLUMNS)),
            arguments={
                "out": call.out,
                "topk_ids": call.topk_ids,
                "combine": self.memory.bytes("combine"),
                **self._words("rank_finished", "abort", "launch_counters", "epoch", "status"),
                "report": call.report,
                "peers": self.peers,
                "abort_offset": self.memory.layout.offset("abort"),
                "device_num_tokens": call.num_tokens,
                "rank": self.rank,
                "ep_size": problem.ep_size,
                "num_rows": num_rows,
                "capacity": problem.num_max_tokens_per_rank,
                "top_k": problem.top_k,
                "num_experts": problem.num_experts,
                "hidden_size": problem.hidden_size,
                "combine_row_bytes": self._row_bytes("combine"),
                "launch_words": launch_words(self.rings),
                "join": int(LaunchCounter.COMBINED),
                "patience": self.patience,
            },
            constants={
                "FP8_TRANSPORT": self._fp8_transport,
                "ROWS": ROWS,
                "COLUMNS": COLUMNS,
                "RANKS": RANKS,
                "WAVES": WAVES,
                "LANES": self.target.lanes,
                "CLOCK": self.target.clock,
            },
        )

    # -- parts of them ------------------------------------------------------------------------------------------

    def _in_language(self, kernel: Any) -> Any:
        """A kernel whose source is Triton and Gluon at once, in the language of the main loop.

        Besides the persistent stages, one that stores to other ranks: in Gluon it does so by `store_through`.
        """
        return _as_gluon(kernel) if self.target.main_loop is MainLoop.CDNA4 else kernel

    @property
    def _fp4(self) -> bool:
        return self.problem.quant is QuantMode.A4W4

    @property
    def _fp8_transport(self) -> bool:
        return self.problem.transport is Transport.FP8_BLOCKWISE_1X32

    def _words(self, *names: str) -> dict[str, Tensor]:
        return {name: self.memory.words(name) for name in names}

    def _row_bytes(self, name: str) -> int:
        return self.memory.layout[name].row_bytes

    def _pick_grid(self, call: CallTensors) -> tuple[int]:
        return (max(ceil_div(call.topk_ids.numel(), PICKS), 1),)
