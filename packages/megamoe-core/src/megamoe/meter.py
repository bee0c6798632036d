"""Metrics of a session: rows per expert, dropped ids, time-outs. What is not metered pays nothing.

    meter = Meter(session, on_metrics=publish, every=100)
    y = session.forward(...)
    meter.count()             # after each forward; inside of a captured graph too

`count` adds the call's rows per expert to a tensor on the device: no wait, and captured with the call that it follows,
so that replays are counted. Reading them waits for the device; it happens in `collect`, and every `every` calls where
a callback was given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megamoe.backend import Session, SessionStats
from megamoe.errors import ConfigError


@dataclass(frozen=True, kw_only=True, eq=False)
class Metrics:
    """What one rank did since it was asked last.

    Args:
        ep_rank: the rank.
        calls: calls counted, replays of graphs included.
        rows_per_expert: `[E_local]` int64 on the CPU, rows that each local expert received in them.
        dropped_ids: ids outside of [-1, num_experts), skipped.
        timeouts: calls that timed out.
        num_fused_shared_experts: how many of the last local experts are shared ones, which every token picks.
    """

    ep_rank: int
    calls: int
    rows_per_expert: Tensor
    dropped_ids: int
    timeouts: int
    num_fused_shared_experts: int = 0

    @property
    def imbalance(self) -> float:
        """Rows of the busiest routed local expert over their mean; 1 is even, 0 means that there were none."""
        rows = self.rows_per_expert[: len(self.rows_per_expert) - self.num_fused_shared_experts].double()
        return float(rows.max() / rows.mean()) if bool(rows.any()) else 0.0


@dataclass
class _Tally:
    """One rank's sums since the last `collect`, and the session's counters then."""

    rows: Tensor
    calls: Tensor
    before: SessionStats = field(default_factory=SessionStats)


class Meter:
    """Counts what a session's calls did. Not thread-safe, as sessions are not.

    Args:
        session: whose calls; with virtual ranks every rank is counted.
        on_metrics: called by `count` with one `Metrics` per driven rank; it must not raise.
        every: calls between two callbacks. Calls that are captured, and replays, make none: use `collect`.
        num_fused_shared_experts: of `SharedExperts`, if the session runs any; `Metrics.imbalance` leaves them out.

    Raises:
        ConfigError: `every` is not a number of calls, or no routed expert would be left.
    """

    def __init__(
        self,
        session: Session,
        on_metrics: Callable[[list[Metrics]], None] | None = None,
        *,
        every: int = 100,
        num_fused_shared_experts: int = 0,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError("every is not a number of calls", got=repr(every), expected="an int >= 1")
        num_local_experts = session.plan.problem.num_local_experts
        if not 0 <= num_fused_shared_experts < num_local_experts:
            raise ConfigError(
                "not a number of shared experts among a rank's experts",
                got=num_fused_shared_experts,
                expected=f"0 to {num_local_experts - 1}",
            )
        self._session = session
        self._on_metrics = on_metrics
        self._every = every
        self._num_fused_shared_experts = num_fused_shared_experts
        self._since_callback = 0
        with torch.inference_mode(False):  # so that they can be added to in any mode
            self._tallies = [
                _Tally(rows=torch.zeros_like(counts, dtype=torch.int64), calls=counts.new_zeros((), dtype=torch.int64))
                for counts in _per_rank(session.receive_counts())
            ]
        self._mark()

    def count(self) -> None:
        """Stream-ordered, graph-safe where there is no callback to make. Count the session's last call."""
        for tally, counts in zip(self._tallies, _per_rank(self._session.receive_counts()), strict=True):
            tally.rows += counts
            tally.calls += 1
        if self._on_metrics is not None and not _capturing():
            self._since_callback += 1
            if self._since_callback == self._every:
                self._on_metrics(self.collect())

    def collect(self) -> list[Metrics]:
        """What each driven rank did since the last time, which starts anew. Synchronises."""
        collected = []
        first = 0 if self._session.ep_rank is None else self._session.ep_rank
        for rank, (tally, stats) in enumerate(zip(self._tallies, _per_rank(self._session.stats()), strict=True), first):
            collected.append(
                Metrics(
                    ep_rank=rank,
                    calls=int(tally.calls),
                    rows_per_expert=tally.rows.to("cpu", copy=True),
                    dropped_ids=stats.dropped_ids - tally.before.dropped_ids,
                    timeouts=stats.timeouts - tally.before.timeouts,
                    num_fused_shared_experts=self._num_fused_shared_experts,
                )
            )
            tally.rows.zero_()
            tally.calls.zero_()
        self._mark()
        return collected

    def _mark(self) -> None:
        self._since_callback = 0
        for tally, stats in zip(self._tallies, _per_rank(self._session.stats()), strict=True):
            tally.before = SessionStats(dropped_ids=stats.dropped_ids, timeouts=stats.timeouts)


def _per_rank(value: Any) -> list[Any]:
    """A list also where the session has one rank."""
    return value if isinstance(value, list) else [value]


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
