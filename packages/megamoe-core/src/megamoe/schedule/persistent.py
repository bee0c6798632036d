"""The persistent programs: what every worker of every rank does in one call, and in which order.

The block order
    Units are GEMM1 and GEMM2 column tiles. Blocks come in groups of `group_blocks`, the last group perhaps smaller. In
    step s come the GEMM1 tiles of group s (if it exists), then the GEMM2 tiles of group s - lag / group_blocks (if it
    exists): column by column, and of a column block by block. Each CTA runs its units in increasing order. Here
    unit i is CTA i mod G's; the CTAs of the SM90 kernel claim the next unit from a counter instead, which keeps the
    argument below: the CTA that claimed a unit has run all lower units that it claimed. Neighbours run at one time and
    share what they read in the L2 cache: the weights of a column, and the activations of a group. A group of one block
    shares no weights; a large one keeps many blocks in the ring.

Why a ring of at least `lag + group_blocks` blocks cannot deadlock
    Take a rank whose counts have arrived, and its lowest unit u that has not run. All lower units have run.
    - u = GEMM2(b): it waits for the GEMM1 tiles of b, which are lower.
    - u = GEMM1(b): it waits for the pulls of b. A CTA's dispatch worker pulls in block order, so what could hold a pull
      of b back is the ring wait of a block b' <= b: that block b' - ring has retired. It lies at least a group
      more than the lag before b', so its GEMM2 tiles are in an earlier step than b', are lower than u, and have run.
    So u can run. With groups of one and ring = lag, GEMM2(b - ring) would come in step b, after GEMM1(b): a deadlock.
    Counts arrive because stage and route wait for nothing but each other's end on the same rank, and a call's
    `finish` waits for nothing but units and pulls. So every rank's `finish` comes, and with it every `combine`.

Why one wait per block guards the whole ring
    A slot holds a block's pool rows, its meta and its A2. The pulls of block b wait until block b - ring has retired:
    all its GEMM2 tiles have read A2 and meta. GEMM1(b) overwrites A2 only after rows_arrived[b], which each pull raises
    after that wait, so the wait covers A2 too.

Why no hand-shake on entry is needed
    A rank's call e ends after rank_finished(e) of every rank, raised after all units of that rank. All its pulls came
    before (a unit waits for the rows of its block), and all reads of counts (a CTA's math worker starts after its
    dispatch worker has read them; without that, a dispatch worker without rows could read counts of e + 1). So inputs,
    entries and counts of e + 1 overwrite nothing that is still read. `combine` of e + 1 at home rank h is written by
    owners that have h's counts of e + 1, which h publishes after its call e has ended.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from megamoe.schedule.protocol import (
    A2_WRITTEN,
    BLOCK_RETIRED,
    COUNTS_LOADED,
    COUNTS_PUBLISHED,
    GRID_JOIN,
    RANK_FINISHED,
    ROWS_ARRIVED,
    Answer,
    Call,
    ClearCounters,
    CombineTokens,
    CountPicks,
    Flag,
    Gemm1,
    Gemm2,
    Join,
    LoadCounts,
    Op,
    Phase,
    ProtocolShape,
    PullRows,
    PushCounts,
    PushEntries,
    Raise,
    Role,
    StageInput,
    Wait,
    counter_words,
)
from megamoe.schedule.tiles import Block, Counts, ceil_div, plan_blocks, share

Program: TypeAlias = Generator[Op, Answer, None]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One column tile of one block in one of the GEMMs (`Phase.GEMM1` or `Phase.GEMM2`)."""

    phase: Phase
    block: int
    n_tile: int


def block_order(
    *, num_blocks: int, num_gemm1_tiles: int, num_gemm2_tiles: int, lag_blocks: int, group_blocks: int = 1
) -> Iterator[Unit]:
    """All units of a rank, in the order in which CTAs take them. `lag_blocks` is a multiple of `group_blocks`."""
    groups = [range(first, min(first + group_blocks, num_blocks)) for first in range(0, num_blocks, group_blocks)]
    lag = lag_blocks // group_blocks
    for step in range(len(groups) + lag):
        if step < len(groups):
            for n_tile in range(num_gemm1_tiles):
                for block in groups[step]:
                    yield Unit(phase=Phase.GEMM1, block=block, n_tile=n_tile)
        if step >= lag:
            for n_tile in range(num_gemm2_tiles):
                for block in groups[step - lag]:
                    yield Unit(phase=Phase.GEMM2, block=block, n_tile=n_tile)


def unit_at(
    unit: int,
    *,
    num_blocks: int,
    num_gemm1_tiles: int,
    num_gemm2_tiles: int,
    lag_blocks: int,
    group_blocks: int = 1,
) -> Unit | None:
    """Unit number `unit` of `block_order`, in closed form, as devices compute it; None past the last one.

    The order has three stretches: GEMM1 alone until the lag is reached, both, and GEMM2 alone.
    """
    groups = ceil_div(num_blocks, group_blocks)
    lead = min(lag_blocks // group_blocks, groups)
    lead_blocks = min(lead * group_blocks, num_blocks)  # whose GEMM1 comes alone
    early_blocks = min((groups - lead) * group_blocks, num_blocks)  # whose GEMM2 does not

    def in_group(phase: Phase, group: int, index: int) -> Unit:
        first = group * group_blocks
        n_tile, block = divmod(index, min(num_blocks - first, group_blocks))
        return Unit(phase=phase, block=first + block, n_tile=n_tile)

    gemm1_units, gemm2_units = group_blocks * num_gemm1_tiles, group_blocks * num_gemm2_tiles
    if unit < lead_blocks * num_gemm1_tiles:
        return in_group(Phase.GEMM1, unit // gemm1_units, unit % gemm1_units)
    unit -= lead_blocks * num_gemm1_tiles
    both_units = (num_blocks - lead_blocks) * num_gemm1_tiles + early_blocks * num_gemm2_tiles
    if unit < both_units:
        step = min(unit // (gemm1_units + gemm2_units), groups - lead - 1)  # the last one may have fewer
        index = unit - step * (gemm1_units + gemm2_units)
        own_gemm1_units = min(num_blocks - (lead + step) * group_blocks, group_blocks) * num_gemm1_tiles
        if index < own_gemm1_units:
            return in_group(Phase.GEMM1, lead + step, index)
        return in_group(Phase.GEMM2, step, index - own_gemm1_units)
    unit -= both_units
    if unit < (num_blocks - early_blocks) * num_gemm2_tiles:
        return in_group(Phase.GEMM2, groups - lead + unit // gemm2_units, unit % gemm2_units)
    return None


def cta_program(shape: ProtocolShape, call: Call, cta: int) -> dict[Role, Program]:
    """The two programs of one CTA for one call. Both must be driven to their end, concurrently."""
    return {Role.DISPATCH: dispatch_role(shape, call, cta), Role.MATH: math_role(shape, call, cta)}


def dispatch_role(shape: ProtocolShape, call: Call, cta: int) -> Program:
    """Clear, stage, route, then pull rows into the ring until all blocks are filled."""
    yield from _clear(shape, cta)
    yield from _stage(shape, call, cta)
    yield from _route(shape, call, cta)
    for src in _ranks_from(call.rank, shape):
        yield Wait(flag=COUNTS_PUBLISHED, index=src, target=call.epoch, peer=src, phase=Phase.DISPATCH)
    counts = yield from _load_counts()
    yield _count(COUNTS_LOADED, call, cta, 1, Phase.DISPATCH)
    yield from _pull(shape, call, cta, counts)


def math_role(shape: ProtocolShape, call: Call, cta: int) -> Program:
    """Run this CTA's units, tell every rank when all of this rank's are done, and combine."""
    yield Wait(flag=COUNTS_LOADED, index=cta, target=1, peer=call.rank, phase=Phase.DISPATCH)
    counts = yield from _load_counts()
    yield from _multiply(shape, call, cta, counts)
    yield from _finish(shape, call, cta)
    yield from _combine(shape, call, cta)


def _clear(shape: ProtocolShape, cta: int) -> Program:
    words = share(counter_words(shape), shape.num_ctas, cta)
    if words:
        yield ClearCounters(first=words.start, num=len(words))


def _stage(shape: ProtocolShape, call: Call, cta: int) -> Program:
    tokens = share(call.num_tokens, shape.num_ctas, cta)
    if tokens:
        yield StageInput(first=tokens.start, num=len(tokens))


def _route(shape: ProtocolShape, call: Call, cta: int) -> Program:
    """Push entries and counts to their owners; CTA 0 publishes them when every CTA of this rank is done."""
    picks = share(call.num_tokens * shape.top_k, shape.num_ctas, cta)
    if picks:
        yield CountPicks(cta=cta, first=picks.start, num=len(picks))
    yield _arrive(Join.COUNTED, call, Phase.ROUTE)
    owners = range(cta, shape.ep_size, shape.num_ctas)
    if picks or owners:
        yield _await_join(Join.COUNTED, shape, call, Phase.ROUTE)
    if picks:
        yield PushEntries(first=picks.start, num=len(picks))
    for owner in owners:
        yield PushCounts(owner=owner)
    yield _arrive(Join.ROUTED, call, Phase.ROUTE)
    if cta == 0:
        yield _await_join(Join.ROUTED, shape, call, Phase.ROUTE)
        for owner in _ranks_from(call.rank, shape):
            yield Raise(flag=COUNTS_PUBLISHED, rank=owner, index=call.rank, amount=call.epoch, phase=Phase.ROUTE)


def _load_counts() -> Generator[Op, Answer, Counts]:
    counts = yield LoadCounts()
    assert counts is not None
    return counts


def _pull(shape: ProtocolShape, call: Call, cta: int, counts: Counts) -> Program:
    """Pull this worker's chunks of rows. Chunk c, counted over all blocks, belongs to worker c mod G."""
    chunk = 0
    for block in plan_blocks(counts, call.rank, shape.block_m, shape.ring_blocks):
        slot_is_free = False
        for first in range(0, block.num_rows, shape.rows_per_pull):
            if chunk % shape.num_ctas == cta:
                if not slot_is_free:
                    yield from _await_slot(shape, call, block)
                    slot_is_free = True
                num = min(shape.rows_per_pull, block.num_rows - first)
                yield PullRows(block=block, first=first, num=num)
                yield _count(ROWS_ARRIVED, call, block.index, num, Phase.DISPATCH)
            chunk += 1


def _await_slot(shape: ProtocolShape, call: Call, block: Block) -> Program:
    """Wait until the block that used this ring slot before, if any, has retired."""
    if block.index >= shape.ring_blocks:
        yield Wait(
            flag=BLOCK_RETIRED,
            index=block.index - shape.ring_blocks,
            target=shape.num_gemm2_tiles,
            peer=call.rank,
            phase=Phase.DISPATCH,
        )


def _multiply(shape: ProtocolShape, call: Call, cta: int, counts: Counts) -> Program:
    blocks = plan_blocks(counts, call.rank, shape.block_m, shape.ring_blocks)
    order = block_order(
        num_blocks=len(blocks),
        num_gemm1_tiles=shape.num_gemm1_tiles,
        num_gemm2_tiles=shape.num_gemm2_tiles,
        lag_blocks=shape.lag_blocks,
        group_blocks=shape.group_blocks,
    )
    for index, unit in enumerate(order):
        if index % shape.num_ctas == cta:
            run = _gemm1 if unit.phase is Phase.GEMM1 else _gemm2
            yield from run(shape, call, blocks[unit.block], unit.n_tile)


def _gemm1(shape: ProtocolShape, call: Call, block: Block, n_tile: int) -> Program:
    yield Wait(flag=ROWS_ARRIVED, index=block.index, target=block.num_rows, peer=call.rank, phase=Phase.GEMM1)
    yield Gemm1(block=block, n_tile=n_tile)
    yield _count(A2_WRITTEN, call, block.index, 1, Phase.GEMM1)


def _gemm2(shape: ProtocolShape, call: Call, block: Block, n_tile: int) -> Program:
    yield Wait(flag=A2_WRITTEN, index=block.index, target=shape.num_gemm1_tiles, peer=call.rank, phase=Phase.GEMM2)
    yield Gemm2(block=block, n_tile=n_tile)
    yield _count(BLOCK_RETIRED, call, block.index, 1, Phase.GEMM2)


def _finish(shape: ProtocolShape, call: Call, cta: int) -> Program:
    yield _arrive(Join.FINISHED, call, Phase.FINISH)
    if cta == 0:
        yield _await_join(Join.FINISHED, shape, call, Phase.FINISH)
        for home in _ranks_from(call.rank, shape):
            yield Raise(flag=RANK_FINISHED, rank=home, index=call.rank, amount=call.epoch, phase=Phase.FINISH)


def _combine(shape: ProtocolShape, call: Call, cta: int) -> Program:
    """Every worker waits for every rank, with nothing to combine too: the end of the call tells that all are done."""
    for owner in _ranks_from(call.rank, shape):
        yield Wait(flag=RANK_FINISHED, index=owner, target=call.epoch, peer=owner, phase=Phase.COMBINE)
    tokens = share(call.num_tokens, shape.num_ctas, cta)
    if tokens:
        yield CombineTokens(first=tokens.start, num=len(tokens))


def _ranks_from(rank: int, shape: ProtocolShape) -> Iterator[int]:
    """All ranks, one's own first, so that ranks do not all address the same peer at once."""
    return ((rank + step) % shape.ep_size for step in range(shape.ep_size))


def _count(flag: Flag, call: Call, index: int, amount: int, phase: Phase) -> Raise:
    """Count up one of this rank's own counters."""
    return Raise(flag=flag, rank=call.rank, index=index, amount=amount, phase=phase)


def _arrive(join: Join, call: Call, phase: Phase) -> Raise:
    return _count(GRID_JOIN, call, join, 1, phase)


def _await_join(join: Join, shape: ProtocolShape, call: Call, phase: Phase) -> Wait:
    return Wait(flag=GRID_JOIN, index=join, target=shape.num_ctas, peer=call.rank, phase=phase)
