"""Metrics of a session: rows per expert, dropped ids, time-outs. What is not metered pays nothing.

    meter = Meter(session, on_metrics=publish, every=100)
    y = session.forward(...)
    meter.count()             # after each forward; inside of a captured graph too

`count` adds the call's rows per expert to a tensor on the device: no wait, and captured with the call that it follows,
so that replays are counted. Reading them waits for the device; it happens in `collect`, and every `every` calls where
a callback was given. Where several layers share the session, each counts with a counter of its own:

    counter = meter.layer("model.layers.3")
    y = session.forward(...)
    counter()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
        rows_per_expert: `[E_local]` int64 on the CPU, rows that each local expert received in them, over all layers.
        dropped_ids: ids outside of [-1, num_experts), skipped.
        timeouts: calls that timed out.
        num_fused_shared_experts: how many of the last local experts are shared ones, which every token picks.
        rows_per_layer: `rows_per_expert` of each layer that has a counter of its own.
    """

    ep_rank: int
    calls: int
    rows_per_expert: Tensor
    dropped_ids: int
    timeouts: int
    num_fused_shared_experts: int = 0
    rows_per_layer: Mapping[str, Tensor] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for other processes."""
        return {
            "ep_rank": self.ep_rank,
            "calls": self.calls,
            "rows_per_expert": self.rows_per_expert.tolist(),
            "rows_per_layer": {name: rows.tolist() for name, rows in self.rows_per_layer.items()},
            "imbalance": self.imbalance,
            "dropped_ids": self.dropped_ids,
            "timeouts": self.timeouts,
        }

    @property
    def imbalance(self) -> float:
        """Rows of the busiest routed local expert over their mean; 1 is even, 0 means that there were none.

        Of the worst layer, where layers were counted one by one: each has experts of its own.
        """
        num_routed = len(self.rows_per_expert) - self.num_fused_shared_experts
        layers = self.rows_per_layer.values() or (self.rows_per_expert,)
        return max(_imbalance(rows[:num_routed].double()) for rows in layers)


def _imbalance(rows: Tensor) -> float:
    return float(rows.max() / rows.mean()) if bool(rows.any()) else 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tally:
    """Sums of one rank since the last `collect`, on its device."""

    rows: Tensor
    calls: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCounter:
    """Counts the calls of one layer; made by `Meter.layer`.

    Args:
        meter: what they are counted for.
        tallies: one for each rank that the session drives.
    """

    meter: Meter
    tallies: list[_Tally]

    def __call__(self) -> None:
        """Stream-ordered, graph-safe where there is no callback to make. Count the session's last call."""
        self.meter._add_to(self.tallies)


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
        self._before = self._stats()
        self._layers: dict[str, LayerCounter] = {}
        self._unnamed = self._new_tallies()

    def _stats(self) -> list[SessionStats]:
        """By driven rank, as they are now: a session may go on counting in the same object."""
        return [replace(stats) for stats in _per_rank(self._session.stats())]

    def _new_tallies(self) -> list[_Tally]:
        with torch.inference_mode(False):  # so that they can be added to in any mode
            return [
                _Tally(rows=torch.zeros_like(counts, dtype=torch.int64), calls=counts.new_zeros((), dtype=torch.int64))
                for counts in _per_rank(self._session.receive_counts())
            ]

    def layer(self, name: str) -> LayerCounter:
        """The counter of the layer `name`; to be asked for before a graph is captured, which it allocates for."""
        if name not in self._layers:
            self._layers[name] = LayerCounter(meter=self, tallies=self._new_tallies())
        return self._layers[name]

    def count(self) -> None:
        """Stream-ordered, graph-safe where there is no callback to make. Count the session's last call."""
        self._add_to(self._unnamed)

    def _add_to(self, tallies: list[_Tally]) -> None:
        for tally, counts in zip(tallies, _per_rank(self._session.receive_counts()), strict=True):
            tally.rows.add_(counts)
            tally.calls.add_(1)
        if self._on_metrics is not None and not _capturing():
            self._since_callback += 1
            if self._since_callback == self._every:
                self._on_metrics(self.collect())

    def collect(self) -> list[Metrics]:
        """What each driven rank did since the last time, which starts anew. Synchronises."""
        first = 0 if self._session.ep_rank is None else self._session.ep_rank
        stats = self._stats()
        collected = [self._collect(rank, first + rank, now) for rank, now in enumerate(stats)]
        self._before = stats
        self._since_callback = 0
        return collected

    def _collect(self, index: int, ep_rank: int, now: SessionStats) -> Metrics:
        """Of the driven rank `index`, whose sums start anew."""
        layers = {name: _take(counter.tallies[index]) for name, counter in self._layers.items()}
        calls, rows = _take(self._unnamed[index])
        for its_calls, its_rows in layers.values():
            calls, rows = calls + its_calls, rows + its_rows
        before = self._before[index]
        return Metrics(
            ep_rank=ep_rank,
            calls=calls,
            rows_per_expert=rows,
            dropped_ids=now.dropped_ids - before.dropped_ids,
            timeouts=now.timeouts - before.timeouts,
            num_fused_shared_experts=self._num_fused_shared_experts,
            rows_per_layer={name: its_rows for name, (_, its_rows) in layers.items()},
        )


def _take(tally: _Tally) -> tuple[int, Tensor]:
    """Calls, and rows on the CPU; the tally is zero afterwards."""
    calls, rows = int(tally.calls), tally.rows.to("cpu", copy=True)
    tally.rows.zero_()
    tally.calls.zero_()
    return calls, rows


def _per_rank(value: Any) -> list[Any]:
    """A list also where the session has one rank."""
    return value if isinstance(value, list) else [value]


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
