"""A workgroup: its waves, its barrier, its LDS with a record of who used which bytes since the last barrier.

Source: AMD CDNA4 ISA, "Data share operations" and S_BARRIER.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megamoe_rocm.isa.accesses import Access
from megamoe_rocm.isa.caches import Cache, Moments
from megamoe_rocm.isa.errors import LdsRaceFault, MemoryFault
from megamoe_rocm.isa.wave import Array, Wave

if TYPE_CHECKING:
    from megamoe_rocm.isa.machine import Machine
    from megamoe_rocm.isa.program import Program

SLOTS = 32  # a workgroup has at most 16 waves; the rest of an epoch's numbers mean "several"
SEVERAL = SLOTS - 1
IN_FLIGHT = np.int64(1) << 62  # a DMA into these bytes has been issued and not waited for


class LocalMemory:
    """One workgroup's LDS.

    Args:
        num_bytes: its size.
        granule: bytes that the record of uses keeps apart: the kernel's narrowest LDS access.
        content: initial bytes, at least `num_bytes`; random, for nothing may depend on them.
    """

    def __init__(self, *, num_bytes: int, granule: int, content: Array) -> None:
        size = -(-num_bytes // 16) * 16
        self.num_bytes = num_bytes
        self.granule = granule
        self.data = content[:size].copy()
        self.words = self.data.view(np.uint32)
        self.writers = np.full(size // granule + 1, -1, np.int64)
        self.readers = np.full(size // granule + 1, -1, np.int64)
        self.epoch = 0

    def check(self, addresses: Array, num_bytes: int) -> None:
        """Refuse bytes beyond the end."""
        if addresses.size and (int(addresses.max()) + num_bytes > self.num_bytes or int(addresses.min()) < 0):
            raise MemoryFault(
                f"LDS bytes {int(addresses.min())} to {int(addresses.max()) + num_bytes} of {self.num_bytes}"
            )

    def spans(self, addresses: Array, num_bytes: int) -> Array:
        """Granules that the lanes' bytes touch."""
        if num_bytes <= self.granule:
            return addresses // self.granule
        return addresses[:, None] // self.granule + np.arange(num_bytes // self.granule)

    def note_read(self, wave: int, spans: Array) -> None:
        """Record a read.

        Raises:
            LdsRaceFault: another wave wrote these bytes since the last barrier, or a DMA into them is under way.
        """
        now = self.epoch * SLOTS
        self._refuse(self.writers[spans], now, wave, "reads bytes that", "wrote")
        before = self.readers[spans]
        self.readers[spans] = np.where((before >= now) & (before != now + wave), now + SEVERAL, now + wave)

    def note_write(self, wave: int, spans: Array, *, in_flight: bool = False, changes: bool = True) -> None:
        """Record a write.

        Args:
            wave: who writes.
            spans: granules.
            in_flight: a DMA, until it is waited for.
            changes: whether any byte gets another value than it has. Waves may write the same values to the same bytes:
                compilers let waves that hold the same part of a tensor store it all.

        Raises:
            LdsRaceFault: another wave used these bytes since the last barrier.
        """
        now = self.epoch * SLOTS
        writers = self.writers[spans]
        if changes or in_flight:
            self._refuse(writers, now, wave, "writes bytes that", "wrote")
        self._refuse(self.readers[spans], now, wave, "writes bytes that", "read")
        shared = (writers >= now) & (writers != now + wave)
        self.writers[spans] = IN_FLIGHT if in_flight else np.where(shared, now + SEVERAL, now + wave)

    def note_landed(self, wave: int, spans: Array) -> None:
        """Record that a DMA was waited for."""
        self.writers[spans] = self.epoch * SLOTS + wave

    def _refuse(self, uses: Array, now: int, wave: int, does: str, did: str) -> None:
        bad = (uses >= now) & (uses != now + wave)
        if bad.any():
            other = int(uses[bad].max())
            if other >= IN_FLIGHT:
                raise LdsRaceFault(f"{does} a DMA is still filling, without a wait")
            who = "several waves" if other - now == SEVERAL else f"wave {other - now}"
            raise LdsRaceFault(f"{does} {who} {did}, without a barrier between")


class Workgroup:
    """One workgroup.

    Args:
        machine: that runs it.
        rank: on which rank's device.
        program: the kernel.
        coordinates: in the grid.
        lds: its local memory.
        started: global memory as it was when the kernel started.
    """

    def __init__(
        self,
        *,
        machine: Machine,
        program: Program,
        rank: int,
        coordinates: tuple[int, int, int],
        lds: LocalMemory,
        started: Moments,
    ) -> None:
        self.machine = machine
        self.program = program
        self.rank = rank
        self.name = f"rank {rank} {program.code.name} workgroup {coordinates}"
        self.lds = lds
        self.cache = Cache(memory=machine.memory, rank=rank, started=started, decide_stale=machine.decide_stale)
        self.waves: list[Wave] = []
        self.outstanding: list[Access] = []  # not yet taken effect, in issue order
        self.stores_outstanding = 0
        self.starved = False  # gets turns only rarely
        self.patience = 1  # one in so many turns lets outstanding operations take effect

    def release_barrier(self) -> bool:
        """Let the waves go on if all that have not ended stand at the barrier."""
        alive = [wave for wave in self.waves if wave.state != "done"]
        if not alive or any(wave.state != "barrier" for wave in alive):
            return False
        self.lds.epoch += 1
        for wave in alive:
            wave.state = "running"
            for access in (*wave.lgkm, *wave.vm):
                # Not waited for, so it may as well happen only now, after the barrier.
                if access.lds_again is not None:
                    access.lds_again()
        return True
