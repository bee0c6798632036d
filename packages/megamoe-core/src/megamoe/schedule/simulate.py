"""How long a call should take: the persistent schedule, played through with measured times of its pieces.

An event model of one rank, whose peers do the same as it does at the same time. Blocks, lag, ring and the order of
units are the kernel's own (schedule/persistent.py); what a piece takes is schedule/kernel_rates.py's.

    exchange    launch, stage, route, two grid joins, a flag to every peer, the plan of the pool: a chain of latencies
    pull        rows in block order over the link, as far ahead as the ring lets
    multiply    CTAs claim units in order; a unit starts when its rows or its A2 are there. Its main loop ends when both
                its weights have come and the tensor cores are done; the next unit's weights come during its epilogue
    weights     the first block of an expert streams them from memory, at most `num_stages` ahead of the tensor cores,
                which all streaming CTAs share evenly; later blocks find them in the L2 cache. Padding rows are read
                too, and dirty lines of the cache are written back as others come in
    send        results leave on the link as tiles end; pulls and peers' results queue for the same direction of it
    finish      a grid join and a flag to every peer, once the last result has left
    combine     top_k rows a token read, one written, at the memory's rate

Not in the model: contention in the L2 cache beyond what the measured main loops had, blocks of an expert whose weights
left that cache, skew between ranks, and fan-in (R peers' flags are polled as one).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol, runtime_checkable

from megamoe.errors import ConfigError
from megamoe.problem import MoEProblem, QuantMode, Transport
from megamoe.schedule.kernel_rates import KernelRates, Link
from megamoe.schedule.persistent import Unit, unit_at
from megamoe.schedule.protocol import Phase
from megamoe.schedule.tiles import ceil_div
from megamoe.schedule.workspace import ACTIVATION_ROWS, combine_row_bytes

SECTOR_BYTES = 32  # what a scattered store moves at least
WARPGROUP_ROWS = 64  # of a tile: one warpgroup's WGMMA
RATED_ROWS = 128  # that the epilogues of `KernelRates` are for


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a backend cuts a call into units, and on how many CTAs it runs them.

    Attributes:
        block_m, block_n, block_k: rows, columns and stage depth of a tile.
        num_ctas: of a rank, one per SM.
        num_stages: that weights may be ahead of the tensor cores.
        box_rows: rows of a copy of activations; copies without a valid row are left out.
        lag_blocks, ring_blocks, group_blocks: see `schedule.waves.Ring`.
        prefetched_k_blocks: of each CTA's first tile, whose weights come while ranks still exchange counts.
    """

    block_m: int
    block_n: int
    block_k: int
    num_ctas: int
    num_stages: int
    box_rows: int
    lag_blocks: int
    ring_blocks: int
    prefetched_k_blocks: int = 0
    group_blocks: int = 1


@runtime_checkable
class Tiled(Protocol):
    """A backend's configuration that can be simulated."""

    def tiling(self, problem: MoEProblem, num_tokens: int, num_ctas: int) -> Tiling:
        """The cut of a call with `num_tokens` tokens on every rank."""
        ...


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One rank's call, microseconds.

    Attributes:
        us: from launch to end; the sum of the next four.
        exchange_us: until the pool is planned.
        multiply_us: until the last result has left.
        finish_us: until every rank is known to be done.
        combine_us: the rest.
        num_blocks: pool blocks.
        hbm_bytes: weights streamed.
        link_bytes: of the busier direction: rows pulled and peers' results.
        math_share: of the CTAs' time while multiplying, in which the math warps work and wait for nothing.
    """

    us: float
    exchange_us: float
    multiply_us: float
    finish_us: float
    combine_us: float
    num_blocks: int
    hbm_bytes: float
    link_bytes: float
    math_share: float


def simulate(
    problem: MoEProblem,
    tiling: Tiling,
    *,
    num_tokens: int,
    rows_per_expert: Sequence[int],
    links: Sequence[Link],
    rates: KernelRates,
    dirty_l2_bytes: int = 0,
) -> Prediction:
    """Predict a call.

    Args:
        problem: sizes; `a8w8`, the mode whose pieces are measured. Inputs are taken as already quantised.
        tiling: the backend's cut.
        num_tokens: on this rank.
        rows_per_expert: that this rank's experts receive (schedule/expected_rows.py).
        links: to other ranks; their shares sum to the share of rows that leave the rank.
        rates: of the pieces.
        dirty_l2_bytes: of the L2 cache, written before the call and not written back yet. All of the cache after a
            benchmark's flush, which fills memory with zeros.

    Raises:
        ConfigError: a mode or tile height without measured pieces.
    """
    if problem.quant is not QuantMode.A8W8 or tiling.block_m not in rates.k_block_us:
        raise ConfigError(
            f"no main loop of {problem.quant} with blocks of {tiling.block_m} rows was measured on {rates.device}",
            expected=f"a8w8 with blocks of {' or '.join(map(str, rates.k_block_us))} rows",
        )
    layer = _Layer.of(problem, tiling)
    blocks = _cut(rows_per_expert, tiling.block_m)
    exchange = _exchange_us(layer, num_tokens, links, rates)
    # The clock falls with the power that the math draws: first at the boost clock, then at the one for as much math.
    cool = _Rank(layer, blocks, links, rates, dirty_l2_bytes, slowdown=1.0)
    cool.run()
    slowdown = 1 + (rates.sustained_slowdown - 1) * cool.math_share
    rank = _Rank(layer, blocks, links, rates, dirty_l2_bytes, slowdown=slowdown)
    multiply = rank.run()
    finish = _finish_us(links, rates)
    combined_bytes = num_tokens * (problem.top_k * layer.row_out_bytes + 2 * problem.hidden_size)
    combine = combined_bytes / rates.copy_bytes_per_s * 1e6 + 2 * rates.memory_latency_us
    return Prediction(
        us=exchange + multiply + finish + combine,
        exchange_us=exchange,
        multiply_us=multiply,
        finish_us=finish,
        combine_us=combine,
        num_blocks=len(blocks),
        hbm_bytes=rank.hbm_bytes,
        link_bytes=rank.link_bytes,
        math_share=rank.math_share,
    )


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """Sizes of the problem in tiles and bytes."""

    tiling: Tiling
    top_k: int
    row_in_bytes: int
    row_out_bytes: int
    quantised_rows_out: bool
    k_blocks: dict[Phase, int]
    n_tiles: dict[Phase, int]

    @classmethod
    def of(cls, problem: MoEProblem, tiling: Tiling) -> _Layer:
        hidden, inter = problem.hidden_size, problem.intermediate_size
        rows = ACTIVATION_ROWS[problem.quant]
        return cls(
            tiling=tiling,
            top_k=problem.top_k,
            row_in_bytes=rows.payload_bytes(hidden) + rows.scales_bytes(hidden),
            row_out_bytes=combine_row_bytes(problem.transport, hidden),
            quantised_rows_out=problem.transport is not Transport.BF16,
            k_blocks={Phase.GEMM1: ceil_div(hidden, tiling.block_k), Phase.GEMM2: ceil_div(inter, tiling.block_k)},
            n_tiles={Phase.GEMM1: ceil_div(2 * inter, tiling.block_n), Phase.GEMM2: ceil_div(hidden, tiling.block_n)},
        )

    @property
    def k_block_bytes(self) -> int:
        """FP8 weights of one stage."""
        return self.tiling.block_n * self.tiling.block_k


@dataclass(frozen=True, kw_only=True)
class _Block:
    num_rows: int
    streams_weights: bool


def _cut(rows_per_expert: Sequence[int], block_m: int) -> list[_Block]:
    return [
        _Block(num_rows=min(block_m, rows - first), streams_weights=first == 0)
        for rows in rows_per_expert
        for first in range(0, rows, block_m)
    ]


def _flag_us(links: Sequence[Link], rates: KernelRates) -> float:
    """A flag to the furthest peer; through this rank's own memory where it has none."""
    return max((link.flag_us for link in links), default=rates.memory_latency_us)


def _exchange_us(layer: _Layer, num_tokens: int, links: Sequence[Link], rates: KernelRates) -> float:
    """The chain that ends with the pool's plan: no step of it starts before the one before has ended."""
    load, join, flag = rates.memory_latency_us, rates.grid_join_us, _flag_us(links, rates)
    entry_bytes = num_tokens * layer.top_k * SECTOR_BYTES
    steps = (
        rates.launch_us + load,  # arguments, epoch
        2 * num_tokens * layer.row_in_bytes / rates.copy_bytes_per_s * 1e6 + load,  # stage
        load + load + join + load,  # read ids, claim places, join, read everybody's
        load + max((link.share * entry_bytes / link.push_bytes_per_s * 1e6 for link in links), default=0.0),  # push
        2 * flag + join,  # pushes acknowledged, join
        flag + load,  # the flag, then the counts
        rates.plan_us,
    )
    return sum(steps)


def _finish_us(links: Sequence[Link], rates: KernelRates) -> float:
    """Results acknowledged, a join, a flag."""
    return 3 * _flag_us(links, rates) + rates.grid_join_us


class _MemoryBus:
    """Device memory: streams share it evenly, and what one can't take goes to the others.

    Streams of one limit progress alike, so one number per limit, the bytes that a stream present from the start would
    have got, orders their ends.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_us = bytes_per_s / 1e6
        self._ends: dict[float, list[tuple[float, int]]] = defaultdict(list)
        self._served: dict[float, float] = defaultdict(float)
        self._time = 0.0
        self.next_end = (inf, 0.0)
        """When the next stream ends if none is added before, and its limit."""

    def _rates(self) -> dict[float, float]:
        """Bytes per microsecond of the streams of each limit."""
        free, num_streams = self._bytes_per_us, sum(map(len, self._ends.values()))
        rates = {}
        for limit in sorted(limit for limit, ends in self._ends.items() if ends):
            rates[limit] = min(limit, free / num_streams)
            free -= rates[limit] * len(self._ends[limit])
            num_streams -= len(self._ends[limit])
        return rates

    def _advance(self, time: float) -> None:
        for limit, rate in self._rates().items():
            self._served[limit] += (time - self._time) * rate
        self._time = time

    def add(self, time: float, cta: int, num_bytes: float, limit: float) -> None:
        """Start a stream that takes at most `limit` bytes per microsecond."""
        self._advance(time)
        heapq.heappush(self._ends[limit], (self._served[limit] + num_bytes, cta))
        self._find_next_end()

    def end(self) -> int:
        """The CTA whose stream ends next."""
        time, limit = self.next_end
        self._advance(time)
        cta = heapq.heappop(self._ends[limit])[1]
        self._find_next_end()
        return cta

    def _find_next_end(self) -> None:
        ends = [
            (self._time + max(0.0, self._ends[limit][0][0] - self._served[limit]) / rate, limit)
            for limit, rate in self._rates().items()
        ]
        self.next_end = min(ends, default=(inf, 0.0))


class _Pipe:
    """One direction of a link: first come, first served."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.free_at = 0.0

    def move(self, time: float, num_bytes: float, bytes_per_s: float) -> float:
        """When `num_bytes` that are ready at `time` have passed."""
        self.free_at = max(time, self.free_at) + self.link.share * num_bytes / bytes_per_s * 1e6
        return self.free_at


@dataclass(kw_only=True)
class _Cta:
    """Where a CTA is: its unit, what its main loop still waits for, and when its math warps are free again."""

    unit: Unit | None = None
    parts_left: int = 0
    free_at: float = 0.0


class _Rank:
    """One rank from the plan of its pool (time 0) to its last result's departure."""

    def __init__(
        self,
        layer: _Layer,
        blocks: Sequence[_Block],
        links: Sequence[Link],
        rates: KernelRates,
        dirty_l2_bytes: int,
        slowdown: float,
    ) -> None:
        self._layer, self._blocks, self._rates, self._slowdown = layer, blocks, rates, slowdown
        self._remote_share = sum(link.share for link in links)
        self._pipes = [_Pipe(link) for link in links]
        self._bus = _MemoryBus(rates.hbm_bytes_per_s)
        self._ctas = [_Cta() for _ in range(layer.tiling.num_ctas)]
        self._events: list[tuple[float, int, str, int, Unit | None]] = []
        self._next_event = self._next_unit = self._next_pull = 0
        self._tiles_done: dict[tuple[Phase, int], int] = defaultdict(int)
        self._rows_here: set[int] = set()
        self._waiting: dict[tuple[Phase, int], list[tuple[int, int]]] = defaultdict(list)
        self._pull_waits_for: int | None = None
        self._math_us = self._end = 0.0
        self._dirty_left: float = dirty_l2_bytes
        self.hbm_bytes = 0.0
        self.link_bytes = 0.0

    @property
    def math_share(self) -> float:
        """Share of the CTAs' time that main loops and epilogues take by themselves."""
        return self._math_us / (self._end * len(self._ctas)) if self._end else 0.0

    def run(self) -> float:
        """Microseconds until the last result has left."""
        self._at(self._rates.memory_latency_us, "pull")  # entries are read first
        for cta in range(len(self._ctas)):
            self._at(0.0, "claim", cta)
        while True:
            stream_end, _ = self._bus.next_end
            if stream_end <= (self._events[0][0] if self._events else inf):
                if stream_end == inf:
                    break
                self._end_part(stream_end, self._bus.end())
                continue
            time, _, kind, index, unit = heapq.heappop(self._events)
            self._end = time
            if kind == "claim":
                self._claim(time, index)
            elif kind == "multiplied":
                self._end_part(time, index)
            elif kind == "pull":
                self._pull(time)
            elif kind == "arrived":
                self._rows_here.add(index)
                self._wake(time, Phase.GEMM1, index)
            else:
                assert unit is not None
                self._end_unit(time, unit)
        self._end = max([self._end, *(pipe.free_at for pipe in self._pipes)])
        return self._end

    def _at(self, time: float, kind: str, index: int = 0, unit: Unit | None = None) -> None:
        self._next_event += 1
        heapq.heappush(self._events, (time, self._next_event, kind, index, unit))

    def _pull(self, time: float) -> None:
        """Ask for the rows of the next block, unless its ring slot is taken."""
        block, ring = self._next_pull, self._layer.tiling.ring_blocks
        if block == len(self._blocks):
            return
        if block >= ring and not self._is_done(Phase.GEMM2, block - ring):
            self._pull_waits_for = block - ring
            return
        self._next_pull += 1
        num_bytes = self._blocks[block].num_rows * self._layer.row_in_bytes
        passed = [pipe.move(time, num_bytes, pipe.link.pull_bytes_per_s) for pipe in self._pipes]
        self.link_bytes += num_bytes * self._remote_share
        # Asked for and sent, stored, published.
        latency = 2 * _flag_us([pipe.link for pipe in self._pipes], self._rates) + 2 * self._rates.memory_latency_us
        self._at(max(passed, default=time) + latency, "arrived", block)
        self._at(max(passed, default=time), "pull")

    def _claim(self, time: float, index: int) -> None:
        unit = unit_at(
            self._next_unit,
            num_blocks=len(self._blocks),
            num_gemm1_tiles=self._layer.n_tiles[Phase.GEMM1],
            num_gemm2_tiles=self._layer.n_tiles[Phase.GEMM2],
            lag_blocks=self._layer.tiling.lag_blocks,
            group_blocks=self._layer.tiling.group_blocks,
        )
        if unit is None:
            return
        is_first = self._next_unit < len(self._ctas)
        self._next_unit += 1
        self._ctas[index].unit = unit
        early = self._layer.tiling.prefetched_k_blocks if is_first else 0
        if unit.block in self._rows_here if unit.phase is Phase.GEMM1 else self._is_done(Phase.GEMM1, unit.block):
            self._start(time, index, early)
        else:  # weights don't wait: the stages fill meanwhile
            early = max(early, self._layer.tiling.num_stages)
            self._waiting[unit.phase, unit.block].append((index, early))

    def _start(self, time: float, index: int, early_k_blocks: int) -> None:
        """Begin a main loop, of whose weights `early_k_blocks` are here."""
        cta, rates, layer = self._ctas[index], self._rates, self._layer
        assert cta.unit is not None
        block, k_blocks = self._blocks[cta.unit.block], layer.k_blocks[cta.unit.phase]
        k_block_us = self._slowdown * rates.k_block_us[layer.tiling.block_m]
        if block.num_rows <= layer.tiling.block_m - WARPGROUP_ROWS:
            k_block_us *= rates.half_tile
        duration = self._slowdown * rates.tile_us + k_block_us * k_blocks
        self._math_us += duration
        self._at(max(time, cta.free_at) + duration, "multiplied", index)
        cta.parts_left = 1
        padding = -block.num_rows % layer.tiling.box_rows * layer.tiling.block_k / layer.n_tiles[cta.unit.phase]
        k_block_bytes = padding + layer.k_block_bytes * block.streams_weights
        self.hbm_bytes += k_blocks * k_block_bytes
        num_bytes = max(0, k_blocks - early_k_blocks) * k_block_bytes
        if num_bytes:
            cta.parts_left = 2
            # Stages ahead of the tensor cores are all that a stream can be.
            limit = k_blocks * k_block_bytes / (max(1, k_blocks - layer.tiling.num_stages) * k_block_us)
            limit = min(limit, rates.sm_stream_bytes_per_s / 1e6)
            put_out = min(self._dirty_left, num_bytes)  # a line that comes in puts a dirty one out
            self._dirty_left -= put_out
            self._bus.add(time, index, num_bytes + put_out, limit * (1 + put_out / num_bytes))

    def _end_part(self, time: float, index: int) -> None:
        """Weights have come, or the tensor cores are done; the main loop ends with the later one."""
        cta = self._ctas[index]
        cta.parts_left -= 1
        if cta.parts_left:
            return
        assert cta.unit is not None
        epilogue = self._epilogue_us(cta.unit)
        self._math_us += epilogue
        cta.free_at = time + epilogue
        self._at(cta.free_at, "stored", unit=cta.unit)
        self._claim(time, index)

    def _epilogue_us(self, unit: Unit) -> float:
        rates, layer = self._rates, self._layer
        rows = layer.tiling.block_m / RATED_ROWS
        if unit.phase is Phase.GEMM1:
            return self._slowdown * rows * rates.activation_epilogue_us
        stored = rates.quantise_epilogue_us if layer.quantised_rows_out else rates.store_epilogue_us
        pushed = self._tile_out_bytes(unit) * self._remote_share / rates.sm_push_bytes_per_s * 1e6
        return max(self._slowdown * rows * stored, pushed)

    def _tile_out_bytes(self, unit: Unit) -> float:
        return self._blocks[unit.block].num_rows * self._layer.row_out_bytes / self._layer.n_tiles[Phase.GEMM2]

    def _end_unit(self, time: float, unit: Unit) -> None:
        self._tiles_done[unit.phase, unit.block] += 1
        if unit.phase is Phase.GEMM2:
            num_bytes = self._tile_out_bytes(unit)
            self.link_bytes += num_bytes * self._remote_share
            for pipe in self._pipes:
                pipe.move(time, num_bytes, pipe.link.push_bytes_per_s)
        if not self._is_done(unit.phase, unit.block):
            return
        if unit.phase is Phase.GEMM1:
            self._wake(time, Phase.GEMM2, unit.block)
        elif unit.block == self._pull_waits_for:
            self._pull_waits_for = None
            self._pull(time)

    def _is_done(self, phase: Phase, block: int) -> bool:
        return self._tiles_done[phase, block] == self._layer.n_tiles[phase]

    def _wake(self, time: float, phase: Phase, block: int) -> None:
        for index, early_k_blocks in self._waiting.pop((phase, block), []):
            self._start(time, index, early_k_blocks)
