"""Run a layer's launches (`megamoe_rocm.kernels.launch`) in the interpreter, on tensors of this process.

Tensors become buffers in place: the kernels read and write the tensors' own memory. A rank's workspace becomes one
buffer an array, so that an access that leaves its array faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megamoe.schedule.workspace import Array
from megamoe_rocm.aot.code_object import CodeObject
from megamoe_rocm.code_store import code_key, find_or_compile
from megamoe_rocm.isa import host_memory
from megamoe_rocm.isa.address_space import Buffer
from megamoe_rocm.isa.errors import LaunchArgumentsError
from megamoe_rocm.isa.machine import DEFAULT_MAX_STEPS, Machine
from megamoe_rocm.isa.program import Argument, Program
from megamoe_rocm.kernels.launch import Launch


class Programs:
    """Decoded kernels, by what they were compiled for.

    Args:
        find: the code object of a launch, such as `CodeStore.find`; compiled by default.
    """

    def __init__(self, find: Callable[[Launch], CodeObject] = find_or_compile) -> None:
        self._find = find
        self._programs: dict[str, Program] = {}

    def get(self, launch: Launch) -> Program:
        """The program of a launch."""
        key = code_key(launch)
        if key not in self._programs:
            self._programs[key] = Program.load(self._find(launch))
        return self._programs[key]

    def loaded(self) -> tuple[Program, ...]:
        """All programs, in the order of their first launches."""
        return tuple(self._programs.values())

    def with_other(self, program: Program, other: Program) -> Programs:
        """The same programs with one replaced, as for a run without one of its instructions."""
        copy = Programs(self._find)
        copy._programs = {key: other if value is program else value for key, value in self._programs.items()}
        return copy


class Device:
    """The devices of some ranks, emulated together.

    Args:
        num_ranks: how many.
        seed: of the schedule and everything else that is left open.
        programs: shared between devices, to compile once.
        max_resident: workgroups of a launch that are on a device together; all by default.

    `executed` has the code objects of all launches.
    """

    def __init__(
        self, *, num_ranks: int, seed: int = 0, programs: Programs | None = None, max_resident: int | None = None
    ) -> None:
        self.machine = Machine(num_ranks=num_ranks, seed=seed)
        self.executed: dict[str, CodeObject] = {}  # by SHA-256
        self._programs = programs or Programs()
        self._max_resident = max_resident
        self._addresses: dict[int, tuple[int, Tensor]] = {}  # a storage's address here -> in the interpreter
        self._arguments: dict[int, Buffer] = {}  # of these, the ones that are no workspace

    def workspace(self, *, rank: int, num_bytes: int, arrays: Iterable[Array]) -> Tensor:
        """Allocate a rank's workspace, mapped for all ranks: uint8, zeroed.

        Its address is the same for the host and for the kernels, so that the host may store addresses in memory.

        Args:
            rank: whose.
            num_bytes: its size.
            arrays: its arrays; bytes between them can't be used by kernels.
        """
        tensor = torch.from_numpy(host_memory.allocate(num_bytes))
        self.adopt(tensor, rank=rank, arrays=arrays)
        return tensor

    def adopt(self, workspace: Tensor, *, rank: int, arrays: Iterable[Array]) -> None:
        """Map the workspace of a rank, made by `workspace` of another device, for all ranks."""
        data: NDArray[np.uint8] = workspace.numpy()
        address = data.ctypes.data
        everyone = frozenset(range(self.machine.num_ranks))
        for item in arrays:
            if item.num_bytes:
                part = data[item.offset : item.offset + item.num_bytes]
                self.machine.memory.place(
                    name=item.name,
                    rank=rank,
                    data=part,
                    num_bytes=part.size,
                    ranks=everyone,
                    address=address + item.offset,
                )
        self._addresses[address] = (address, workspace)

    def launch(self, launch: Launch, *, rank: int) -> None:
        """Queue one launch behind the rank's earlier ones."""
        arguments: dict[str, Argument] = {}
        for name, value in launch.arguments.items():
            arguments[name] = self._address(value, name, rank) if isinstance(value, Tensor) else value
        x, y, z = (*launch.grid, 1, 1)[:3]
        program = self._programs.get(launch)
        self.executed[program.code.sha256] = program.code
        self.machine.launch(program, grid=(x, y, z), arguments=arguments, rank=rank, max_resident=self._max_resident)

    def run(self, launches: Sequence[Sequence[Launch]], *, max_steps: int = DEFAULT_MAX_STEPS) -> int:
        """Run each rank's launches in order, all ranks at the same time; returns the number of instructions."""
        for rank, items in enumerate(launches):
            for item in items:
                self.launch(item, rank=rank)
        return self.machine.run(max_steps=max_steps)

    def _address(self, tensor: Tensor, name: str, rank: int) -> int:
        key = tensor.untyped_storage().data_ptr()
        if key not in self._addresses:
            data = _storage(tensor)
            if not data.size:
                return 0  # an empty tensor: any access faults
            memory = self.machine.memory
            address = memory.reserve(data.size)
            nobody: frozenset[int] = frozenset()
            buffer = memory.place(name=name, rank=rank, data=data, num_bytes=data.size, ranks=nobody, address=address)
            self._addresses[key], self._arguments[key] = (address, tensor), buffer
        if key in self._arguments:  # who is handed a tensor may use it
            self._arguments[key].ranks |= {rank}
        address = self._addresses[key][0] + int(tensor.storage_offset()) * tensor.element_size()
        if address % 16:
            raise LaunchArgumentsError(f"the tensor {name} is not aligned to 16 bytes", got=hex(address))
        return address


def _storage(tensor: Tensor) -> NDArray[np.uint8]:
    """All bytes of a tensor's storage, as a view."""
    data: NDArray[np.uint8] = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    return data
