"""Small Triton kernels to execute: a scaled GEMM, an MXFP4 quantiser, and hand-overs between workgroups and ranks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scaled_gemm(
    a, a_scale, w, w_scale, c, N, Kb, A_FORMAT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """c[M, N] = a[M, K] w[N, K]ᵀ with E8M0 scales [rows, K / 32]; w is packed e2m1, a is e2m1 or e4m3. Kb = K / 2."""
    PACK: tl.constexpr = 2 if A_FORMAT == "e2m1" else 1
    K = Kb * 2
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    blocks = tl.arange(0, BK // 32)
    a_at = a + rows[:, None] * (Kb * (2 // PACK)) + tl.arange(0, BK // PACK)[None, :]
    w_at = w + columns[None, :] * Kb + tl.arange(0, BK // 2)[:, None]
    a_scale_at = a_scale + rows[:, None] * (K // 32) + blocks[None, :]
    w_scale_at = w_scale + columns[:, None] * (K // 32) + blocks[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(K // BK):
        acc = tl.dot_scaled(
            tl.load(a_at), tl.load(a_scale_at), A_FORMAT, tl.load(w_at), tl.load(w_scale_at), "e2m1", acc
        )
        a_at += BK // PACK
        w_at += BK // 2
        a_scale_at += BK // 32
        w_scale_at += BK // 32
    tl.store(c + rows[:, None] * N + columns[None, :], acc)


@triton.jit
def e2m1_code(x):
    """Nearest e2m1 code of a value already divided by its scale, ties to even, saturating."""
    m = tl.abs(x)
    code = (m > 0.25).to(tl.int32) + (m >= 0.75) + (m > 1.25) + (m >= 1.75) + (m > 2.5) + (m >= 3.5) + (m > 5.0)
    return code | tl.where(x.to(tl.int32, bitcast=True) < 0, 8, 0)


@triton.jit
def quantize_mxfp4(x, q, scales, rows, H, BLOCKS: tl.constexpr):
    """x[rows, H] BF16 to packed e2m1 [rows, H / 2] and E8M0 [rows, H / 32]; rounds scales up."""
    row = tl.program_id(0)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    element = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    live = (block[:, None] < H // 32) & (row < rows)
    value = tl.load(x + row * H + element, mask=live, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(value), axis=1)
    exponent = tl.maximum(((amax.to(tl.int32, bitcast=True) + 0x3FFFFF) >> 23) - 2, 0)  # amax / 6, to the power above
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    even, odd = tl.split((value * inverse[:, None]).reshape(BLOCKS, 16, 2))
    packed = (e2m1_code(even) | (e2m1_code(odd) << 4)).to(tl.uint8)
    pair = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(q + row * (H // 2) + pair, packed, mask=live)
    tl.store(scales + row * (H // 32) + block, exponent.to(tl.uint8), mask=(block < H // 32) & (row < rows))


@triton.jit
def drain_stores():
    """Every wave of four waits until its stores are complete; a barrier and a flag after it cover them."""
    tl.inline_asm_elementwise(
        "s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1", "=v,v", [tl.arange(0, 256)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def hand_over(x, y, flag, out, B: tl.constexpr, DRAIN: tl.constexpr):
    """Workgroup 0 writes y = x + 1 and raises the flag; workgroup 1 waits for it and writes out = 2 y."""
    i = tl.arange(0, B)
    if tl.program_id(0) == 0:
        tl.store(y + i, tl.load(x + i) + 1)
        if DRAIN:
            drain_stores()
        tl.debug_barrier()
        tl.atomic_add(flag, 1, sem="release", scope="gpu")
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") < 1:
            pass
        tl.store(out + i, tl.load(y + i) * 2)


@triton.jit
def exchange(x, peers, flags, out, rank, epoch, B: tl.constexpr, DRAIN: tl.constexpr):
    """Each of two ranks stores its x into the other's inbox, raises the other's flag, waits for its own, sums both.

    peers holds two 64-bit addresses: the inbox of each rank; flags likewise.
    """
    other = 1 - rank
    i = tl.arange(0, B)
    inbox = tl.load(peers + other).to(tl.pointer_type(tl.int32))
    mine = tl.load(peers + rank).to(tl.pointer_type(tl.int32))
    there = tl.load(flags + other).to(tl.pointer_type(tl.int32))
    here = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    value = tl.load(x + i)
    tl.store(tl.multiple_of(inbox, 16) + i, value, cache_modifier=".wt")
    if DRAIN:
        drain_stores()
    tl.debug_barrier()
    tl.atomic_add(there, 1, sem="release", scope="sys")
    while tl.atomic_add(here, 0, sem="acquire", scope="sys") < epoch:
        pass
    tl.store(out + i, value + tl.load(tl.multiple_of(mine, 16) + i))
