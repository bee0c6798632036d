"""Global memory: registered buffers at 64-bit addresses, each owned by a rank and usable by some ranks.

Buffers lie far apart, and across 4 GiB boundaries where they are small enough: an address computed in 32 bits, a
dropped carry or an index beyond the end hits no buffer and faults.
"""

from __future__ import annotations

from bisect import bisect_right
from weakref import ReferenceType, ref

import numpy as np
from numpy.typing import NDArray

from megamoe_rocm.isa.errors import MemoryFault
from megamoe_rocm.isa.wave import Array

FIRST_ADDRESS = 0x7F00_0000_0000
SPACING = 1 << 32


def words_of(data: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The whole words of some bytes, as a view."""
    return data[: data.size // 4 * 4].view(np.uint32)


class Snapshot:
    """A buffer's bytes at one moment; they are copied only when the buffer is written afterwards.

    Args:
        buffer: whose.
    """

    __slots__ = ("__weakref__", "data", "words")

    def __init__(self, buffer: Buffer) -> None:
        self.data = buffer.data
        self.words = buffer.words

    def keep(self) -> None:
        """The buffer is about to change: copy."""
        self.data = self.data.copy()
        self.words = words_of(self.data)


class Buffer:
    """One allocation.

    Args:
        name: for messages.
        rank: the owner.
        ranks: who may use it; the owner always does.
        address: of the first byte.
        data: its bytes, uint8; at least `num_bytes`.
        num_bytes: how many of them belong to the buffer.
        changes: the address space's count of writes.
    """

    __slots__ = ("_moment", "address", "changes", "data", "name", "num_bytes", "rank", "ranks", "words")

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        ranks: frozenset[int],
        address: int,
        data: NDArray[np.uint8],
        num_bytes: int,
        changes: list[int],
    ) -> None:
        self.name = name
        self.rank = rank
        self.ranks = ranks | {rank}
        self.address = address
        self.data = data
        self.words = words_of(data)
        self.num_bytes = num_bytes
        self.changes = changes
        self._moment: ReferenceType[Snapshot] | None = None

    def snapshot(self) -> Snapshot:
        """The bytes as they are now."""
        moment = self._moment() if self._moment is not None else None
        if moment is None:
            moment = Snapshot(self)
            self._moment = ref(moment)
        return moment

    def about_to_change(self) -> None:
        """To be called before each write."""
        self.changes[0] += 1
        if self._moment is not None:
            moment = self._moment()
            if moment is not None:
                moment.keep()
            self._moment = None

    def read(self, dtype: object = np.uint8) -> Array:
        """A copy of the content as a flat array of `dtype`."""
        return self.data[: self.num_bytes].copy().view(dtype)  # type: ignore[call-overload, no-any-return]

    def write(self, values: Array) -> None:
        """Replace the content from its start on."""
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        self.about_to_change()
        self.data[: raw.size] = raw

    def __repr__(self) -> str:
        return f"{self.name} of rank {self.rank} ({self.num_bytes} bytes at {self.address:#x})"


class AddressSpace:
    """All buffers of all ranks."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._buffers: list[Buffer] = []
        self._next = FIRST_ADDRESS
        self._changes = [0]
        self._moments: tuple[int, dict[int, Snapshot]] = (-1, {})

    def snapshot(self) -> dict[int, Snapshot]:
        """All buffers as they are now, by their addresses."""
        if self._moments[0] != self._changes[0]:
            self._moments = (self._changes[0], {buffer.address: buffer.snapshot() for buffer in self._buffers})
        return self._moments[1]

    def at(self, address: int) -> Buffer:
        """The buffer that starts at `address`."""
        return self._buffers[bisect_right(self._starts, address) - 1]

    def allocate(self, *, name: str, rank: int, num_bytes: int, ranks: frozenset[int]) -> Buffer:
        """A buffer of zeroed bytes, aligned to 4 KiB."""
        data = np.zeros(-(-num_bytes // 16) * 16, np.uint8)
        return self.place(
            name=name, rank=rank, data=data, num_bytes=num_bytes, ranks=ranks, address=self.reserve(num_bytes)
        )

    def reserve(self, num_bytes: int) -> int:
        """A free address, aligned to 4 KiB, far from all others."""
        # The 4 GiB boundary falls inside; a buffer of one page can't straddle it and ends there.
        before = -(-(num_bytes // 2) // 4096) * 4096
        address = self._next + SPACING - before
        self._next += SPACING * (2 + num_bytes // SPACING)
        return address

    def place(
        self, *, name: str, rank: int, data: NDArray[np.uint8], num_bytes: int, ranks: frozenset[int], address: int
    ) -> Buffer:
        """Make `data` a buffer at a reserved address, without a copy."""
        buffer = Buffer(
            name=name, rank=rank, ranks=ranks, address=address, data=data, num_bytes=num_bytes, changes=self._changes
        )
        self._changes[0] += 1
        at = bisect_right(self._starts, address)
        self._starts.insert(at, address)
        self._buffers.insert(at, buffer)
        return buffer

    def find(self, rank: int, first: int, end: int) -> Buffer:
        """The buffer that holds bytes `first` to `end` wholly.

        Raises:
            MemoryFault: none does, or it is not mapped for `rank`.
        """
        at = bisect_right(self._starts, first) - 1
        buffer = self._buffers[at] if at >= 0 else None
        if buffer is None or end > buffer.address + buffer.num_bytes:
            near = f"; the buffer below is {buffer}" if buffer is not None else ""
            raise MemoryFault(f"bytes {first:#x} to {end:#x} are in no buffer{near}")
        if rank not in buffer.ranks:
            raise MemoryFault(f"bytes {first:#x} to {end:#x} are in {buffer}, which rank {rank} has not mapped")
        return buffer


class Lanes:
    """Per-lane byte ranges of one buffer: what a vector memory instruction touches there.

    Args:
        buffer: where they are.
        offsets: byte offset in the buffer of each such lane.
        lanes: which lanes, as indices, or None for all 64.
        num_bytes: per lane.
    """

    __slots__ = ("buffer", "first", "indices", "lanes", "last", "num_bytes", "offsets")

    def __init__(self, buffer: Buffer, offsets: Array, lanes: Array | None, num_bytes: int) -> None:
        self.buffer = buffer
        self.offsets = offsets
        self.lanes = lanes
        self.num_bytes = num_bytes
        self.first = int(offsets.min())
        self.last = int(offsets.max()) + num_bytes
        whole = num_bytes % 4 == 0 and not (np.bitwise_or.reduce(offsets) & 3)
        # Word indices `[lane, word]` where everything is aligned, otherwise byte indices.
        if whole:
            self.indices = (offsets >> 2)[:, None] + WORDS[num_bytes // 4]
        else:
            self.indices = offsets[:, None] + BYTES[:num_bytes]

    def overlaps(self, other: Lanes) -> bool:
        """Whether some byte may be in both; exact up to gaps between lanes."""
        return self.buffer is other.buffer and self.first < other.last and other.first < self.last

    @property
    def aligned(self) -> bool:
        """Whether `indices` count words."""
        return self.num_bytes % 4 == 0 and self.indices.shape[1] * 4 == self.num_bytes

    def load(self, source: Buffer | Snapshot) -> Array:
        """`[lane, word]` uint32, as they are or were; the last word is zero-extended."""
        if self.aligned:
            words: Array = source.words[self.indices]
            return words
        raw = np.zeros((len(self.offsets), -(-self.num_bytes // 4) * 4), np.uint8)
        raw[:, : self.num_bytes] = source.data[self.indices]
        return raw.view(np.uint32)

    def store(self, values: Array) -> None:
        """Write `[lane, word]` uint32; where lanes overlap, the highest lane's bytes stay."""
        self.buffer.about_to_change()
        if self.aligned:
            self.buffer.words[self.indices] = values
        else:
            raw = np.ascontiguousarray(values).view(np.uint8)[:, : self.num_bytes]
            self.buffer.data[self.indices] = raw


BYTES = np.arange(16)
WORDS = [np.arange(count) for count in range(5)]


def resolve(space: AddressSpace, rank: int, addresses: Array, active: Array | None, num_bytes: int) -> list[Lanes]:
    """Split a vector access by buffer.

    Args:
        addresses: of all 64 lanes, int64.
        active: booleans, or None for all.
        num_bytes: per lane.

    Raises:
        MemoryFault: some lane's bytes are in no buffer of the rank.
    """
    lanes = None if active is None else np.flatnonzero(active)
    used = addresses if lanes is None else addresses[lanes]
    if used.size == 0:
        return []
    first, last = int(used.min()), int(used.max()) + num_bytes
    buffer = space.find(rank, first, first + num_bytes)
    if last <= buffer.address + buffer.num_bytes:
        return [Lanes(buffer, used - buffer.address, lanes, num_bytes)]
    parts: dict[int, tuple[Buffer, list[int]]] = {}
    for at, address in enumerate(used.tolist()):
        buffer = space.find(rank, address, address + num_bytes)
        parts.setdefault(buffer.address, (buffer, []))[1].append(at)
    numbers = np.arange(len(addresses)) if lanes is None else lanes
    return [Lanes(item, used[ats] - item.address, numbers[ats], num_bytes) for item, ats in parts.values()]
