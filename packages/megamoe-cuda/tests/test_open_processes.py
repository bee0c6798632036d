"""Opening in several processes where it can't work: every rank raises the same clear error, and none waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megamoe.errors import BackendUnavailableError, ConfigError, MegaMoEError
from megamoe.launch import RankContext, spawn_ranks
from megamoe.problem import MoEProblem
from megamoe_cuda import backend as cuda_backend
from megamoe_cuda.backend import CudaBackend
from megamoe_cuda.symm_nvshmem import NvshmemGroup, is_installed

PROBLEM = MoEProblem(
    hidden_size=512, intermediate_size=256, num_experts=8, top_k=2, num_max_tokens_per_rank=64, ep_size=2
)
LIMIT_S = 60.0


def _join(context: RankContext) -> dist.ProcessGroup:
    dist.init_process_group(
        "gloo", init_method=f"file://{context.directory / 'store'}", rank=context.rank, world_size=context.world_size
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _open(context: RankContext, problem: MoEProblem) -> None:
    cuda_backend.SEEN_RIGHT_ON = "a process of this test"
    CudaBackend().open(CudaBackend().plan(problem), _join(context))


def _use_nvshmem(context: RankContext) -> None:
    NvshmemGroup(_join(context), torch.device("cpu"), timeout_s=LIMIT_S)


def errors_of(outcomes: list[object]) -> list[BaseException]:
    errors = [outcome.error for outcome in outcomes]  # type: ignore[attr-defined]
    assert all(isinstance(error, MegaMoEError) for error in errors), errors
    return errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_ranks_without_a_gpu_all_say_so() -> None:
    outcomes = spawn_ranks(_open, 2, PROBLEM, timeout_s=LIMIT_S)
    for error in errors_of(outcomes):
        assert isinstance(error, BackendUnavailableError)
        assert "can't run here" in str(error)


@pytest.mark.skipif(is_installed(), reason="nvshmem4py is installed")
def test_ranks_without_nvshmem_all_name_it_and_the_other_provider() -> None:
    for error in errors_of(spawn_ranks(_use_nvshmem, 2, timeout_s=LIMIT_S)):
        assert isinstance(error, BackendUnavailableError)
        assert "NVSHMEM can't be loaded" in str(error)
        assert "TorchSymmGroup" in str(error)


def test_a_group_of_the_wrong_size_is_refused_by_each_rank() -> None:
    for error in errors_of(spawn_ranks(_open, 2, replace(PROBLEM, ep_size=4), timeout_s=LIMIT_S)):
        assert isinstance(error, ConfigError)
        assert "got 2 ranks; expected ep_size = 4" in str(error)
