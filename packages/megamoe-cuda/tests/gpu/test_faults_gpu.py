"""What can go wrong around a call of several processes, over PyTorch symmetric memory. On one GPU they take turns.

Run with the matrix: `pytest -p claim packages/megamoe-cuda/tests/gpu/test_faults_gpu.py`. The matrix itself holds late,
silent and killed ranks; docs/reliability.md names the test of every fault.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import fault_ranks

from megamoe.backend import VirtualRanks
from megamoe.launch import run_ranks, spawn_ranks
from megamoe.problem import MoEProblem
from megamoe.testing.data import make_weights, shard
from megamoe_cuda.backend import CudaBackend

pytestmark = pytest.mark.gpu

TIMEOUT_S = 180.0  # of all ranks of a test together
ALONE = torch.cuda.device_count() < 2  # ranks share the GPU


@contextmanager
def seats(num_ranks: int) -> Iterator[None]:
    """Processes that are started here find a GPU each, or share what there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGAMOE_RANKS_PER_GPU", str(-(-num_ranks // max(1, torch.cuda.device_count()))))
        yield


@pytest.fixture(scope="module")
def outcomes() -> Any:
    """Outcome of each fault on each rank, and the error that ended the run, if one did."""
    found: dict[str, list[Any]] = {fault.__name__: [None, None] for fault in fault_ranks.FAULTS}

    def keep(rank: int, message: tuple[str, Any]) -> None:
        name, outcome = message
        found[name][rank] = outcome
        print(f"rank {rank}: {name}: {outcome}")

    with seats(2):
        try:
            run_ranks(fault_ranks.all_faults, 2, timeout_s=TIMEOUT_S, on_report=keep)
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


def test_many_uneven_calls_of_two_processes(of: Callable[..., Any]) -> None:
    assert of(fault_ranks.many_uneven_calls) == ["", ""]


def test_out_of_memory_on_one_rank_raises_on_both(of: Callable[..., Any]) -> None:
    for error, right in of(fault_ranks.out_of_memory_on_one_rank):
        assert error.startswith(f"WorkspaceError: rank {0 if ALONE else 1} "), error
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


def test_a_late_rank_is_waited_for() -> None:
    """90 seconds, with the default time-out."""
    with seats(2):
        assert run_ranks(fault_ranks.late_rank, 2, timeout_s=TIMEOUT_S) == [True, True]


def test_survivors_of_a_killed_rank_open_a_new_session() -> None:
    """Two of three; they name the one that is gone."""
    with seats(3):
        outcomes = spawn_ranks(fault_ranks.survive, 3, timeout_s=TIMEOUT_S, grace_s=60)
    by_rank = sorted(outcomes, key=lambda outcome: outcome.rank)
    assert "killed by SIGKILL" in str(by_rank[2].error)
    for outcome in by_rank[:2]:
        assert outcome.error is None, outcome.traceback
        error, right = outcome.value
        assert error.startswith(("MegaMoETimeoutError", "RankFailedError")), error
        assert right
    assert any("rank 2" in outcome.value[0] for outcome in by_rank[:2])


# -- one process -------------------------------------------------------------------------------------------------------


def test_ten_thousand_uneven_calls() -> None:
    """Two virtual ranks with other token counts in every call, zero included, into guarded memory."""
    problem, device, guard = fault_ranks.PROBLEM, torch.device("cuda"), 4
    backend = CudaBackend()
    with backend.open(backend.plan(problem), VirtualRanks()) as session:
        session.warmup()
        weights = [session.prepare(share) for share in shard(make_weights(problem, device), 2)]
        counts = (0, 256, 1, 63, 64, 65, 200, 0, 17, 128, 129)
        calls = [random_calls(problem, (mine, counts[index - 1])) for index, mine in enumerate(counts)]
        alone = [[y.clone() for y in session.forward(*call, weights)] for call in calls]
        guarded = [
            [torch.full((len(y) + 2 * guard, problem.hidden_size), 7.0, dtype=y.dtype, device=device) for y in ys]
            for ys in alone
        ]
        for step in range(10_000):
            which = step * 7 % len(calls)
            session.forward(*calls[which], weights, out=[rows[guard:-guard] for rows in guarded[which]])
            if step % 1000 == 999:
                session.check()
        for rows, expected in zip(chain(*guarded), chain(*alone), strict=True):
            assert torch.equal(rows[guard:-guard], expected)
            assert bool((torch.cat((rows[:guard], rows[-guard:])) == 7.0).all()), "written past an output"


def random_calls(problem: MoEProblem, num_tokens: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Rows, ids and router weights of each rank."""
    rng = torch.Generator("cuda").manual_seed(num_tokens[0])
    options: Any = {"generator": rng, "device": "cuda"}
    x = [torch.randn(count, problem.hidden_size, **options).bfloat16() for count in num_tokens]
    ids = [torch.rand(count, problem.num_experts, **options).argsort(-1) for count in num_tokens]
    router = [torch.rand(count, problem.top_k, **options) for count in num_tokens]
    return x, [of_rank[:, : problem.top_k].contiguous() for of_rank in ids], router


COMPUTE = """
import dataclasses, hashlib, torch, fault_ranks, megamoe_cuda.backend as backend
from megamoe.testing.data import make_weights
backend.SEEN_RIGHT_ON = backend.SEEN_RIGHT_ON or "under test"
problem = dataclasses.replace(fault_ranks.PROBLEM, ep_size=1)
cuda = backend.CudaBackend()
with cuda.open(cuda.plan(problem)) as session:
    weights = session.prepare(make_weights(problem, torch.device("cuda")))
    x = torch.randn(9, problem.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    ids = torch.arange(36, dtype=torch.int32, device="cuda").reshape(9, 4) % 16
    y = session.forward(x, ids, torch.ones(9, 4, device="cuda"), weights)
    session.check()
    assert y.isfinite().all() and y.any()
    print("bits", hashlib.sha256(y.view(torch.int16).cpu().numpy().tobytes()).hexdigest())
"""


def test_two_processes_compile_at_once(tmp_path: Path) -> None:
    """Neither finds the kernel in the cache; both compute the same bits, and leave a cache that serves a third."""
    options: Any = {"cwd": Path(__file__).parent, "env": os.environ | {"MEGAMOE_CACHE_DIR": str(tmp_path)}}
    command = [sys.executable, "-c", COMPUTE]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **pipes, **options) for _ in range(2)]
    told = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], [stderr for _, stderr in told]
    left = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    third = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, **options)
    bits = [re.findall("bits ([0-9a-f]{64})", stdout) for stdout in (told[0][0], told[1][0], third.stdout)]
    assert len(bits[0]) == 1
    assert bits[0] == bits[1] == bits[2]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == left, "compiled again"


FORK = """
import os, megamoe, megamoe_cuda.backend
child = os.fork()
if child:
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_after_the_import() -> None:
    """Importing starts no CUDA: a forked child opens a session of its own and computes."""
    command, here = [sys.executable, "-c", FORK + COMPUTE], Path(__file__).parent
    result = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
