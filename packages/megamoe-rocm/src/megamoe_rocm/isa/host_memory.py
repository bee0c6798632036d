"""Memory of this process at addresses of our choosing, so that addresses that a host stores in memory hold on a device.

Linux only. Each allocation lies across a 4 GiB boundary, gigabytes from the next, as all buffers of the interpreter do.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref

import numpy as np
from numpy.typing import NDArray

from megamoe_rocm.isa.errors import IsaError

FIRST_SLOT = 0x2000_0000_0000  # far from where Linux places programs, heaps and libraries
SLOT_BYTES = 1 << 34
PAGE = 4096
READ_WRITE = 0x3  # PROT_READ | PROT_WRITE
ANONYMOUS_FIXED = 0x2 | 0x20 | 0x4000 | 0x100000  # MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE, MAP_FIXED_NOREPLACE

_slots = itertools.count()


def allocate(num_bytes: int) -> NDArray[np.uint8]:
    """Zeroed bytes; given back when nothing refers to them any more.

    Raises:
        IsaError: the address range is taken.
    """
    if num_bytes > SLOT_BYTES // 2:
        raise IsaError("more memory than a slot of the interpreter's holds", got=num_bytes, expected=SLOT_BYTES // 2)
    size = max(-(-num_bytes // PAGE), 2) * PAGE
    address = FIRST_SLOT + next(_slots) * SLOT_BYTES + SLOT_BYTES // 2 - size // 2 // PAGE * PAGE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    if libc.mmap(address, size, READ_WRITE, ANONYMOUS_FIXED, -1, 0) != address:
        raise IsaError("memory could not be mapped", got=hex(address), hint=f"errno {ctypes.get_errno()}")
    block = (ctypes.c_uint8 * num_bytes).from_address(address)
    weakref.finalize(block, libc.munmap, address, size)
    return np.ctypeslib.as_array(block)
