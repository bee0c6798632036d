"""Models of roles that wait for each other, run in random orders of events."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

from megamoe.problem import MoEProblem

A8W4 = MoEProblem(
    hidden_size=4096,
    intermediate_size=2048,
    num_experts=32,
    top_k=8,
    num_max_tokens_per_rank=8192,
    quant="a8w4",
    act_format="fp8_1x128",
)
Wait = Callable[[], bool]


class Crew:
    """Roles at work: each an iterator over what it waits for next. Some are slow."""

    def __init__(self, roles: Iterable[Iterator[Wait]], rng: random.Random) -> None:
        self.waiting: list[tuple[Iterator[Wait], Wait]] = [(role, lambda: True) for role in roles]
        self._pace = [rng.random() for _ in self.waiting]
        self._rng = rng

    def ready(self) -> list[int]:
        """Who need not wait any longer."""
        return [i for i, (_, wait) in enumerate(self.waiting) if wait()]

    def let_one_go_on(self, ready: list[int]) -> None:
        """To its next wait, or to its end."""
        i = self._rng.choices(ready, [self._pace[i] + 0.01 for i in ready])[0]
        try:
            self.waiting[i] = (self.waiting[i][0], next(self.waiting[i][0]))
        except StopIteration:
            del self.waiting[i], self._pace[i]
