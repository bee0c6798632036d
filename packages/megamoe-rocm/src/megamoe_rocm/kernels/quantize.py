"""Phase `stage`: the rank's tokens, quantised or copied into its `input` arrays, where owners pull them."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from megamoe_rocm.kernels.numerics import MX_BLOCK, bf16_to_float, quantize_blocks


@triton.jit
def quantize_input(
    hidden_states,
    payload,
    scales,
    device_num_tokens,
    num_rows,
    hidden_size,
    hidden_stride,
    payload_stride,
    scales_stride,
    FP4: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantise BF16 `[T, H]` per 1x32; program (i, j) takes `ROWS` tokens and `COLUMNS` columns.

    Args:
        hidden_states: `[num_rows, H]` BF16, rows `hidden_stride` (a multiple of 16) elements apart.
        payload, scales: the input arrays, bytes; rows `payload_stride` (a multiple of 16) and `scales_stride` apart.
        device_num_tokens: int32; rows from there on are padding and are not staged.
        num_rows: rows of `hidden_states`.
        hidden_size: H, a multiple of 256.
    """
    num_tokens = tl.minimum(tl.load(device_num_tokens), num_rows)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_offset = tl.expand_dims(row.to(tl.int64), 1)
    is_token = tl.expand_dims(row < num_tokens, 1)
    inside = is_token & tl.expand_dims(column < hidden_size, 0)
    x = tl.load(hidden_states + row_offset * hidden_stride + tl.expand_dims(column, 0), mask=inside, other=0.0)
    words, bytes_ = quantize_blocks(bf16_to_float(x), ROWS, COLUMNS, FP4)

    PER_WORD: tl.constexpr = 8 if FP4 else 4
    at = tl.program_id(1) * (COLUMNS // PER_WORD) + tl.arange(0, COLUMNS // PER_WORD)
    # A change of type forgets that rows are aligned, a division what the number of words is a multiple of.
    inside = is_token & tl.expand_dims(at < tl.multiple_of(hidden_size // PER_WORD, 16), 0)
    target = tl.multiple_of((payload + row_offset * payload_stride).to(tl.pointer_type(tl.int32)), [16, 16])
    tl.store(target + tl.expand_dims(at, 0), words, mask=inside)
    at = tl.program_id(1) * (COLUMNS // MX_BLOCK) + tl.arange(0, COLUMNS // MX_BLOCK)
    inside = is_token & tl.expand_dims(at * MX_BLOCK < hidden_size, 0)
    tl.store(scales + row_offset * scales_stride + tl.expand_dims(at, 0), bytes_, mask=inside)


@triton.jit
def copy_input(
    source,
    target,
    device_num_tokens,
    num_rows,
    row_bytes,
    source_stride,
    target_stride,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Copy rows that the caller quantised, `[num_rows, row_bytes]` from `source` to `target`, 8 bytes at a time.

    Program (i, j) takes `ROWS` rows and `CHUNKS` times 8 bytes of each: one of them a lane. Sizes and strides are in
    bytes and multiples of 8.
    """
    num_tokens = tl.minimum(tl.load(device_num_tokens), num_rows)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    chunk = tl.expand_dims(tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS), 0)
    inside = tl.expand_dims(row < num_tokens, 1) & (chunk < row_bytes // 8)
    row_offset = tl.expand_dims(row.to(tl.int64), 1)
    values = tl.load((source + row_offset * source_stride).to(tl.pointer_type(tl.int64)) + chunk, mask=inside)
    tl.store((target + row_offset * target_stride).to(tl.pointer_type(tl.int64)) + chunk, values, mask=inside)
