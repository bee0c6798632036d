"""Stores that go past all caches, to memory of other ranks."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from megamoe_rocm.kernels.axes import in_gluon, lanes, owners

WIDTHS = {2: "short", 4: "dword", 8: "dwordx2"}


def store_assembly(num_bytes: Any, lanes_that_store: Any, _semantic: Any = None) -> Any:
    """Store a lane's `$2` at `$1` where `$3` is not 0 and the lane is one of those that store.

    LLVM takes a store with these cache bits for a volatile one and waits for each before the next, which over a link
    takes longer than the multiplication of a tile. In assembly it does not know of the stores; `drain` waits for them.
    The mask is the whole of a lane's operand: EXEC is put back before LLVM's next instruction.
    """
    storing = lanes_that_store.value
    lines = ["v_cmp_ne_u32_e32 vcc, 0, $3"]
    if storing != 2**64 - 1:
        low, high = storing & 0xFFFFFFFF, storing >> 32
        lines += [f"s_and_b32 vcc_lo, vcc_lo, {low:#x}", f"s_and_b32 vcc_hi, vcc_hi, {high:#x}"]
    lines += [
        "s_and_saveexec_b64 vcc, vcc",
        f"global_store_{WIDTHS[num_bytes.value]} $1, $2, off sc0 sc1",
        "s_mov_b64 exec, vcc",
        "v_mov_b32_e32 $0, 0",
    ]
    return tl.constexpr("\n".join(lines))


store_assembly.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def store_through(target, values, mask, BYTES: tl.constexpr):
    """Store `values` of BYTES, 2, 4 or 8, at pointers `target` where `mask`; those of 2 are given as int32.

    On gfx950 the stores are under way when this returns: `drain` before they are released.
    """
    if in_gluon():
        tl.inline_asm_elementwise(
            store_assembly(BYTES, owners(values)),
            "=v,v,v,v,~{vcc},~{scc}",
            [target.to(tl.int64), values, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(target, values.to(target.dtype.element_ty), mask=mask, cache_modifier=".wt")


@triton.jit
def drain(WAVES: tl.constexpr):
    """Every wave waits until its `store_through` stores are complete."""
    if in_gluon():
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32_e32 $0, $1",
            "=v,v",
            [lanes(WAVES * 64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
