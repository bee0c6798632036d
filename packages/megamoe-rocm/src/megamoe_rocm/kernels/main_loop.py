"""The GEMMs' main loop: the portable one, in plain Triton, and the choice between it and that of gfx950.

The portable loop is `tl.dot_scaled` on operands that lie as gfx950's MFMA wants them. Every load is contiguous in
memory; what follows is a change of shape that the compiler turns into the operands' layout. The order of additions is
the same in both loops and in every tile shape: steps of BLOCK_K along K, each accumulated in FP32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from megamoe_rocm.kernels import main_loop_cdna4


@triton.jit
def unshuffle_scales(stored, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """`[ROWS, BLOCK_K / 32]` of SCALE_SHUFFLE bytes `[ROWS / 32, BLOCK_K]`."""
    split = tl.reshape(stored, [ROWS // 32, BLOCK_K // 256, 4, 16, 2, 2])
    return tl.reshape(tl.permute(split, [0, 4, 3, 1, 5, 2]), [ROWS, BLOCK_K // 32])


@triton.jit
def unshuffle_weight(stored, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """`[ROWS, BLOCK_K / 2]` of PRESHUFFLE_16X16 bytes `[ROWS / 16, 8 * BLOCK_K]`."""
    split = tl.reshape(stored, [ROWS // 16, BLOCK_K // 32, 16, 16])
    return tl.reshape(tl.permute(split, [0, 2, 1, 3]), [ROWS, BLOCK_K // 2])


@triton.jit
def multiply_portable(
    rows,
    row_scales,
    first_row,
    row_stride,
    weight,
    weight_scale,
    first_column,
    K,
    FP4: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHT_CACHE: tl.constexpr,
):
    """`multiply` for every target of Triton's."""
    PER_BYTE: tl.constexpr = 2 if FP4 else 1
    row = first_row + tl.arange(0, BLOCK_M)
    byte = tl.arange(0, BLOCK_K // PER_BYTE)
    row_group = first_row // 32 + tl.arange(0, BLOCK_M // 32)
    weight_group = first_column // 16 + tl.arange(0, BLOCK_N // 16)
    scale_group = first_column // 32 + tl.arange(0, BLOCK_N // 32)
    scale_byte = tl.arange(0, BLOCK_K)
    weight_byte = tl.arange(0, 8 * BLOCK_K)

    a = rows + tl.expand_dims(row.to(tl.int64) * row_stride, 1) + tl.expand_dims(byte, 0)
    a_scale = row_scales + tl.expand_dims(row_group * K, 1) + tl.expand_dims(scale_byte, 0)
    w = weight + tl.expand_dims(weight_group * (8 * K), 1) + tl.expand_dims(weight_byte, 0)
    w_scale = weight_scale + tl.expand_dims(scale_group * K, 1) + tl.expand_dims(scale_byte, 0)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, K, BLOCK_K):
        x = tl.load(a)
        x_scale = unshuffle_scales(tl.load(a_scale), BLOCK_M, BLOCK_K)
        y = tl.trans(unshuffle_weight(tl.load(w, cache_modifier=WEIGHT_CACHE), BLOCK_N, BLOCK_K))
        y_scale = unshuffle_scales(tl.load(w_scale, cache_modifier=WEIGHT_CACHE), BLOCK_N, BLOCK_K)
        if FP4:
            acc = tl.dot_scaled(x, x_scale, "e2m1", y, y_scale, "e2m1", acc)
        else:
            acc = tl.dot_scaled(x.to(tl.float8e4nv, bitcast=True), x_scale, "e4m3", y, y_scale, "e2m1", acc)
        a += BLOCK_K // PER_BYTE
        a_scale += BLOCK_K
        w += 8 * BLOCK_K
        w_scale += BLOCK_K
    return acc


@triton.jit
def multiply(
    rows,
    row_scales,
    first_row,
    row_stride,
    weight,
    weight_scale,
    first_column,
    K,
    FP4: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHT_CACHE: tl.constexpr,
    WAVES: tl.constexpr,
    MAIN_LOOP: tl.constexpr,
):
    """`[BLOCK_M, BLOCK_N]` FP32: rows `first_row ..` of a block times columns `first_column ..` of one expert's weight.

    Args:
        rows: the block's first row; e2m1 (FP4, two to a byte) or e4m3, rows `row_stride` bytes apart.
        row_scales: the block's E8M0 scales in operand order.
        weight: the expert's `[N, K / 2]` bytes of e2m1, preshuffled; BLOCK_N divides N.
        weight_scale: its E8M0 scales in operand order.
        K: a multiple of BLOCK_K; BLOCK_K is a multiple of 256.
        WEIGHT_CACHE: cache modifier of the weights' loads.
        WAVES: of the program.
        MAIN_LOOP: a value of launch.MainLoop.

    Rows past the block's last valid one are multiplied too, whatever they hold: a row never sees another.
    """
    if MAIN_LOOP == "cdna4":
        acc = main_loop_cdna4.multiply(
            rows,
            row_scales,
            first_row,
            row_stride,
            weight,
            weight_scale,
            first_column,
            K,
            FP4,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            WEIGHT_CACHE,
            WAVES,
        )
    else:
        acc = multiply_portable(
            rows,
            row_scales,
            first_row,
            row_stride,
            weight,
            weight_scale,
            first_column,
            K,
            FP4,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            WEIGHT_CACHE,
        )
    return acc
