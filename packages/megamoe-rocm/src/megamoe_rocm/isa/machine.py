"""The machine: ranks, their launches, and a scheduler that interleaves all waves adversarially.

Everything that is left open on a device is drawn from one seed: which wave goes next and for how long, when an
outstanding memory operation takes effect, what uninitialised registers and LDS hold. Two runs with one seed are the
same run.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from megamoe_rocm.isa.accesses import complete, perform
from megamoe_rocm.isa.address_space import AddressSpace, Buffer, Lanes
from megamoe_rocm.isa.caches import Cache, Moments
from megamoe_rocm.isa.errors import DeadlockError, ExecutionFault, PendingRegisterFault
from megamoe_rocm.isa.program import Argument, Program
from megamoe_rocm.isa.wave import LANES, NUM_VGPRS, Array, Wave
from megamoe_rocm.isa.workgroup import LocalMemory, Workgroup

MAX_LDS_BYTES = 163840
DEFAULT_MAX_STEPS = 50_000_000
QUANTA = (3, 20, 100, 400)  # instructions a turn; short ones find races, long ones let a wave run ahead
STARVED_SHARE = 4  # one in so many workgroups gets turns only rarely
STALENESS = (0.0, 0.5, 1.0)  # share of loads that give old bytes where a cache may hold them
EARLINESS = (0.0, 0.5, 0.95)  # share of memory operations that take effect at their issue
PATIENCE = (1, 8, 64)  # how long others linger, in sixteenths of a turn of their workgroup's


@dataclass(kw_only=True)
class Launch:
    """One kernel launch.

    Args:
        program: what runs.
        rank: on which rank's device.
        groups: coordinates of the workgroups that have not started.
        max_resident: workgroups that are on the device together; the others start as these end.
        kernarg: the kernarg segment.
        resident: workgroups that are on the device.
        started: global memory as it was when the launch began.
        caches: those of workgroups that have ended; written back when the launch does.
    """

    program: Program
    rank: int
    groups: list[tuple[int, int, int]]
    max_resident: int
    kernarg: Buffer
    resident: list[Workgroup] = field(default_factory=list)
    started: Moments | None = None
    caches: list[Cache] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether every workgroup has ended."""
        return not self.groups and not self.resident


class Machine:
    """Some ranks, each with a device and memory that peers may map.

    Args:
        num_ranks: how many.
        seed: of everything that is left open.
    """

    def __init__(self, *, num_ranks: int = 1, seed: int = 0) -> None:
        self.num_ranks = num_ranks
        self.memory = AddressSpace()
        self.steps = 0
        self.stored_bytes: dict[tuple[int, int], int] = {}
        self._random = random.Random(seed)
        noise = np.random.default_rng(seed)
        self._registers = noise.integers(0, 1 << 32, (NUM_VGPRS, LANES), np.uint32)
        self._lds_noise = noise.integers(0, 256, MAX_LDS_BYTES + 16, np.uint8)
        self._started_at = int(noise.integers(0, 1 << 56))
        self._early = self._random.choice(EARLINESS)
        self._stale = self._random.choice(STALENESS)
        self._slow_rank = self._random.choice((None, *range(num_ranks)))
        self._queues: dict[int, list[Launch]] = {rank: [] for rank in range(num_ranks)}

    def buffer(
        self, content: Array | int, *, rank: int = 0, name: str = "buffer", peers: bool | Iterable[int] = False
    ) -> Buffer:
        """Allocate device memory.

        Args:
            content: initial content, copied; or a size in bytes, zeroed.
            rank: the owner.
            name: for messages.
            peers: ranks besides the owner that may use it; True for all.
        """
        ranks = range(self.num_ranks) if peers is True else () if peers is False else peers
        size = content if isinstance(content, int) else content.nbytes
        buffer = self.memory.allocate(name=name, rank=rank, num_bytes=size, ranks=frozenset(ranks))
        if not isinstance(content, int):
            buffer.write(content)
        return buffer

    def launch(
        self,
        program: Program,
        *,
        grid: tuple[int, int, int] | int,
        arguments: Mapping[str, Argument],
        rank: int = 0,
        max_resident: int | None = None,
    ) -> None:
        """Queue a launch behind the rank's earlier ones.

        Args:
            program: the kernel.
            grid: workgroups in each dimension, or in the first.
            arguments: by name.
            rank: whose device runs it.
            max_resident: workgroups that are on the device together; all by default.
        """
        grid = (grid, 1, 1) if isinstance(grid, int) else grid
        segment = program.kernarg(arguments, grid)
        # Workgroups start in order of their ids, x fastest.
        groups = [(x, y, z) for z, y, x in product(*(range(count) for count in reversed(grid)))]
        kernarg = self.buffer(segment, rank=rank, name=f"kernarg of {program.code.name}")
        self._queues[rank].append(
            Launch(program=program, rank=rank, groups=groups, max_resident=max_resident or len(groups), kernarg=kernarg)
        )

    def run(self, *, max_steps: int = DEFAULT_MAX_STEPS) -> int:
        """Run all queued launches to their ends, ranks concurrently.

        Args:
            max_steps: instructions that all waves may execute together.

        Returns:
            how many they did.

        Raises:
            ExecutionFault: a wave did something wrong.
            DeadlockError: all waves wait for each other, or the bound is reached.
        """
        start = self.steps
        with np.errstate(all="ignore"):
            while launches := [queue[0] for queue in self._queues.values() if queue]:
                for launch in launches:
                    self._start_groups(launch)
                self._turn(launches)
                for launch in launches:
                    self._retire(launch)
                if self.steps - start > max_steps:
                    raise self._deadlock(f"not done after {max_steps} instructions")
        return self.steps - start

    @property
    def clock(self) -> int:
        """What the clocks show: instructions since some moment or other."""
        return self._started_at + self.steps

    def decide_early(self) -> bool:
        """Whether a memory operation takes effect at its issue."""
        return self._random.random() < self._early

    def decide_stale(self) -> bool:
        """Whether a load that may hit a stale cache line does."""
        return self._random.random() < self._stale

    def count_store(self, rank: int, parts: Sequence[Lanes]) -> None:
        """Count the bytes that a store moves from a rank to the owner of the memory."""
        for part in parts:
            key = (rank, part.buffer.rank)
            self.stored_bytes[key] = self.stored_bytes.get(key, 0) + part.num_bytes * len(part.offsets)

    def _start_groups(self, launch: Launch) -> None:
        if launch.started is None:
            launch.started = self.memory.snapshot()
        while launch.groups and len(launch.resident) < launch.max_resident:
            launch.resident.append(self._workgroup(launch, launch.groups.pop(0)))

    def _workgroup(self, launch: Launch, coordinates: tuple[int, int, int]) -> Workgroup:
        program, resources, descriptor = launch.program, launch.program.code.resources, launch.program.code.descriptor
        lds = LocalMemory(num_bytes=resources.lds_bytes, granule=program.lds_granule, content=self._lds_noise)
        group = Workgroup(
            machine=self,
            program=program,
            rank=launch.rank,
            coordinates=coordinates,
            lds=lds,
            started=launch.started or {},
        )
        group.starved = launch.rank == self._slow_rank or self._random.randrange(STARVED_SHARE) == 0
        group.patience = 16 * self._random.choice(PATIENCE)
        scalars = [
            *program.user_sgprs(launch.kernarg.address, launch.kernarg.data),
            *(value for value, given in zip(coordinates, descriptor.workgroup_id_sgprs) if given),
        ]
        for index in range(resources.num_warps):
            wave = Wave(group, index, self._registers)
            wave.s[: len(scalars)] = scalars
            # Work item ids of a one-dimensional workgroup, packed in ten bits each (y = z = 0).
            wave.v[0] = np.arange(LANES, dtype=np.uint32) + LANES * index
            wave.pc = program.entry
            group.waves.append(wave)
        return group

    def _turn(self, launches: Sequence[Launch]) -> None:
        groups = [group for launch in launches for group in launch.resident]
        ready = [group for group in groups if any(wave.state == "running" for wave in group.waves)]
        if not ready:
            # Only memory operations of ended waves are left, or nothing at all goes on.
            if not any(self._drain(group) for group in groups):
                raise self._deadlock("every wave that has not ended stands at a barrier")
            return
        group = self._random.choice(ready)
        if group.starved and len(ready) > 1 and self._random.randrange(16):
            group = self._random.choice(ready)
        wave = self._random.choice([item for item in group.waves if item.state == "running"])
        if self._random.randrange(group.patience) == 0:
            self._settle(group)
        self._run_wave(wave, self._random.choice(QUANTA))
        if wave.state != "running":
            group.release_barrier()

    def _settle(self, group: Workgroup) -> None:
        """Let some outstanding operations take effect: none stays outstanding for ever."""
        for access in [item for item in group.outstanding if self._random.random() < 0.5]:
            perform(group.waves[0], access)
        if self._random.random() < 0.5:
            group.cache.write_back("system")

    @staticmethod
    def _drain(group: Workgroup) -> bool:
        """Complete what ended waves left outstanding."""
        ended = [wave for wave in group.waves if wave.state == "done" and (wave.vm or wave.lgkm)]
        for wave in ended:
            while wave.vm:
                complete(wave, wave.vm.popleft())
            wave.lgkm.clear()
        return bool(ended)

    def _run_wave(self, wave: Wave, quantum: int) -> None:
        program = wave.group.program
        steps, touched, pc, done = program.steps, program.touched, wave.pc, 0
        try:
            while done < quantum:
                if wave.pending and wave.pending & touched[pc]:
                    raise PendingRegisterFault("uses a register whose load has not been waited for")
                following = steps[pc](wave)
                done += 1
                if following is None:
                    pc += 1
                elif following >= 0:
                    pc = following
                else:
                    pc = ~following
                    break
        except ExecutionFault as fault:
            raise fault.located(f"{wave.name} at {program.describe(pc)}") from None
        finally:
            wave.pc = pc
            wave.steps += done
            self.steps += done

    def _retire(self, launch: Launch) -> None:
        for group in [item for item in launch.resident if all(wave.state == "done" for wave in item.waves)]:
            # The stores of an ended wave become visible at last when the kernel ends, or when they feel like it.
            if (
                launch.done
                or not group.outstanding
                or self._random.randrange(group.patience) == 0
                or not self._others(launch, group)
            ):
                self._drain(group)
                launch.resident.remove(group)
                launch.caches.append(group.cache)
        if launch.done:
            for cache in launch.caches:
                cache.write_back("system")
            self._queues[launch.rank].remove(launch)

    @staticmethod
    def _others(launch: Launch, group: Workgroup) -> bool:
        return any(wave.state != "done" for other in launch.resident if other is not group for wave in other.waves)

    def _deadlock(self, message: str) -> DeadlockError:
        lines = [
            f"{wave.name}: {wave.state} at {wave.group.program.describe(wave.pc)}"
            for queue in self._queues.values()
            for launch in queue[:1]
            for group in launch.resident
            for wave in group.waves
            if wave.state != "done"
        ]
        return DeadlockError(
            message, waves=tuple(lines), hint="a flag that is never raised, or a barrier not all reach"
        )
