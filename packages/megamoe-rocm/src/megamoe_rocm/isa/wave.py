"""The state of one wave: registers, masks, what is outstanding.

Source: AMD CDNA4 ISA, "Program organization" and "Kernel state".
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from megamoe_rocm.isa.accesses import Access
    from megamoe_rocm.isa.workgroup import Workgroup

Array = NDArray[Any]

LANES = 64
NUM_SGPRS = 128
NUM_VGPRS = 512  # v0 to v255, then a0 to a255
FIRST_AGPR = 256
VCC, M0, EXEC = 106, 124, 126  # where the scalar operands' encoding puts them
ALL_LANES = (1 << LANES) - 1
SGPR_BIT = NUM_VGPRS  # bit of s0 in a register set; vector registers come first


def lanes_of(mask: int) -> NDArray[np.bool_]:
    """A 64-bit mask as booleans, lane 0 first."""
    raw = np.frombuffer(mask.to_bytes(8, "little"), np.uint8)
    return np.unpackbits(raw, bitorder="little").view(np.bool_)


def mask_of(lanes: Array) -> int:
    """Booleans as a 64-bit mask, lane 0 in bit 0."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


class Wave:
    """One wave.

    Args:
        group: the workgroup it belongs to.
        index: its place in the workgroup.
        registers: initial vector registers, `[512, 64]` uint32; copied. Random bits: nothing may depend on them.
    """

    __slots__ = (
        "exec_mask", "fp16_overflow_clamps", "full", "group", "index", "lanes", "lgkm", "pc", "pending", "s", "scc",
        "sf", "si", "state", "steps", "v", "v16", "vf", "vi", "vm",
    )  # fmt: skip

    def __init__(self, group: Workgroup, index: int, registers: NDArray[np.uint32]) -> None:
        self.group = group
        self.index = index
        self.v = registers.copy()
        self.vi, self.vf, self.v16 = self.v.view(np.int32), self.v.view(np.float32), self.v.view(np.uint16)
        self.s = registers[0].repeat(2)[:NUM_SGPRS].copy()
        self.si, self.sf = self.s.view(np.int32), self.s.view(np.float32)
        self.scc = 0
        self.fp16_overflow_clamps = False  # MODE.FP16_OVFL
        self.pc = 0
        self.steps = 0
        self.state = "running"
        self.vm: deque[Access] = deque()
        self.lgkm: deque[Access] = deque()
        self.pending = 0
        self.set_exec(ALL_LANES)

    def set_exec(self, mask: int) -> None:
        """Set EXEC."""
        self.exec_mask = mask
        self.full = mask == ALL_LANES
        self.lanes = lanes_of(mask)
        self.s[EXEC] = mask & 0xFFFFFFFF
        self.s[EXEC + 1] = mask >> 32

    def read32(self, index: int) -> int:
        """One scalar register."""
        return int(self.s[index])

    def read64(self, index: int) -> int:
        """Two scalar registers."""
        return int(self.s[index]) | int(self.s[index + 1]) << 32

    def write32(self, index: int, value: int) -> None:
        """Write one scalar register; EXEC takes effect at once."""
        self.s[index] = value & 0xFFFFFFFF
        if index >= EXEC:
            self.set_exec(self.read64(EXEC))

    def write64(self, index: int, value: int) -> None:
        """Write two scalar registers."""
        if index == EXEC:
            self.set_exec(value & ALL_LANES)
            return
        self.s[index] = value & 0xFFFFFFFF
        self.s[index + 1] = (value >> 32) & 0xFFFFFFFF

    def write_vector(self, index: int, value: Array) -> None:
        """Write one vector register in the active lanes; `value` has 64 or 1 elements of 32 bits of any type."""
        target = self.v if value.dtype == np.uint32 else self.vf if value.dtype == np.float32 else self.vi
        if self.full:
            target[index] = value
        else:
            np.copyto(target[index], value, where=self.lanes, casting="no")

    def refresh_pending(self) -> None:
        """Recompute which registers have a load outstanding."""
        pending = 0
        for access in self.vm:
            pending |= access.registers
        for access in self.lgkm:
            pending |= access.registers
        self.pending = pending

    @property
    def name(self) -> str:
        """Rank, workgroup and wave, for messages."""
        return f"{self.group.name} wave {self.index}"
