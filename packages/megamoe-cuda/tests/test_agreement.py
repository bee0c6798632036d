"""Opening together: a rank that can't take part makes all raise, and nobody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megamoe.errors import BackendUnavailableError, ConfigError, MegaMoEError, WorkspaceError
from megamoe_cuda.agreement import Seat, agree, check_seats, take_seat

SEATS = [Seat(boot="b", host="h", pci_bus_id=f"0000:0{rank}:00.0", plan="p") for rank in range(3)]


class ThreadRanks:
    """Ranks as threads; a gather completes only when every rank has come."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.values: list[Any] = [None] * size

    def on(self, rank: int) -> Rank:
        return Rank(self, rank)


class Rank:
    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self.ranks, self.rank, self.size = ranks, rank, ranks.size

    def all_gather(self, value: Any) -> list[Any]:
        self.ranks.values[self.rank] = value
        self.ranks.barrier.wait()
        gathered = list(self.ranks.values)
        self.ranks.barrier.wait()
        return gathered


def run(size: int, body: Callable[[Rank], Any]) -> list[Any]:
    """Results of `body` on each rank; an exception is a result."""
    ranks, results = ThreadRanks(size), [None] * size

    def work(rank: int) -> None:
        try:
            results[rank] = body(ranks.on(rank))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_results_come_back_when_all_succeed() -> None:
    assert run(3, lambda rank: agree(rank, "count", lambda: rank.rank * 10)) == [0, 10, 20]


def allocate_on(rank: Rank, failing: dict[int, Exception]) -> str:
    def act() -> str:
        if rank.rank in failing:
            raise failing[rank.rank]
        return "allocated"

    return agree(rank, "allocate the workspace", act)


def test_one_ranks_failure_is_raised_by_all_and_named() -> None:
    failing: dict[int, Exception] = {1: WorkspaceError("out of memory", got="1 GiB free", expected="2 GiB")}
    results = run(3, lambda rank: allocate_on(rank, failing))
    assert [type(result) for result in results] == [WorkspaceError] * 3
    assert str(results[1]) == "out of memory; got 1 GiB free; expected 2 GiB"
    assert str(results[0]) == str(results[2]).replace("rank 2", "rank 0")
    assert str(results[0]).startswith("rank 1 could not allocate the workspace: out of memory; got 1 GiB free")


def test_all_raise_for_the_same_rank_when_several_fail() -> None:
    failing: dict[int, Exception] = {1: WorkspaceError("one"), 2: BackendUnavailableError("two")}
    results = run(3, lambda rank: allocate_on(rank, failing))
    assert [type(result) for result in results] == [WorkspaceError] * 3


def test_a_librarys_own_error_does_not_leave_the_peers_waiting() -> None:
    results = run(2, lambda rank: allocate_on(rank, {0: RuntimeError("dlopen failed")}))
    assert all(isinstance(result, BackendUnavailableError) for result in results)
    assert all("dlopen failed" in str(result) for result in results)


def test_equal_seats_on_gpus_of_one_host_are_fine() -> None:
    for answer in (True, None):
        check_seats(SEATS, 1, lambda bus, answer=answer: answer)


@pytest.mark.parametrize(
    "change, error, says",
    [
        ({"plan": "q"}, ConfigError, "ranks 0 and 2 open different plans"),
        ({"boot": "c", "host": "other"}, BackendUnavailableError, "different hosts; got h and other"),
        ({"pci_bus_id": SEATS[0].pci_bus_id}, ConfigError, "ranks 0 and 2 are on one GPU"),
    ],
    ids=["plan", "host", "gpu"],
)
def test_a_seat_that_does_not_fit_is_named(change: dict[str, str], error: type[MegaMoEError], says: str) -> None:
    seats = [*SEATS[:2], replace(SEATS[2], **change)]
    with pytest.raises(error) as raised:
        check_seats(seats, 0, lambda bus: True)
    assert says in str(raised.value)


def test_a_missing_path_names_both_ends() -> None:
    with pytest.raises(BackendUnavailableError) as raised:
        check_seats(SEATS, 0, lambda bus: bus != SEATS[1].pci_bus_id)
    assert "from rank 0 (0000:00:00.0) to rank 1 (0000:01:00.0)" in str(raised.value)


def test_this_process_has_a_seat() -> None:
    assert take_seat("0000:00:00.0", "p") == take_seat("0000:00:00.0", "p")
    assert take_seat("0000:00:00.0", "p").boot
