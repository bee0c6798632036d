"""The protocol between ranks and between the workers of a rank: regions, flags, phases, and the ops of a program.

This file is the one source of these facts. The model checker explores the programs of `schedule/persistent.py`, which
are sequences of the ops below; the CPU reference executes the same programs; kernels take flag counts and targets from
the same table.

Who runs
    R ranks (`ep_size`), G CTAs per rank (`num_ctas`), two roles per CTA (`Role`). One (rank, cta, role) is a *worker*:
    a sequential program. Workers of one rank, and of different ranks, run concurrently and in any interleaving.

Calls
    One call of the layer is one epoch, a uint32 that grows by one per call and wraps. All workers of a rank finish
    call e before any worker of that rank starts call e + 1, and what they did is visible then (a kernel boundary on one
    stream; the end of a thread pool's job). Ranks are not aligned otherwise: one rank may be in call e + 1 while
    another still runs e. Every rank makes every call, with zero tokens too.

Memory order
    Acts (`StageInput` ... `CombineTokens`) are plain loads and stores: they order nothing.
    `Raise` is a release, `Wait` is an acquire, both at the flag's scope. A wait that was satisfied by several raises
    of a counter acquires what each of the raising workers did before its raise. Order is transitive: worker a raises
    to b, b raises to c, then c sees what a did.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import ClassVar, TypeAlias

from megamoe.errors import ConfigError
from megamoe.schedule.tiles import Block, Counts

UINT32_RANGE = 1 << 32


class Phase(StrEnum):
    """Where a worker is; the names that time-outs and traces use."""

    STAGE = "stage"
    ROUTE = "route"
    DISPATCH = "dispatch"
    GEMM1 = "gemm1"
    GEMM2 = "gemm2"
    FINISH = "finish"
    COMBINE = "combine"


class Role(StrEnum):
    """The two concurrent programs of a CTA. A kernel gives each its own warps."""

    DISPATCH = "dispatch"  # stages, routes and pulls rows into the ring
    MATH = "math"  # multiplies, sends rows home and combines


class Scope(StrEnum):
    """Who takes part in a flag's release and acquire."""

    GPU = "gpu"  # workers of one rank
    SYSTEM = "system"  # workers of all ranks


class Life(StrEnum):
    """How a flag is made ready for the next call."""

    EPOCH = "epoch"
    """Holds the epoch of the last call that raised it. Never reset; compared by signed difference, so it survives the
    wrap at 2^32. Opening (or resetting) a session stores first_epoch - 1 in it, then all ranks meet, so that the value
    it starts with satisfies no wait."""

    PARITY = "parity"
    """A counter, kept twice: calls of even and of odd epochs use their own copy. Each call zeroes the copy that it does
    not use, which nobody touches then. Both start at zero."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One kind of flag. `one_per`, `raised_by` and `target` are for readers; `flag_words` and the programs compute.

    Attributes:
        name: the name in traces, time-outs and generated constants.
        lives_on: the rank in whose workspace its words are: the rank that waits.
        one_per: what its index counts.
        raised_by: who raises it, when.
        target: the value that satisfies a wait.
        scope: whether a peer raises it.
        life: epoch or parity.
    """

    name: str
    lives_on: str
    one_per: str
    raised_by: str
    target: str
    scope: Scope
    life: Life


COUNTS_PUBLISHED = Flag(
    name="counts_published",
    lives_on="owner",
    one_per="source rank",
    raised_by="the source's CTA 0, once its entries and counts for this owner and all its input rows are stored",
    target="epoch",
    scope=Scope.SYSTEM,
    life=Life.EPOCH,
)
RANK_FINISHED = Flag(
    name="rank_finished",
    lives_on="home rank",
    one_per="owner rank",
    raised_by="the owner's CTA 0, once the owner has pulled all rows and stored all rows of GEMM2",
    target="epoch",
    scope=Scope.SYSTEM,
    life=Life.EPOCH,
)
ROWS_ARRIVED = Flag(
    name="rows_arrived",
    lives_on="owner",
    one_per="pool block",
    raised_by="each pull into the block, by the number of rows it stored",
    target="valid rows of the block",
    scope=Scope.GPU,
    life=Life.PARITY,
)
A2_WRITTEN = Flag(
    name="a2_written",
    lives_on="owner",
    one_per="pool block",
    raised_by="each GEMM1 column tile of the block",
    target="GEMM1 column tiles",
    scope=Scope.GPU,
    life=Life.PARITY,
)
BLOCK_RETIRED = Flag(
    name="block_retired",
    lives_on="owner",
    one_per="pool block",
    raised_by="each GEMM2 column tile of the block",
    target="GEMM2 column tiles",
    scope=Scope.GPU,
    life=Life.PARITY,
)
GRID_JOIN = Flag(
    name="grid_join",
    lives_on="every rank",
    one_per="join of a call (Join)",
    raised_by="each CTA, once it has done what the join stands for",
    target="CTAs",
    scope=Scope.GPU,
    life=Life.PARITY,
)
COUNTS_LOADED = Flag(
    name="counts_loaded",
    lives_on="every rank",
    one_per="CTA",
    raised_by="the CTA's dispatch worker, once it has read the counts; a kernel's roles meet at a CTA barrier instead",
    target="1",
    scope=Scope.GPU,
    life=Life.PARITY,
)

FLAGS = (COUNTS_PUBLISHED, RANK_FINISHED, ROWS_ARRIVED, A2_WRITTEN, BLOCK_RETIRED, GRID_JOIN, COUNTS_LOADED)
"""All flags, in workspace order: those that peers raise first."""

PARITY_FLAGS = tuple(flag for flag in FLAGS if flag.life is Life.PARITY)


class Join(IntEnum):
    """Index of a grid join. Every CTA arrives at each; who waits is said here."""

    ROUTED = 0  # input rows, entries and counts of this rank are stored; CTA 0 waits
    FINISHED = 1  # all units of this rank have run, so all rows are pulled, multiplied and sent home; CTA 0 waits
    COUNTED = 2  # this rank's picks are counted per expert; comes before ROUTED; CTAs that push entries or counts wait


@dataclass(frozen=True, kw_only=True)
class Region:
    """One array of the workspace, or one of the caller's tensors.

    `cell` is the unit in which the programs write and read it; two workers may touch different cells at the same time.
    """

    name: str
    lives_on: str
    cell: str
    written_by: str
    read_by: str


INPUT = Region(
    name="input", lives_on="home rank", cell="token: its payload and scales", written_by="home rank", read_by="owners"
)
ROUTE_TOTALS = Region(
    name="route_totals",
    lives_on="home rank",
    cell="CTA: its picks per global expert; a kernel keeps the sums over CTAs, in counters of the parity kind",
    written_by="home rank",
    read_by="home rank",
)
ROUTE_ENTRIES = Region(
    name="route_entries",
    lives_on="owner",
    cell="(source rank, entry): int32 token * top_k + slot, FP32 router weight; a source's entries are sorted by local "
    "expert, with no gaps; their order within one expert never changes the result",
    written_by="source rank",
    read_by="owner",
)
ROUTE_COUNTS = Region(
    name="route_counts",
    lives_on="owner",
    cell="source rank: int32 [num_local_experts]",
    written_by="source rank",
    read_by="owner",
)
POOL = Region(
    name="pool",
    lives_on="owner",
    cell="(ring slot, row): payload, scales, and meta (source rank, token * top_k + slot, router weight)",
    written_by="owner",
    read_by="owner",
)
A2 = Region(
    name="a2",
    lives_on="owner",
    cell="(ring slot, GEMM1 column tile): payload and scales",
    written_by="owner",
    read_by="owner",
)
COMBINE = Region(
    name="combine",
    lives_on="home rank",
    cell="(slot, token, GEMM2 column tile)",
    written_by="owner of the slot's expert",
    read_by="home rank",
)

REGIONS = (INPUT, ROUTE_TOTALS, ROUTE_ENTRIES, ROUTE_COUNTS, POOL, A2, COMBINE)


@dataclass(frozen=True, kw_only=True)
class ProtocolShape:
    """What the protocol depends on: the same on all ranks, and constant over the calls of a session.

    Attributes:
        ep_size: ranks.
        num_ctas: CTAs per rank.
        num_local_experts: experts per rank.
        top_k: picks per token.
        num_max_tokens_per_rank: capacity; a call may bring fewer, also none.
        block_m: rows of a pool block.
        ring_blocks: blocks that the pool and A2 hold at a time.
        lag_blocks: GEMM2 of a block comes that many blocks after its GEMM1; a multiple of `group_blocks`.
        num_gemm1_tiles: GEMM1 column tiles of a block; 1 where an act spans all columns.
        num_gemm2_tiles: GEMM2 column tiles of a block.
        rows_per_pull: rows of one `PullRows`, at most; `block_m` pulls whole blocks, 1 single rows.
        max_blocks: pool blocks of the fullest possible call (`tiles.max_pool_blocks`).
        group_blocks: blocks whose tiles come column by column (schedule/persistent.py).
    """

    ep_size: int
    num_ctas: int
    num_local_experts: int
    top_k: int
    num_max_tokens_per_rank: int
    block_m: int
    ring_blocks: int
    lag_blocks: int
    num_gemm1_tiles: int
    num_gemm2_tiles: int
    rows_per_pull: int
    max_blocks: int
    group_blocks: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < (0 if name in ("lag_blocks", "max_blocks", "num_max_tokens_per_rank") else 1):
                raise ConfigError(f"{name} is too small", got=value)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call on one rank: its epoch (uint32) and how many tokens the rank brings (0 <= num_tokens <= capacity)."""

    rank: int
    epoch: int
    num_tokens: int

    @property
    def parity(self) -> int:
        """Which copy of the parity counters this call uses."""
        return self.epoch % 2


def next_epoch(epoch: int, step: int = 1) -> int:
    """The epoch `step` calls later (earlier, if negative), uint32."""
    return (epoch + step) % UINT32_RANGE


def reached(value: int, target: int) -> bool:
    """Whether a flag's word satisfies a wait: value - target >= 0 as a signed 32-bit difference, for both lives."""
    return (value - target) % UINT32_RANGE < UINT32_RANGE // 2


def initial_value(flag: Flag, first_epoch: int) -> int:
    """What all words of a flag hold before the call of `first_epoch`: when a session opens, and after a reset.

    After these stores all ranks meet, before the first of them makes a call.
    """
    return next_epoch(first_epoch, -1) if flag.life is Life.EPOCH else 0


def flag_words(flag: Flag, shape: ProtocolShape) -> int:
    """uint32 words of a flag in one rank's workspace; for parity flags, of one of the two copies."""
    if flag is COUNTS_PUBLISHED or flag is RANK_FINISHED:
        return shape.ep_size
    if flag is GRID_JOIN:
        return len(Join)
    return shape.num_ctas if flag is COUNTS_LOADED else shape.max_blocks


def counter_words(shape: ProtocolShape) -> int:
    """uint32 words of one copy of all parity flags."""
    return sum(flag_words(flag, shape) for flag in PARITY_FLAGS)


def counter_word(flag: Flag, index: int, shape: ProtocolShape) -> int:
    """Word of a parity flag within its copy: the flags of `PARITY_FLAGS` one after the other."""
    before = PARITY_FLAGS[: PARITY_FLAGS.index(flag)]
    return sum(flag_words(earlier, shape) for earlier in before) + index


def counter_flag(word: int, shape: ProtocolShape) -> tuple[Flag, int]:
    """Inverse of `counter_word`: the flag and the index of a word of a copy."""
    for flag in PARITY_FLAGS:
        if word < flag_words(flag, shape):
            return flag, word
        word -= flag_words(flag, shape)
    raise IndexError(word)


# --------------------------------------------------------------------------------------------------------------------
# Ops. A program is a generator that yields them one by one; the executor runs each to its end before it resumes the
# generator. Only LoadCounts has a result, which the executor sends into the generator. `rank` below is the worker's.
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Block until `reached(word, target)` for this rank's own word `index` of `flag`, then acquire.

    A parity flag's word is in this call's copy. An executor may run the rank's other workers meanwhile. On a
    time-out it raises MegaMoETimeoutError with `phase`, `peer` (whom it waited for) and `index`.
    """

    flag: Flag
    index: int
    target: int
    peer: int
    phase: Phase


@dataclass(frozen=True, kw_only=True)
class Raise:
    """Release, then change word `index` of `flag` on rank `rank`: an epoch flag is set to `amount` (which is the
    epoch; a single worker in the world ever raises that word), a parity flag of this call's copy grows by `amount`
    atomically. Only epoch flags are raised on other ranks."""

    flag: Flag
    rank: int
    index: int
    amount: int
    phase: Phase


@dataclass(frozen=True, kw_only=True)
class ClearCounters:
    """Zero words `first .. first + num - 1` of the copy of the parity counters that this call does not use."""

    phase: ClassVar[Phase] = Phase.STAGE
    first: int
    num: int


@dataclass(frozen=True, kw_only=True)
class StageInput:
    """Quantise or copy the caller's tokens `first .. first + num - 1` into this rank's `input`."""

    phase: ClassVar[Phase] = Phase.STAGE
    reads: ClassVar[tuple[Region, ...]] = ()
    writes: ClassVar[tuple[Region, ...]] = (INPUT,)
    first: int
    num: int


@dataclass(frozen=True, kw_only=True)
class CountPicks:
    """Count this rank's picks `first .. first + num - 1` per expert, for the `PushEntries` of all CTAs of the rank.

    A pick is token * top_k + slot. Ids of -1 are skipped; ids outside [-1, num_experts) are skipped, and the rank's
    counter of dropped ids grows. An executor whose `PushEntries` looks at all picks itself only counts dropped ids.
    """

    phase: ClassVar[Phase] = Phase.ROUTE
    reads: ClassVar[tuple[Region, ...]] = ()
    writes: ClassVar[tuple[Region, ...]] = (ROUTE_TOTALS,)
    cta: int
    first: int
    num: int


@dataclass(frozen=True, kw_only=True)
class PushEntries:
    """Write the entries of this rank's picks `first .. first + num - 1` to `route_entries[src=rank]` of their owners.

    Entries of one source at one owner are sorted by local expert, so a place follows from the counts of all CTAs.
    Picks without an expert have no entry.
    """

    phase: ClassVar[Phase] = Phase.ROUTE
    reads: ClassVar[tuple[Region, ...]] = (ROUTE_TOTALS,)
    writes: ClassVar[tuple[Region, ...]] = (ROUTE_ENTRIES,)
    first: int
    num: int


@dataclass(frozen=True, kw_only=True)
class PushCounts:
    """Write the counts of all of this rank's picks per expert of `owner` to `owner`'s `route_counts[src=rank]`."""

    phase: ClassVar[Phase] = Phase.ROUTE
    reads: ClassVar[tuple[Region, ...]] = (ROUTE_TOTALS,)
    writes: ClassVar[tuple[Region, ...]] = (ROUTE_COUNTS,)
    owner: int


@dataclass(frozen=True, kw_only=True)
class LoadCounts:
    """Read all of this rank's `route_counts` and send them back as `Counts`."""

    phase: ClassVar[Phase] = Phase.DISPATCH
    reads: ClassVar[tuple[Region, ...]] = (ROUTE_COUNTS,)
    writes: ClassVar[tuple[Region, ...]] = ()


@dataclass(frozen=True, kw_only=True)
class PullRows:
    """Copy rows `first .. first + num - 1` of `block` into the pool, in ring slot `block.slot`.

    `block.rows(first, num)` says which entries of which source; an entry's token names the row of that source's
    `input` (a remote load). Payload, scales and meta are stored. Rows of the block past its last valid one are not
    written by anybody: their old content must never reach a valid row.
    """

    phase: ClassVar[Phase] = Phase.DISPATCH
    reads: ClassVar[tuple[Region, ...]] = (ROUTE_ENTRIES, INPUT)
    writes: ClassVar[tuple[Region, ...]] = (POOL,)
    block: Block
    first: int
    num: int


@dataclass(frozen=True, kw_only=True)
class Gemm1:
    """GEMM1, bias, SwiGLU and requantisation of column tile `n_tile` of `block`: pool slot to A2 slot."""

    phase: ClassVar[Phase] = Phase.GEMM1
    reads: ClassVar[tuple[Region, ...]] = (POOL,)
    writes: ClassVar[tuple[Region, ...]] = (A2,)
    block: Block
    n_tile: int


@dataclass(frozen=True, kw_only=True)
class Gemm2:
    """GEMM2, bias, router weight and transport rounding of column tile `n_tile` of `block`; each row is stored to
    `combine[slot][token]` of its home rank (a remote store). Reads all of A2's column tiles, and the pool's meta."""

    phase: ClassVar[Phase] = Phase.GEMM2
    reads: ClassVar[tuple[Region, ...]] = (POOL, A2)
    writes: ClassVar[tuple[Region, ...]] = (COMBINE,)
    block: Block
    n_tile: int


@dataclass(frozen=True, kw_only=True)
class CombineTokens:
    """Sum tokens `first .. first + num - 1` over their slots, in order, into the caller's output. Slots whose id is
    not an expert contribute zero, and their place in `combine` is never read."""

    phase: ClassVar[Phase] = Phase.COMBINE
    reads: ClassVar[tuple[Region, ...]] = (COMBINE,)
    writes: ClassVar[tuple[Region, ...]] = ()
    first: int
    num: int


Act: TypeAlias = (
    StageInput | CountPicks | PushEntries | PushCounts | LoadCounts | PullRows | Gemm1 | Gemm2 | CombineTokens
)
"""Ops with a body that each executor brings: plain accesses to the regions that `reads` and `writes` name."""

Op: TypeAlias = Wait | Raise | ClearCounters | Act

Answer: TypeAlias = Counts | None
"""What an executor sends back: the counts for LoadCounts, nothing for the rest."""
