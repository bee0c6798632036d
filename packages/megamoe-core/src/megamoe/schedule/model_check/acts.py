"""Acts on symbolic data, and the check that they are done exactly once.

Each value carries its epoch, so that data of an earlier call are never taken for this one's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import assert_never

from megamoe.schedule.model_check.memory import Accesses, Problem, Violation
from megamoe.schedule.model_check.programs import Model
from megamoe.schedule.protocol import (
    A2,
    COMBINE,
    INPUT,
    POOL,
    ROUTE_COUNTS,
    ROUTE_ENTRIES,
    ROUTE_TOTALS,
    Act,
    Call,
    CombineTokens,
    CountPicks,
    Gemm1,
    Gemm2,
    LoadCounts,
    Op,
    ProtocolShape,
    PullRows,
    PushCounts,
    PushEntries,
    StageInput,
)
from megamoe.schedule.tiles import Block, Counts, ceil_div, share


def run_act(model: Model, memory: Accesses, call: Call, act: Act) -> None:
    """The body of an act: its loads and stores."""
    rank, epoch = call.rank, call.epoch
    match act:
        case StageInput():
            for token in range(act.first, act.first + act.num):
                memory.write((epoch, token), INPUT, rank, token)
        case CountPicks():
            memory.write((epoch, act.first), ROUTE_TOTALS, rank, act.cta)
        case PushEntries():
            _read_totals(model, memory, call)
            places = model.routed_by(call, rank).places
            for pick in range(act.first, act.first + act.num):
                if pick in places:
                    owner, entry = places[pick]
                    memory.write((epoch, pick), ROUTE_ENTRIES, owner, rank, entry)
        case PushCounts():
            _read_totals(model, memory, call)
            memory.write((epoch, model.routed_by(call, rank).counts[act.owner]), ROUTE_COUNTS, act.owner, rank)
        case LoadCounts():
            for src, counts in enumerate(model.counts(model.call_index(call), rank)):
                memory.read((epoch, counts), ROUTE_COUNTS, rank, src)
        case PullRows():
            _pull_rows(model, memory, call, act)
        case Gemm1():
            for row, home in enumerate(_homes(model, call, act.block)):
                memory.read((epoch, act.block.index, *home), POOL, rank, act.block.slot, row)
            memory.write((epoch, act.block.index), A2, rank, act.block.slot, act.n_tile)
        case Gemm2():
            _gemm2(model, memory, call, act)
        case CombineTokens():
            _combine_tokens(model, memory, call, act)
        case _:
            assert_never(act)


def _read_totals(model: Model, memory: Accesses, call: Call) -> None:
    for cta in range(model.shape.num_ctas):
        picks = share(call.num_tokens * model.shape.top_k, model.shape.num_ctas, cta)
        if picks:
            memory.read((call.epoch, picks.start), ROUTE_TOTALS, call.rank, cta)


def _pull_rows(model: Model, memory: Accesses, call: Call, act: PullRows) -> None:
    entries = [
        (segment.src_rank, entry)
        for segment in act.block.segments
        for entry in range(segment.first_entry, segment.first_entry + segment.num_rows)
    ]
    homes = _homes(model, call, act.block)
    for row in range(act.first, act.first + act.num):
        (src, entry), (_, pick) = entries[row], homes[row]
        memory.read((call.epoch, pick), ROUTE_ENTRIES, call.rank, src, entry)
        token = pick // model.shape.top_k
        memory.read((call.epoch, token), INPUT, src, token)
        memory.write((call.epoch, act.block.index, src, pick), POOL, call.rank, act.block.slot, row)


def _homes(model: Model, call: Call, block: Block) -> list[tuple[int, int]]:
    """Home rank and pick of each valid row of a block."""
    return [
        (segment.src_rank, pick)
        for segment in block.segments
        for entry in range(segment.first_entry, segment.first_entry + segment.num_rows)
        for pick, place in model.routed_by(call, segment.src_rank).places.items()
        if place == (call.rank, entry)
    ]


def _gemm2(model: Model, memory: Accesses, call: Call, act: Gemm2) -> None:
    block = act.block
    for n_tile in range(model.shape.num_gemm1_tiles):
        memory.read((call.epoch, block.index), A2, call.rank, block.slot, n_tile)
    expert = call.rank * model.shape.num_local_experts + block.local_expert_idx
    for row, (src, pick) in enumerate(_homes(model, call, block)):
        memory.read((call.epoch, block.index, src, pick), POOL, call.rank, block.slot, row)
        token, slot = divmod(pick, model.shape.top_k)
        memory.write((call.epoch, expert), COMBINE, src, slot, token, act.n_tile)


def _combine_tokens(model: Model, memory: Accesses, call: Call, act: CombineTokens) -> None:
    tokens = model.calls[model.call_index(call)][call.rank]
    num_experts = model.shape.ep_size * model.shape.num_local_experts
    for token in range(act.first, act.first + act.num):
        for slot, expert in enumerate(tokens[token]):
            if 0 <= expert < num_experts:
                for n_tile in range(model.shape.num_gemm2_tiles):
                    memory.read((call.epoch, expert), COMBINE, call.rank, slot, token, n_tile)


# -- exactly once: a static check, since programs do not depend on timing ---------------------------------------------


def find_uncovered(model: Model) -> Violation | None:
    """The first thing that the programs do not do exactly once."""
    for index, routing in enumerate(model.calls):
        for rank in range(model.shape.ep_size):
            steps = [s for s in model.steps() if s.worker.rank == rank and model.call_index(s.call) == index]
            done = Counter(item for step in steps for item in _items(step.op))
            wanted = Counter(_wanted_items(model.shape, len(routing[rank]), model.counts(index, rank)))
            for item in sorted(done.keys() | wanted.keys()):
                if done[item] != wanted[item]:
                    message = f"rank {rank}, call {index}: {item} is done {done[item]} times and not {wanted[item]}"
                    trace = tuple(step for step in steps if item in _items(step.op))
                    return Violation(problem=Problem.COVERAGE, message=message, trace=trace)
    return None


def _items(op: Op) -> list[tuple[str, int, int]]:
    """What an op gets done, in units that must be done once."""
    match op:
        case StageInput() | CombineTokens() | CountPicks() | PushEntries():
            return [(type(op).__name__, index, 0) for index in range(op.first, op.first + op.num)]
        case PushCounts():
            return [("PushCounts", op.owner, 0)]
        case PullRows():
            return [("PullRows", op.block.index, row) for row in range(op.first, op.first + op.num)]
        case Gemm1() | Gemm2():
            return [(type(op).__name__, op.block.index, op.n_tile)]
        case _:
            return []


def _wanted_items(shape: ProtocolShape, num_tokens: int, counts: Counts) -> Iterator[tuple[str, int, int]]:
    """What one rank has to get done in one call, counted from the routing and not from the plan of blocks."""
    for token in range(num_tokens):
        yield from (("StageInput", token, 0), ("CombineTokens", token, 0))
    for pick in range(num_tokens * shape.top_k):
        yield from (("CountPicks", pick, 0), ("PushEntries", pick, 0))
    for owner in range(shape.ep_size):
        yield ("PushCounts", owner, 0)
    first_block = 0
    for expert in range(shape.num_local_experts):
        num_rows = sum(of_src[expert] for of_src in counts)
        num_blocks = ceil_div(num_rows, shape.block_m)
        for row in range(num_rows):
            yield ("PullRows", first_block + row // shape.block_m, row % shape.block_m)
        for block in range(first_block, first_block + num_blocks):
            yield from (("Gemm1", block, n_tile) for n_tile in range(shape.num_gemm1_tiles))
            yield from (("Gemm2", block, n_tile) for n_tile in range(shape.num_gemm2_tiles))
        first_block += num_blocks
