"""Symmetric memory from NVSHMEM, through nvshmem4py.

The kernel holds no NVSHMEM call: what it needs is memory that peers can address, and a table of base pointers. NVSHMEM
is initialised from a torch process group (rank 0's unique id is broadcast), or joined where the process has initialised
it already, whoever did it. It stays initialised until the process ends: finalizing is collective and would take it from
whoever else uses it.

Facts, nvshmem4py 0.4.1: `core.init` with method "uid" wants the current device, rank and number of ranks; `malloc` and
`free` are collectives over all PEs; `ptr(address, pe)` is 0 where there is no peer-to-peer path.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.errors import BackendUnavailableError, ConfigError, WorkspaceError
from megamoe.symm import Group, SymmetricBuffer
from megamoe.symm.agreement import ProcessGroupRanks, agree

ALIGNMENT = 1024  # bytes; arrays of a workspace start at multiples of it


def is_installed() -> bool:
    """Whether nvshmem4py can be found; imports nothing."""
    found = importlib.util.find_spec("nvshmem")
    return found is not None and found.origin is not None  # a mere folder of that name has no origin


class NvshmemGroup(Group):
    """One rank of a process group, with memory from NVSHMEM's symmetric heap.

    Args:
        process_group: carries the collectives; its ranks are all of NVSHMEM's PEs, in any order.
        device: this rank's GPU.
        timeout_s: seconds to wait for the other ranks while NVSHMEM is initialised.

    Raises:
        BackendUnavailableError: nvshmem4py or NVSHMEM is missing or does not start; raised on every rank.
        ConfigError: NVSHMEM is initialised already, for other ranks than those of `process_group`.
    """

    if_a_rank_died: ClassVar[str] = "restart the processes of all ranks: NVSHMEM does not go on without one of them"

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, *, timeout_s: float) -> None:
        """COLLECTIVE."""
        super().__init__(dist.get_rank(process_group), dist.get_world_size(process_group))
        self._meeting = ProcessGroupRanks(process_group)
        self._device = device
        self._addresses: dict[int, int] = {}  # id of a buffer -> its address here
        self._core, self._bindings = agree(self, "load NVSHMEM", _load, timeout_s=timeout_s)
        joined = agree(self, "look at NVSHMEM", self._is_initialized, timeout_s=timeout_s)
        states = self.all_gather(bytes([joined]), timeout_s=timeout_s, phase="look at NVSHMEM")
        if len(set(states)) > 1:
            raise ConfigError("NVSHMEM is initialised on some ranks of the group and not on others")
        if not joined:
            self._initialize(timeout_s)
        self._pes = self._find_pes(timeout_s)

    def _is_initialized(self) -> bool:
        return bool(self._bindings.init_status() >= self._bindings.Init_status.STATUS_IS_INITIALIZED)

    def _initialize(self, timeout_s: float) -> None:
        uid = agree(
            self, "make NVSHMEM's unique id", lambda: self._core.get_unique_id(empty=self.rank > 0), timeout_s=timeout_s
        )
        own = ctypes.string_at(uid.ptr, uid._data.nbytes)
        id_of_rank_0 = self.all_gather(own, timeout_s=timeout_s, phase="share NVSHMEM's unique id")[0]
        ctypes.memmove(uid.ptr, id_of_rank_0, len(id_of_rank_0))

        def start() -> None:
            device = importlib.import_module("cuda.core").Device(self._device.index)
            device.set_current()
            self._core.init(device=device, uid=uid, rank=self.rank, nranks=self.size, initializer_method="uid")

        agree(self, "initialise NVSHMEM", start, timeout_s=timeout_s)

    def _find_pes(self, timeout_s: float) -> list[int]:
        """NVSHMEM's number of every rank."""
        if self._bindings.n_pes() != self.size:
            raise ConfigError(
                "NVSHMEM was initialised for other ranks",
                got=f"{self._bindings.n_pes()} PEs",
                expected=f"the {self.size} ranks of this process group",
                hint="its allocations are collectives over all PEs: open the session on the group that NVSHMEM has, or "
                "use PyTorch symmetric memory (megamoe.symm.torch_symm.TorchSymmGroup)",
            )
        own = self._bindings.my_pe().to_bytes(4, "little")
        pes = self.all_gather(own, timeout_s=timeout_s, phase="number NVSHMEM's PEs")
        return [int.from_bytes(pe, "little") for pe in pes]

    def allocate(self, num_bytes: int, *, timeout_s: float) -> SymmetricBuffer:
        """COLLECTIVE. See `Group.allocate`; `free` gives the buffer back."""
        agree(self, "allocate symmetric memory", lambda: self._check_free(num_bytes), timeout_s=timeout_s)
        address = self._bindings.align(ALIGNMENT, num_bytes)

        def map_peers() -> SymmetricBuffer:
            if not address:
                raise WorkspaceError(
                    f"NVSHMEM can't allocate {num_bytes} bytes",
                    hint="NVSHMEM_SYMMETRIC_SIZE bounds its heap where NVSHMEM_DISABLE_CUDA_VMM=1 is set",
                )
            return SymmetricBuffer(
                rank=self.rank, ranks=tuple(self._peer(address, rank, num_bytes) for rank in range(self.size))
            )

        buffer = agree(self, "map the peers' memory", map_peers, timeout_s=timeout_s)
        self._addresses[id(buffer)] = address
        buffer.local.zero_()
        torch.cuda.synchronize(self._device)
        self.barrier(timeout_s=timeout_s, phase="allocate")
        return buffer

    def _check_free(self, num_bytes: int) -> None:
        """Raise before the collective allocation where this GPU can't hold it: inside, peers would wait."""
        free, _ = torch.cuda.mem_get_info(self._device)
        if free < num_bytes:
            torch.cuda.empty_cache()  # what torch keeps for itself is of no use to NVSHMEM
            free, _ = torch.cuda.mem_get_info(self._device)
        if free < num_bytes:
            raise WorkspaceError("out of GPU memory", got=f"{free} bytes free", expected=f"{num_bytes} bytes")

    def _peer(self, address: int, rank: int, num_bytes: int) -> Tensor:
        peer_address = self._bindings.ptr(address, self._pes[rank])
        if not peer_address:
            raise BackendUnavailableError(
                f"no peer-to-peer path from rank {self.rank} to rank {rank}: NVSHMEM can't map its memory",
                hint="look at `nvidia-smi topo -p2p r`",
            )
        return bytes_at(peer_address, num_bytes, self._device)

    def free(self, buffer: SymmetricBuffer) -> None:
        """COLLECTIVE. Give back a buffer of `allocate`; its tensors must not be used any more."""
        torch.cuda.synchronize(self._device)
        self._bindings.free(self._addresses.pop(id(buffer)))

    def _all_gather(self, data: bytes, timeout_s: float, phase: str) -> list[bytes]:
        return self._meeting.all_gather(data, timeout_s=timeout_s, phase=phase)

    def dead_peers(self) -> frozenset[int]:
        """None known: the process group notices a death only in its own collectives."""
        return frozenset()

    def close(self) -> None:
        """NVSHMEM stays initialised; see the top of this file."""


def bytes_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """uint8 `[num_bytes]` over memory that NVSHMEM owns, as `device` addresses it.

    Not through `__cuda_array_interface__`: torch asks the driver whose memory it is, hears the peer's GPU, and copies.
    """
    storage = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))


def _load() -> tuple[Any, Any]:
    """nvshmem.core and nvshmem.bindings, with the host library loaded."""
    try:
        core = importlib.import_module("nvshmem.core")
        bindings = importlib.import_module("nvshmem.bindings")
        core.get_version()  # loads libnvshmem_host
    except Exception as error:  # a missing package, a library that is not found, a symbol that it lacks
        raise BackendUnavailableError(
            f"NVSHMEM can't be loaded: {type(error).__name__}: {error}",
            hint="pip install nvshmem4py-cu13 (or -cu12), or use PyTorch symmetric memory "
            "(megamoe.symm.torch_symm.TorchSymmGroup)",
        ) from error
    return core, bindings
