"""Functions that `test_launch` runs on ranks; a module of its own, since a spawned process has to import them."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch

from megamoe.errors import MegaMoETimeoutError
from megamoe.launch import RankContext


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)  # its arguments are lost, so it pickles but does not load
        self.lock = threading.Lock()


def double(context: RankContext, values: torch.Tensor) -> torch.Tensor:
    context.report(f"rank {context.rank} of {context.world_size}")
    (context.directory / f"{context.name}-{context.rank}").touch()
    return values[context.rank] * 2


def fail_on(context: RankContext, bad_rank: int, how: str) -> int:
    """`bad_rank` fails in the given way, and the others notice by a timeout of their own."""
    if context.rank != bad_rank:
        raise MegaMoETimeoutError(rank=context.rank, peer=bad_rank, phase="counts", timeout_s=0.1, epoch=1)
    time.sleep(0.3)
    if how == "raise":
        raise ValueError("deliberate")
    if how == "unpicklable":
        raise Unpicklable("one", "two")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(7)
    return context.rank


def hang_unless(context: RankContext, good_rank: int) -> int:
    if context.rank != good_rank:
        time.sleep(600)
    return os.getpid()


def fail_then_others_hang(context: RankContext, bad_rank: int) -> int:
    context.report(os.getpid())
    if context.rank == bad_rank:
        raise RuntimeError("deliberate")
    time.sleep(600)
    return 0


def same(context: RankContext, *values: object) -> tuple[object, ...]:
    return values


def leave(context: RankContext, error: type[BaseException]) -> None:
    raise error(0)


def unpicklable_result(context: RankContext) -> object:
    return threading.Lock()
