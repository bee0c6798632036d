"""Symmetric memory from Mori, AMD's symmetric-memory library.

The kernels hold no Mori call: what they need is memory that peers can address, and a table of base addresses. Mori is
initialised from a unique id that rank 0 hands to the others, or joined where the process has initialised it already,
whoever did it. It stays initialised until the process ends: finalizing is collective and would take it from whoever
else uses it.

Facts, amd-mori 1.2.4 (mori/shmem/api.py; docs/MORI-SHMEM-GUIDE.md and src/shmem of ROCm/mori):

- `shmem_init_attr(flags, rank, nranks, unique_id)` returns 0 for success; `shmem_get_unique_id()` 128 bytes.
- MORI_SHMEM_HEAP_SIZE, bytes or with a suffix M or G, is read when Mori is initialised and bounds what is allocated.
- `shmem_malloc(size)` returns an address, 0 where the heap is exhausted; the memory is not initialised, and caches of
  the GPU do not keep it (the heap is hipDeviceMallocUncached). Ranks must allocate the same sizes in the same order.
- `shmem_ptr_p2p(pointer, my_pe, pe)` is 0 where only RDMA leads to `pe`.
- Nothing public says whether it is initialised, and asking for anything else before it is ends the process: both ways
  to initialise it first note the device in `mori.shmem.api._shmem_module_loaded_gpus`, `shmem_finalize` takes it out.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, ClassVar

import torch
from torch import Tensor

from megamoe.errors import BackendUnavailableError, ConfigError, MegaMoEError, WorkspaceError
from megamoe.schedule.tiles import round_up
from megamoe.symm import Group, SymmetricBuffer
from megamoe.symm.agreement import Ranks, agree

HEAP_SIZE = "MORI_SHMEM_HEAP_SIZE"
HEAP_CHUNK = 64 << 20  # bytes; the granularity of Mori's heap, by default
SESSIONS = 2  # sessions of the first one's size that the heap is made for: reset, taps and a second one need room
HEAP_OF_MANY_SESSIONS = "32G"  # for a process that opens sessions of all sizes, as a run of the conformance matrix
ALIGNMENT = 256  # bytes; what Mori aligns to


class MoriGroup(Group):
    """One rank of a group, with memory from Mori's heap.

    Args:
        ranks: to meet on, a torch process group's (`ProcessGroupRanks`) or any other's: they hand each other the unique
            id. They are all of Mori's PEs, in any order.
        device: this rank's GPU.
        heap_bytes: that each session allocates; sizes the heap, unless MORI_SHMEM_HEAP_SIZE does.
        timeout_s: seconds to wait for the other ranks while Mori is initialised.

    Raises:
        BackendUnavailableError: Mori is missing or does not start; raised on every rank.
        ConfigError: Mori is initialised already, for other ranks than these.
    """

    if_a_rank_died: ClassVar[str] = "restart the processes of all ranks: Mori does not go on without one of them"

    def __init__(self, ranks: Ranks, device: torch.device, *, heap_bytes: int, timeout_s: float) -> None:
        """COLLECTIVE."""
        super().__init__(ranks.rank, ranks.size)
        self._meeting = ranks
        self._device = device
        self._addresses: dict[int, int] = {}  # id of a buffer -> its address here
        self._shmem: Any = agree(self, "load Mori", _load, timeout_s=timeout_s)
        joined = self._is_initialized()
        states = self.all_gather(bytes([joined]), timeout_s=timeout_s, phase="look at Mori")
        if len(set(states)) > 1:
            raise ConfigError("Mori is initialised on some ranks of the group and not on others")
        if not joined:
            self._initialize(heap_bytes, timeout_s)
        self._pes = self._find_pes(timeout_s)

    def _is_initialized(self) -> bool:
        return self._device.index in importlib.import_module("mori.shmem.api")._shmem_module_loaded_gpus

    def _initialize(self, heap_bytes: int, timeout_s: float) -> None:
        os.environ.setdefault(HEAP_SIZE, str(heap_size(heap_bytes)))
        uid = agree(
            self,
            "make Mori's unique id",
            lambda: self._shmem.shmem_get_unique_id() if self.rank == 0 else b"",
            timeout_s=timeout_s,
        )
        id_of_rank_0 = self.all_gather(uid, timeout_s=timeout_s, phase="share Mori's unique id")[0]

        def start() -> None:
            flags = self._shmem.MORI_SHMEM_INIT_WITH_UNIQUEID
            status = self._shmem.shmem_init_attr(flags, self.rank, self.size, id_of_rank_0)
            if status:
                raise BackendUnavailableError(
                    "Mori does not start",
                    got=f"status {status}",
                    hint=f"its log says why (MORI_GLOBAL_LOG_LEVEL=info); {HEAP_SIZE} was {os.environ[HEAP_SIZE]}",
                )

        agree(self, "initialise Mori", start, timeout_s=timeout_s)

    def _find_pes(self, timeout_s: float) -> list[int]:
        """Mori's number of every rank."""
        if self._shmem.shmem_npes() != self.size:
            raise ConfigError(
                "Mori was initialised for other ranks",
                got=f"{self._shmem.shmem_npes()} PEs",
                expected=f"the {self.size} ranks of this group",
                hint="its allocations are collectives over all PEs: open the session on the group that Mori has",
            )
        own = self._shmem.shmem_mype().to_bytes(4, "little")
        pes = self.all_gather(own, timeout_s=timeout_s, phase="number Mori's PEs")
        return [int.from_bytes(pe, "little") for pe in pes]

    def allocate(self, num_bytes: int, *, timeout_s: float) -> SymmetricBuffer:
        """COLLECTIVE. See `Group.allocate`; `free` gives the buffer back."""
        address = self._shmem.shmem_malloc(round_up(num_bytes, ALIGNMENT))

        def map_peers() -> SymmetricBuffer:
            if not address:
                raise WorkspaceError(
                    f"Mori's heap has no {num_bytes} bytes left",
                    got=f"{HEAP_SIZE}={os.environ.get(HEAP_SIZE, 'not set')}",
                    hint=f"set {HEAP_SIZE} before whoever initialises Mori first; a session takes "
                    "plan.workspace.symmetric_bytes",
                )
            ranks = tuple(self._peer(address, rank, num_bytes) for rank in range(self.size))
            return SymmetricBuffer(rank=self.rank, ranks=ranks)

        try:
            buffer = agree(self, "map the peers' memory", map_peers, timeout_s=timeout_s)
        except MegaMoEError:
            if address:
                self._shmem.shmem_free(address)
            raise
        self._addresses[id(buffer)] = address
        buffer.local.zero_()
        self._synchronize()
        self.barrier(timeout_s=timeout_s, phase="allocate")
        return buffer

    def _peer(self, address: int, rank: int, num_bytes: int) -> Tensor:
        peer_address = self._shmem.shmem_ptr_p2p(address, self._pes[self.rank], self._pes[rank])
        if not peer_address:
            raise BackendUnavailableError(
                f"no peer-to-peer path from rank {self.rank} to rank {rank}: Mori reaches it by RDMA only",
                hint="ranks must be GPUs of one host; look at `rocm-smi --showtopoaccess`, and unset MORI_DISABLE_P2P",
            )
        return bytes_at(peer_address, num_bytes, self._device)

    def free(self, buffer: SymmetricBuffer) -> None:
        """COLLECTIVE. Give back a buffer of `allocate`; its tensors must not be used any more."""
        self._synchronize()
        self._shmem.shmem_free(self._addresses.pop(id(buffer)))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _all_gather(self, data: bytes, timeout_s: float, phase: str) -> list[bytes]:
        return self._meeting.all_gather(data, timeout_s=timeout_s, phase=phase)

    def dead_peers(self) -> frozenset[int]:
        """None known: the process group notices a death only in its own collectives."""
        return frozenset()

    def close(self) -> None:
        """Mori stays initialised; see the top of this file."""


def heap_size(session_bytes: int) -> int:
    """Bytes of a heap for sessions of this size."""
    return SESSIONS * round_up(session_bytes + ALIGNMENT, HEAP_CHUNK)


def bytes_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """uint8 `[num_bytes]` over memory that Mori owns, as `device` addresses it.

    Not through `__cuda_array_interface__`: torch asks the driver whose memory it is, hears the peer's GPU, and copies.
    """
    storage = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))


def _load() -> Any:
    try:
        return importlib.import_module("mori.shmem")
    except (ImportError, OSError) as error:  # OSError where ROCm's libraries are missing
        raise BackendUnavailableError(
            f"Mori can't be loaded: {type(error).__name__}: {error}",
            hint="pip install megamoe-rocm[mori]; an OSError means that it misses ROCm's libraries",
        ) from error
