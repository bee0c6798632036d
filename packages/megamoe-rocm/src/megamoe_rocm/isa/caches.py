"""What a workgroup sees of memory that others write, and when others see what it writes.

The caches of a device are modelled by what they may do at worst, as if each workgroup had one to itself:

- a plain load (or a scalar one) may give bytes as they were at any time since the workgroup's last `buffer_inv` of
  agent or system scope; a scalar load, since the kernel started. Loads with `sc1` give them as they are;
- a plain store is seen by other workgroups only after a `buffer_wbl2` of its workgroup, or at the kernel's end, or when
  the line happens to be evicted. Stores with `sc1` are seen at once; on another rank's memory only with `sc0 sc1`, or
  after a write-back with both;
- a workgroup sees the words that it stored itself, and those on which its atomics acted, which they do in memory; words
  beside them may still be old.

Whether the scope of an invalidate suffices for what another *rank* wrote is not told apart here; `megamoe_rocm.aot`
looks at those bits.

Source: LLVM AMDGPUUsage, "Memory Model GFX942"; AMD CDNA3 ISA document, "Memory scopes".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megamoe_rocm.isa.address_space import Lanes, Snapshot
from megamoe_rocm.isa.wave import Array

if TYPE_CHECKING:
    from megamoe_rocm.isa.address_space import AddressSpace

Moments = dict[int, Snapshot]  # by the buffers' addresses


class Cache:
    """One workgroup's.

    Args:
        memory: what lies behind.
        rank: whose device it is on.
        started: memory as it was when the kernel started.
        decide_stale: whether a load that may be stale is.
    """

    def __init__(self, *, memory: AddressSpace, rank: int, started: Moments, decide_stale: Callable[[], bool]) -> None:
        self._memory = memory
        self._rank = rank
        self._started = started
        self._oldest = started
        self._decide_stale = decide_stale
        self._dirty: list[tuple[Lanes, Array]] = []
        # Which words of a buffer the workgroup itself wrote since it last invalidated, by the buffer's address.
        self._own: dict[int, NDArray[np.bool_]] = {}

    def load(self, part: Lanes, scope: str) -> Array:
        """What a load of a scope gives."""
        self._expose(part)
        address = part.buffer.address
        now = part.load(part.buffer)
        if scope != "workgroup" or address not in self._oldest or not self._decide_stale():
            return now
        old = part.load(self._oldest[address])
        own = self._own.get(address)
        if own is None:
            return old
        mixed: Array = np.where(own[part.indices] if part.aligned else own[part.indices >> 2][:, :1], now, old)
        return mixed

    def load_scalar(self, address: int, first: int, count: int) -> Array:
        """Words of the buffer at `address` through the scalar cache."""
        stale = self._started.get(address)
        words = stale.words if stale is not None and self._decide_stale() else self._memory.at(address).words
        return words[first : first + count]

    def store(self, part: Lanes, content: Array, scope: str) -> None:
        """Take a store of a scope."""
        self._own_up(part)
        if scope == "system" or (scope == "agent" and part.buffer.rank == self._rank):
            self._expose(part)
            part.store(content)
        else:
            self._dirty.append((part, content))

    def touch(self, part: Lanes) -> None:
        """Make ready for an atomic."""
        self._own_up(part)
        self._expose(part)

    def write_back(self, scope: str) -> None:
        """Let others see what was stored: all of it, or, at agent scope, what is in this rank's memory."""
        kept = []
        for part, content in self._dirty:
            if scope == "system" or part.buffer.rank == self._rank:
                part.store(content)
            else:
                kept.append((part, content))
        self._dirty = kept

    def invalidate(self) -> None:
        """Forget everything that was read."""
        self._oldest = self._memory.snapshot()
        self._own = {}
        for part, _ in self._dirty:
            self._own_up(part)

    def _own_up(self, part: Lanes) -> None:
        """Note which words are the workgroup's own."""
        own = self._own.get(part.buffer.address)
        if own is None:
            own = self._own[part.buffer.address] = np.zeros(-(-part.buffer.data.size // 4), np.bool_)
        own[part.indices if part.aligned else part.indices >> 2] = True

    def _expose(self, part: Lanes) -> None:
        """Evict what the workgroup stored there and has not written back."""
        last = max((at for at, (mine, _) in enumerate(self._dirty) if mine.overlaps(part)), default=-1)
        # What was stored before it as well: stores to the same bytes keep their order.
        for earlier, content in self._dirty[: last + 1]:
            earlier.store(content)
        del self._dirty[: last + 1]
