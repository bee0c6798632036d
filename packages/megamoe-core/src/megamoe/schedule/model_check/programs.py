"""What is explored: a scenario, turned into one list of ops per worker, perhaps with a fault in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from megamoe.schedule.persistent import Program, cta_program
from megamoe.schedule.protocol import (
    FLAGS,
    Call,
    ClearCounters,
    CombineTokens,
    CountPicks,
    Flag,
    Gemm1,
    Gemm2,
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
    counter_flag,
    initial_value,
    next_epoch,
    reached,
)
from megamoe.schedule.tiles import Counts

Routing: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]
"""`routing[rank][token]`: the token's `top_k` expert ids, -1 for none. Ranks may bring different numbers of tokens."""

WordKey: TypeAlias = tuple[str, int, int, int]
"""A flag's word: flag, rank, copy (0 unless it is a parity flag), index."""

CALL_BOUNDARY = Flag(
    name="call_boundary",
    lives_on="every rank",
    one_per="call",
    raised_by="each worker at the end of a call; it stands for a kernel boundary and is no word in memory",
    target="workers of the rank",
    scope=Scope.GPU,
    life=Life.PARITY,
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """`calls[i]` is the routing of call i, whose epoch is first_epoch + i (uint32).

    `program` gives the two programs of a CTA for one call; a backend may bring a variant of the protocol. `own_flags`
    are flags of that variant beside `protocol.FLAGS`; their words start at 0 and nothing clears them.
    """

    shape: ProtocolShape
    calls: tuple[Routing, ...]
    first_epoch: int = 1
    program: Callable[[ProtocolShape, Call, int], dict[Role, Program]] = cta_program
    own_flags: tuple[Flag, ...] = ()


@dataclass(frozen=True)
class WorkerId:
    """One sequential program."""

    rank: int
    cta: int
    role: Role

    def __str__(self) -> str:
        return f"rank {self.rank} cta {self.cta} {self.role}"


@dataclass(frozen=True)
class Step:
    """One op of one worker in one call."""

    worker: WorkerId
    call: Call
    op: Op

    def __str__(self) -> str:
        return f"{self.worker!s:<22} epoch {self.call.epoch} {self.op.phase:<8} {describe(self.op)}"

    @property
    def flag(self) -> Flag:
        """The flag that a wait or raise touches."""
        assert isinstance(self.op, (Wait, Raise))
        return self.op.flag

    @property
    def word(self) -> WordKey:
        """The word that a wait or raise touches."""
        assert isinstance(self.op, (Wait, Raise))
        copy = self.call.parity if self.flag.life is Life.PARITY else 0
        rank = self.op.rank if isinstance(self.op, Raise) else self.call.rank
        return (self.flag.name, rank, copy, self.op.index)

    def cleared_words(self, shape: ProtocolShape) -> list[WordKey]:
        """The words that a clear zeroes."""
        assert isinstance(self.op, ClearCounters)
        places = [counter_flag(word, shape) for word in range(self.op.first, self.op.first + self.op.num)]
        return [(flag.name, self.call.rank, 1 - self.call.parity, index) for flag, index in places]


def describe(op: Op) -> str:
    """One line for a trace."""
    match op:
        case Wait():
            return f"wait {op.flag.name}[{op.index}] >= {op.target} from rank {op.peer}"
        case Raise():
            sign = "=" if op.flag.life is Life.EPOCH else "+="
            return f"raise {op.flag.name}[{op.index}] of rank {op.rank} {sign} {op.amount}"
        case ClearCounters():
            return f"clear counters {op.first}..{op.first + op.num - 1} of the other parity"
        case StageInput() | CombineTokens():
            return f"{op.phase} tokens {op.first}..{op.first + op.num - 1}"
        case CountPicks() | PushEntries():
            verb = "count" if isinstance(op, CountPicks) else "push"
            return f"{verb} picks {op.first}..{op.first + op.num - 1}"
        case PushCounts():
            return f"push counts to rank {op.owner}"
        case LoadCounts():
            return "load counts"
        case PullRows():
            return f"pull rows {op.first}..{op.first + op.num - 1} of block {op.block.index} into slot {op.block.slot}"
        case Gemm1() | Gemm2():
            return f"{op.phase} tile {op.n_tile} of block {op.block.index} in slot {op.block.slot}"
        case _:
            assert_never(op)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A change of the protocol. Its default fields change nothing.

    Attributes:
        name: its name.
        shape: changes the shape.
        program: changes one worker's ops of one call.
        initial: what a flag's words hold when the session opens, from the first epoch.
        scope: the scope of a flag.
        reached: the comparison of a wait.
        acquires: whether a wait for a flag orders memory, or is relaxed.
        releases: whether a raise of a flag orders memory, or is relaxed.
    """

    name: str
    shape: Callable[[ProtocolShape], ProtocolShape] = lambda shape: shape
    program: Callable[[list[Op], WorkerId, Call], list[Op]] = lambda ops, _worker, _call: ops
    initial: Callable[[Flag, int], int] = initial_value
    scope: Callable[[Flag], Scope] = lambda flag: flag.scope
    reached: Callable[[int, int], bool] = reached
    acquires: Callable[[Flag], bool] = lambda _flag: True
    releases: Callable[[Flag], bool] = lambda _flag: True


NO_FAULT = Fault(name="none")


@dataclass(frozen=True)
class Routed:
    """Where the picks of one rank in one call go: `places[pick]` is (owner, entry)."""

    places: dict[int, tuple[int, int]]
    counts: Counts  # [owner][local expert]

    @classmethod
    def of(cls, shape: ProtocolShape, tokens: Sequence[Sequence[int]]) -> Routed:
        """Sort picks by expert, then by pick; ids that are no expert go nowhere."""
        picks = [(expert, pick) for pick, expert in enumerate(expert for ids in tokens for expert in ids)]
        counts = [[0] * shape.num_local_experts for _ in range(shape.ep_size)]
        places: dict[int, tuple[int, int]] = {}
        for expert, pick in sorted(picks):
            owner, local_expert = divmod(expert, shape.num_local_experts)
            if 0 <= owner < shape.ep_size:
                places[pick] = (owner, sum(counts[owner]))
                counts[owner][local_expert] += 1
        return cls(places, tuple(map(tuple, counts)))


class Model:
    """A scenario with a fault: the part that does not change while it runs."""

    def __init__(self, scenario: Scenario, fault: Fault) -> None:
        self.shape = fault.shape(scenario.shape)
        self.fault = fault
        self.calls = scenario.calls
        self.first_epoch = scenario.first_epoch
        self.initial = {flag.name: fault.initial(flag, scenario.first_epoch) for flag in FLAGS}
        self.initial.update({flag.name: 0 for flag in (CALL_BOUNDARY, *scenario.own_flags)})
        self.cta_program = scenario.program
        self.routed = [[Routed.of(self.shape, tokens) for tokens in routing] for routing in scenario.calls]
        self.workers = [
            WorkerId(rank, cta, role)
            for rank in range(self.shape.ep_size)
            for cta in range(self.shape.num_ctas)
            for role in Role
        ]
        self.programs = [tuple(self._program(worker)) for worker in self.workers]

    def call_index(self, call: Call) -> int:
        """Which of the scenario's calls it is."""
        return next_epoch(call.epoch, -self.first_epoch)

    def routed_by(self, call: Call, src: int) -> Routed:
        """Where `src`'s picks go in the call of this epoch."""
        return self.routed[self.call_index(call)][src]

    def counts(self, call_index: int, owner: int) -> Counts:
        """What `owner` receives in a call."""
        return tuple(routed.counts[owner] for routed in self.routed[call_index])

    def steps(self) -> Iterator[Step]:
        """All steps of all workers."""
        return (step for program in self.programs for step in program)

    def _program(self, worker: WorkerId) -> Iterator[Step]:
        num_workers = self.shape.num_ctas * len(Role)
        for index, routing in enumerate(self.calls):
            epoch = next_epoch(self.first_epoch, index)
            call = Call(rank=worker.rank, epoch=epoch, num_tokens=len(routing[worker.rank]))
            ops = list(self.fault.program(self._ops(worker, call, self.counts(index, worker.rank)), worker, call))
            phase = Phase.COMBINE
            ops.append(Raise(flag=CALL_BOUNDARY, rank=worker.rank, index=index, amount=1, phase=phase))
            ops.append(Wait(flag=CALL_BOUNDARY, index=index, target=num_workers, peer=worker.rank, phase=phase))
            yield from (Step(worker, call, op) for op in ops)

    def _ops(self, worker: WorkerId, call: Call, counts: Counts) -> list[Op]:
        """Run the generator to its end. `acts.py` checks that LoadCounts finds these counts."""
        program = self.cta_program(self.shape, call, worker.cta)[worker.role]
        ops: list[Op] = []
        try:
            op = next(program)
            while True:
                ops.append(op)
                op = program.send(counts if isinstance(op, LoadCounts) else None)
        except StopIteration:
            return ops
