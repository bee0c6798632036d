"""How a plan is opened: the ranks agree that each of them can, then share memory, then make the session ready.

What a rung brings is a launcher, and symmetric memory for the process group of an application.
"""

from __future__ import annotations

from typing import Any

import torch

from megamoe.backend import Plan, VirtualRanks
from megamoe.errors import BackendUnavailableError, ConfigError, WorkspaceError
from megamoe.opening import require_paths
from megamoe.symm import Group, PeerMemory
from megamoe.symm.agreement import Ranks, agree
from megamoe_rocm import __version__
from megamoe_rocm.code_store import find_or_compile
from megamoe_rocm.probe import TARGET, probe
from megamoe_rocm.rungs import WHAT, Rung
from megamoe_rocm.runtime.launcher import InterpretedLauncher, Launcher
from megamoe_rocm.session import RocmSession
from megamoe_rocm.symm_mori import MoriGroup

SM90 = (9, 0)


@torch.inference_mode(False)  # reset() writes to what is allocated here, in any mode
def open_session(plan: Plan, group: Any, ranks: Ranks | None, *, rung: Rung, timeout_s: float) -> RocmSession:
    """COLLECTIVE. Open `plan` on every rank of `group`.

    Args:
        plan: equal on every rank.
        group: a process group, a `megamoe.symm.Group`, `VirtualRanks()` or None; checked against the plan.
        ranks: the same, to meet on; None where this process has all ranks.
        rung: where the kernels run.
        timeout_s: how long a wait for a peer may take.

    Raises:
        BackendUnavailableError, ConfigError, WorkspaceError: see `RocmBackend.open`; on every rank.
    """
    if rung is Rung.ISA:
        return _open_emulated(plan, group, timeout_s)
    launcher = agree(ranks, "look at the machine", lambda: make_launcher(rung), timeout_s=timeout_s)
    if ranks is not None and launcher.device.type == "cuda":
        require_paths(ranks, plan, launcher.device, version=__version__, timeout_s=timeout_s)
    provider = _provider(group, ranks, plan, launcher.device, rung, timeout_s)
    virtual = isinstance(group, VirtualRanks)

    def make() -> RocmSession:
        return RocmSession(
            plan,
            group=provider,
            virtual=virtual,
            launcher=launcher,
            timeout_s=timeout_s,
            allocate=lambda num_bytes: _allocate(provider, plan.problem.ep_size, num_bytes, launcher.device, timeout_s),
        )

    session = agree(ranks, "prepare the session", make, timeout_s=timeout_s)
    session.start()
    return session


def make_launcher(rung: Rung) -> Launcher:
    """What runs launches on a rung other than the emulated one, on the current device.

    Raises:
        BackendUnavailableError: this machine or the current device can't.
    """
    verdict = probe(rung)
    if not verdict.ok:
        raise BackendUnavailableError(f"backend rocm can't run here ({verdict.reason}): {verdict.detail}")
    if rung is Rung.INTERPRETER:
        return InterpretedLauncher()
    device = torch.device("cuda", torch.cuda.current_device())
    if rung is Rung.NVIDIA:
        from megamoe_rocm.runtime.nvidia import NvidiaLauncher

        _require_device(device, rung, torch.cuda.get_device_capability(device) == SM90)
        return NvidiaLauncher(device)
    from megamoe_rocm.runtime.hip_runtime import HipLauncher, query

    _require_device(device, rung, query(device.index).target == TARGET)
    return HipLauncher(device, find_or_compile)


def _require_device(device: torch.device, rung: Rung, fits: bool) -> None:
    if not fits:
        raise BackendUnavailableError(
            f"the current device is not {WHAT[rung]}",
            got=torch.cuda.get_device_name(device),
            hint="call torch.cuda.set_device() first",
        )


def _open_emulated(plan: Plan, group: Any, timeout_s: float) -> RocmSession:
    from megamoe_rocm.isa.session import EmulatedLauncher, EmulatedSession

    virtual = isinstance(group, VirtualRanks)
    if not virtual and (group is not None or plan.problem.ep_size > 1):
        raise ConfigError("the instruction interpreter runs all ranks in one process", hint="pass VirtualRanks()")
    verdict = probe(Rung.ISA)
    if not verdict.ok:
        raise BackendUnavailableError(f"backend rocm can't run here ({verdict.reason}): {verdict.detail}")
    launcher = EmulatedLauncher(plan.problem.ep_size)
    session = EmulatedSession(plan, launcher=launcher, timeout_s=timeout_s, virtual=virtual)
    session.start()
    return session


def _provider(
    group: Any, ranks: Ranks | None, plan: Plan, device: torch.device, rung: Rung, timeout_s: float
) -> Group | None:
    """COLLECTIVE. Where symmetric memory comes from."""
    if ranks is None or isinstance(group, Group):
        return group if isinstance(group, Group) else None
    if rung is Rung.GFX950:
        return MoriGroup(ranks, device, heap_bytes=plan.workspace.symmetric_bytes, timeout_s=timeout_s)
    if rung is Rung.NVIDIA:
        from megamoe.symm.torch_symm import TorchSymmGroup

        return TorchSymmGroup(group, device)
    from megamoe.symm.shm import connect_process_group

    return connect_process_group(group, timeout_s=timeout_s)


def _allocate(group: Group | None, size: int, num_bytes: int, device: torch.device, timeout_s: float) -> PeerMemory:
    """COLLECTIVE. Workspaces of all ranks, `num_bytes` each."""
    if group is not None:
        buffer = group.allocate(num_bytes, timeout_s=timeout_s)
        if isinstance(group, MoriGroup):
            return PeerMemory(ranks=buffer.ranks, release=lambda: group.free(buffer))
        return PeerMemory(ranks=buffer.ranks, release=lambda: None)
    try:
        ranks = tuple(torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(size))
    except (torch.OutOfMemoryError, RuntimeError) as error:
        raise WorkspaceError(
            "out of memory", got=str(error).splitlines()[0], expected=f"{size * num_bytes} bytes on {device}"
        ) from None
    return PeerMemory(ranks=ranks, release=lambda: None)
