"""Where scales are: the device's form of `megamoe.layouts.SCALE_SHUFFLE`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401  # Triton's interpreter looks for it in the globals of each function


@triton.jit
def scale_offset(row, block, K):
    """Byte of the scale of `row` and block `block` of 32 columns, among scales of K columns in operand order."""
    within = (block % 4) * 64 + (row % 16) * 4 + (row // 16 % 2) * 2 + block // 4 % 2
    return row // 32 * K + block // 8 * 256 + within
