"""Memory with vector clocks: every access is checked for what must have come before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias

from megamoe.schedule.model_check.programs import Model, Step, WordKey, WorkerId
from megamoe.schedule.protocol import UINT32_RANGE, Act, ClearCounters, Life, Raise, Region, Scope, Wait

Clock: TypeAlias = tuple[int, ...]
"""Per worker, how many of its steps are known to have happened."""

Stamp: TypeAlias = tuple[int, int]
"""A step: its worker, and its number among that worker's, from 1."""

CellKey: TypeAlias = tuple[str, int, tuple[int, ...]]
"""A region's cell: region, rank, index."""

Trail: TypeAlias = "tuple[Trail, Step] | None"
"""The steps so far, newest first; branches of the search share their beginnings."""


class Problem(StrEnum):
    """What can be wrong."""

    DATA_RACE = "data race"
    UNWRITTEN = "read before its write"
    STALE = "read of another block's or call's data"
    DEADLOCK = "deadlock"
    COVERAGE = "not exactly once"


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A broken property, with the steps that show it, oldest first."""

    problem: Problem
    message: str
    trace: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.problem}: {self.message}", "  after", *(f"    {step}" for step in self.trace)])


class ViolationFound(Exception):
    """Carries a violation out of the search."""

    def __init__(self, problem: Problem, message: str, trace: tuple[Step, ...]) -> None:
        super().__init__(message)
        self.violation = Violation(problem=problem, message=message, trace=trace)


@dataclass(frozen=True)
class Cell:
    """A cell's content, its last write, and each worker's last read since."""

    value: object
    write: Stamp
    reads: tuple[Stamp, ...] = ()


@dataclass(frozen=True)
class Word:
    """A flag's word: its values since it was last cleared, oldest first, each with the clock that a wait acquires."""

    values: tuple[tuple[int, Clock], ...]
    cleared: Stamp | None = None
    touched: tuple[Stamp, ...] = ()  # each worker's last wait or raise since it was cleared

    @property
    def value(self) -> int:
        """The newest value."""
        return self.values[-1][0]

    def satisfying_clock(self, model: Model, wait: Wait) -> Clock | None:
        """The clock of the oldest value that satisfies the wait, or None."""
        return next((clock for value, clock in self.values if model.fault.reached(value, wait.target)), None)


@dataclass
class State:
    """The part that changes while a scenario runs."""

    positions: list[int]
    clocks: list[list[int]]
    cells: dict[CellKey, Cell] = field(default_factory=dict)
    words: dict[WordKey, Word] = field(default_factory=dict)
    trail: Trail = None

    @classmethod
    def initial(cls, model: Model) -> State:
        """Before the first step."""
        size = len(model.workers)
        return cls([0] * size, [[0] * size for _ in range(size)])

    def copy(self) -> State:
        """An independent state; records are immutable and shared."""
        clocks = [list(clock) for clock in self.clocks]
        return State(list(self.positions), clocks, dict(self.cells), dict(self.words), self.trail)

    def key(self) -> object:
        """Equal for states with the same future. Cells follow from positions, unless there is a race."""
        words = frozenset((key, word.values) for key, word in self.words.items())
        return (tuple(self.positions), tuple(map(tuple, self.clocks)), words)

    def word(self, model: Model, key: WordKey) -> Word:
        """The word, with its initial value if nobody has touched it."""
        return self.words.get(key) or Word(((model.initial[key[0]], (0,) * len(self.positions)),))


class Accesses:
    """Memory as one step sees it."""

    def __init__(self, model: Model, state: State, worker: int, step: Step) -> None:
        self.model, self.state, self.worker, self.step = model, state, worker, step
        self.clock = state.clocks[worker]
        self.now = (worker, state.positions[worker])

    # -- cells ------------------------------------------------------------------------------------------------------

    def read(self, wanted: object, region: Region, rank: int, *index: int) -> None:
        """A plain load of a cell, which must hold `wanted`."""
        assert region in _act(self.step).reads, f"{region.name} is not declared to be read by {self.step}"
        key = (region.name, rank, index)
        cell = self.state.cells.get(key)
        if cell is None:
            raise ViolationFound(Problem.UNWRITTEN, f"{_name(key)} by\n    {self.step}", self._trace([self.worker]))
        self._require_after([cell.write], _name(key))
        if cell.value != wanted:
            message = f"{_name(key)} holds {cell.value} and not {wanted} for\n    {self.step}"
            raise ViolationFound(Problem.STALE, message, self._trace([self.worker]))
        self.state.cells[key] = replace(cell, reads=self._and_now(cell.reads))

    def write(self, value: object, region: Region, rank: int, *index: int) -> None:
        """A plain store to a cell."""
        assert region in _act(self.step).writes, f"{region.name} is not declared to be written by {self.step}"
        key = (region.name, rank, index)
        cell = self.state.cells.get(key)
        if cell is not None:
            self._require_after([cell.write, *cell.reads], _name(key))
        self.state.cells[key] = Cell(value, self.now)

    # -- flags ------------------------------------------------------------------------------------------------------

    def acquire(self, wait: Wait) -> None:
        """A wait that is satisfied."""
        clock = self._touch(self.step.word).satisfying_clock(self.model, wait)
        assert clock is not None
        if self.model.fault.acquires(wait.flag):
            self.clock[:] = map(max, self.clock, clock)

    def release(self, op: Raise) -> None:
        """A raise."""
        word = self._touch(self.step.word)
        is_epoch = op.flag.life is Life.EPOCH
        spans = op.rank == self.step.call.rank or self.model.fault.scope(op.flag) is Scope.SYSTEM
        own = tuple(self.clock) if spans and self.model.fault.releases(op.flag) else (0,) * len(self.clock)
        clock = own if is_epoch else tuple(map(max, word.values[-1][1], own))
        value = op.amount if is_epoch else (word.value + op.amount) % UINT32_RANGE
        self.state.words[self.step.word] = replace(word, values=(*word.values, (value, clock)))

    def clear(self, _op: ClearCounters) -> None:
        """Plain stores of zero to words that nobody may touch at the same time."""
        for key in self.step.cleared_words(self.model.shape):
            self._require_after(self.state.word(self.model, key).touched, _word_name(key))
            self.state.words[key] = Word(((0, (0,) * len(self.clock)),), cleared=self.now)

    def _touch(self, key: WordKey) -> Word:
        word = self.state.word(self.model, key)
        if word.cleared is not None:
            self._require_after([word.cleared], _word_name(key))
        word = replace(word, touched=self._and_now(word.touched))
        self.state.words[key] = word
        return word

    def _and_now(self, stamps: tuple[Stamp, ...]) -> tuple[Stamp, ...]:
        return (*(stamp for stamp in stamps if stamp[0] != self.worker), self.now)

    # -- reports ----------------------------------------------------------------------------------------------------

    def _require_after(self, others: Sequence[Stamp], what: str) -> None:
        """This access must come after `others` by clock."""
        for worker, time in others:
            if self.clock[worker] < time:
                other = self.model.programs[worker][time - 1]
                message = f"{what}: nothing orders\n    {other}\n  before\n    {self.step}"
                raise ViolationFound(Problem.DATA_RACE, message, self._trace([worker, self.worker]))

    def _trace(self, workers: Sequence[int]) -> tuple[Step, ...]:
        return last_steps(self.state, [self.model.workers[worker] for worker in workers], 6)


def last_steps(state: State, workers: Sequence[WorkerId], num_each: int) -> tuple[Step, ...]:
    """The last steps of these workers, and the raises by others that satisfied the waits among them."""
    budget = Counter(dict.fromkeys(workers, num_each))
    waited: set[tuple[WordKey, int]] = set()
    shown: list[Step] = []
    trail = state.trail
    while trail is not None:
        trail, step = trail
        is_own = budget[step.worker] > 0
        if is_own:
            budget[step.worker] -= 1
            if isinstance(step.op, Wait):
                waited.add((step.word, step.call.epoch))
        is_others = isinstance(step.op, Raise) and step.worker not in budget
        if is_own or (is_others and (step.word, step.call.epoch) in waited):
            shown.append(step)
    return tuple(reversed(shown))


def _act(step: Step) -> Act:
    assert not isinstance(step.op, (Wait, Raise, ClearCounters))
    return step.op


def _name(key: CellKey) -> str:
    return f"{key[0]}{list(key[2])} of rank {key[1]}"


def _word_name(key: WordKey) -> str:
    return f"{key[0]}[{key[3]}] of rank {key[1]}, copy {key[2]}"
