"""What the protocol asks of a group of ranks: symmetric buffers, a meeting before and after, and who has died.

Memory order on CPU
    Flags are aligned 4-byte words that numpy stores and loads with one move each. On x86-64 a core's stores become
    visible in their order, and its loads are done in theirs, so a plain store is a release and a plain load an acquire;
    copies that use non-temporal stores (memcpy of large blocks) end with a store fence. Between the threads of one
    process the interpreter lock, which every one of these accesses holds, orders the rest on any machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megamoe.errors import SessionError


@dataclass(frozen=True, kw_only=True, eq=False)
class SymmetricBuffer:
    """The same number of bytes on every rank, zeroed, each mapped here.

    The memory goes when the last rank has dropped its tensors.

    Args:
        rank: whose `local` this is.
        ranks: uint8 `[num_bytes]` of every rank, in rank order.
    """

    rank: int
    ranks: tuple[Tensor, ...]

    @property
    def local(self) -> Tensor:
        """This rank's bytes."""
        return self.ranks[self.rank]

    def peer(self, rank: int) -> Tensor:
        """Bytes of `rank`, this one's own included; what is stored there is seen there."""
        return self.ranks[rank]


@dataclass(frozen=True, kw_only=True)
class PeerMemory:
    """Workspaces of all ranks, as one device addresses them, from whatever allocated them.

    Args:
        ranks: uint8 of every rank, in rank order.
        release: gives them back; collective where the provider's is.
    """

    ranks: tuple[Tensor, ...]
    release: Callable[[], None]


class Group(ABC):
    """Ranks that share memory. Collectives are called by every rank, in the same order.

    A collective that fails leaves the ranks at different places, so the group refuses all later ones.
    """

    if_a_rank_died: ClassVar[str] = "the others go on in a new session, on a new group without it"
    """What the ranks that are left can do; part of error messages."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._broken: str | None = None

    @abstractmethod
    def allocate(self, num_bytes: int, *, timeout_s: float) -> SymmetricBuffer:
        """COLLECTIVE. A zeroed buffer of `num_bytes` on every rank.

        Raises:
            WorkspaceError: some rank is out of memory; raised on every rank.
            MegaMoETimeoutError, RankFailedError: a rank did not come, or died.
        """

    @abstractmethod
    def _all_gather(self, data: bytes, timeout_s: float, phase: str) -> list[bytes]:
        """`all_gather` without the check for earlier failures."""

    def all_gather(self, data: bytes, *, timeout_s: float, phase: str) -> list[bytes]:
        """COLLECTIVE. Everybody's `data`, in rank order; for small things (at most 64 KiB).

        Args:
            data: this rank's.
            timeout_s: seconds to wait for the others.
            phase: what the ranks meet for; named when a wait times out.

        Raises:
            MegaMoETimeoutError, RankFailedError: a rank did not come, or died.
            SessionError: an earlier collective of this group failed.
        """
        if self._broken is not None:
            raise SessionError(
                f"this group can't be used any more: {self._broken}", hint="make a new group of the ranks that are left"
            )
        try:
            return self._all_gather(data, timeout_s, phase)
        except Exception as error:
            self._broken = str(error)
            raise

    def barrier(self, *, timeout_s: float, phase: str) -> None:
        """COLLECTIVE. Return once every rank has come; what they stored before is visible then."""
        self.all_gather(b"", timeout_s=timeout_s, phase=phase)

    @abstractmethod
    def dead_peers(self) -> frozenset[int]:
        """Ranks that can never answer again. Cheap; does not block."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group; buffers stay valid. Calling it again does nothing."""
