"""Small kernels to compile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale(x, y, n, factor, B: tl.constexpr):
    """y = x * factor."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n) * factor, mask=i < n)


@triton.jit
def publish(y, flag, B: tl.constexpr):
    """Peer stores, then a flag at system scope."""
    i = tl.arange(0, B)
    tl.store(y + i, i, cache_modifier=".wt")
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release", scope="sys")


@triton.jit
def publish_without_release(y, flag, B: tl.constexpr):
    """The same with a relaxed flag and cached stores."""
    i = tl.arange(0, B)
    tl.store(y + i, i)
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="relaxed", scope="sys")


@triton.jit
def many_values(x, y, B: tl.constexpr):
    """A sum over pairs that keeps far too many values alive."""
    i = tl.arange(0, B)
    a = tl.load(x + i)
    b = tl.load(x + B + i)
    tl.store(y + i, tl.sum(a[:, None] * b[None, :] * b[:, None] + a[None, :], axis=1))


@triton.jit
def refused(x):
    """Does not compile: a string is stored."""
    tl.store(x, tl.load(x) + "one")
