"""Index ranges for source that is compiled as Triton and as Gluon.

Triton picks the layout of every tensor, Gluon wants to be told. Kernels ask these functions for their ranges; from
there on layouts follow from operands. In Triton, and in its interpreter, they are `tl.arange`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._semantic import GluonSemantic


def in_gluon(_semantic: Any = None) -> Any:
    """Whether the function that calls this is being compiled as Gluon; the interpreter gives no `_semantic`."""
    return tl.constexpr(isinstance(_semantic, GluonSemantic)) if _semantic else False


def layout_of(tensor: Any, _semantic: Any = None) -> Any:
    """A tensor's layout, None in Triton."""
    return tl.constexpr(tensor.type.layout) if isinstance(_semantic, GluonSemantic) else None


def owners(tensor: Any, _semantic: Any = None) -> Any:
    """The lanes of a wave, a bit each, that are the first to hold their element of a Gluon tensor.

    The result of a reduction is in several lanes at once. That it is in several registers or waves is refused: what is
    stored would be stored twice.
    """
    layout = _semantic.to_linear_layout(tensor.type.layout, tensor.type.shape).value
    assert all(any(basis) for basis in (*layout.reg_bases, *layout.warp_bases)), f"an element is held twice: {layout}"
    copies = sum(1 << bit for bit, basis in enumerate(layout.lane_bases) if not any(basis))
    return tl.constexpr(sum(1 << lane for lane in range(1 << len(layout.lane_bases)) if lane & copies == 0))


# The compiler calls such functions while it translates, and says what it is translating to.
in_gluon.__triton_builtin__ = True  # type: ignore[attr-defined]
layout_of.__triton_builtin__ = True  # type: ignore[attr-defined]
owners.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def lanes(N: tl.constexpr):
    """0 to N - 1, one a lane, wave by wave."""
    if in_gluon():
        index = gl.arange(0, N, gl.BlockedLayout([1], [64], [gl.num_warps()], [0]))
    else:
        index = tl.arange(0, N)
    return index


@triton.jit
def rows_like(tensor, N: tl.constexpr):
    """0 to N - 1 as `[N, 1]`, to go with the two-dimensional `tensor`."""
    LAYOUT: tl.constexpr = layout_of(tensor)
    if LAYOUT is None:
        index = tl.arange(0, N)
    else:
        index = gl.arange(0, N, gl.SliceLayout(1, LAYOUT))
    return tl.expand_dims(index, 1)


@triton.jit
def columns_like(tensor, N: tl.constexpr):
    """0 to N - 1 as `[1, N]`, to go with the two-dimensional `tensor`."""
    LAYOUT: tl.constexpr = layout_of(tensor)
    if LAYOUT is None:
        index = tl.arange(0, N)
    else:
        index = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
    return tl.expand_dims(index, 0)


@triton.jit
def rows_of_copy(N: tl.constexpr):
    """0 to N - 1 as `[N]`: rows that are moved, each by one wave."""
    if in_gluon():
        index = gl.arange(0, N, gl.SliceLayout(1, gl.BlockedLayout([1, 4], [1, 64], [gl.num_warps(), 1], [1, 0])))
    else:
        index = tl.arange(0, N)
    return index


@triton.jit
def columns_of_copy(N: tl.constexpr):
    """0 to N - 1 as `[N]`: what is moved of each row; of words, 16 bytes a lane."""
    if in_gluon():
        index = gl.arange(0, N, gl.SliceLayout(0, gl.BlockedLayout([1, 4], [1, 64], [gl.num_warps(), 1], [1, 0])))
    else:
        index = tl.arange(0, N)
    return index
