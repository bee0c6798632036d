"""Ranks as threads of one process, on CPU memory."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megamoe.errors import MegaMoETimeoutError, WorkspaceError
from megamoe.symm.base import Group, SymmetricBuffer


@dataclass(kw_only=True)
class _Meeting:
    """One collective: what each rank brought; None where it has not come yet."""

    brought: list[object]
    num_left: int = 0

    def missing(self) -> int | None:
        """The lowest rank that has not come."""
        return next((rank for rank, value in enumerate(self.brought) if value is None), None)


@dataclass(kw_only=True)
class _World:
    """What the threads share. The n-th collective of each rank is the same meeting."""

    size: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    meetings: dict[int, _Meeting] = field(default_factory=dict)


class InprocGroup(Group):
    """One rank of a group of threads; `create` makes all of them."""

    def __init__(self, world: _World, rank: int) -> None:
        super().__init__(rank, world.size)
        self._world = world
        self._num_meetings = 0

    @classmethod
    def create(cls, size: int) -> list[InprocGroup]:
        """A group of `size` ranks; give each thread its own."""
        world = _World(size=size)
        return [cls(world, rank) for rank in range(size)]

    def allocate(self, num_bytes: int, *, timeout_s: float) -> SymmetricBuffer:
        """See `Group.allocate`."""
        try:
            own: Tensor | str = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:  # torch's allocator; the others must not wait for this rank
            own = str(error).splitlines()[0]
        ranks: list[Tensor] = []
        for rank, memory in enumerate(self._meet(own, timeout_s, "allocate")):
            if not isinstance(memory, Tensor):
                raise WorkspaceError(f"rank {rank} can't allocate {num_bytes} bytes: {memory}")
            ranks.append(memory)
        return SymmetricBuffer(rank=self.rank, ranks=tuple(ranks))

    def _all_gather(self, data: bytes, timeout_s: float, phase: str) -> list[bytes]:
        return [value for value in self._meet(data, timeout_s, phase) if isinstance(value, bytes)]

    def _meet(self, value: object, timeout_s: float, phase: str) -> list[object]:
        world, number = self._world, self._num_meetings
        self._num_meetings += 1
        deadline = time.monotonic() + timeout_s
        with world.changed:
            meeting = world.meetings.setdefault(number, _Meeting(brought=[None] * world.size))
            meeting.brought[self.rank] = value
            world.changed.notify_all()
            while (late := meeting.missing()) is not None:
                if not world.changed.wait(max(0.0, deadline - time.monotonic())):
                    raise MegaMoETimeoutError(
                        rank=self.rank, peer=late, phase=phase, timeout_s=timeout_s, epoch=0, index=number
                    )
            meeting.num_left += 1
            if meeting.num_left == world.size:
                del world.meetings[number]
            return list(meeting.brought)

    def dead_peers(self) -> frozenset[int]:
        """None: a thread dies only with the whole process."""
        return frozenset()

    def close(self) -> None:
        """Nothing to give back: the buffers belong to their tensors."""
