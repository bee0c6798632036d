"""Symmetric memory: the same tests for threads of one process and for the sockets and files of processes."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from megamoe.errors import (
    BackendUnavailableError,
    ConfigError,
    MegaMoETimeoutError,
    RankFailedError,
    SessionError,
    WorkspaceError,
)
from megamoe.symm import Group, InprocGroup, ShmGroup

SIZE = 3
TIMEOUT_S = 20.0


def in_threads(function: Callable[..., Any], *args: Any, size: int = SIZE) -> list[Any]:
    """`function(rank, *args)` on a thread per rank; what each returned, or its exception."""

    def run(rank: int) -> Any:
        try:
            return function(rank, *args)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def connect(rank: int, name: str) -> ShmGroup:
    return ShmGroup.connect(name, rank, SIZE, timeout_s=TIMEOUT_S)


@pytest.fixture(params=["inproc", "shm"])
def groups(request: pytest.FixtureRequest) -> Iterator[list[Group]]:
    made: list[Any]
    if request.param == "inproc":
        made = list(InprocGroup.create(SIZE))
    else:
        made = in_threads(connect, secrets.token_hex(4))
    yield made
    for group in made:
        group.close()


def test_ranks(groups: list[Group]) -> None:
    assert [(group.rank, group.size) for group in groups] == [(rank, SIZE) for rank in range(SIZE)]


def test_all_gather_keeps_rank_order(groups: list[Group]) -> None:
    def gather(rank: int) -> list[bytes]:
        first = groups[rank].all_gather(bytes([rank]) * (rank + 1), timeout_s=TIMEOUT_S, phase="test")
        second = groups[rank].all_gather(b"again", timeout_s=TIMEOUT_S, phase="test")
        assert second == [b"again"] * SIZE
        return first

    assert in_threads(gather) == [[b"\0", b"\1\1", b"\2\2\2"]] * SIZE


def test_what_one_rank_stores_the_others_load(groups: list[Group]) -> None:
    def exchange(rank: int) -> list[int]:
        group = groups[rank]
        buffer = group.allocate(4 * SIZE, timeout_s=TIMEOUT_S)
        assert not buffer.local.any()
        group.barrier(timeout_s=TIMEOUT_S, phase="test")  # a peer may not store before all have looked
        for peer in range(SIZE):
            buffer.peer(peer).view(torch.int32)[rank] = 100 * peer + rank
        group.barrier(timeout_s=TIMEOUT_S, phase="test")
        return buffer.local.view(torch.int32).tolist()

    assert in_threads(exchange) == [[100 * rank + src for src in range(SIZE)] for rank in range(SIZE)]


def test_two_buffers_are_apart(groups: list[Group]) -> None:
    def fill(rank: int) -> bool:
        one = groups[rank].allocate(64, timeout_s=TIMEOUT_S)
        two = groups[rank].allocate(64, timeout_s=TIMEOUT_S)
        one.local.fill_(1)
        groups[rank].barrier(timeout_s=TIMEOUT_S, phase="test")
        return all(bool(one.peer(peer).eq(1).all()) and not two.peer(peer).any() for peer in range(SIZE))

    assert in_threads(fill) == [True] * SIZE


def test_a_barrier_holds_until_the_last_rank_comes(groups: list[Group]) -> None:
    came: list[float] = []

    def meet(rank: int) -> float:
        if rank == 1:
            time.sleep(0.2)
            came.append(time.monotonic())
        groups[rank].barrier(timeout_s=TIMEOUT_S, phase="test")
        return time.monotonic()

    assert min(in_threads(meet)) >= came[0]


def test_a_missing_rank_is_named(groups: list[Group]) -> None:
    def meet(rank: int) -> None:
        if rank != 1:
            groups[rank].barrier(timeout_s=0.2, phase="tea")

    for rank, error in enumerate(in_threads(meet)):
        if rank != 1:
            assert isinstance(error, MegaMoETimeoutError)
            assert (error.rank, error.peer, error.phase) == (rank, 1, "tea")
            with pytest.raises(SessionError, match="can't be used any more"):
                groups[rank].barrier(timeout_s=TIMEOUT_S, phase="test")


def test_no_memory_is_an_error_on_every_rank(groups: list[Group]) -> None:
    def allocate(rank: int) -> None:
        groups[rank].allocate((1 << 50) if rank == 1 else 64, timeout_s=TIMEOUT_S)

    for error in in_threads(allocate):
        assert isinstance(error, WorkspaceError)
        assert "rank 1" in str(error)


def test_nobody_is_dead(groups: list[Group]) -> None:
    assert all(group.dead_peers() == frozenset() for group in groups)


def test_a_rank_that_left_is_noticed() -> None:
    groups = in_threads(connect, secrets.token_hex(4))
    groups[2].close()
    groups[2].close()
    assert groups[0].dead_peers() == groups[1].dead_peers() == {2}
    with pytest.raises(RankFailedError) as caught:
        groups[0].barrier(timeout_s=TIMEOUT_S, phase="test")
    assert caught.value.peer == 2
    for group in groups:
        group.close()


def test_shm_leaves_no_trace_in_the_file_system() -> None:
    def listing() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if "megamoe" in name}

    groups = in_threads(connect, secrets.token_hex(4))
    before = listing()
    buffers = in_threads(lambda rank: groups[rank].allocate(1 << 16, timeout_s=TIMEOUT_S))
    assert listing() == before
    assert buffers[0].local.numel() == 1 << 16
    for group in groups:
        group.close()
    assert not buffers[1].peer(0).any()  # a buffer outlives its group


def test_a_rank_that_never_connects_is_named() -> None:
    with pytest.raises(MegaMoETimeoutError) as caught:
        ShmGroup.connect(secrets.token_hex(4), 0, 2, timeout_s=0.1)
    assert (caught.value.rank, caught.value.peer, caught.value.phase) == (0, 1, "connect")
    with pytest.raises(MegaMoETimeoutError) as caught:
        ShmGroup.connect(secrets.token_hex(4), 1, 2, timeout_s=0.1)
    assert caught.value.peer == 0


def test_a_rank_joins_once() -> None:
    name, started = secrets.token_hex(4), threading.Event()

    def first() -> None:
        started.set()
        with pytest.raises(MegaMoETimeoutError):
            ShmGroup.connect(name, 0, 2, timeout_s=1.0)

    thread = threading.Thread(target=first)
    thread.start()
    started.wait()
    time.sleep(0.1)
    with pytest.raises(ConfigError, match="is there already"):
        ShmGroup.connect(name, 0, 2, timeout_s=1.0)
    thread.join()


def test_other_memory_orders_than_x86_s_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match=r"memory order of x86-64; got aarch64; use VirtualRanks\(\)"):
        ShmGroup.connect("x", 0, 2, timeout_s=1.0)


def test_a_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank"):
        ShmGroup.connect("x", 2, 2, timeout_s=1.0)


def test_gpu_memory_wants_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    from megamoe.symm.torch_symm import TorchSymmGroup

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="for GPUs"):
            TorchSymmGroup(dist.group.WORLD, torch.device("cpu"))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(BackendUnavailableError, match="torch sees no GPU here; use ShmGroup"):
            TorchSymmGroup(dist.group.WORLD, torch.device("cuda", 0))
    finally:
        dist.destroy_process_group()
