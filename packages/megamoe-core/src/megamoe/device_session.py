"""What the sessions of every backend on GPUs have in common: from the workspaces to the last meeting of the ranks.

A call is queued on a stream and ends, or fails, later. So a failure is what kernels have left in host memory, which
each later use of the session looks at; and flags may be set, and memory given back, only when every rank's launches
have ended. Both orders are the same on all hardware and are kept here, and so is what an error of a call leads to.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megamoe import env
from megamoe.backend import Plan, Session, SessionStats, StageTaps
from megamoe.call_checks import ask_for_reset, by_rank, last_call_failed, require_ids
from megamoe.errors import CaptureError, MegaMoETimeoutError, ProtocolError, SessionError
from megamoe.symm import Group, PeerMemory


class DeviceSession(Session):
    """A session whose calls are launches on a stream: of one rank, or of all (virtual ranks) where `ep_rank` is None.

    A backend's subclass implements `_prepare`, `keep_taps` and the hooks below. Its `keep_taps` is
    `_require_healthy()`, `_give_back()`, another `_layout` and tensors in `_gate_up`, `start()`.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        group: Group | None,
        virtual: bool,
        device: torch.device,
        timeout_s: float,
        allocate: Callable[[int], PeerMemory],
    ) -> None:
        """Local; `start` makes the session ready for calls.

        Args:
            plan: a plan of the backend.
            group: the other ranks; None where this process has all.
            virtual: whether one call drives all ranks and takes lists.
            device: where tensors are.
            timeout_s: how long a wait for a peer may take.
            allocate: COLLECTIVE; workspaces of that many bytes each.
        """
        rank = 0 if group is None else group.rank
        super().__init__(plan, None if virtual else rank)
        self._logger = logging.getLogger(f"megamoe.{plan.backend}")
        self._layout = plan.workspace
        self._group = group
        self._driven = range(plan.problem.ep_size) if virtual else range(rank, rank + 1)
        self._device = device
        self._timeout_s = timeout_s
        self._allocate = allocate
        self._memory = NO_MEMORY
        self._check_ids = env.debug()
        self._calls = 0
        self._timeouts = 0
        self._failure: ProtocolError | SessionError | None = None
        self._gate_up: Sequence[Tensor] | None = None  # GEMM1's accumulators by driven rank, where taps are kept

    # -- what a backend brings ----------------------------------------------------------------------------------

    @abstractmethod
    def _take_memory(self) -> None:
        """COLLECTIVE. Set `_memory` to workspaces of `_layout`, and make what depends on where they are."""

    @abstractmethod
    def _words(self, rank: int, array: str) -> Tensor:
        """A flag or counter array of a driven rank's workspace, int32, flat."""

    @abstractmethod
    def _set_flags(self, rank: int, epoch: int) -> None:
        """Stream-ordered. In a driven rank's workspace, make `epoch` the last call's, with no flag raised since.

        `dropped_ids`, a sum over all calls, stays.
        """

    @abstractmethod
    def _load_kernels(self) -> None:
        """Compile and load the kernels of every call that can be made. Local."""

    @abstractmethod
    def _unload_kernels(self) -> None:
        """Give loaded kernels back; their launches have ended."""

    @abstractmethod
    def _call(self, rows: Sequence[Sequence[Any]]) -> list[Tensor]:
        """Check the arguments of `forward`, a row (`call_checks.ARGUMENTS`) of each driven rank, launch the call, and
        return the ranks' outputs."""

    @abstractmethod
    def _find_failure(self) -> ProtocolError | None:
        """What kernels have written into host memory, as an error, after logging it. Does not synchronise."""

    @abstractmethod
    def _forget_failure(self) -> None:
        """Clear what `_find_failure` reads."""

    @abstractmethod
    def _receive_counts(self) -> list[Tensor]:
        """Stream-ordered. A copy of the last call's counts, `[E_local]` int32 by driven rank."""

    @abstractmethod
    def _read_taps(self) -> list[StageTaps | None]:
        """The last call's taps by driven rank; asked for only where they were kept."""

    def _synchronize(self) -> None:
        """Wait until every launch has ended."""
        torch.cuda.synchronize(self._device)

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """COLLECTIVE. Allocate the workspaces and make them ready for the first call."""
        self._take_memory()
        for rank in self._driven:
            self._words(rank, "dropped_ids").zero_()
        self.start_epochs(0)

    def start_epochs(self, epoch: int) -> None:
        """COLLECTIVE. Make `epoch` the number of the last call on every rank, with no flag raised since."""
        for rank in self._driven:
            self._set_flags(rank, epoch)
        self._synchronize()
        self._meet("reset: all flags are set")

    def warmup(self) -> float:
        """COLLECTIVE. Compile and load the kernels of every call that can be made; returns the seconds it took."""
        self._require_healthy()
        start = time.perf_counter()
        self._load_kernels()
        self._meet("warmup")
        return time.perf_counter() - start

    def close(self) -> None:
        """COLLECTIVE. Give the workspace back, once every rank's calls have ended; calling it again does nothing."""
        if self.closed:
            return
        self.closed = True
        self._give_back()

    def _give_back(self) -> None:
        self._synchronize()
        self._unload_kernels()
        try:
            self._meet("close")
        except (SessionError, ProtocolError, RuntimeError):  # RuntimeError: what torch.distributed raises
            self._logger.warning(
                "another rank is gone: memory whose release is collective is kept until this process ends"
            )
        else:
            self._memory.release()
        self._memory = NO_MEMORY

    def _meet(self, phase: str, timeout_s: float | None = None) -> None:
        if self._group is not None:
            self._group.barrier(timeout_s=self._timeout_s if timeout_s is None else timeout_s, phase=phase)

    # -- calls --------------------------------------------------------------------------------------------------

    def _forward(self, arguments: Sequence[Any]) -> Any:
        """Stream-ordered; graph-safe after `warmup` where the backend captures."""
        self._require_healthy()
        try:
            outputs = self._call(by_rank(arguments, len(self._driven)) if self.ep_rank is None else [arguments])
        except BaseException as error:  # Ctrl-C may have come before the launch
            self._leave_out(error)
            raise
        self._calls += 1
        return self._per_rank(outputs)

    def _look_at_ids(self, topk_ids: Tensor, num_tokens: int | Tensor | None) -> None:
        """For debug mode: raise InputError for an id of no expert in a row that is no padding. Synchronises, so that it
        does nothing while a graph is captured."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        valid = len(topk_ids) if num_tokens is None else max(0, int(num_tokens))
        require_ids(topk_ids[:valid], self.plan.problem.num_experts)

    # -- failures -----------------------------------------------------------------------------------------------

    def _require_healthy(self) -> None:
        """Raise if the session is closed, or if a call that has ended by now failed. Does not synchronise."""
        if self.closed:  # asked here, to spare every forward a call
            self.require_open()
        if self._failure is None:
            self._failure = self._find_failure()
            if self._failure is None:
                return
            self._timeouts += isinstance(self._failure, MegaMoETimeoutError)
        raise self._failure

    def _leave_out(self, error: BaseException) -> None:
        """Refuse later calls until a reset, after `error` kept this rank from launching a call that its peers launch.

        Peers can't be told: they wait for this rank until the time-out. A capture sends nothing, on any rank.
        """
        if self._group is not None and self._group.size > 1 and not isinstance(error, CaptureError):
            self._failure = last_call_failed(error)
            ask_for_reset(error)

    def check(self) -> None:
        """Raise what calls up to now left behind. Synchronises the device."""
        self.require_open()
        self._synchronize()
        self._require_healthy()

    def reset(self) -> None:
        """COLLECTIVE. Make the session usable again after a failed call.

        Waits twice the time-out for the others: a rank whose arguments were refused is here at once, while its peers'
        launches wait for it until the time-out.
        """
        self.require_open()
        self._synchronize()
        self._meet("reset: all launches have ended", 2 * self._timeout_s)
        self._forget_failure()
        self.start_epochs(0)
        self._failure = None

    @property
    def _if_a_rank_died(self) -> str | None:
        """What the ranks that are left can do; None where this process has all."""
        return None if self._group is None else self._group.if_a_rank_died

    # -- reports ------------------------------------------------------------------------------------------------

    def receive_counts(self) -> Any:
        """Stream-ordered. `[E_local]` int32 rows that each local expert received in the last call; see `Session`."""
        self.require_open()
        return self._per_rank(self._receive_counts())

    def stats(self) -> Any:
        """`SessionStats`; synchronises."""
        self.require_open()
        self._synchronize()
        return self._per_rank(
            [
                SessionStats(
                    calls=self._calls,
                    dropped_ids=int(self._words(rank, "dropped_ids").item()),
                    timeouts=self._timeouts,
                )
                for rank in self._driven
            ]
        )

    def taps(self) -> Any:
        """`StageTaps` of the last call, None for a rank that received no rows; a list with virtual ranks.

        Raises:
            SessionError: `keep_taps` was not called before it.
        """
        self.require_open()
        if self._gate_up is None:
            raise SessionError("this session keeps no taps", hint="call keep_taps() before forward()")
        return self._per_rank(self._read_taps())

    def _per_rank(self, values: Sequence[Any]) -> Any:
        """A list with virtual ranks, else this rank's."""
        return list(values) if self.ep_rank is None else values[0]


def _nothing() -> None:
    """Nothing to give back."""


NO_MEMORY = PeerMemory(ranks=(), release=_nothing)
