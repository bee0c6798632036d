"""How far GEMM2 trails GEMM1, and how many blocks the ring must hold.

The seed ran experts in waves: GEMM1 of a wave, then GEMM2 of the wave, with a pool that holds all rows. Here GEMM2 of a
block trails its GEMM1 by a short lag, and the pool is a ring (schedule/persistent.py). Two numbers replace the waves.

- A larger lag gives GEMM1's last tiles of a block more time before GEMM2 asks for them.
- A larger ring lets pulls run further ahead of the math; the smallest that works is lag + 1, or lag + group.
"""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.errors import ConfigError
from megamoe.schedule.tiles import balanced_blocks, max_pool_blocks

LAG_FRACTION = 0.45  # with the two bounds: the lag of the best public kernel of this design
MIN_LAG_BLOCKS = 8
MAX_LAG_BLOCKS = 64

MAX_PREFETCH_BLOCKS = 64
"""Blocks beyond the live set, which pulls may fill ahead of GEMM1. An H200 works on about 8 blocks of 16 tiles at a
time, so this is some 8 rounds of slack; with 128 rows a block and the seed's shape (H=4096, I=2048) it costs 50 MiB."""


def default_lag(num_blocks: int) -> int:
    """Lag in blocks for a call of about `num_blocks` blocks: 0.45 of them, at least 8, at most 64."""
    return min(max(int(LAG_FRACTION * num_blocks), MIN_LAG_BLOCKS), MAX_LAG_BLOCKS)


def live_blocks(lag_blocks: int, num_blocks: int, group_blocks: int = 1) -> int:
    """Blocks in use at a time when pulls do not run ahead: from a block's first pull to its last GEMM2 tile.

    When GEMM1 of block s is the lowest unit that has not run, GEMM2 of blocks up to s - lag - 1 has run. Blocks
    s - lag .. s are in use: lag + 1, or all, if there are fewer. The same holds for groups.
    """
    return min(lag_blocks + group_blocks, num_blocks)


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Geometry of the block ring for one tile height.

    Attributes:
        block_m: rows of a block.
        lag_blocks: blocks that GEMM2 trails GEMM1 by.
        ring_blocks: blocks that the ring holds.
        max_blocks: blocks of the fullest possible call.
        group_blocks: blocks whose tiles come column by column (schedule/persistent.py).

    Raises:
        ConfigError: the ring is smaller than the live set. Such a ring deadlocks in a call that is full enough.
    """

    block_m: int
    lag_blocks: int
    ring_blocks: int
    max_blocks: int
    group_blocks: int = 1

    def __post_init__(self) -> None:
        if self.lag_blocks % self.group_blocks:
            raise ConfigError("the lag is no whole groups of blocks", got=self.lag_blocks, expected=self.group_blocks)
        needed = max(live_blocks(self.lag_blocks, self.max_blocks, self.group_blocks), 1)
        if self.ring_blocks < needed:
            raise ConfigError(
                f"the ring is smaller than the live set of lag {self.lag_blocks} and {self.max_blocks} blocks",
                got=self.ring_blocks,
                expected=f"at least {needed}",
                hint="enlarge ring_blocks or shorten lag_blocks",
            )

    @property
    def num_rows(self) -> int:
        """Rows of the ring, padding included."""
        return self.ring_blocks * self.block_m


def default_ring(
    *,
    ep_size: int,
    num_max_tokens_per_rank: int,
    top_k: int,
    num_local_experts: int,
    block_m: int,
    lag_blocks: int | None = None,
    ring_blocks: int | None = None,
) -> Ring:
    """The ring for a capacity, sized for full calls with balanced routing. Fuller calls only turn it more often.

    It holds the live set and as many blocks again as a balanced call has, up to `MAX_PREFETCH_BLOCKS`; and never more
    than the fullest call fills. `lag_blocks` and `ring_blocks` override the defaults.
    """
    max_blocks = max_pool_blocks(
        ep_size=ep_size,
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        top_k=top_k,
        num_local_experts=num_local_experts,
        block_m=block_m,
    )
    usual_blocks = balanced_blocks(
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        top_k=top_k,
        num_local_experts=num_local_experts,
        block_m=block_m,
    )
    if lag_blocks is None:
        lag_blocks = default_lag(usual_blocks)
    if ring_blocks is None:
        prefetch_blocks = min(usual_blocks, MAX_PREFETCH_BLOCKS)
        ring_blocks = min(live_blocks(lag_blocks, max_blocks) + prefetch_blocks, max_blocks)
    return Ring(block_m=block_m, lag_blocks=lag_blocks, ring_blocks=ring_blocks, max_blocks=max_blocks)
