"""Opening together: a rank that can't take part makes all raise, and nobody waits for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megamoe.errors import (
    BackendUnavailableError,
    ConfigError,
    MegaMoEError,
    MegaMoETimeoutError,
    RankFailedError,
    WorkspaceError,
)
from megamoe.symm import Group
from megamoe.symm.agreement import Seat, agree, check_seats, exchange_seats, take_seat
from megamoe.testing.threads import on_ranks

SEATS = [Seat(boot="b", host="h", gpu=f"gpu-{rank}", plan="p") for rank in range(3)]


def allocate(group: Group, failing: dict[int, Exception]) -> str:
    def act() -> str:
        if group.rank in failing:
            raise failing[group.rank]
        return f"allocated on {group.rank}"

    return agree(group, "allocate the workspace", act, timeout_s=20)


def test_results_come_back_when_all_succeed() -> None:
    assert on_ranks(2, lambda group: allocate(group, {})) == ["allocated on 0", "allocated on 1"]


def test_a_process_without_peers_needs_no_group() -> None:
    assert agree(None, "count", lambda: 3, timeout_s=1) == 3
    with pytest.raises(BackendUnavailableError, match="could not count: ZeroDivisionError"):
        agree(None, "count", lambda: 1 // 0, timeout_s=1)


def test_one_ranks_failure_is_raised_by_all_and_named() -> None:
    failing: dict[int, Exception] = {1: WorkspaceError("out of memory", got="1 GiB free", expected="2 GiB", hint="h")}
    results = on_ranks(3, lambda group: allocate(group, failing))
    assert [type(result) for result in results] == [WorkspaceError] * 3
    assert results[1] is failing[1]
    for peer in (0, 2):
        text = "rank 1 could not allocate the workspace: out of memory; got 1 GiB free; expected 2 GiB; h"
        assert str(results[peer]) == text


def test_all_raise_for_the_same_rank_when_several_fail() -> None:
    failing: dict[int, Exception] = {1: WorkspaceError("one"), 2: BackendUnavailableError("two")}
    results = on_ranks(3, lambda group: allocate(group, failing))
    assert [type(result) for result in results] == [WorkspaceError] * 3


def test_a_librarys_own_error_does_not_leave_the_peers_waiting() -> None:
    results = on_ranks(2, lambda group: allocate(group, {0: RuntimeError("dlopen failed")}))
    assert all(isinstance(result, BackendUnavailableError) for result in results)
    assert all("dlopen failed" in str(result) for result in results)


def test_an_error_that_names_its_ranks_reaches_the_peers() -> None:
    timeout = MegaMoETimeoutError(rank=0, peer=1, phase="allocate", timeout_s=5, epoch=0)
    own, peer = on_ranks(2, lambda group: allocate(group, {0: timeout}))
    assert own is timeout
    assert isinstance(peer, RankFailedError)
    assert (peer.rank, peer.peer) == (1, 0)
    assert "waited 5 s" in str(peer)


def test_seats_are_exchanged() -> None:
    assert on_ranks(3, lambda group: exchange_seats(group, SEATS[group.rank], timeout_s=20)) == [SEATS] * 3


def test_equal_seats_on_gpus_of_one_host_are_fine() -> None:
    for answer in (True, None):
        check_seats(SEATS, 1, lambda gpu, answer=answer: answer)


@pytest.mark.parametrize(
    "change, error, says",
    [
        ({"plan": "q"}, ConfigError, "ranks 0 and 2 open different plans"),
        ({"boot": "c", "host": "other"}, BackendUnavailableError, "different hosts; got h and other"),
        ({"gpu": SEATS[0].gpu}, ConfigError, "ranks 0 and 2 are on one GPU"),
    ],
    ids=["plan", "host", "gpu"],
)
def test_a_seat_that_does_not_fit_is_named(change: dict[str, str], error: type[MegaMoEError], says: str) -> None:
    seats = [*SEATS[:2], replace(SEATS[2], **change)]
    with pytest.raises(error) as raised:
        check_seats(seats, 0, lambda gpu: True)
    assert says in str(raised.value)


def test_a_missing_path_names_both_ends() -> None:
    with pytest.raises(BackendUnavailableError) as raised:
        check_seats(SEATS, 0, lambda gpu: gpu != SEATS[1].gpu)
    assert "from rank 0 (gpu-0) to rank 1 (gpu-1)" in str(raised.value)


def test_this_process_has_a_seat() -> None:
    assert take_seat("gpu-0", "p") == take_seat("gpu-0", "p")
    assert take_seat("gpu-0", "p").boot


def test_ranks_share_a_gpu_only_where_that_is_said() -> None:
    seats = [SEATS[0], replace(SEATS[1], gpu=SEATS[0].gpu), SEATS[2]]
    asked: list[str] = []

    def can_access(gpu: str) -> bool:
        asked.append(gpu)
        return True

    check_seats(seats, 0, can_access, ranks_per_gpu=2)
    assert asked == [SEATS[2].gpu]  # a GPU is not its own peer
    with pytest.raises(ConfigError, match="ranks 0 and 1 are on one GPU.*MEGAMOE_RANKS_PER_GPU"):
        check_seats(seats, 0, can_access)
    crowded = [replace(seat, gpu=SEATS[0].gpu) for seat in SEATS]
    with pytest.raises(ConfigError, match="are on one GPU"):
        check_seats(crowded, 0, can_access, ranks_per_gpu=2)
