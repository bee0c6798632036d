"""Seeded faults: mistakes that protocols of this kind have had, or invite. The model checker must find each.

They prove the checker, not the protocol: a checker that found none of them would call anything right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from megamoe.schedule.model_check.memory import Problem
from megamoe.schedule.model_check.programs import Fault, Scenario, WorkerId
from megamoe.schedule.protocol import (
    A2_WRITTEN,
    BLOCK_RETIRED,
    COUNTS_LOADED,
    COUNTS_PUBLISHED,
    FLAGS,
    GRID_JOIN,
    RANK_FINISHED,
    ROWS_ARRIVED,
    UINT32_RANGE,
    Call,
    ClearCounters,
    Flag,
    Gemm1,
    Gemm2,
    Join,
    Life,
    Op,
    ProtocolShape,
    PullRows,
    Raise,
    Scope,
    Wait,
    next_epoch,
)
from megamoe.schedule.tiles import max_pool_blocks

FAULT_SHAPE = ProtocolShape(
    ep_size=2,
    num_ctas=2,
    num_local_experts=2,
    top_k=2,
    num_max_tokens_per_rank=3,
    block_m=2,
    ring_blocks=2,
    lag_blocks=1,
    num_gemm1_tiles=2,
    num_gemm2_tiles=2,
    rows_per_pull=1,
    max_blocks=max_pool_blocks(ep_size=2, num_max_tokens_per_rank=3, top_k=2, num_local_experts=2, block_m=2),
)
"""Small, and yet the ring turns: rank 0 gets four blocks for two slots."""

_MIXED = (((0, 1), (0, 2), (3, -1)), ((0, 0), (1, 3), (1, 1)))
_RANK_1_IDLE = (((0, 1), (1, 0), (0, 0)), ())  # it sends nothing and receives nothing

FAULT_SCENARIO = Scenario(
    shape=FAULT_SHAPE, calls=(_MIXED, _RANK_1_IDLE, _MIXED), first_epoch=next_epoch(UINT32_RANGE, -1)
)
"""Three calls, so that each copy of the counters is used again; the epoch wraps after the first."""


@dataclass(frozen=True, kw_only=True)
class SeededFault:
    """A fault, where it shows, and as what.

    `problems` are those that count as finding it: a missing order shows as a race or as a wrong read, depending on
    which the search meets first.
    """

    fault: Fault
    problems: frozenset[Problem]
    scenario: Scenario = FAULT_SCENARIO


Edit: TypeAlias = Callable[[Op, WorkerId, Call], list[Op]]
"""What stands in the place of an op."""

_UNORDERED = frozenset({Problem.DATA_RACE, Problem.UNWRITTEN, Problem.STALE})
_STUCK = frozenset({Problem.DEADLOCK})
_MISCOUNTED = frozenset({Problem.COVERAGE})


def _edited(name: str, problems: frozenset[Problem], edit: Edit) -> SeededFault:
    """A fault that replaces single ops."""

    def program(ops: list[Op], worker: WorkerId, call: Call) -> list[Op]:
        return [new for op in ops for new in edit(op, worker, call)]

    return SeededFault(fault=Fault(name=name, program=program), problems=problems)


# -- faults of one flag -----------------------------------------------------------------------------------------------


def _drop_raise(flag: Flag) -> SeededFault:
    def edit(op: Op, worker: WorkerId, _call: Call) -> list[Op]:
        return [] if isinstance(op, Raise) and op.flag is flag and worker.rank == worker.cta == 0 else [op]

    return _edited(f"{flag.name} is not raised by CTA 0 of rank 0", _STUCK, edit)


def _drop_wait(flag: Flag, join: Join | None = None) -> SeededFault:
    def edit(op: Op, _worker: WorkerId, _call: Call) -> list[Op]:
        return [] if isinstance(op, Wait) and op.flag is flag and join in (None, op.index) else [op]

    name = flag.name if join is None else f"{flag.name} {join.name}"
    return _edited(f"{name} is not waited for", _UNORDERED, edit)


def _satisfied_early(flag: Flag) -> SeededFault:
    def edit(op: Op, _worker: WorkerId, _call: Call) -> list[Op]:
        if isinstance(op, Wait) and op.flag is flag:
            return [replace(op, target=next_epoch(op.target, -1))]
        return [op]

    return _edited(f"{flag.name} satisfies its wait one raise early", _UNORDERED, edit)


def _raised_early(flag: Flag, act: type[PullRows] | type[Gemm1] | type[Gemm2]) -> SeededFault:
    """The raise that follows each act changes places with it."""

    def program(ops: list[Op], _worker: WorkerId, _call: Call) -> list[Op]:
        ops = list(ops)
        for index in range(len(ops) - 1):
            if isinstance(ops[index], act):
                ops[index], ops[index + 1] = ops[index + 1], ops[index]
        return ops

    name = f"{flag.name} is raised before the data are stored"
    return SeededFault(fault=Fault(name=name, program=program), problems=_UNORDERED)


def _relaxed_wait(flag: Flag) -> SeededFault:
    fault = Fault(name=f"{flag.name} is polled relaxed", acquires=lambda polled: polled is not flag)
    return SeededFault(fault=fault, problems=_UNORDERED)


def _relaxed_raise(flag: Flag) -> SeededFault:
    fault = Fault(name=f"{flag.name} is raised relaxed", releases=lambda raised: raised is not flag)
    return SeededFault(fault=fault, problems=_UNORDERED)


def _gpu_scope(flag: Flag) -> SeededFault:
    fault = Fault(name=f"{flag.name} is raised at gpu scope", scope=lambda f: Scope.GPU if f is flag else f.scope)
    return SeededFault(fault=fault, problems=_UNORDERED)


# -- faults of the ring -----------------------------------------------------------------------------------------------


def _wait_for_wrong_block(op: Op, _worker: WorkerId, _call: Call) -> list[Op]:
    if isinstance(op, Wait) and op.flag is BLOCK_RETIRED:
        return [replace(op, index=op.index - 1)] if op.index else []
    return [op]


def _wait_for_gemm1_only(op: Op, _worker: WorkerId, _call: Call) -> list[Op]:
    if isinstance(op, Wait) and op.flag is BLOCK_RETIRED:
        return [replace(op, flag=A2_WRITTEN, target=FAULT_SHAPE.num_gemm1_tiles)]
    return [op]


def _reversed(name: str, act: type[PullRows] | type[Gemm1], ops_before: int) -> SeededFault:
    """The acts of each worker in reverse order, each with the wait before it (if any) and the raise after it."""

    def program(ops: list[Op], _worker: WorkerId, _call: Call) -> list[Op]:
        spans = [slice(i - ops_before, i + 2) for i, op in enumerate(ops) if isinstance(op, act)]
        result = list(ops)
        for span, source in zip(spans, reversed(spans), strict=True):
            result[span] = ops[source]
        return result

    return SeededFault(fault=Fault(name=name, program=program), problems=_STUCK | _UNORDERED)


# -- faults between calls and between ranks ---------------------------------------------------------------------------


def _satisfied_at_once(flag: Flag, first_epoch: int) -> int:
    return first_epoch if flag.life is Life.EPOCH else 0


def _no_clear(op: Op, _worker: WorkerId, _call: Call) -> list[Op]:
    return [] if isinstance(op, ClearCounters) else [op]


def _silent_when_empty(op: Op, _worker: WorkerId, call: Call) -> list[Op]:
    is_silent = isinstance(op, Raise) and op.flag is COUNTS_PUBLISHED and call.num_tokens == 0
    return [] if is_silent else [op]


def _roles_do_not_meet(op: Op, _worker: WorkerId, call: Call) -> list[Op]:
    """Math workers wait for the sources themselves, so a dispatch worker without rows may read counts at any time."""
    if isinstance(op, Wait) and op.flag is COUNTS_LOADED:
        sources = range(FAULT_SHAPE.ep_size)
        return [replace(op, flag=COUNTS_PUBLISHED, index=src, target=call.epoch, peer=src) for src in sources]
    return [op]


def _waits_only_where_it_sent(op: Op, _worker: WorkerId, call: Call) -> list[Op]:
    """Rank 0 sends rank 1 nothing in `_RANK_1_IDLE`."""
    is_skipped = (
        isinstance(op, Wait)
        and op.flag is RANK_FINISHED
        and (call.rank, op.peer) == (0, 1)
        and call.epoch == next_epoch(FAULT_SCENARIO.first_epoch)
    )
    return [] if is_skipped else [op]


# -- faults of the work itself ----------------------------------------------------------------------------------------


def _tile_skipped(op: Op, _worker: WorkerId, _call: Call) -> list[Op]:
    return [] if isinstance(op, Gemm1) and op.block.index == 1 and op.n_tile == 1 else [op]


def _tile_twice(op: Op, _worker: WorkerId, _call: Call) -> list[Op]:
    return [op, op] if isinstance(op, Gemm2) and op.block.index == 1 and op.n_tile == 0 else [op]


SEEDED_FAULTS: tuple[SeededFault, ...] = (
    *map(_drop_raise, FLAGS),
    *(_drop_wait(flag) for flag in FLAGS if flag is not GRID_JOIN),
    *(_drop_wait(GRID_JOIN, join) for join in Join),
    *map(_satisfied_early, FLAGS),
    _raised_early(ROWS_ARRIVED, PullRows),
    _raised_early(A2_WRITTEN, Gemm1),
    _raised_early(BLOCK_RETIRED, Gemm2),
    *map(_relaxed_wait, FLAGS),
    *map(_relaxed_raise, FLAGS),
    *(_gpu_scope(flag) for flag in FLAGS if flag.scope is Scope.SYSTEM),
    SeededFault(
        fault=Fault(name="the ring is one slot too small", shape=lambda s: replace(s, ring_blocks=s.ring_blocks - 1)),
        problems=_STUCK,
    ),
    _edited("the ring waits for the wrong block", _UNORDERED, _wait_for_wrong_block),
    _edited("a slot is reused once GEMM1 has read it", _UNORDERED, _wait_for_gemm1_only),
    _reversed("units run in decreasing order", Gemm1, ops_before=1),
    _reversed("blocks are pulled in decreasing order", PullRows, ops_before=0),
    SeededFault(
        fault=Fault(name="the first value of a flag satisfies the first wait", initial=_satisfied_at_once),
        problems=_UNORDERED,
    ),
    SeededFault(
        fault=Fault(name="flags start at zero, epochs do not", initial=lambda _flag, _first_epoch: 0),
        problems=_UNORDERED,
        scenario=replace(FAULT_SCENARIO, first_epoch=(1 << 31) + 1),
    ),
    SeededFault(
        fault=Fault(name="epochs are compared as unsigned numbers", reached=lambda value, target: value >= target),
        problems=_UNORDERED | _STUCK,
    ),
    _edited("counters are not cleared", _UNORDERED, _no_clear),
    _edited("a rank without tokens publishes no counts", _STUCK, _silent_when_empty),
    _edited("the roles of a CTA do not meet", _UNORDERED, _roles_do_not_meet),
    _edited("a rank does not wait for peers that it sent nothing to", _UNORDERED, _waits_only_where_it_sent),
    _edited("a GEMM1 tile is skipped", _MISCOUNTED, _tile_skipped),
    _edited("a GEMM2 tile runs twice", _MISCOUNTED, _tile_twice),
)
"""All of them. Names are unique."""
