"""The protocol of this package in the terms of `megamoe.schedule.protocol`, for the model checker.

A variant of `megamoe.schedule.persistent`: the same regions, the same flags between ranks (counts_published,
rank_finished), the same ring. What differs is inside a rank. A call is a sequence of launches on one stream, and a
launch boundary stands where the fused programs have a2_written, block_retired and two of the grid joins:

    count    stage the tokens, clear, count picks; the last program to arrive turns totals into bases
    push     push entries; the last program to arrive pushes counts and raises counts_published on every rank
    plan     one program waits for counts_published of every rank
    stage 1  pulls and GEMM1 tiles of as many blocks as the ring holds; a tile waits for rows_arrived of its block
    stage 2  GEMM2 tiles of these blocks; in the last round, the last program to arrive raises rank_finished everywhere
    combine  waits for rank_finished of every rank

Stages 1 and 2 take turns, `max_blocks / ring_blocks` times, so a launch boundary also frees the ring.

Within stage 1, programs take units by tickets: units start in order, and which program runs which is open. A tile waits
for chunks that are earlier units, so the earliest unit that has not run can run: no deadlock, whatever is resident.
`Takers` fixes who takes what, and the checker is given many.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from megamoe.schedule.persistent import Program, unit_at
from megamoe.schedule.protocol import (
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
    Life,
    LoadCounts,
    Op,
    Phase,
    ProtocolShape,
    PullRows,
    PushCounts,
    PushEntries,
    Raise,
    Role,
    Scope,
    StageInput,
    Wait,
    counter_words,
)
from megamoe.schedule.tiles import Block, Counts, ceil_div, plan_blocks, share

LAUNCH_BOUNDARY = Flag(
    name="launch_boundary",
    lives_on="every rank",
    one_per="launch of a call",
    raised_by="each program at the end of a launch; it stands for a kernel boundary and is no word in memory",
    target="programs",
    scope=Scope.GPU,
    life=Life.PARITY,
)


class Launch(IntEnum):
    """Launches of a call; stages 1 and 2 of round n come 2n later."""

    COUNT = 0
    PUSH = 1
    PLAN = 2
    STAGE1 = 3
    STAGE2 = 4


MAX_LAUNCHES = 1 << 16  # of a call, for numbers of boundaries that no two calls share

Takers = Callable[[int, int], int]
"""(launch, unit) -> the program that takes the unit."""


@dataclass(frozen=True, kw_only=True)
class StagedProgram:
    """What every program of every rank does in one call.

    Attributes:
        takers: who takes which unit of a persistent launch.
        last: the program that arrives last where the last one has something to do.
        lead_blocks: blocks that pulls run ahead of GEMM1.
    """

    takers: Takers
    last: int = 0
    lead_blocks: int = 1

    def __call__(self, shape: ProtocolShape, call: Call, cta: int) -> dict[Role, Program]:
        """The checker's two roles: all is done in one, the other has nothing to do."""
        return {Role.DISPATCH: _nothing(), Role.MATH: self._program(shape, call, cta)}

    def _program(self, shape: ProtocolShape, call: Call, cta: int) -> Program:
        yield from self._count(shape, call, cta)
        yield from _boundary(shape, call, Launch.COUNT)
        yield from self._push(shape, call, cta)
        yield from _boundary(shape, call, Launch.PUSH)
        if cta == 0:
            yield from _await_counts(shape, call)
            yield from _load_counts()
        yield from _boundary(shape, call, Launch.PLAN)
        num_rounds = ceil_div(max(shape.max_blocks, 1), shape.ring_blocks)
        for index in range(num_rounds):
            yield from self._stage1(shape, call, cta, index)
            yield from _boundary(shape, call, Launch.STAGE1 + 2 * index)
            yield from self._stage2(shape, call, cta, index, is_last=index == num_rounds - 1)
            yield from _boundary(shape, call, Launch.STAGE2 + 2 * index)
        yield from self._combine(shape, call, cta)

    def _count(self, shape: ProtocolShape, call: Call, cta: int) -> Program:
        tokens = share(call.num_tokens, shape.num_ctas, cta)
        if tokens:
            yield StageInput(first=tokens.start, num=len(tokens))
        words = share(counter_words(shape), shape.num_ctas, cta)
        if words:
            yield ClearCounters(first=words.start, num=len(words))
        picks = share(call.num_tokens * shape.top_k, shape.num_ctas, cta)
        if picks:
            yield CountPicks(cta=cta, first=picks.start, num=len(picks))
        yield from self._arrive(Join.COUNTED, shape, call, cta, Phase.ROUTE)

    def _push(self, shape: ProtocolShape, call: Call, cta: int) -> Program:
        picks = share(call.num_tokens * shape.top_k, shape.num_ctas, cta)
        if picks:
            yield PushEntries(first=picks.start, num=len(picks))
        yield from self._arrive(Join.ROUTED, shape, call, cta, Phase.ROUTE)
        if cta == self.last:
            for owner in range(shape.ep_size):
                yield PushCounts(owner=owner)
            yield from _publish(COUNTS_PUBLISHED, shape, call, Phase.ROUTE)

    def _stage1(self, shape: ProtocolShape, call: Call, cta: int, index: int) -> Program:
        yield from _await_counts(shape, call)  # every program reads what peers stored
        counts = yield from _load_counts()
        blocks = _blocks_of_round(shape, call, counts, index)
        chunks = ceil_div(shape.block_m, shape.rows_per_pull)
        for unit in range(len(blocks) * (chunks + shape.num_gemm1_tiles)):
            found = unit_at(
                unit,
                num_blocks=len(blocks),
                num_gemm1_tiles=chunks,  # the two kinds here are chunks and GEMM1 tiles
                num_gemm2_tiles=shape.num_gemm1_tiles,
                lag_blocks=self.lead_blocks,
            )
            assert found is not None
            if self.takers(Launch.STAGE1 + 2 * index, unit) % shape.num_ctas == cta:
                run = _pull if found.phase is Phase.GEMM1 else _gemm1
                yield from run(shape, call, blocks[found.block], found.n_tile)

    def _stage2(self, shape: ProtocolShape, call: Call, cta: int, index: int, *, is_last: bool) -> Program:
        counts = yield from _load_counts()
        blocks = _blocks_of_round(shape, call, counts, index)
        for unit in range(len(blocks) * shape.num_gemm2_tiles):
            if self.takers(Launch.STAGE2 + 2 * index, unit) % shape.num_ctas == cta:
                block, n_tile = divmod(unit, shape.num_gemm2_tiles)
                yield Gemm2(block=blocks[block], n_tile=n_tile)
        if is_last:
            yield from self._arrive(Join.FINISHED, shape, call, cta, Phase.FINISH)
            if cta == self.last:
                yield from _publish(RANK_FINISHED, shape, call, Phase.FINISH)

    def _combine(self, shape: ProtocolShape, call: Call, cta: int) -> Program:
        for owner in _ranks_from(call.rank, shape):
            yield Wait(flag=RANK_FINISHED, index=owner, target=call.epoch, peer=owner, phase=Phase.COMBINE)
        tokens = share(call.num_tokens, shape.num_ctas, cta)
        if tokens:
            yield CombineTokens(first=tokens.start, num=len(tokens))

    def _arrive(self, join: Join, shape: ProtocolShape, call: Call, cta: int, phase: Phase) -> Program:
        """Every program arrives; the last one has acquired what all released. Nobody else waits."""
        yield Raise(flag=GRID_JOIN, rank=call.rank, index=join, amount=1, phase=phase)
        if cta == self.last:
            yield Wait(flag=GRID_JOIN, index=join, target=shape.num_ctas, peer=call.rank, phase=phase)


def _nothing() -> Program:
    yield from ()


def _boundary(shape: ProtocolShape, call: Call, launch: int) -> Program:
    index = call.epoch * MAX_LAUNCHES + launch
    yield Raise(flag=LAUNCH_BOUNDARY, rank=call.rank, index=index, amount=1, phase=Phase.STAGE)
    yield Wait(flag=LAUNCH_BOUNDARY, index=index, target=shape.num_ctas, peer=call.rank, phase=Phase.STAGE)


def _await_counts(shape: ProtocolShape, call: Call) -> Program:
    for src in _ranks_from(call.rank, shape):
        yield Wait(flag=COUNTS_PUBLISHED, index=src, target=call.epoch, peer=src, phase=Phase.DISPATCH)


def _load_counts() -> Generator[Op, Answer, Counts]:
    counts = yield LoadCounts()
    assert counts is not None
    return counts


def _publish(flag: Flag, shape: ProtocolShape, call: Call, phase: Phase) -> Program:
    for peer in _ranks_from(call.rank, shape):
        yield Raise(flag=flag, rank=peer, index=call.rank, amount=call.epoch, phase=phase)


def _blocks_of_round(shape: ProtocolShape, call: Call, counts: Counts, index: int) -> Sequence[Block]:
    blocks = plan_blocks(counts, call.rank, shape.block_m, shape.ring_blocks)
    return blocks[index * shape.ring_blocks : (index + 1) * shape.ring_blocks]


def _pull(shape: ProtocolShape, call: Call, block: Block, chunk: int) -> Program:
    first = chunk * shape.rows_per_pull
    num = min(shape.rows_per_pull, block.num_rows - first)
    if num > 0:
        yield PullRows(block=block, first=first, num=num)
        yield Raise(flag=ROWS_ARRIVED, rank=call.rank, index=block.index, amount=num, phase=Phase.DISPATCH)


def _gemm1(shape: ProtocolShape, call: Call, block: Block, n_tile: int) -> Program:
    yield Wait(flag=ROWS_ARRIVED, index=block.index, target=block.num_rows, peer=call.rank, phase=Phase.GEMM1)
    yield Gemm1(block=block, n_tile=n_tile)


def _ranks_from(rank: int, shape: ProtocolShape) -> Iterator[int]:
    return ((rank + step) % shape.ep_size for step in range(shape.ep_size))
