"""Which interleavings are run, and what came of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from megamoe.schedule.model_check.acts import find_uncovered, run_act
from megamoe.schedule.model_check.memory import Accesses, Problem, State, Violation, ViolationFound, last_steps
from megamoe.schedule.model_check.programs import NO_FAULT, Fault, Model, Scenario, Step, WordKey
from megamoe.schedule.protocol import UINT32_RANGE, ClearCounters, Life, Raise, Wait


class Search(Enum):
    """Which interleavings are run; the package's docstring says why REDUCED is enough."""

    REDUCED = "one of each class of equivalent interleavings"
    ALL = "every interleaving of every op"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Outcome of a search.

    Attributes:
        violation: the first that was found, or None.
        num_steps: ops executed, over all schedules.
        num_schedules: schedules run to their end, or into a state that had been seen before.
        is_complete: whether everything was covered; False after a violation, at the limit of steps, for random walks.
    """

    violation: Violation | None
    num_steps: int
    num_schedules: int
    is_complete: bool


def explore(
    scenario: Scenario, *, fault: Fault = NO_FAULT, search: Search = Search.REDUCED, max_steps: int = 1_000_000
) -> Result:
    """Search depth first until a violation is found, everything is covered, or `max_steps` ops have been executed."""
    return _Run(scenario, fault).explore(search, max_steps)


def walk(scenario: Scenario, *, seeds: Sequence[int], fault: Fault = NO_FAULT) -> Result:
    """Run one random interleaving of all ops per seed: for configurations that are too large to search."""
    return _Run(scenario, fault).walk(seeds)


class _Run:
    """One search."""

    def __init__(self, scenario: Scenario, fault: Fault) -> None:
        self.model = Model(scenario, fault)
        self.words_to_permute = _words_whose_order_matters(self.model)
        self.num_steps = 0
        self.num_schedules = 0

    def explore(self, search: Search, max_steps: int) -> Result:
        violation = find_uncovered(self.model)
        if violation is None:
            try:
                self._search(search, max_steps)
            except ViolationFound as found:
                violation = found.violation
        return self._result(violation, is_complete=violation is None and self.num_steps < max_steps)

    def walk(self, seeds: Sequence[int]) -> Result:
        violation = find_uncovered(self.model)
        if violation is None:
            try:
                for seed in seeds:
                    self._walk(random.Random(seed))
            except ViolationFound as found:
                violation = found.violation
        return self._result(violation, is_complete=False)

    def _result(self, violation: Violation | None, *, is_complete: bool) -> Result:
        return Result(
            violation=violation,
            num_steps=self.num_steps,
            num_schedules=self.num_schedules,
            is_complete=is_complete,
        )

    def _search(self, search: Search, max_steps: int) -> None:
        seen: set[object] = set()
        stack = [State.initial(self.model)]
        while stack and self.num_steps < max_steps:
            state = stack.pop()
            choices = self._choices(state, search)
            if len(choices) == 1 and search is Search.REDUCED:
                self._execute(state, choices[0])
                stack.append(state)
                continue
            if not choices:
                self._require_end(state)
            key = state.key()
            if not choices or key in seen:
                self.num_schedules += 1
                continue
            seen.add(key)
            for worker in choices:
                branch = state.copy()
                self._execute(branch, worker)
                stack.append(branch)

    def _walk(self, chooser: random.Random) -> None:
        state = State.initial(self.model)
        while choices := self._choices(state, Search.ALL):
            self._execute(state, chooser.choice(choices))
        self._require_end(state)
        self.num_schedules += 1

    def _choices(self, state: State, search: Search) -> list[int]:
        """Workers whose next op may run now; with Search.REDUCED, those that have to be tried."""
        runnable = [worker for worker in range(len(self.model.workers)) if self._is_enabled(state, worker)]
        if search is Search.REDUCED:
            for worker in runnable:
                step = self.model.programs[worker][state.positions[worker]]
                if not isinstance(step.op, Raise) or step.word not in self.words_to_permute:
                    return [worker]
        return runnable

    def _is_enabled(self, state: State, worker: int) -> bool:
        program, position = self.model.programs[worker], state.positions[worker]
        if position == len(program):
            return False
        step = program[position]
        if not isinstance(step.op, Wait):
            return True
        return state.word(self.model, step.word).satisfying_clock(self.model, step.op) is not None

    def _execute(self, state: State, worker: int) -> None:
        """Run the next op of `worker`."""
        step = self.model.programs[worker][state.positions[worker]]
        self.num_steps += 1
        state.positions[worker] += 1
        state.clocks[worker][worker] = state.positions[worker]
        state.trail = (state.trail, step)
        accesses = Accesses(self.model, state, worker, step)
        match step.op:
            case Wait():
                accesses.acquire(step.op)
            case Raise():
                accesses.release(step.op)
            case ClearCounters():
                accesses.clear(step.op)
            case _:
                run_act(self.model, accesses, step.call, step.op)

    def _require_end(self, state: State) -> None:
        """Nothing can run: fine if all programs have ended, else a deadlock."""
        programs = zip(self.model.programs, state.positions, strict=True)
        blocked = [program[position] for program, position in programs if position < len(program)]
        if blocked:
            waits = "".join(f"\n    {step}, is {state.word(self.model, step.word).value}" for step in blocked)
            trace = last_steps(state, [step.worker for step in blocked], 2)
            raise ViolationFound(Problem.DEADLOCK, f"no worker can go on{waits}", trace)


def _words_whose_order_matters(model: Model) -> frozenset[WordKey]:
    """Words some wait of which can be satisfied by a part of the raises that it could see.

    An epoch word is fine if one worker raises it: its raises are ordered anyway. A counter is fine if each wait asks
    for all that has been added at the end of its call, and, where it is of the parity kind, it is cleared in between.
    """
    raises: dict[WordKey, list[Step]] = {}
    waits: dict[WordKey, list[Step]] = {}
    cleared: set[tuple[WordKey, int]] = set()
    for step in model.steps():
        if isinstance(step.op, ClearCounters):
            cleared.update((word, model.call_index(step.call)) for word in step.cleared_words(model.shape))
        elif isinstance(step.op, Raise):
            raises.setdefault(step.word, []).append(step)
        elif isinstance(step.op, Wait):
            waits.setdefault(step.word, []).append(step)

    def is_fine(word: WordKey, steps: list[Step]) -> bool:
        if steps[0].flag.life is Life.EPOCH:
            return len({step.worker for step in steps}) == 1
        return _waits_ask_for_all(model, word, steps, waits.get(word, []), cleared)

    return frozenset(word for word, steps in raises.items() if not is_fine(word, steps))


def _waits_ask_for_all(
    model: Model, word: WordKey, raises: list[Step], waits: list[Step], cleared: set[tuple[WordKey, int]]
) -> bool:
    """Whether each wait for a counter's word asks for all that is added to it until the end of the wait's call."""
    value = model.initial[word[0]]
    for index in range(len(model.calls)):
        ops = [step.op for step in (*raises, *waits) if model.call_index(step.call) == index]
        if (word, index - 1) in cleared:
            value = 0
        value += sum(op.amount for op in ops if isinstance(op, Raise))
        if any(op.target != value % UINT32_RANGE for op in ops if isinstance(op, Wait)):
            return False
    return True
