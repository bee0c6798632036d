"""Opening a session of the reference: who has which memory, and whether all ranks have the same plan."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from megamoe.backend import Plan
from megamoe.errors import ConfigError, WorkspaceError
from megamoe.opening import given_workspace
from megamoe.reference.executor import RankExecutor
from megamoe.reference.memory import RankMemory
from megamoe.reference.plan import ReferencePlan
from megamoe.reference.session import CPU_DEVICE, ReferenceSession
from megamoe.symm import Group
from megamoe.symm.agreement import Ranks
from megamoe.symm.shm import connect_process_group

WORKSPACE_ALIGN = 16  # bytes; what torch needs to view them as words


def open_session(
    plan: Plan, group: Any, ranks: Ranks | None, *, timeout_s: float, workspace: Tensor | None
) -> ReferenceSession:
    """COLLECTIVE. See `ReferenceBackend.open`; `ranks` are those of `megamoe.opening.ranks_of`."""
    assert isinstance(plan, ReferencePlan)
    if ranks is None:
        return _open_alone(plan, virtual=group is not None, timeout_s=timeout_s, workspace=workspace)
    if workspace is not None:
        raise ConfigError("with a group the reference allocates its shared memory itself", got="workspace=")
    if isinstance(group, Group):
        return _open_ranked(plan, group, owns_group=False, timeout_s=timeout_s)
    return _open_ranked(plan, connect_process_group(group, timeout_s=timeout_s), owns_group=True, timeout_s=timeout_s)


def _open_alone(plan: ReferencePlan, *, virtual: bool, timeout_s: float, workspace: Tensor | None) -> ReferenceSession:
    """All ranks in this process."""
    layout, size = plan.workspace, plan.problem.ep_size
    if workspace is not None:
        if virtual:
            raise ConfigError("virtual ranks allocate their own memory", got="workspace=", expected="None")
        given = given_workspace(workspace, layout.num_bytes, CPU_DEVICE, alignment=WORKSPACE_ALIGN)
        spaces = [given.zero_()]
    else:
        spaces = [_allocate(layout.num_bytes) for _ in range(size)]
    split = layout.symmetric_bytes
    memories = tuple(RankMemory(layout, space[:split], space[split:]) for space in spaces)
    executors = [RankExecutor(plan.problem, plan.shape, rank, memories) for rank in range(size)]
    session = ReferenceSession(plan, executors, None, virtual=virtual, owns_group=False, timeout_s=timeout_s)
    session.ready_flags()
    return session


def _open_ranked(plan: ReferencePlan, group: Group, *, owns_group: bool, timeout_s: float) -> ReferenceSession:
    """One rank of a group."""
    layout = plan.workspace
    digest = hashlib.sha256(repr(plan).encode()).digest()
    try:
        local, failure = _allocate(layout.local_bytes), ""
    except WorkspaceError as error:
        local, failure = torch.empty(0, device="cpu"), str(error)
    reports = group.all_gather(digest + failure.encode(), timeout_s=timeout_s, phase="open")
    for rank, report in enumerate(reports):
        if report[: len(digest)] != digest:
            raise ConfigError(
                f"rank {rank} opens another plan than rank {group.rank}", hint="compare str(plan) of the two"
            )
        if len(report) > len(digest):
            raise WorkspaceError(f"rank {rank}: {report[len(digest) :].decode()}")
    buffer = group.allocate(layout.symmetric_bytes, timeout_s=timeout_s)
    memories = tuple(
        RankMemory(layout, symmetric, local if rank == group.rank else None)
        for rank, symmetric in enumerate(buffer.ranks)
    )
    executor = RankExecutor(plan.problem, plan.shape, group.rank, memories)
    session = ReferenceSession(plan, [executor], group, virtual=False, owns_group=owns_group, timeout_s=timeout_s)
    session.ready_flags()
    return session


def _allocate(num_bytes: int) -> Tensor:
    try:
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:  # torch's allocator
        raise WorkspaceError(
            f"can't allocate {num_bytes} bytes: {str(error).splitlines()[0]}", hint="plan a smaller capacity"
        ) from None
