"""The launcher: results in order, the first cause of a failure, and never a hang."""

from __future__ import annotations

import importlib
import os
import pickle
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megamoe.errors import ConfigError, MegaMoETimeoutError
from megamoe.launch import RankProcessError, dumps, run_ranks, spawn_ranks


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


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_rank_that_leaves_does_not_take_the_launcher_with_it(workers: ModuleType, error: type[BaseException]) -> None:
    """`sys.exit(0)` on a rank would otherwise end the launching program, as a success."""
    with pytest.raises(RankProcessError, match=f"rank 0 raised {error.__name__}"):
        run_ranks(workers.leave, 1, error, timeout_s=60)


def test_tensors_of_every_dtype_arrive(workers: ModuleType) -> None:
    values = torch.arange(8, dtype=torch.uint8)
    sent = [
        values.view(torch.float8_e4m3fn),
        values.view(torch.float8_e8m0fnu),
        values.bfloat16().view(2, 4).t(),
        values.bool(),
        torch.empty(0, 3),
        torch.tensor(1.5),
        torch._neg_view(torch.ones(2)),
    ]
    (got,) = run_ranks(workers.same, 1, *sent, timeout_s=60)
    for tensor, expected in zip(got, sent, strict=True):
        assert tensor.dtype == expected.dtype
        assert tensor.shape == expected.shape
        assert tensor.float().tolist() == expected.float().tolist()


def test_what_does_not_pickle_is_said_before_and_after(workers: ModuleType) -> None:
    with pytest.raises(ConfigError, match="does not pickle.*a function of a module"):
        run_ranks(lambda context: 1, 1, timeout_s=60)
    with pytest.raises(TypeError, match="pickle.*lock"):
        run_ranks(workers.unpicklable_result, 1, timeout_s=60)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(4, dtype=torch.int32).view(1, 4)[:, 1],  # one element: contiguous, whatever its stride
        torch.arange(12, dtype=torch.int16).view(3, 4).T,
        torch.arange(12.0).view(3, 4)[1:, ::2].to(torch.float8_e4m3fn),
        torch.tensor(5),
        torch.empty(3, 0),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}",
)
def test_tensors_between_ranks_keep_dtype_shape_and_values(tensor: torch.Tensor) -> None:
    copy = pickle.loads(dumps(tensor))  # noqa: S301 - just made
    assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(copy.float(), tensor.float())
