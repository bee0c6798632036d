"""Ranks as GPUs of one machine, through torch.distributed._symmetric_memory.

The process group carries the collectives, with its own timeout; peers' buffers are mapped over NVLink or PCIe.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from megamoe import env
from megamoe.errors import BackendUnavailableError, ConfigError, WorkspaceError
from megamoe.symm.base import Group, SymmetricBuffer


class TorchSymmGroup(Group):
    """One rank of a `torch.distributed` process group on GPUs.

    Args:
        process_group: with a backend that gathers objects (nccl or gloo).
        device: this rank's GPU.

    Raises:
        BackendUnavailableError: this machine or build of torch has no GPU or no symmetric memory.
        ConfigError: a device that is not a GPU.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(dist.get_rank(process_group), dist.get_world_size(process_group))
        if device.type != "cuda":
            raise ConfigError("symmetric GPU memory is for GPUs", got=device, expected="a cuda device")
        if not torch.cuda.is_available():
            raise BackendUnavailableError("torch sees no GPU here", hint="use ShmGroup for CPU processes")
        self._process_group = process_group
        self._device = device

    def allocate(self, num_bytes: int, *, timeout_s: float) -> SymmetricBuffer:
        """See `Group.allocate`. `timeout_s` bounds the meeting only; mapping follows the process group's timeout."""
        import torch.distributed._symmetric_memory as symm_mem

        if env.ranks_per_gpu() > 1:
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # torch has the same check, read at rendezvous
        failure = ""
        try:
            local = symm_mem.empty(num_bytes, dtype=torch.uint8, device=self._device).zero_()
        except RuntimeError as error:  # out of memory, or no symmetric allocator
            failure = str(error).splitlines()[0]
        for rank, report in enumerate(self.all_gather(failure.encode(), timeout_s=timeout_s, phase="allocate")):
            if report:
                raise WorkspaceError(f"rank {rank} can't allocate {num_bytes} bytes: {report.decode()}")
        handle: Any = symm_mem.rendezvous(local, self._process_group.group_name)
        if handle is None:
            raise WorkspaceError(
                "the GPUs of this group can't map each other's memory", hint="see nvidia-smi topo -p2p r"
            )
        peers = (handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(self.size))
        ranks = tuple(local if rank == self.rank else peer for rank, peer in enumerate(peers))
        torch.cuda.synchronize(self._device)
        self.barrier(timeout_s=timeout_s, phase="allocate")
        return SymmetricBuffer(rank=self.rank, ranks=ranks)

    def _all_gather(self, data: bytes, timeout_s: float, phase: str) -> list[bytes]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, data, group=self._process_group)
        return gathered

    def dead_peers(self) -> frozenset[int]:
        """None known: the process group notices a death only in its own collectives."""
        return frozenset()

    def close(self) -> None:
        """The process group is the caller's; nothing to give back."""
