"""Drives the programs of one call to their end, on a few threads.

Any thread steps any program that no other thread is stepping, one op at a time; a wait whose flag is not there yet is
passed over until the next turn. A thread stays with a rank while anything moves there, so that a rank's blocks run
nearly in their order and an expert's weights are dequantised once. When nothing moves at all it looks after failed
ranks and the time, and sleeps a little.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from megamoe.errors import MegaMoETimeoutError
from megamoe.reference.executor import RankExecutor
from megamoe.schedule.persistent import Program, cta_program
from megamoe.schedule.protocol import Answer, Call, Wait
from megamoe.stages.multiply import fixed_arithmetic

_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 5e-3  # after some 10 ms of waiting; at 2 ms, looking took 4% of a core per waiting rank


@dataclass(kw_only=True, eq=False)
class _Worker:
    """One role of one CTA: a program and what it waits for."""

    executor: RankExecutor
    program: Program
    waiting: Wait | None = None
    since: float = 0.0
    answer: Answer = None
    done: bool = False
    stepping: threading.Lock = field(default_factory=threading.Lock)

    def step(self) -> bool:
        """Do the program's next op; False if it waits, has ended, or another thread is at it."""
        if self.done or not self.stepping.acquire(blocking=False):
            return False
        try:
            return self._step()
        finally:
            self.stepping.release()

    def _step(self) -> bool:
        if self.waiting is not None:
            if not self.executor.satisfied(self.waiting):
                return False
            self.waiting = None
        try:
            op = self.program.send(self.answer)
        except StopIteration:
            self.done = True
            return False
        self.answer = None
        if isinstance(op, Wait):
            self.since = time.monotonic()
            self.waiting = op
        else:
            self.answer = self.executor.run(op)
        return True


class Driver:
    """One call of the ranks of one session.

    Args:
        executors: the session's ranks, their arguments taken.
        calls: their calls.
        num_threads: threads to use, the caller's included; at most the plan's CTAs.
        timeout_s: how long a wait may take.
        dead_peers: ranks that have died.
    """

    def __init__(
        self,
        executors: Sequence[RankExecutor],
        calls: Sequence[Call],
        *,
        num_threads: int,
        timeout_s: float,
        dead_peers: Callable[[], frozenset[int]],
    ) -> None:
        self._timeout_s = timeout_s
        self._dead_peers = dead_peers
        self._driven = {call.rank for call in calls}
        self._epoch = calls[0].epoch
        self._last_step = time.monotonic()
        self._failure: BaseException | None = None
        self._num_threads = num_threads
        self._ranks = [
            [
                _Worker(executor=executor, program=program)
                for cta in range(executor.shape.num_ctas)
                for program in cta_program(executor.shape, call, cta).values()
            ]
            for executor, call in zip(executors, calls, strict=True)
        ]

    def run(self) -> None:
        """Return when every program has ended; raise the first error otherwise, after all threads have stopped."""
        helpers = [threading.Thread(target=self._drive) for _ in range(self._num_threads - 1)]
        with fixed_arithmetic():
            try:
                for helper in helpers:
                    helper.start()
                self._drive()
            except BaseException as error:  # an interrupt, or no thread to be had: those that run have to stop
                self._failure = self._failure or error
            for helper in helpers:
                self._join(helper)
        if self._failure is not None:
            raise self._failure

    def _join(self, helper: threading.Thread) -> None:
        """Wait for a helper's end, through interrupts: the call's tensors are in its hands."""
        while helper.ident is not None and helper.is_alive():
            try:
                helper.join()
            except BaseException as error:
                self._failure = self._failure or error

    def _drive(self) -> None:
        try:
            torch.set_num_threads(1)
            # As the caller's mode does not reach other threads, and memory may come from inference mode.
            with torch.inference_mode():
                self._step_all()
        except BaseException as error:  # an interrupt too: the other threads have to stop
            if self._failure is None:
                self._failure = error

    def _step_all(self) -> None:
        sleep_s = _FIRST_SLEEP_S
        while self._failure is None and not all(worker.done for workers in self._ranks for worker in workers):
            moved = False
            for workers in self._ranks:
                while self._step_rank(workers):
                    moved = True
            if moved:
                sleep_s = _FIRST_SLEEP_S
            else:
                self._look_around()
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)

    def _step_rank(self, workers: list[_Worker]) -> bool:
        """Step each worker of a rank once; whether any moved."""
        if self._failure is not None:
            return False
        moved = False
        for worker in workers:
            if worker.step():
                moved = True
                self._last_step = time.monotonic()
        return moved

    def _look_around(self) -> None:
        """Raise if a peer has failed, or a wait has run out of time."""
        dead, now = self._dead_peers(), time.monotonic()
        # A rank that this session drives is late only when nothing moves here at all.
        busy = any(worker.stepping.locked() for workers in self._ranks for worker in workers)
        since_last_step = 0.0 if busy else now - self._last_step
        for workers in self._ranks:
            late = [(worker, worker.waiting) for worker in workers if worker.waiting is not None]
            late = [(worker, wait) for worker, wait in late if not worker.executor.satisfied(wait)]
            if late:
                late[0][0].executor.check_peers(dead)
            for worker, wait in late:
                waited = now - worker.since
                if wait.peer in self._driven:
                    waited = min(waited, since_last_step)
                if waited > self._timeout_s:
                    raise MegaMoETimeoutError(
                        rank=worker.executor.rank,
                        peer=wait.peer,
                        phase=wait.phase,
                        timeout_s=self._timeout_s,
                        epoch=self._epoch,
                        index=wait.index,
                    )
