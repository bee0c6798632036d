"""The launcher: results in order, the first cause of a failure, and never a hang."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megamoe.errors import ConfigError, MegaMoETimeoutError
from megamoe.launch import RankProcessError, run_ranks, spawn_ranks


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("launch_workers")


def test_results_come_in_rank_order_and_reports_reach_the_parent(workers: ModuleType) -> None:
    reports: list[tuple[int, str]] = []
    values = torch.arange(3)
    results = run_ranks(
        workers.double, 3, values, timeout_s=60, on_report=lambda rank, message: reports.append((rank, message))
    )
    assert [int(value) for value in results] == [0, 2, 4]
    assert sorted(reports) == [(rank, f"rank {rank} of 3") for rank in range(3)]


def test_an_error_is_raised_as_its_own_type_with_the_remote_traceback(workers: ModuleType) -> None:
    with pytest.raises(ValueError, match="deliberate") as caught:
        run_ranks(workers.fail_on, 2, 1, "raise", timeout_s=60)
    assert "raised on rank 1" in caught.value.__notes__[0]
    assert "launch_workers.py" in caught.value.__notes__[0]


def test_an_error_that_can_not_be_pickled_is_named(workers: ModuleType) -> None:
    with pytest.raises(RankProcessError, match="rank 0 raised Unpicklable: onetwo"):
        run_ranks(workers.fail_on, 1, 0, "unpicklable", timeout_s=60)


def test_a_killed_rank_is_the_cause_and_the_others_outcomes_are_kept(workers: ModuleType) -> None:
    outcomes = spawn_ranks(workers.fail_on, 2, 1, "kill", timeout_s=60)
    errors = {outcome.rank: outcome.error for outcome in outcomes}
    assert isinstance(errors[0], MegaMoETimeoutError)
    assert isinstance(errors[1], RankProcessError)
    assert errors[1].exit_code == -9
    assert "SIGKILL" in str(errors[1])
    with pytest.raises(RankProcessError, match="exit code 7"):
        run_ranks(workers.fail_on, 2, 1, "exit", timeout_s=60)


def test_the_others_are_stopped_after_the_grace_time(workers: ModuleType) -> None:
    started = time.monotonic()
    pids: list[int] = []
    with pytest.raises(RuntimeError, match="deliberate"):
        run_ranks(
            workers.fail_then_others_hang,
            2,
            0,
            timeout_s=60,
            grace_s=0.5,
            on_report=lambda rank, pid: pids.append(pid),
        )
    assert time.monotonic() - started < 30
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_hang_ends_at_the_timeout_and_names_the_rank(workers: ModuleType) -> None:
    outcomes = spawn_ranks(workers.hang_unless, 2, 0, timeout_s=5)
    assert sorted(outcome.rank for outcome in outcomes) == [0, 1]
    hung = next(outcome for outcome in outcomes if outcome.rank == 1)
    assert hung.stopped
    assert "rank 1 was not finished after 5 s" in str(hung.error)


def test_no_ranks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="world_size"):
        spawn_ranks(time.sleep, 0, timeout_s=1)
