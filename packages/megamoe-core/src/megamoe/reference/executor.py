"""What one rank does for each op of a program: flags on symmetric memory, and the stages between its regions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megamoe.backend import SessionStats, StageTaps
from megamoe.errors import RankFailedError
from megamoe.formats import Quantized, activation_format, transport_format
from megamoe.problem import MoEProblem
from megamoe.reference.memory import RankMemory, Words
from megamoe.reference.staged import concatenate_taps
from megamoe.reference.weights import ExpertReader, MatrixCache
from megamoe.schedule.protocol import (
    FLAGS,
    RANK_FINISHED,
    UINT32_RANGE,
    Answer,
    Call,
    ClearCounters,
    CombineTokens,
    CountPicks,
    Flag,
    Gemm1,
    Gemm2,
    Life,
    LoadCounts,
    Op,
    ProtocolShape,
    PullRows,
    PushCounts,
    PushEntries,
    Raise,
    StageInput,
    Wait,
    counter_word,
    initial_value,
    next_epoch,
    reached,
)
from megamoe.schedule.tiles import Block, Counts
from megamoe.stages.combine import combine_tokens
from megamoe.stages.dispatch import pull_rows
from megamoe.stages.gemm1 import gemm1
from megamoe.stages.gemm2 import gemm2
from megamoe.stages.multiply import pad_rows
from megamoe.stages.p2p import send_rows
from megamoe.stages.quantize_input import quantize_input
from megamoe.stages.route import Routing, is_expert, out_of_range, route
from megamoe.stages.swiglu_quant import SwiGLU, swiglu_quant

COMBINE_ROWS = 256  # tokens that combine holds as FP32 at a time: a few MB at H = 7168


@dataclass(frozen=True, kw_only=True, eq=False)
class RankArguments:
    """One rank's arguments of one call, checked.

    Args:
        hidden_states: `[T, H]` BF16, or in the mode's activation format.
        topk_ids: `[T, K]`.
        topk_weights: `[T, K]` FP32.
        reader: the rank's experts.
        out: `[T, H]` BF16.
        num_tokens: valid rows; those after it are padding.
    """

    hidden_states: Tensor | Quantized
    topk_ids: Tensor
    topk_weights: Tensor
    reader: ExpertReader
    out: Tensor
    num_tokens: int


class RankExecutor:
    """One rank. Its workers may be driven by several threads.

    Args:
        problem: the layer.
        shape: the plan's protocol.
        rank: which rank.
        memories: every rank's memory; local sections are there for `rank` only.
    """

    def __init__(
        self,
        problem: MoEProblem,
        shape: ProtocolShape,
        rank: int,
        memories: tuple[RankMemory, ...],
    ) -> None:
        self.problem = problem
        self.shape = shape
        self.rank = rank
        self.stats = SessionStats()
        self.keep_taps = False
        self.counts: Counts = ((0,) * shape.num_local_experts,) * shape.ep_size
        self._memories = memories
        self._memory = memories[rank]
        self._fmt = activation_format(problem.quant, problem.act_format)
        self._transport = transport_format(problem.transport)
        self._activation = SwiGLU.of(problem)
        self._lock = threading.Lock()  # of counters, statistics and taps, between the threads of this rank
        self._routing_lock = threading.Lock()
        self._base_epoch = 0
        self._taps: dict[int, StageTaps] = {}  # by block
        self._gate_up: dict[int, Tensor] = {}  # of blocks between their GEMMs, if taps are kept

    # -- life ----------------------------------------------------------------------------------------------------

    def reset(self, first_epoch: int) -> None:
        """Ready the flags for calls from `first_epoch` on; all ranks meet before and after."""
        self._base_epoch = next_epoch(first_epoch, -1)
        for flag in FLAGS:
            name = "counters" if flag.life is Life.PARITY else flag.name
            self._memory.words(name)[:] = initial_value(flag, first_epoch)
        self._memory.words("abort")[:] = self._base_epoch  # an epoch that fails no call

    def begin(self, call: Call, arguments: RankArguments, cache: MatrixCache) -> None:
        """Take the arguments of a call that is about to be driven; `cache` is shared by the ranks of the session."""
        self._call = call
        self._cache = cache
        self._arguments = arguments
        self._routing: Routing | None = None
        self._valid = is_expert(arguments.topk_ids[: call.num_tokens], self.problem.num_experts)
        self._taps, self._gate_up = {}, {}

    def end(self) -> None:
        """Let go of the call's tensors, the FP32 matrices above all."""
        del self._arguments, self._cache, self._routing, self._valid

    def abort(self, epoch: int) -> None:
        """Tell every rank that this one failed in call `epoch`."""
        for memory in self._memories:
            memory.words("abort")[self.rank] = epoch

    def check_peers(self, dead: frozenset[int]) -> None:
        """Raise RankFailedError if a rank failed in this call or before, or died without having finished its part."""
        for peer, word in enumerate(self._memory.words("abort").tolist()):
            if peer != self.rank and word != self._base_epoch and reached(self._call.epoch, word):
                what = f"rank {peer} raised in the middle of call {word}"
                raise self._failed(peer, what, f"rank {peer}'s own error says more")
        for peer in dead:
            if not reached(int(self._memory.words(RANK_FINISHED.name)[peer]), self._call.epoch):
                hint = (
                    f"rank {peer}'s own log says more; if it says nothing, it was killed, or closed its session alone"
                )
                raise self._failed(peer, f"rank {peer}'s process ended or left the group", hint)

    def _failed(self, peer: int, why: str, hint: str) -> RankFailedError:
        return RankFailedError(
            f"rank {self.rank} can't finish call {self._call.epoch}: {why}",
            rank=self.rank,
            peer=peer,
            hint=f"{hint}; then every rank calls session.reset() together, or opens a new session on a group of the "
            "ranks that are left",
        )

    # -- flags -----------------------------------------------------------------------------------------------------

    def satisfied(self, wait: Wait) -> bool:
        """Whether the flag has its target; if so, what was stored before it was raised is visible."""
        return reached(int(self._words(self._memory, wait.flag)[self._word(wait.flag, wait.index)]), wait.target)

    def _raise(self, op: Raise) -> None:
        words = self._words(self._memories[op.rank], op.flag)
        word = self._word(op.flag, op.index)
        if op.flag.life is Life.EPOCH:
            words[word] = op.amount
        else:
            with self._lock:
                words[word] = (int(words[word]) + op.amount) % UINT32_RANGE

    def _words(self, memory: RankMemory, flag: Flag) -> Words:
        if flag.life is Life.PARITY:
            copy: Words = memory.words("counters")[self._call.parity]
            return copy
        return memory.words(flag.name)

    def _word(self, flag: Flag, index: int) -> int:
        return counter_word(flag, index, self.shape) if flag.life is Life.PARITY else index

    def _clear_counters(self, op: ClearCounters) -> None:
        self._memory.words("counters")[1 - self._call.parity][op.first : op.first + op.num] = 0

    # -- acts ------------------------------------------------------------------------------------------------------

    def run(self, op: Op) -> Answer:
        """Do an op that is not a wait, to its end."""
        return _BODIES[type(op)](self, op)

    def _stage_input(self, op: StageInput) -> None:
        began = time.perf_counter()
        rows = slice(op.first, op.first + op.num)
        x = self._arguments.hidden_states
        if isinstance(x, Tensor):
            x = quantize_input(x[rows], self._fmt)
        else:
            x = Quantized(payload=x.payload[rows], scales=None if x.scales is None else x.scales[rows], fmt=x.fmt)
        num_bytes = self._store("input", rows, x)
        self._count("quantize_input", began, op.num, num_bytes)

    def _count_picks(self, op: CountPicks) -> None:
        """Dropped ids only: `route` counts the others, for all workers of the rank at once."""
        ids = self._arguments.topk_ids[: self._call.num_tokens].flatten()[op.first : op.first + op.num]
        dropped = int(out_of_range(ids, self.problem.num_experts).sum())
        with self._lock:
            self.stats.dropped_ids += dropped

    def _routed(self) -> Routing:
        """This rank's picks, sorted; done by the first worker that asks."""
        with self._routing_lock:
            if self._routing is None:
                began = time.perf_counter()
                ids = self._arguments.topk_ids[: self._call.num_tokens]
                topk_weights = self._arguments.topk_weights[: self._call.num_tokens]
                self._routing = route(ids, topk_weights, self.problem.num_experts)
                self._count("route", began, len(self._routing.picks), 0)
            return self._routing

    def _counts_by_owner(self, routing: Routing) -> Tensor:
        return routing.counts.view(self.shape.ep_size, self.shape.num_local_experts)

    def _push_entries(self, op: PushEntries) -> None:
        routing = self._routed()
        began = time.perf_counter()
        entries = torch.stack((routing.picks, routing.weights.view(torch.int32)), dim=1)
        mine = (routing.picks >= op.first) & (routing.picks < op.first + op.num)
        first = 0
        for owner, num_entries in enumerate(self._counts_by_owner(routing).sum(1).tolist()):
            last = first + num_entries
            places = mine[first:last].nonzero().flatten()
            target = self._memories[owner].rows("route_entries", torch.int32)[self.rank]
            target.index_copy_(0, places, entries[first:last][places])
            first = last
        self._count("route", began, 0, int(mine.sum()) * entries.shape[1] * entries.itemsize)

    def _push_counts(self, op: PushCounts) -> None:
        routing = self._routed()
        counts = self._counts_by_owner(routing)[op.owner]
        self._memories[op.owner].rows("route_counts", torch.int32)[self.rank] = counts.unsqueeze(1)

    def _load_counts(self, op: LoadCounts) -> Counts:
        counts = self._memory.words("route_counts").tolist()
        self.counts = tuple(tuple(per_expert) for per_expert in counts)
        return self.counts

    def _pull_rows(self, op: PullRows) -> None:
        began = time.perf_counter()
        names = [name for name in ("payload", "scales") if self._memory.has(f"pool_{name}")]
        row = op.block.slot * self.shape.block_m + op.first
        num_bytes = 0
        for segment in op.block.rows(op.first, op.num):
            place = slice(row, row + segment.num_rows)
            entries = self._memory.rows("route_entries", torch.int32)[segment.src_rank]
            entries = entries[segment.first_entry : segment.first_entry + segment.num_rows]
            for name in names:
                pool = self._memory.rows(f"pool_{name}")[place]
                source = self._memories[segment.src_rank].rows(f"input_{name}")
                pull_rows(source, entries[:, 0], self.shape.top_k, out=pool)
                num_bytes += pool.numel()
            meta = self._memory.rows("pool_meta", torch.int32)[place]
            meta[:, 0] = segment.src_rank
            meta[:, 1:3] = entries
            row += segment.num_rows
        self._count("dispatch", began, op.num, num_bytes)

    def _gemm1(self, op: Gemm1) -> None:
        block, reader = op.block, self._arguments.reader
        began = time.perf_counter()
        w13 = self._cache.get("w13", self.rank, block.local_expert_idx, reader.w13)
        x = pad_rows(self._load("pool", block, self.problem.hidden_size).dequantize())
        gate_up = gemm1(x, w13, reader.w13_bias(block.local_expert_idx))
        began = self._count("gemm1", began, block.num_rows, gate_up[: block.num_rows].nbytes)
        a2 = swiglu_quant(gate_up, self._activation, self._fmt)
        first = block.slot * self.shape.block_m
        num_bytes = self._store("a2", slice(first, first + block.num_rows), a2)
        self._count("swiglu_quant", began, block.num_rows, num_bytes)
        if self.keep_taps:
            with self._lock:
                self._gate_up[block.index] = gate_up[: block.num_rows]

    def _gemm2(self, op: Gemm2) -> None:
        block, reader = op.block, self._arguments.reader
        began = time.perf_counter()
        w2 = self._cache.get("w2", self.rank, block.local_expert_idx, reader.w2)
        a2 = self._load("a2", block, self.problem.intermediate_size)
        first = block.slot * self.shape.block_m
        meta = self._memory.rows("pool_meta", torch.int32)[first : first + block.num_rows]
        topk_weights = pad_rows(meta[:, 2].view(torch.float32))
        weighted = gemm2(pad_rows(a2.dequantize()), w2, reader.w2_bias(block.local_expert_idx), topk_weights)
        weighted = weighted[: block.num_rows]
        began = self._count("gemm2", began, block.num_rows, weighted.nbytes)
        wire = self._transport.encode(weighted)
        row = 0
        for segment in block.segments:
            place = slice(row, row + segment.num_rows)
            combine = self._memories[segment.src_rank].rows("combine")[..., : wire.shape[1]]
            send_rows(wire[place], meta[place, 1], combine)
            row += segment.num_rows
        self._count("p2p", began, block.num_rows, wire.numel())
        if self.keep_taps:
            tap = StageTaps(
                src_rank=meta[:, 0].clone(),  # the ring will be used again
                src_pick=meta[:, 1].clone(),
                local_expert=torch.full_like(meta[:, 0], block.local_expert_idx),
                gate_up=self._gate_up.pop(block.index),
                a2=replace(a2, payload=a2.payload.clone(), scales=None if a2.scales is None else a2.scales.clone()),
                contribution=weighted,
            )
            with self._lock:
                self._taps[block.index] = tap

    def _combine_tokens(self, op: CombineTokens) -> None:
        began = time.perf_counter()
        row_bytes = self._transport.row_bytes(self.problem.hidden_size)
        combine = self._memory.rows("combine")
        for first in range(op.first, op.first + op.num, COMBINE_ROWS):
            tokens = slice(first, min(first + COMBINE_ROWS, op.first + op.num))
            wire, valid = combine[:, tokens, :row_bytes], self._valid[tokens]
            self._arguments.out[tokens] = combine_tokens(wire, valid, self._transport, self.problem.hidden_size)
        self._count("combine", began, op.num, op.num * self.problem.hidden_size * self._arguments.out.itemsize)

    # -- regions and statistics ------------------------------------------------------------------------------------

    def _store(self, region: str, rows: slice, x: Quantized) -> int:
        """Store the first rows of `x` into rows of `region`; returns bytes."""
        num_bytes = 0
        for name, tensor in (("payload", x.payload), ("scales", x.scales)):
            if tensor is not None:
                data = tensor[: rows.stop - rows.start].contiguous().view(torch.uint8)
                self._memory.rows(f"{region}_{name}")[rows, : data.shape[1]] = data
                num_bytes += data.numel()
        return num_bytes

    def _load(self, region: str, block: Block, num_columns: int) -> Quantized:
        """The valid rows of a block."""
        first = block.slot * self.shape.block_m
        rows = slice(first, first + block.num_rows)
        payload = self._memory.rows(f"{region}_payload")[rows, : self._fmt.payload_bytes(num_columns)]
        scales = None
        if self._fmt.scale_dtype is not None:
            scales = self._memory.rows(f"{region}_scales")[rows, : self._fmt.scale_bytes(num_columns)]
            scales = scales.contiguous().view(self._fmt.scale_dtype)
        return Quantized(payload=payload.contiguous().view(self._fmt.payload_dtype), scales=scales, fmt=self._fmt)

    def stage_taps(self) -> StageTaps | None:
        """Taps of the last call, blocks in order; None if the rank received no row or did not keep them."""
        taps = [self._taps[index] for index in sorted(self._taps)]
        return concatenate_taps(taps) if taps else None

    def _count(self, stage: str, began: float, num_rows: int, num_bytes: int) -> float:
        """Add to the statistics of a stage; returns the time, at which the next stage begins."""
        now, stats = time.perf_counter(), self.stats
        with self._lock:
            stats.stage_seconds[stage] = stats.stage_seconds.get(stage, 0.0) + now - began
            stats.stage_rows[stage] = stats.stage_rows.get(stage, 0) + num_rows
            stats.stage_bytes[stage] = stats.stage_bytes.get(stage, 0) + num_bytes
        return now


# Of the class: a table of bound methods would be a cycle, and keep a closed session's memory.
_BODIES: Mapping[type[Any], Callable[[RankExecutor, Any], Answer]] = {
    Raise: RankExecutor._raise,
    ClearCounters: RankExecutor._clear_counters,
    StageInput: RankExecutor._stage_input,
    CountPicks: RankExecutor._count_picks,
    PushEntries: RankExecutor._push_entries,
    PushCounts: RankExecutor._push_counts,
    LoadCounts: RankExecutor._load_counts,
    PullRows: RankExecutor._pull_rows,
    Gemm1: RankExecutor._gemm1,
    Gemm2: RankExecutor._gemm2,
    CombineTokens: RankExecutor._combine_tokens,
}
