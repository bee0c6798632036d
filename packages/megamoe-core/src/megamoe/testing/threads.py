"""Ranks as threads of the test's own process, for what is collective and needs no session."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from megamoe.symm import InprocGroup


def on_ranks(size: int, body: Callable[[InprocGroup], Any]) -> list[Any]:
    """What `body` returns or raises on each of `size` ranks, threads named by their rank."""
    groups = InprocGroup.create(size)
    results: list[Any] = [None] * size

    def work(group: InprocGroup) -> None:
        try:
            results[group.rank] = body(group)
        except Exception as error:
            results[group.rank] = error

    threads = [threading.Thread(target=work, args=(group,), name=str(group.rank)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
