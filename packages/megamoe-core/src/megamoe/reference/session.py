"""Sessions of the reference: one rank of a group, or all ranks at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from megamoe import env
from megamoe.backend import HiddenStates, Session, StageTaps
from megamoe.call_checks import (
    ask_for_reset,
    by_rank,
    check_call,
    last_call_failed,
    of_each,
    require_ids,
    require_own_memory,
    valid_rows,
)
from megamoe.errors import (
    InputError,
    MegaMoETimeoutError,
    RankFailedError,
    SessionError,
)
from megamoe.formats import Quantized, activation_format
from megamoe.reference.driver import Driver
from megamoe.reference.executor import RankArguments, RankExecutor
from megamoe.reference.plan import ReferencePlan
from megamoe.reference.weights import ExpertReader, MatrixCache, named_tensors
from megamoe.schedule.protocol import Call, next_epoch
from megamoe.stages.multiply import heights_agree
from megamoe.symm import Group
from megamoe.tensors import ExpertWeights, PreparedWeights, require_prepared

CPU_DEVICE = torch.device("cpu")


class ReferenceSession(Session):
    """One rank of a group, or all ranks of a group of one process.

    `forward` is synchronous: it returns when the result is there, or raises. Threads: as many as torch is set to where
    forward is called, at most `plan.config.num_ctas`; each computes alone, so that bits do not depend on their number.

    A call that fails on one rank ends on all: the rank that raises tells the others, which raise RankFailedError at
    once. This holds for bad arguments too.
    """

    weight_layout: ClassVar[str] = "checkpoint_order-v1"

    def __init__(
        self,
        plan: ReferencePlan,
        executors: Sequence[RankExecutor],
        group: Group | None,
        *,
        virtual: bool,
        owns_group: bool,
        timeout_s: float,
    ) -> None:
        """Use `ReferenceBackend.open`, which calls `ready_flags` too."""
        super().__init__(plan, None if virtual else executors[0].rank)
        self._plan = plan
        self._executors = executors
        self._group = group
        self._virtual = virtual
        self._owns_group = owns_group
        self._timeout_s = timeout_s
        self._num_calls = 0
        self._failure: BaseException | None = None
        self._check_ids = env.debug()
        self._fmt = activation_format(plan.problem.quant, plan.problem.act_format)

    # -- weights -------------------------------------------------------------------------------------------------

    def _prepare(self, weights: ExpertWeights) -> PreparedWeights:
        """The same tensors, not copied: experts are dequantised one at a time, in each call."""
        for name, tensor in weights.tensors():
            if tensor.device.type != "cpu":
                raise InputError(f"{name} is not on CPU", got=tensor.device, expected="CPU tensors")
        return PreparedWeights.of(
            self._plan.problem,
            backend=self.plan.backend,
            layout=self.weight_layout,
            tensors=named_tensors(weights),
        )

    # -- calls ---------------------------------------------------------------------------------------------------

    def _forward(self, arguments: Sequence[Any]) -> Any:
        """A failed call leaves NaN in `out`."""
        self.require_open()
        if self._failure is not None:
            raise last_call_failed(self._failure)
        epoch = next_epoch(self._plan.config.first_epoch, self._num_calls)
        try:
            rows = by_rank(arguments, len(self._executors)) if self._virtual else [arguments]
            checked = of_each(self._check_rank, rows, virtual=self._virtual)
        except BaseException as error:
            if self._has_peers:
                self._fail(error, epoch)
                ask_for_reset(error)
            raise
        self._num_calls += 1
        try:
            self._drive(checked, epoch)
        except BaseException as error:
            _fill(checked, torch.nan)
            self._fail(error, epoch)
            raise
        _fill(checked, 0, padding=True)
        outputs = [rank.out for rank in checked]
        return outputs if self._virtual else outputs[0]

    @property
    def _has_peers(self) -> bool:
        return self._group is not None and self._group.size > 1

    def _leave_out(self, error: BaseException) -> None:
        if self._has_peers:
            self._failure = error
            ask_for_reset(error)

    def _check_rank(
        self,
        _index: int,
        hidden_states: HiddenStates,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weights: PreparedWeights,
        out: Tensor | None,
        num_tokens: int | Tensor | None,
    ) -> RankArguments:
        """Hold one rank's arguments against the plan, before anything is sent."""
        problem = self._plan.problem
        require_prepared(
            weights, backend=self.plan.backend, layout=self.weight_layout, problem=problem, device=CPU_DEVICE
        )
        num_rows = check_call(problem, hidden_states, topk_ids, topk_weights, out, device=CPU_DEVICE)
        valid = _num_valid_rows(num_tokens, num_rows)
        if out is not None:
            require_own_memory(out, hidden_states, topk_ids, topk_weights, weights, num_tokens)
        if self._check_ids:
            require_ids(topk_ids[:valid], problem.num_experts)
        if out is None:
            out = torch.empty(num_rows, problem.hidden_size, dtype=torch.bfloat16, device="cpu")
        return RankArguments(
            hidden_states=self._in_format(hidden_states),
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            reader=ExpertReader.of(problem, weights.tensors),
            out=out,
            num_tokens=valid,
        )

    def _in_format(self, hidden_states: HiddenStates) -> Tensor | Quantized:
        if isinstance(hidden_states, Tensor):
            return hidden_states.resolve_neg()  # torch can't view the bytes of a lazy negation
        if isinstance(hidden_states, Quantized):
            if hidden_states.fmt != self._fmt:
                raise InputError(
                    "hidden_states are in another format", got=hidden_states.fmt.name, expected=self._fmt.name
                )
            return hidden_states
        payload, scales = hidden_states
        return Quantized(payload=payload, scales=scales, fmt=self._fmt)

    def _drive(self, arguments: Sequence[RankArguments], epoch: int) -> None:
        num_threads = min(torch.get_num_threads(), self._plan.config.num_ctas)
        cache = MatrixCache(2 * (num_threads + 1))  # w13 and w2 of an expert per thread, and of the next
        calls = []
        for executor, rank in zip(self._executors, arguments, strict=True):
            calls.append(Call(rank=executor.rank, epoch=epoch, num_tokens=rank.num_tokens))
            executor.begin(calls[-1], rank, cache)
        driver = Driver(
            self._executors,
            calls,
            num_threads=num_threads,
            timeout_s=self._timeout_s,
            dead_peers=frozenset if self._group is None else self._group.dead_peers,
        )
        try:
            driver.run()
        finally:
            for executor in self._executors:
                executor.stats.calls += 1
                executor.end()

    def _fail(self, error: BaseException, epoch: int) -> None:
        self._failure = error
        for executor in self._executors:
            executor.stats.timeouts += isinstance(error, MegaMoETimeoutError)
            if not isinstance(error, RankFailedError):  # the rank that failed has told everybody
                executor.abort(epoch)

    def warmup(self) -> float:
        """COLLECTIVE. Find out how the BLAS treats this layer's shapes; returns the seconds it took."""
        self.require_open()
        began = time.perf_counter()
        hidden, inter = self._plan.problem.hidden_size, self._plan.problem.intermediate_size
        heights_agree(2 * inter, hidden)
        heights_agree(hidden, inter)
        return time.perf_counter() - began

    def check(self) -> None:
        """Raise what the last call raised, if it failed."""
        self.require_open()
        if self._failure is not None:
            raise self._failure

    def reset(self) -> None:
        """COLLECTIVE. Make the session usable again after a failed call.

        Raises:
            MegaMoETimeoutError, RankFailedError: a rank did not come, or is dead; open a new session without it.
        """
        self.require_open()
        if self._group is not None:
            # Ranks may have failed in different calls, but none is inside one any more once all have come.
            counts = self._group.all_gather(
                self._num_calls.to_bytes(8, "little"), timeout_s=self._timeout_s, phase="reset"
            )
            self._num_calls = max(int.from_bytes(count, "little") for count in counts)
        self.ready_flags()
        self._failure = None

    def ready_flags(self) -> None:
        """COLLECTIVE. Ready the flags of every driven rank for the next call, and meet the others."""
        for executor in self._executors:
            executor.reset(next_epoch(self._plan.config.first_epoch, self._num_calls))
        if self._group is not None:
            self._group.barrier(timeout_s=self._timeout_s, phase="reset")

    # -- what the last calls left --------------------------------------------------------------------------------

    def receive_counts(self) -> Any:
        """See `Session.receive_counts`."""
        self.require_open()
        return self._result(
            [torch.tensor(rank.counts, dtype=torch.int32, device="cpu").sum(0).int() for rank in self._executors]
        )

    def stats(self) -> Any:
        """See `Session.stats`. Seconds are summed over threads; bytes are those that the stage stored or handed on."""
        self.require_open()
        return self._result([executor.stats for executor in self._executors])

    def keep_taps(self) -> None:
        """From the next call on, keep what stands between the stages (for tests: it takes memory)."""
        self.require_open()
        for executor in self._executors:
            executor.keep_taps = True

    def taps(self) -> Any:
        """`StageTaps` of the last call, None for a rank that received no rows; a list with virtual ranks.

        Raises:
            SessionError: they were not kept.
        """
        self.require_open()
        if not self._executors[0].keep_taps:
            raise SessionError("no taps were kept", hint="call session.keep_taps() before forward")
        taps: list[StageTaps | None] = [executor.stage_taps() for executor in self._executors]
        return self._result(taps)

    def _result(self, per_rank: Sequence[Any]) -> Any:
        return list(per_rank) if self._virtual else per_rank[0]

    def close(self) -> None:
        """COLLECTIVE, but waits for nobody: peers that are still in their last call keep the memory that they use."""
        if self.closed:
            return
        self.closed = True
        self._executors = ()
        self._failure = None  # its traceback holds the call's tensors
        if self._group is not None and self._owns_group:
            self._group.close()


def _num_valid_rows(num_tokens: Any, num_rows: int) -> int:
    """Rows of a call that are no padding; on a CPU a scalar's value is looked at too.

    Raises:
        InputError: see `valid_rows`.
    """
    if num_tokens is None:
        return num_rows
    count = valid_rows(num_tokens, num_rows, CPU_DEVICE)
    return int(valid_rows(int(count), num_rows, CPU_DEVICE))


@torch.inference_mode()  # `out` may come from inference mode, or ask for gradients, which there are none of
def _fill(arguments: Sequence[RankArguments], value: float, *, padding: bool = False) -> None:
    """Fill every rank's output, or its padding rows only."""
    for rank in arguments:
        rank.out[rank.num_tokens if padding else 0 :] = value
