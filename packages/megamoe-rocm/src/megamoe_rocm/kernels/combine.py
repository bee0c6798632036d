"""Phase `combine`: wait for every rank, decode, and sum each token's rows in FP32 in the order of its slots."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from megamoe_rocm.kernels.flags import STATUS_WORDS, arrive, call_epoch, publish, wait_for_ranks
from megamoe_rocm.kernels.numerics import bf16_bits, bf16_to_float, decode_e4m3, scale_value

COMBINE = tl.constexpr(6)  # place in launch.PHASES


@triton.jit
def combine_rows(
    out,
    topk_ids,
    combine,
    rank_finished,
    abort,
    launch_counters,
    epoch,
    status,
    report,
    peers,
    abort_offset,
    device_num_tokens,
    rank,
    ep_size,
    num_rows,
    capacity,
    top_k,
    num_experts,
    hidden_size,
    combine_row_bytes,
    launch_words,
    join,
    patience,
    FP8_TRANSPORT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    WAVES: tl.constexpr,
    LANES: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """`out[t] = bf16(((0 + row of slot 0) + row of slot 1) + ...)`; a program takes `ROWS` tokens, `COLUMNS` columns.

    Slots without an expert add exactly 0, whatever their bytes are. Rows of `out` from `device_num_tokens` on get
    zeros. After a time-out all rows get NaN. The last program to arrive ends the call: it advances `epoch`, and tells
    the host and the other ranks of a time-out, so that they need not wait for theirs.

    Args:
        out: `[num_rows, H]` BF16, contiguous.
        combine: `[top_k, capacity, combine_row_bytes]` of this rank.
        rank_finished, abort: `[ep_size]` flags.
        peers: `[ep_size]` int64, base address of each rank's symmetric memory.
        abort_offset: bytes from there to `abort`.
        report: `[STATUS_WORDS]` int32 that the host can read; receives `status` after a time-out.
    """
    call = call_epoch(epoch)
    wait_for_ranks(rank_finished, abort, call, ep_size, patience, status, rank, COMBINE, RANKS, CLOCK, WAVES, LANES)

    num_tokens = tl.minimum(tl.load(device_num_tokens), num_rows)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.expand_dims(tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), 0)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for slot in range(top_k):
        ids = tl.load(topk_ids + token * top_k + slot, mask=token < num_tokens, other=-1)
        has_row = tl.expand_dims((ids >= 0) & (ids < num_experts), 1)
        inside = has_row & (column < hidden_size)
        row = combine + (tl.cast(slot, tl.int64) * capacity + tl.expand_dims(token, 1)) * combine_row_bytes
        if FP8_TRANSPORT:
            code = tl.load(row + column, mask=inside, other=0).to(tl.int32)
            byte = tl.load(row + hidden_size + column // 32, mask=inside, other=0).to(tl.int32)
            value = decode_e4m3(code) * scale_value(byte)
        else:
            value = bf16_to_float(tl.load(row.to(tl.pointer_type(tl.bfloat16)) + column, mask=inside, other=0.0))
        acc += tl.where(has_row, value, 0.0)
    acc = tl.where(tl.load(status, volatile=True) == 0, acc, float("nan"))
    target = out + tl.expand_dims(token, 1).to(tl.int64) * hidden_size + column
    inside = tl.expand_dims(token < num_rows, 1) & (column < hidden_size)
    tl.store(target, bf16_bits(acc).to(tl.bfloat16, bitcast=True), mask=inside)

    before = arrive(launch_counters + (call & 1) * launch_words + join, 1, WAVES, "gpu", LANES)
    if before == WAVES * tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(epoch, call)
        if tl.load(status, volatile=True) != 0:
            word = tl.arange(0, STATUS_WORDS)
            tl.store(report + word, tl.load(status + word, volatile=True))
            publish(peers, rank, ep_size, abort_offset, call, RANKS)
