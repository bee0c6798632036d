"""A session whose kernels are compiled for gfx950 and executed in the interpreter: all ranks in one process, on a CPU.

It shows what the kernels compute, to anyone, without a GPU. It takes seconds where a GPU takes microseconds, so plans
for it name a device with few compute units: `plan.device.num_sms` times the tile's programs are executed per launch.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

from megamoe.backend import Plan
from megamoe.symm import PeerMemory
from megamoe_rocm.aot.code_object import CodeObject
from megamoe_rocm.isa.device import Device, Programs
from megamoe_rocm.isa.machine import DEFAULT_MAX_STEPS
from megamoe_rocm.kernels.launch import GFX950, Launch
from megamoe_rocm.rungs import PLANNED_FOR, Rung
from megamoe_rocm.runtime.launcher import Launcher
from megamoe_rocm.session import RocmSession

EMULATED = PLANNED_FOR[Rung.ISA]  # an MI355X of one compute unit


@cache
def shared_programs() -> Programs:
    """Each kernel is found and decoded once in a process."""
    return Programs()


class EmulatedLauncher(Launcher):
    """Runs the launches of all ranks in the interpreter, side by side, once a call has been queued.

    Args:
        num_ranks: how many.
        seed: of the schedule.
        programs: by default those that all launchers of the process share.
        max_steps: instructions of one call of all ranks; more are a deadlock.
    """

    def __init__(
        self, num_ranks: int, *, seed: int = 0, programs: Programs | None = None, max_steps: int = DEFAULT_MAX_STEPS
    ) -> None:
        self.device = torch.device("cpu")
        self.target = GFX950
        self.programs = programs or shared_programs()
        self.emulated = Device(num_ranks=num_ranks, seed=seed, programs=self.programs)
        self._max_steps = max_steps

    def load(self, launches: Iterable[Launch]) -> None:
        """See `Launcher.load`."""
        for launch in launches:
            self.programs.get(launch)

    def launch(self, launch: Launch, *, rank: int) -> None:
        """See `Launcher.launch`."""
        self.emulated.launch(launch, rank=rank)

    def flush(self) -> None:
        """Run what was queued."""
        self.emulated.machine.run(max_steps=self._max_steps)


class EmulatedSession(RocmSession):
    """A session of virtual ranks, or of the only one; see `megamoe.backend.Session`.

    Args:
        plan: a plan of this package's, for a device of few compute units such as `EMULATED`.
        timeout_s: what a wait for a peer may take, by a clock that counts the instructions of all ranks, 1e8 a second.
        launcher: of the plan's ranks.
        virtual: whether calls take and return lists, an entry a rank.
    """

    def __init__(
        self, plan: Plan, *, launcher: EmulatedLauncher, timeout_s: float = 60.0, virtual: bool = True
    ) -> None:
        self._emulator = launcher
        super().__init__(
            plan, group=None, virtual=virtual, launcher=launcher, timeout_s=timeout_s, allocate=self._workspaces
        )

    def _workspaces(self, num_bytes: int) -> PeerMemory:
        ranks = tuple(
            self._emulator.emulated.workspace(rank=rank, num_bytes=num_bytes, arrays=self._layout.arrays)
            for rank in range(self.plan.problem.ep_size)
        )
        return PeerMemory(ranks=ranks, release=lambda: None)

    def executed(self) -> tuple[CodeObject, ...]:
        """The code objects that were executed, by their hashes those that a wheel ships."""
        return tuple(self._emulator.emulated.executed.values())

    @property
    def stored_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes that executed stores moved, by rank and owner of the memory."""
        return self._emulator.emulated.machine.stored_bytes


def open_emulated(plan: Plan, *, seed: int = 0, programs: Programs | None = None) -> EmulatedSession:
    """Open a session of virtual ranks in the interpreter, ready for calls."""
    launcher = EmulatedLauncher(plan.problem.ep_size, seed=seed, programs=programs)
    session = EmulatedSession(plan, launcher=launcher)
    session.start()
    return session
