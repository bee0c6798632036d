"""Which tiles a session has, and which of them a call uses. Pure functions of plain numbers.

A session compiles one kernel per tile and picks one per call, by the call's token count. Ranks may pick
differently: how an owner cuts its rows into blocks shows in nothing that another rank waits for, and a row's bits are
the same in every tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias

from megamoe import backend
from megamoe.errors import ConfigError
from megamoe.problem import Activation, MoEProblem, QuantMode, Transport
from megamoe.schedule.device_spec import H200
from megamoe.schedule.simulate import Tiling
from megamoe.schedule.tiles import ceil_div, round_up
from megamoe.schedule.waves import Ring, default_ring, live_blocks
from megamoe_cuda.kernel_config import (
    BLOCK_K,
    BLOCK_N,
    CONVERTER_GROUP_WARPS,
    NUM_DISPATCH_WARPS,
    PREFETCHED_K_BLOCKS,
    KernelConfig,
    TileConfig,
    element_bytes,
)
from megamoe_cuda.smem_budget import shared_memory

AUTO = "auto"


# Stages: as many as fit beside the staging of the epilogue. Registers: what the warpgroups need without spills.
N32 = TileConfig(
    name="n32", block_m=32, num_stages=5, producer_registers=56, math_registers=224, box_rows=8, swapped_rows=32
)
M64 = TileConfig(name="m64", block_m=64, num_stages=4, producer_registers=56, math_registers=224, box_rows=64)
M128 = TileConfig(name="m128", block_m=128, num_stages=4, producer_registers=56, math_registers=224, box_rows=32)
M128N64 = replace(M128, name="m128n64", swapped_rows=64)
M256 = replace(M128, name="m256", block_m=256, cluster_size=2)
TILES = {tile.name: tile for tile in (N32, M64, M128, M128N64)}
AHEAD = replace(  # mode a8w4, weights converted ahead
    M128N64,
    name="ahead",
    converts_ahead=True,
    converter_warps=4,
    producer_registers=40,
    math_registers=216,
    converter_registers=40,
)
TILES_A8W4 = {
    tile.name: tile
    for tile in (
        replace(N32, num_stages=7, registers_hold_weights=True, math_registers=104),
        replace(
            M64,
            operand_buffers=2,
            packed_stages=4,
            converter_warps=8,
            producer_registers=48,
            math_registers=168,
            converter_registers=48,
        ),
        replace(
            M128N64,
            operand_buffers=2,
            packed_stages=3,
            converter_warps=4,
            producer_registers=40,
            math_registers=216,
            converter_registers=40,
        ),
        AHEAD,
    )
}
"""Those of mode a8w4."""

Limits: TypeAlias = tuple[tuple[float, TileConfig], ...]
"""Mean rows per expert up to which a tile is used, the least first; one that a mode does not have is left out."""

ONE_RANK: Limits = ((20.0, N32), (57.0, M64), (200.0, M128), (inf, M128N64))
"""Where a rank is alone. Seed's shape on an H200, mode a8w8, 2026-11-30, us
(docs/performance-log.md; H = 7168 agrees):

    rows   2  n32 198  m128n64 200  m64 204  m128 215     with swapped operands no padding is read
    rows   8  n32 217  m128n64 220  m64 225  m128 233
    rows  16  n32 221  m128n64 222  m64 225
    rows  24  m64 228  m128n64 229  n32 229
    rows  32  m64 231  m128n64 235  m128 241  n32 269     n32 cuts half of the experts into two blocks
    rows  48  m64 234  m128 248  m128n64 248
    rows  56  m64 247  m128 251  m128n64 254
    rows  64  m128 254  m128n64 261  m64 279              and m64 here
    rows 128  m128 330  m128n64 331
    rows 192  m128 413  m128n64 416
    rows 256  m128n64 486  m128 501  m64 580              the last block of an expert holds few rows
    rows 512  m128n64 921  m128 930"""

AMONG_RANKS: Limits = ((5.0, N32), (33.0, M64), (200.0, M128), (inf, M128N64))
"""Where there are several ranks. Their routing may be skewed, and no rank knows before a call what it will receive: a
rank that receives 1.5 or, under Zipf's law at EP8, 4.9 times the mean may not pay much for a small tile (`megamoe bench
--suite sm90-skew`). With the limits above it took up to 1.25 times as long as balanced routing with as many rows.
Balanced calls pay for these: 2 to 3% from 5 to 20 rows an expert, 5 to 6% from 33 to 57."""

AMONG_RANKS_A8W8: Limits = ((5.0, N32), (27.0, M128N64), (33.0, M64), (200.0, M128), (inf, M128N64))
"""The same in mode a8w8 where `m128n64` takes its blocks one by one. H200, seed's shape, 2026-11-30, us:

    rows  8  m128n64 218  m64 222  n32 215    balanced; n32's blocks and m64's are too small where routing is skewed
    rows 16  m128n64 221  m64 224  n32 220
    rows 24  m128n64 228  m64 228             under Zipf's law the busiest rank takes 321 and 355, balanced routing 279
    rows 32  m128n64 233  m64 228             here 363 and 421, and 381"""

ONE_RANK_A8W4: Limits = ((24.0, N32), (57.0, M64), (576.0, M128N64), (inf, AHEAD))
AMONG_RANKS_A8W4: Limits = ((5.0, N32), (33.0, M64), (576.0, M128N64), (inf, AHEAD))
"""The same in mode a8w4. H200, EP1, seed's shape, 2026-12-01, us:

    rows    2  n32 126  m128n64 156
    rows    8  n32 140  m64 179
    rows   16  n32 157  m64 180
    rows   24  n32 173  m64 182
    rows   32  m64 178  m128n64 213  n32 222
    rows   64  m64 246  m128n64 262
    rows  384  m128n64 812  ahead 983         all experts are converted first
    rows  512  m128n64 1064  ahead 1080
    rows 1024  ahead 1760  m128n64 2234      an expert is converted once, not for each of its blocks
    rows 2048  ahead 3483  m128n64 4474"""

LIMITS_BF16: Limits = ((50.0, M64), (90.0, M128), (inf, M256))
"""Those of mode bf16, likewise:

    rows   64  m128 454  m256 464  m64 537
    rows  128  m256 537  m128 625               both blocks of an expert read its weights at one time
    rows  512  m256 1533  m128 1892
    rows 2048  m256 5714  m128 7258"""

LEAST_PULLED_ROWS = {QuantMode.A8W8: 1, QuantMode.BF16: 2, QuantMode.A8W4: 2}
"""Rows on their way to the pool, in a CTA: a tile gives up stages for them. In mode bf16 a row takes 2 H bytes of
shared memory, in mode a8w4 converted weights take 64 KiB."""
LEAST_STAGES = 2

CONVERTED_EXPERTS = 3
"""Experts that the workspace has room for where weights are converted ahead: 75 MB at the seed's shape."""

MAX_LAG_BLOCKS, MAX_LAG_ROWS = 12, 12 * 128
"""GEMM2 trails GEMM1 by no more. Seed's shape on an H200, 2026-11-30: at 512 to 2048 tokens lags of 14 to 28 blocks of
128 rows were equal and 8 cost 1 to 4%; at 8192 tokens a lag of 64 cost 5% more than one of 12."""

MAX_RING_ROWS = 6144
"""Rows of the ring in FP8, at most: with A2 38 MiB at the seed's shape, so that it stays in an H200's L2 cache of 50
MiB. At 8192 tokens, rings of 24 and 32 blocks of 128 rows beat one of 129 by 4 to 10%. In BF16, half as many."""

GROUP_BLOCKS, GROUPED_EXPERT_BYTES = 4, 40 << 20
"""Blocks of m128n64 whose tiles come column by column, where an expert's weights are larger. They leave the L2 cache
before the next block asks for them, and each block reads them from memory: 25 GB in a call of 8192 tokens at H = 7168,
I = 3072, 48 experts. H200, mode a8w8, 2026-11-30, us without groups, of 2, of 4 (docs/performance-log.md):

    H 7168 I 3072, 63 MiB    2048 tokens 2079, 1996, 1990    8192 tokens 7677, 7068, 7024
    H 7168 I 2048, 42 MiB    2048 tokens 1707, 1699, 1680    8192 tokens 6396, 6342, 6315
    H 4096 I 2048, 24 MiB    2048 tokens  878,  884,  894    8192 tokens 3589, 3605, 3612"""


@dataclass(frozen=True, kw_only=True)
class SessionConfig(backend.KernelConfig):
    """The tiles of a session, for few rows first, each with its ring of blocks.

    Attributes:
        name: "auto", or the name of the one tile that is pinned.
        tiles: shapes and pipelines.
        rings: geometry of the block ring for each tile; all share one piece of memory.
        tap_gemm1: whether kernels also store GEMM1's accumulators, for tests.
        trace: whether kernels also store time stamps of their phases.
    """

    tiles: tuple[TileConfig, ...]
    rings: tuple[Ring, ...]
    tap_gemm1: bool = False
    trace: bool = False

    def tapped(self) -> SessionConfig:
        """The same tiles, for a session that keeps what stands between the stages: no block overwrites another."""
        rings = tuple(replace(ring, ring_blocks=max(ring.ring_blocks, ring.max_blocks)) for ring in self.rings)
        return replace(self, rings=rings, tap_gemm1=True)

    def kernel(
        self, problem: MoEProblem, tile: TileConfig, *, num_virtual_ranks: int, ctas_per_rank: int
    ) -> KernelConfig:
        """What the kernel of `tile` is compiled for. Clusters leave an odd CTA out.

        Raises:
            ConfigError: a cluster has more CTAs than the rank.
        """
        return KernelConfig(
            num_ranks=problem.ep_size,
            num_virtual_ranks=num_virtual_ranks,
            ctas_per_rank=ctas_per_rank // tile.cluster_size * tile.cluster_size,
            num_local_experts=problem.num_local_experts,
            hidden_size=problem.hidden_size,
            intermediate_size=round_up(problem.intermediate_size, BLOCK_K),
            top_k=problem.top_k,
            num_max_tokens_per_rank=problem.num_max_tokens_per_rank,
            tile=tile,
            ring=self.rings[self.tiles.index(tile)],
            session_rings=self.rings,
            transport=Transport(problem.transport),
            activation=Activation(problem.activation),
            swiglu_limit=problem.swiglu_limit,
            quant=QuantMode(problem.quant),
            expert_bias=problem.expert_bias,
            converted_experts=CONVERTED_EXPERTS if any(each.converts_ahead for each in self.tiles) else 0,
            tap_gemm1=self.tap_gemm1,
            trace=self.trace,
        )

    def tile_for(self, problem: MoEProblem, num_tokens: int) -> TileConfig:
        """The tile of a call with `num_tokens` tokens on this rank, if its peers bring about as many."""
        rows_per_expert = _rows_per_expert(problem, num_tokens)
        own = {tile.name: tile for tile in self.tiles}
        fitting = (own[tile.name] for most, tile in _limits(problem) if rows_per_expert <= most and tile.name in own)
        return next(fitting, self.tiles[-1])

    def tiling(self, problem: MoEProblem, num_tokens: int, num_ctas: int) -> Tiling:
        """See `megamoe.schedule.simulate.Tiled`."""
        tile = self.tile_for(problem, num_tokens)
        ring = self.rings[self.tiles.index(tile)]
        # As prefetch_first_weights() of roles/load.cuh guesses.
        one_block_each = 2 * num_tokens * problem.top_k <= problem.num_local_experts * tile.block_m
        return Tiling(
            block_m=tile.block_m,
            block_n=BLOCK_N,
            block_k=BLOCK_K // element_bytes(QuantMode(problem.quant)),
            num_ctas=num_ctas,
            num_stages=tile.weight_stages,
            box_rows=tile.box_rows,
            lag_blocks=ring.lag_blocks,
            ring_blocks=ring.ring_blocks,
            group_blocks=ring.group_blocks,
            prefetched_k_blocks=PREFETCHED_K_BLOCKS if one_block_each and tile.cluster_size == 1 else 0,
        )


def tiles_of(problem: MoEProblem) -> dict[str, TileConfig]:
    """The tiles that kernels of `problem` can have, by name, for few rows first.

    Operands are swapped in a8w4, and in a8w8 without biases; clusters multiply in mode bf16 only. Else whole tiles of
    activations are loaded: no others were measured.
    """
    quant = QuantMode(problem.quant)
    if quant is QuantMode.A8W4:
        one_k_block = min(problem.hidden_size, problem.intermediate_size) <= BLOCK_K
        return {n: with_one_group(tile) if one_k_block else tile for n, tile in TILES_A8W4.items()}
    if quant is QuantMode.A8W8 and not problem.expert_bias:
        return TILES
    tiles = [tile for tile in TILES.values() if not tile.swapped_rows]
    if quant is QuantMode.BF16 and _column_tiles_pair(problem):
        tiles.append(M256)
    return {tile.name: replace(tile, box_rows=tile.tile_m) for tile in tiles}


def _column_tiles_pair(problem: MoEProblem) -> bool:
    """Whether clusters of two CTAs can share out the column tiles of both GEMMs."""
    columns = (2 * round_up(problem.intermediate_size, BLOCK_K), problem.hidden_size)
    return all(ceil_div(number, BLOCK_N) % M256.cluster_size == 0 for number in columns)


def _limits(problem: MoEProblem) -> Limits:
    quant = QuantMode(problem.quant)
    if quant is QuantMode.BF16:
        return LIMITS_BF16
    alone = problem.ep_size == 1
    if quant is QuantMode.A8W4:
        return ONE_RANK_A8W4 if alone else AMONG_RANKS_A8W4
    if alone:
        return ONE_RANK
    return AMONG_RANKS if _shares_weights_in_groups(problem) else AMONG_RANKS_A8W8


def _rows_per_expert(problem: MoEProblem, num_tokens: int) -> float:
    return num_tokens * problem.top_k / problem.num_local_experts


def _shares_weights_in_groups(problem: MoEProblem) -> bool:
    return 3 * problem.hidden_size * problem.intermediate_size > GROUPED_EXPERT_BYTES


def with_one_group(tile: TileConfig) -> TileConfig:
    """`tile` with one group of converter warps."""
    if tile.converter_groups <= 1:
        return tile
    return replace(
        tile,
        converter_warps=CONVERTER_GROUP_WARPS,
        producer_registers=56,
        math_registers=200,
        converter_registers=56,
    )


def config_names(problem: MoEProblem) -> tuple[str, ...]:
    """Names that `session_config` takes for `problem`, the default first."""
    return (AUTO, *tiles_of(problem))


def session_config(problem: MoEProblem, name: str | None, *, num_sms: int = H200.num_sms) -> SessionConfig:
    """The configuration called `name`; None is "auto".

    Args:
        problem: what the session runs.
        name: one of `config_names`, or None.
        num_sms: SMs that its kernels take. Where that is fewer than an H200 has, other kernels may run on the rest, and
            "auto" has no clusters: their CTAs start in pairs on neighbouring SMs, and another kernel may hold one of a
            pair until this one has run.

    Raises:
        ConfigError: there is none of that name.
    """
    name, names = name or AUTO, config_names(problem)
    if name not in names:
        raise ConfigError("no such configuration of backend cuda", got=repr(name), expected=" or ".join(names))
    tiles = _tiles_up_to_capacity(problem, num_sms) if name == AUTO else (tiles_of(problem)[name],)
    rings = tuple(_ring(problem, tile) for tile in tiles)
    tiles = tuple(_with_room_for_rows(problem, tile, ring) for tile, ring in zip(tiles, rings, strict=True))
    return SessionConfig(name=name, tiles=tiles, rings=rings)


def _tiles_up_to_capacity(problem: MoEProblem, num_sms: int) -> tuple[TileConfig, ...]:
    """All tiles that some call can use, by height: those for more rows than a full call has are left out."""
    alone = num_sms >= H200.num_sms
    available = {n: tile for n, tile in tiles_of(problem).items() if alone or tile.cluster_size == 1}
    limits = [(most_rows, tile.name) for most_rows, tile in _limits(problem) if tile.name in available]
    full = _rows_per_expert(problem, problem.num_max_tokens_per_rank)
    used = {name for _, name in limits[: 1 + sum(full > most_rows for most_rows, _ in limits)]}
    return tuple(tile for name, tile in available.items() if name in used)


def _with_room_for_rows(problem: MoEProblem, tile: TileConfig, ring: Ring) -> TileConfig:
    """`tile` with as many of its stages as leave shared memory for `LEAST_PULLED_ROWS`, or with the fewest."""
    *candidates, fewest = _with_fewer_stages(tile)
    for fewer in candidates:
        config = SessionConfig(name=tile.name, tiles=(fewer,), rings=(ring,))
        try:
            memory = shared_memory(config.kernel(problem, fewer, num_virtual_ranks=1, ctas_per_rank=fewer.cluster_size))
        except ConfigError:
            continue
        if NUM_DISPATCH_WARPS * memory.pull_slots >= _least_pulled_rows(problem, tile):
            return fewer
    return fewest


def _least_pulled_rows(problem: MoEProblem, tile: TileConfig) -> int:
    """Converting ahead takes the room of a row for packed weights on their way."""
    return 1 if tile.converts_ahead else LEAST_PULLED_ROWS[QuantMode(problem.quant)]


def _with_fewer_stages(tile: TileConfig) -> Iterator[TileConfig]:
    """`tile` itself, then with fewer and fewer stages; packed ones go first."""
    step, packed_step = max(tile.operand_buffers, 1), max(tile.converter_groups, 1)
    for num_stages in range(tile.num_stages, LEAST_STAGES - 1, -step):
        for packed_stages in range(tile.packed_stages, min(LEAST_STAGES, tile.packed_stages) - 1, -packed_step):
            yield replace(tile, num_stages=num_stages, packed_stages=packed_stages)


def _ring(problem: MoEProblem, tile: TileConfig) -> Ring:
    quant = QuantMode(problem.quant)
    roomy = default_ring(
        ep_size=problem.ep_size,
        num_max_tokens_per_rank=problem.num_max_tokens_per_rank,
        top_k=problem.top_k,
        num_local_experts=problem.num_local_experts,
        block_m=tile.block_m,
    )
    large_experts = _shares_weights_in_groups(problem)
    group = GROUP_BLOCKS if large_experts and quant is QuantMode.A8W8 and tile.name == M128N64.name else 1
    lag = min(roomy.lag_blocks, MAX_LAG_BLOCKS, MAX_LAG_ROWS // tile.block_m) // group * group
    ring_blocks = min(roomy.ring_blocks, MAX_RING_ROWS // element_bytes(quant) // tile.block_m)
    return replace(
        roomy,
        lag_blocks=lag,
        ring_blocks=max(ring_blocks, live_blocks(lag, roomy.max_blocks, group)),
        group_blocks=group,
    )
