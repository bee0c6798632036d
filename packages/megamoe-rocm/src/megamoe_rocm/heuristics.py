"""Which tiles a session has and which of them a call uses: pure functions of plain numbers, over tuning/gfx950.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from megamoe.backend import KernelConfig
from megamoe.errors import ConfigError
from megamoe.problem import MoEProblem
from megamoe.schedule.waves import Ring
from megamoe_rocm.kernels.workspace import ring_of

SCALE_BLOCK_COLUMNS = 256  # columns of K that one dword of shuffled scales covers; the depth of a main loop's step
GATE_UP_COLUMNS = 64  # columns of w13 that hold 32 whole channels in the order BLOCKS_16
CACHE_MODIFIERS = ("", ".ca", ".cg", ".cs", ".cv", ".wb", ".wt")


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """Everything that is a compile-time choice of the persistent stages. Every choice gives the same bits.

    Attributes:
        name: names it in plans, and for pinning.
        block_m: rows of a pool block.
        gemm1_block_m: rows of a GEMM1 tile; divides `block_m`.
        gemm1_block_n: columns of a GEMM1 tile, of the 2I gate and up columns.
        gemm2_block_m: rows of a GEMM2 tile; divides `block_m`.
        gemm2_block_n: columns of a GEMM2 tile.
        num_warps: waves of a program.
        pull_rows: rows that are pulled at a time; divides `block_m`.
        lead_blocks: blocks that pulls run ahead of GEMM1.
        units_per_ticket: units that a ticket stands for: 1 is a strided order over programs, more a contiguous one.
        programs_per_cu: persistent programs for each compute unit.
        weight_cache: cache modifier of loads of weights and their scales.
        a2_cache: cache modifier of stores of A2 and its scales.
        provenance: where the numbers come from.

    Raises:
        ConfigError: a field that the layouts or another field rule out.
    """

    name: str
    block_m: int
    gemm1_block_m: int
    gemm1_block_n: int
    gemm2_block_m: int
    gemm2_block_n: int
    num_warps: int = 4
    pull_rows: int
    lead_blocks: int
    units_per_ticket: int = 1
    programs_per_cu: int = 2
    weight_cache: str = ""
    a2_cache: str = ""
    provenance: str

    def __post_init__(self) -> None:
        for name in ("block_m", "gemm1_block_m", "gemm2_block_m"):
            self._require(name, getattr(self, name) >= 32, "at least 32, the rows of a scale operand")
        rows = ("block_m", "gemm1_block_m", "gemm2_block_m", "pull_rows")
        for name in (*rows, "gemm1_block_n", "gemm2_block_n", "num_warps"):
            value = getattr(self, name)
            self._require(name, value > 0 and value & (value - 1) == 0, "a power of two")
        widest = {"gemm1_block_n": 2 * SCALE_BLOCK_COLUMNS, "gemm2_block_n": SCALE_BLOCK_COLUMNS}
        least = GATE_UP_COLUMNS * self.num_warps  # a wave has whole groups of gate and up
        for name, most in widest.items():  # divides 2I or H, which are such multiples: no tile is partial
            self._require(name, least <= getattr(self, name) <= most, f"{least} to {most}, 64 for each wave")
        for name in ("gemm1_block_m", "gemm2_block_m", "pull_rows"):
            self._require(name, getattr(self, name) <= self.block_m, f"at most block_m = {self.block_m}")
        for name in ("lead_blocks", "units_per_ticket", "programs_per_cu"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("weight_cache", "a2_cache"):
            self._require(name, getattr(self, name) in CACHE_MODIFIERS, f"one of {CACHE_MODIFIERS}")

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(f"tile {self.name}: {name} does not work", got=getattr(self, name), expected=expected)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A tile, and the calls that it is for.

    Attributes:
        max_tokens: tokens of the rank, at most; None is no limit.
        min_capacity: num_max_tokens_per_rank of the session, at least.
        tile: the tile.
    """

    max_tokens: int | None
    min_capacity: int = 0
    tile: TileConfig


@cache
def buckets() -> tuple[Bucket, ...]:
    """The table, first match first."""
    text = resources.files("megamoe_rocm").joinpath("tuning/gfx950.json").read_text(encoding="utf-8")
    return tuple(
        Bucket(
            max_tokens=row["max_tokens"],
            min_capacity=row.get("min_capacity", 0),
            tile=TileConfig(**row["tile"], provenance=row["provenance"]),
        )
        for row in json.loads(text)["buckets"]
    )


def tile_for(*, num_max_tokens_per_rank: int, num_tokens: int) -> TileConfig:
    """The tile of a call. Ranks may choose differently: tiles change no flag that a peer waits for."""
    for bucket in buckets():
        fits = bucket.max_tokens is None or num_tokens <= bucket.max_tokens
        if fits and num_max_tokens_per_rank >= bucket.min_capacity:
            return bucket.tile
    raise AssertionError("the last bucket has no limit")


def tiles_of(num_max_tokens_per_rank: int) -> tuple[TileConfig, ...]:
    """The tiles that calls of a session of this capacity can use, smallest token counts first."""
    counts = largest_counts(num_max_tokens_per_rank)
    tiles = [tile_for(num_max_tokens_per_rank=num_max_tokens_per_rank, num_tokens=count) for count in counts]
    return tuple(dict.fromkeys(tiles))


def largest_counts(num_max_tokens_per_rank: int) -> tuple[int, ...]:
    """The largest token count of each bucket that calls of a session of this capacity can fall into."""
    limits = [bucket.max_tokens for bucket in buckets() if bucket.max_tokens is not None]
    return (*sorted(limit for limit in limits if limit < num_max_tokens_per_rank), num_max_tokens_per_rank)


AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class SessionConfig(KernelConfig):
    """The tiles of a session, each with its ring of blocks.

    Attributes:
        name: "auto", which picks a tile per call, or the name of the one tile that is pinned.
        tiles: the tiles.
        rings: the ring of each; all share one piece of memory.
    """

    tiles: tuple[TileConfig, ...]
    rings: tuple[Ring, ...]

    def pick(self, problem: MoEProblem, num_tokens: int) -> tuple[TileConfig, Ring]:
        """Tile and ring of a call with `num_tokens` tokens."""
        tile = self.tiles[0]
        if self.name == AUTO:
            tile = tile_for(num_max_tokens_per_rank=problem.num_max_tokens_per_rank, num_tokens=num_tokens)
        return tile, self.rings[self.tiles.index(tile)]

    def token_counts(self, problem: MoEProblem) -> tuple[int, ...]:
        """Token counts that between them use every tile."""
        capacity = problem.num_max_tokens_per_rank
        return largest_counts(capacity) if self.name == AUTO else (capacity,)


def config_names() -> tuple[str, ...]:
    """Names that `session_config` takes, the default first."""
    return (AUTO, *dict.fromkeys(bucket.tile.name for bucket in buckets()))


def session_config(problem: MoEProblem, name: str | None) -> SessionConfig:
    """The configuration called `name`; None is "auto".

    Raises:
        ConfigError: there is none of that name.
    """
    name = name or AUTO
    if name not in config_names():
        raise ConfigError("no such configuration of backend rocm", got=repr(name), expected=" or ".join(config_names()))
    if name == AUTO:
        tiles = tiles_of(problem.num_max_tokens_per_rank)
    else:
        tiles = tuple(bucket.tile for bucket in buckets() if bucket.tile.name == name)[:1]
    return config_of(problem, name, tiles)


def config_of(problem: MoEProblem, name: str, tiles: tuple[TileConfig, ...]) -> SessionConfig:
    """A session's configuration of these tiles."""
    return SessionConfig(name=name, tiles=tiles, rings=tuple(ring_of(problem, tile.block_m) for tile in tiles))
