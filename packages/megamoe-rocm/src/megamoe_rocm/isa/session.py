"""A session whose kernels are compiled for gfx950 and executed in the interpreter: all ranks in one process, on a CPU.

It shows what the kernels compute, to anyone, without a GPU. It takes seconds where a GPU takes microseconds, so plans
for it name a device with few compute units: `plan.device.num_sms` times the tile's programs are executed per launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megamoe.backend import Plan
from megamoe.schedule.device_spec import MI355X
from megamoe.symm import PeerMemory
from megamoe_rocm.aot.code_object import CodeObject
from megamoe_rocm.isa.device import Device, Programs
from megamoe_rocm.isa.machine import DEFAULT_MAX_STEPS
from megamoe_rocm.kernels.launch import CallTensors, Launch
from megamoe_rocm.session import RocmSession

EMULATED = replace(MI355X, num_sms=1)  # an MI355X of one compute unit


class EmulatedSession(RocmSession):
    """A session of virtual ranks; see `megamoe.backend.Session`.

    Args:
        plan: a plan of this package's, for a device of few compute units such as `EMULATED`.
        timeout_s: what a wait for a peer may take at least; waits count polls.
        seed: of the schedule.
        programs: shared between sessions, to compile once.
        max_steps: instructions of one call of all ranks; more are a deadlock.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        timeout_s: float = 60.0,
        seed: int = 0,
        programs: Programs | None = None,
        max_steps: int = DEFAULT_MAX_STEPS,
    ) -> None:
        self._programs = programs or Programs()
        self._emulated = Device(num_ranks=plan.problem.ep_size, seed=seed, programs=self._programs)
        self._max_steps = max_steps
        self._turns = 0
        super().__init__(
            plan,
            group=None,
            virtual=True,
            device=torch.device("cpu"),
            timeout_s=timeout_s,
            allocate=self._workspaces,
        )

    def _workspaces(self, num_bytes: int) -> PeerMemory:
        ranks = tuple(
            self._emulated.workspace(rank=rank, num_bytes=num_bytes, arrays=self._layout.arrays)
            for rank in range(self.plan.problem.ep_size)
        )
        return PeerMemory(ranks=ranks, release=lambda: None)

    def _run(self, calls: Sequence[CallTensors]) -> None:
        """Queue one call's launches on all ranks, then run the ranks side by side."""
        super()._run(calls)
        self._emulated.machine.run(max_steps=self._max_steps)

    def _launch(self, launches: Sequence[Launch]) -> None:
        rank = self._turns % self.plan.problem.ep_size  # the ranks take turns, phase by phase
        self._turns += 1
        for launch in launches:
            self._emulated.launch(launch, rank=rank)

    def executed(self) -> tuple[CodeObject, ...]:
        """The code objects that were executed, by their hashes those that a wheel ships."""
        return self._programs.code_objects()

    @property
    def stored_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes that executed stores moved, by rank and owner of the memory."""
        return self._emulated.machine.stored_bytes


def open_emulated(plan: Plan, *, seed: int = 0, programs: Programs | None = None) -> EmulatedSession:
    """Open a session of virtual ranks in the interpreter, ready for calls."""
    session = EmulatedSession(plan, seed=seed, programs=programs)
    session.start()
    return session
