"""Stores that go past all caches, to memory of other ranks."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from megamoe_rocm.kernels.axes import in_gluon, lanes

# LLVM takes a store with these cache bits for a volatile one and waits for each before the next, which over a link
# takes longer than the multiplication of a tile. In assembly it does not know of the stores; `drain` waits for them.
# The mask is the whole of a lane's operand: EXEC is put back before LLVM's next instruction.
STORE_4 = tl.constexpr(
    "v_cmp_ne_u32_e32 vcc, 0, $3\ns_and_saveexec_b64 vcc, vcc\nglobal_store_dword $1, $2, off sc0 sc1\n"
    "s_mov_b64 exec, vcc\nv_mov_b32_e32 $0, 0"
)
STORE_8 = tl.constexpr(
    "v_cmp_ne_u32_e32 vcc, 0, $3\ns_and_saveexec_b64 vcc, vcc\nglobal_store_dwordx2 $1, $2, off sc0 sc1\n"
    "s_mov_b64 exec, vcc\nv_mov_b32_e32 $0, 0"
)


@triton.jit
def store_through(target, values, mask, BYTES: tl.constexpr):
    """Store 32- or 64-bit `values` (BYTES 4 or 8) at pointers `target`, each held by one lane, where `mask`.

    On gfx950 the stores are under way when this returns: `drain` before they are released.
    """
    if in_gluon():
        tl.inline_asm_elementwise(
            STORE_4 if BYTES == 4 else STORE_8,
            "=v,v,v,v,~{vcc}",
            [target.to(tl.int64), values, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(target, values, mask=mask, cache_modifier=".wt")


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
