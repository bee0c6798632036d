"""What can go wrong around a call on two GPUs, a process each, over PyTorch symmetric memory.

Run with the matrix: `pytest -p claim packages/megamoe-cuda/tests/gpu/test_faults_gpu.py`. The matrix itself holds late,
silent and killed ranks; docs/reliability.md names the test of every fault.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import fault_ranks

from megamoe.launch import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def outcomes() -> Any:
    """Outcome of each fault on each rank, and the error that ended the run, if one did."""
    found: dict[str, list[Any]] = {fault.__name__: [None, None] for fault in fault_ranks.FAULTS}

    def keep(rank: int, message: tuple[str, Any]) -> None:
        name, outcome = message
        found[name][rank] = outcome
        print(f"rank {rank}: {name}: {outcome}")

    try:
        run_ranks(fault_ranks.all_faults, 2, timeout_s=120, on_report=keep)
    except Exception as error:
        return found, error
    return found, None


@pytest.fixture
def of(outcomes: Any) -> Callable[..., list[Any]]:
    """Both ranks' outcomes of a fault; the error that ended the run where they are missing."""
    found, error = outcomes

    def look_up(fault: Callable[..., Any]) -> list[Any]:
        if None in found[fault.__name__]:
            raise AssertionError(f"no outcome on every rank: {found[fault.__name__]}") from error
        return found[fault.__name__]  # type: ignore[no-any-return]

    return look_up


def test_an_all_reduce_at_the_same_time(of: Callable[..., Any]) -> None:
    assert of(fault_ranks.beside_an_all_reduce) == [True, True]


def test_an_all_reduce_without_free_sms_ends_in_a_named_timeout(of: Callable[..., Any]) -> None:
    """Both kernels wait for a rank on which the other one runs: the layer's watchdog ends it, and says for whom."""
    results = of(fault_ranks.crossed_with_an_all_reduce)
    assert any(error.startswith("MegaMoETimeoutError") for error, _ in results), results
    assert [right for _, right in results] == [True, True]


def test_ten_thousand_uneven_calls(of: Callable[..., Any]) -> None:
    assert of(fault_ranks.many_uneven_calls) == ["", ""]


def test_out_of_memory_on_one_rank_raises_on_both(of: Callable[..., Any]) -> None:
    for error, right in of(fault_ranks.out_of_memory_on_one_rank):
        assert error.startswith("WorkspaceError: rank 1 "), error
        assert right


def test_a_token_too_many_on_one_rank(of: Callable[..., Any]) -> None:
    """The rank itself gets CapacityError; its peer, in the kernel already, an error of the protocol; a reset mends."""
    (own, own_right), (peers, peers_right) = of(fault_ranks.over_capacity_on_one_rank)
    assert own.startswith("CapacityError: more tokens than the session holds; got 257")
    assert peers.startswith(("MegaMoETimeoutError", "RankFailedError")), peers
    assert own_right
    assert peers_right


def test_two_sessions_on_two_streams(of: Callable[..., Any]) -> None:
    assert of(fault_ranks.two_sessions_on_two_streams) == [True, True]


def test_an_interrupt_while_a_peer_is_late(of: Callable[..., Any]) -> None:
    (felt, right), (_, peers_right) = of(fault_ranks.interrupted_while_waiting)
    assert felt
    assert right
    assert peers_right


def test_a_late_rank_is_waited_for(of: Callable[..., Any]) -> None:
    assert of(fault_ranks.late_rank) == [True, True]


FORKED = """
import os, megamoe, megamoe_cuda.backend as backend
backend.SEEN_RIGHT_ON = backend.SEEN_RIGHT_ON or "under test"
child = os.fork()
if child:
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
import dataclasses, torch, fault_ranks
from megamoe.testing.data import make_weights
problem = dataclasses.replace(fault_ranks.PROBLEM, ep_size=1)
cuda = backend.CudaBackend()
with cuda.open(cuda.plan(problem)) as session:
    weights = session.prepare(make_weights(problem, torch.device("cuda")))
    x = torch.randn(9, problem.hidden_size, device="cuda").bfloat16()
    ids = torch.zeros(9, 4, dtype=torch.int32, device="cuda")
    y = session.forward(x, ids, torch.ones(9, 4, device="cuda"), weights)
    session.check()
os._exit(0 if y.isfinite().all() and y.any() else 1)
"""


def test_a_fork_after_the_import() -> None:
    """Importing starts no CUDA: a forked child opens a session of its own and computes."""
    command, here = [sys.executable, "-c", FORKED], Path(__file__).parent
    result = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
