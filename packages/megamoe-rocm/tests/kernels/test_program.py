"""The model checker proves the package's variant of the protocol, and finds what is taken out of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from megamoe.schedule.model_check import Fault, Problem, Routing, Scenario, WorkerId, explore, walk
from megamoe.schedule.protocol import (
    COUNTS_PUBLISHED,
    RANK_FINISHED,
    ROWS_ARRIVED,
    Call,
    Op,
    ProtocolShape,
    Raise,
    Wait,
)
from megamoe.schedule.tiles import max_pool_blocks
from megamoe_rocm.kernels.program import LAUNCH_BOUNDARY, MAX_LAUNCHES, StagedProgram, Takers

FULL: Routing = (((0, 1), (2, 3), (0, 0)), ((3, 2), (1, 0), (1, 1)))
NOBODY: Routing = ((), ())
ONE_EXPERT: Routing = (((1, 1), (1, 1), (1, 1)), ((1, 1), (1, 1), (1, 1)))
STRANGE_IDS: Routing = (((4, 0), (67, -2), (-1, 3)), ((3, 99),))


def make_shape(*, ring: int, num_ctas: int = 2, ep_size: int = 2, rows_per_pull: int = 1) -> ProtocolShape:
    sizes = {"ep_size": ep_size, "num_max_tokens_per_rank": 3, "top_k": 2, "num_local_experts": 2, "block_m": 2}
    max_blocks = max_pool_blocks(**sizes)
    return ProtocolShape(
        **sizes,
        num_ctas=num_ctas,
        ring_blocks=min(ring, max_blocks),
        lag_blocks=0,
        num_gemm1_tiles=2,
        num_gemm2_tiles=2,
        rows_per_pull=rows_per_pull,
        max_blocks=max_blocks,
    )


def strided(_launch: int, unit: int) -> int:
    return unit


def drawn(seed: int) -> Takers:
    """Tickets in an arbitrary order of programs; a program takes any number of units in a row."""
    return lambda launch, unit: random.Random(f"{seed} {launch} {unit}").randrange(1 << 16)


def scenario(shape: ProtocolShape, *calls: Routing, takers: Takers = strided, **program: int) -> Scenario:
    return Scenario(
        shape=shape,
        calls=calls,
        first_epoch=2**32 - 1,  # the epoch wraps after one call
        program=StagedProgram(takers=takers, **program),
        own_flags=(LAUNCH_BOUNDARY,),
    )


@pytest.mark.parametrize("ring", [1, 2, 99])
@pytest.mark.parametrize("calls", [(FULL, ONE_EXPERT, FULL), (NOBODY, FULL, NOBODY), (STRANGE_IDS, FULL, ONE_EXPERT)])
def test_the_protocol_holds(ring: int, calls: tuple[Routing, ...]) -> None:
    result = explore(scenario(make_shape(ring=ring), *calls))
    assert result.violation is None, result.violation
    assert result.is_complete


@pytest.mark.parametrize("seed", range(12))
def test_it_holds_whoever_takes_which_unit(seed: int) -> None:
    shape = make_shape(ring=1 + seed % 4, num_ctas=1 + seed % 3, rows_per_pull=1 + seed % 2)
    last, lead = seed % shape.num_ctas, 1 + seed % 3
    result = explore(scenario(shape, FULL, ONE_EXPERT, takers=drawn(seed), last=last, lead_blocks=lead))
    assert result.violation is None, result.violation
    assert result.is_complete


def test_random_interleavings_of_every_op() -> None:
    result = walk(scenario(make_shape(ring=2), FULL, STRANGE_IDS, FULL, takers=drawn(5)), seeds=range(20))
    assert result.violation is None, result.violation
    assert result.num_schedules == 20


def without(drop: Callable[[Op], bool]) -> Fault:
    return Fault(name="dropped", program=lambda ops, _worker, _call: [op for op in ops if not drop(op)])


def is_boundary(op: Op, launch: int) -> bool:
    return (
        isinstance(op, (Wait, Raise))
        and op.flag is LAUNCH_BOUNDARY
        and op.index % MAX_LAUNCHES == launch
        and isinstance(op, Wait)
    )


def waits_for(flag: object) -> Callable[[Op], bool]:
    return lambda op: isinstance(op, Wait) and op.flag is flag


@pytest.mark.parametrize(
    "fault",
    [
        without(waits_for(COUNTS_PUBLISHED)),
        without(waits_for(RANK_FINISHED)),
        without(waits_for(ROWS_ARRIVED)),
        without(lambda op: is_boundary(op, 0)),  # count and push
        without(lambda op: is_boundary(op, 3)),  # stage 1 and stage 2 of round 0
        without(lambda op: is_boundary(op, 4)),  # stage 2 of round 0 and stage 1 of round 1: the ring
        Fault(name="relaxed", releases=lambda flag: flag is not COUNTS_PUBLISHED),
        Fault(name="relaxed", acquires=lambda flag: flag is not RANK_FINISHED),
    ],
    ids=["counts", "finished", "rows", "count-push", "stages", "ring", "release", "acquire"],
)
def test_what_is_taken_out_is_missed(fault: Fault) -> None:
    result = explore(scenario(make_shape(ring=2), FULL, ONE_EXPERT), fault=fault)
    assert result.violation is not None
    assert result.violation.problem in (Problem.DATA_RACE, Problem.UNWRITTEN, Problem.STALE)


def test_a_tile_before_its_rows_deadlocks_a_single_program() -> None:
    """Why pulls come first in the order of units: tickets alone would not do."""

    def tile_first(ops: list[Op], _worker: WorkerId, _call: Call) -> list[Op]:
        wait = next((at for at, op in enumerate(ops) if waits_for(ROWS_ARRIVED)(op)), None)
        if wait is None:
            return ops
        pull = next(at for at, op in enumerate(ops) if type(op).__name__ == "PullRows")
        return [*ops[:pull], ops[wait], *ops[pull:wait], *ops[wait + 1 :]]

    shape = replace(make_shape(ring=99), num_ctas=1)
    result = explore(scenario(shape, FULL), fault=Fault(name="tile first", program=tile_first))
    assert result.violation is not None
    assert result.violation.problem is Problem.DEADLOCK
