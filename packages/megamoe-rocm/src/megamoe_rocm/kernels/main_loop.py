"""The GEMMs' main loop, in portable Triton: `tl.dot_scaled` on operands that lie as gfx950's MFMA wants them.

The stages call one device function, so a target can bring its own. The order of additions is the same in every tile
shape: steps of 256 along K, each accumulated in FP32.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from megamoe_rocm.kernels.layouts import scale_offset, weight_offset


@triton.jit
def multiply(
    rows,
    row_scales,
    first_row,
    row_stride,
    weight,
    weight_scale,
    first_column,
    num_columns,
    K,
    FP4: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHT_CACHE: tl.constexpr,
):
    """`[BLOCK_M, BLOCK_N]` FP32: rows `first_row ..` of a block times columns `first_column ..` of one expert's weight.

    Args:
        rows: the block's first row; e2m1 (FP4, two to a byte) or e4m3, rows `row_stride` bytes apart.
        row_scales: the block's E8M0 scales in operand order.
        weight: the expert's `[num_columns, K / 2]` bytes of e2m1, preshuffled.
        weight_scale: its E8M0 scales in operand order.
        K: a multiple of BLOCK_K; BLOCK_K is a multiple of 256.
        WEIGHT_CACHE: cache modifier of the weights' loads.

    Rows past the block's last valid one are multiplied too, whatever they hold: a row never sees another.
    """
    PER_BYTE: tl.constexpr = 2 if FP4 else 1
    row = first_row + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    is_column = column < num_columns
    byte = tl.arange(0, BLOCK_K // PER_BYTE)
    weight_byte = tl.arange(0, BLOCK_K // 2)
    scale = tl.arange(0, BLOCK_K // 32)

    a = rows + tl.expand_dims(row.to(tl.int64) * row_stride, 1) + tl.expand_dims(byte, 0)
    a_scale = row_scales + scale_offset(tl.expand_dims(row, 1), tl.expand_dims(scale, 0), K)
    w = weight + weight_offset(tl.expand_dims(column, 0), tl.expand_dims(weight_byte, 1), K // 2)
    w_scale = weight_scale + scale_offset(tl.expand_dims(column, 1), tl.expand_dims(scale, 0), K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, K, BLOCK_K):
        x = tl.load(a)
        y = tl.load(w, mask=tl.expand_dims(is_column, 0), other=0, cache_modifier=WEIGHT_CACHE)
        y_scale = tl.load(w_scale, mask=tl.expand_dims(is_column, 1), other=0, cache_modifier=WEIGHT_CACHE)
        if FP4:
            acc = tl.dot_scaled(x, tl.load(a_scale), "e2m1", y, y_scale, "e2m1", acc)
        else:
            x = x.to(tl.float8e4nv, bitcast=True)
            acc = tl.dot_scaled(x, tl.load(a_scale), "e4m3", y, y_scale, "e2m1", acc)
        a += BLOCK_K // PER_BYTE
        a_scale += BLOCK_K
        w += BLOCK_K * 8  # BLOCK_K / 2 bytes of each of 16 rows
        w_scale += BLOCK_K
    return acc
