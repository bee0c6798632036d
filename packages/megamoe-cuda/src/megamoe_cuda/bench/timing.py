"""Timing of several implementations in one run, taking turns, so that clock and power drift hit them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

FLUSH_BYTES = 256 << 20  # five times the L2 cache of an H200
WARMUP_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One implementation.

    Args:
        load: put round `i`'s inputs where `call` reads them; not timed.
        call: the timed part; asynchronous.
    """

    load: Callable[[int], None]
    call: Callable[[], None]


def time_interleaved(
    contenders: Mapping[str, Contender], *, repeats: int, barrier: Callable[[], None]
) -> dict[str, list[float]]:
    """COLLECTIVE. Seconds of each call on this rank, by contender.

    Before each call its inputs are loaded, the L2 cache is flushed, and all ranks meet, on the stream.

    Args:
        contenders: by name; the same on every rank.
        repeats: calls of each, after `WARMUP_ROUNDS` that are not counted.
        barrier: stream-ordered meeting of all ranks.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in contenders}
    for round_ in range(WARMUP_ROUNDS + repeats):
        for name, contender in contenders.items():
            begin, end = _event(), _event()
            contender.load(round_)
            flush.zero_()
            barrier()
            begin.record()
            contender.call()
            end.record()
            if round_ >= WARMUP_ROUNDS:
                events[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: [begin.elapsed_time(end) / 1e3 for begin, end in pairs] for name, pairs in events.items()}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
