"""What atomics do to one value.

Source: AMD CDNA3 ISA document, "MUBUF", "FLAT, global" and "DS instructions", atomic operations.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def signed(value: int, width: int) -> int:
    """A bit pattern as a signed integer."""
    return value - (1 << width) if value >> (width - 1) else value


def _float_sum(a: int, b: int) -> int:
    pair = np.array([a, b], np.uint32).view(np.float32)
    return int((pair[:1] + pair[1:]).view(np.uint32)[0])


# (old value, data, compare value, width) -> new value, all as bit patterns; the result is cut to the width.
OPERATIONS: dict[str, Callable[[int, int, int, int], int]] = {
    "swap": lambda old, data, compare, width: data,
    "cmpswap": lambda old, data, compare, width: data if old == compare else old,
    "add": lambda old, data, compare, width: (old + data) & ((1 << width) - 1),
    "sub": lambda old, data, compare, width: (old - data) & ((1 << width) - 1),
    "smin": lambda old, data, compare, width: min(old, data, key=lambda value: signed(value, width)),
    "smax": lambda old, data, compare, width: max(old, data, key=lambda value: signed(value, width)),
    "umin": lambda old, data, compare, width: min(old, data),
    "umax": lambda old, data, compare, width: max(old, data),
    "and": lambda old, data, compare, width: old & data,
    "or": lambda old, data, compare, width: old | data,
    "xor": lambda old, data, compare, width: old ^ data,
    "inc": lambda old, data, compare, width: 0 if old >= data else old + 1,
    "dec": lambda old, data, compare, width: data if old == 0 or old > data else old - 1,
    "add_f32": lambda old, data, compare, width: _float_sum(old, data),
}
