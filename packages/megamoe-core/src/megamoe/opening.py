"""What every backend asks before it opens a session: who meets, how long to wait, whether GPUs reach each other."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe import env
from megamoe.backend import Plan, VirtualRanks
from megamoe.errors import ConfigError, WorkspaceError
from megamoe.symm import Group
from megamoe.symm.agreement import ProcessGroupRanks, Ranks, agree, check_seats, exchange_seats, take_seat
from megamoe.tensors import is_on


def ranks_of(group: Any, plan: Plan, backend: str, config_type: type) -> Ranks | None:
    """The ranks to meet; None where this process has all of them.

    Args:
        group: what `Backend.open` was given.
        plan: what it is to open.
        backend: name of the backend that opens it.
        config_type: of that backend's configurations.

    Raises:
        ConfigError: no plan of the backend, no group, or one of the wrong size. The same on every rank, so none waits.
    """
    if not isinstance(plan, Plan) or plan.backend != backend or not isinstance(plan.config, config_type):
        raise ConfigError(
            f"this is no plan of backend {backend}",
            got=f"one of {plan.backend}" if isinstance(plan, Plan) else type(plan).__name__,
            expected="what its plan(problem) returned",
        )
    ep_size = plan.problem.ep_size
    if isinstance(group, VirtualRanks) or (group is None and ep_size == 1):
        return None
    if group is None:
        raise ConfigError(
            "a plan for several ranks needs a group",
            expected=f"a group of {ep_size} ranks",
            hint="pass a process group, or VirtualRanks()",
        )
    if not isinstance(group, Group | dist.ProcessGroup):
        raise ConfigError(
            "not a group of ranks",
            got=repr(group) if isinstance(group, type) else type(group).__name__,
            expected="a ProcessGroup, a megamoe.symm.Group or VirtualRanks()",
        )
    ranks: Ranks = group if isinstance(group, Group) else ProcessGroupRanks(group)
    if ranks.size != ep_size:
        raise ConfigError(
            "the group's size is not the plan's", got=f"{ranks.size} ranks", expected=f"ep_size = {ep_size}"
        )
    return ranks


def wait_s(timeout_s: float | None) -> float:
    """Seconds that a session's waits may take: those of `Backend.open`, or of MEGAMOE_TIMEOUT_S where it has none.

    Raises:
        ConfigError: no positive number.
    """
    if timeout_s is None:
        return env.timeout_s()
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < float("inf"):
        raise ConfigError("timeout_s is not a time", got=repr(timeout_s), expected="a positive number of seconds")
    return timeout_s


def given_workspace(workspace: object, num_bytes: int, device: torch.device, *, alignment: int) -> Tensor:
    """Memory that `Backend.open` was handed, as `[num_bytes]` uint8.

    Args:
        workspace: what it was given.
        num_bytes: that the session needs of it.
        device: where it computes.
        alignment: bytes that the address has to be a multiple of.

    Raises:
        WorkspaceError: no contiguous uint8 on `device`, too small, or not aligned.
    """
    if not isinstance(workspace, Tensor):
        raise WorkspaceError("the workspace is not a tensor", got=type(workspace).__name__, expected="uint8, or None")
    if not is_on(device, workspace) or workspace.dtype != torch.uint8 or not workspace.is_contiguous():
        raise WorkspaceError(
            "the workspace is not plain bytes of this device",
            got=f"{workspace.dtype} on {workspace.device}, strides {workspace.stride()}",
            expected=f"contiguous uint8 on {device}",
        )
    if workspace.numel() < num_bytes or workspace.data_ptr() % alignment:
        raise WorkspaceError(
            "the workspace is too small or not aligned",
            got=f"{workspace.numel()} bytes at {workspace.data_ptr():#x}",
            expected=f"{num_bytes} bytes at a multiple of {alignment} bytes",
        )
    return workspace.detach().flatten()[:num_bytes]


def require_paths(ranks: Ranks, plan: Plan, device: torch.device, *, version: str, timeout_s: float) -> None:
    """COLLECTIVE. Raise on every rank unless all opened this plan on GPUs that can address each other.

    Args:
        ranks: all of them.
        plan: this rank's.
        device: this rank's GPU.
        version: of the backend's package; ranks of different versions do not work together.
        timeout_s: seconds to wait for the others.

    Raises:
        ConfigError: plans or versions differ, or two ranks share a GPU and `MEGAMOE_RANKS_PER_GPU` does not say so.
        BackendUnavailableError: no peer-to-peer path between two of them.
    """
    seat = take_seat(_gpu_id(device), hashlib.sha256(f"{version} {plan!r}".encode()).hexdigest())
    seats = exchange_seats(ranks, seat, timeout_s=timeout_s)

    def check() -> None:
        check_seats(seats, ranks.rank, lambda gpu: _can_access(device, gpu), ranks_per_gpu=env.ranks_per_gpu())

    agree(ranks, "find its peers", check, timeout_s=timeout_s)


def _gpu_id(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _can_access(device: torch.device, gpu: str) -> bool | None:
    """Whether `device` can address the memory of the GPU with uuid `gpu`; None where this process does not see it."""
    for index in range(torch.cuda.device_count()):
        peer = torch.device("cuda", index)
        if _gpu_id(peer) == gpu:
            return bool(torch.cuda.can_device_access_peer(device, peer))
    return None
