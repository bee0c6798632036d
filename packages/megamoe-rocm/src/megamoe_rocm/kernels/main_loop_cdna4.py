"""The GEMMs' main loop in Gluon, for gfx950: what `main_loop.py` computes, in the same order of additions.

Weights go from memory to registers without LDS, in the order in which they are stored. Activations go to LDS by DMA, a
few steps ahead, and every wave reads all of them. Scales are read one dword a lane; a dword holds the scales of four
operands, and the MFMA picks its byte.

One wave stands along M, so weights are read once; the others divide N among them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

cdna4 = gl.amd.cdna4
async_copy = gl.amd.cdna4.async_copy

CHUNK = gl.constexpr(16)  # bytes that a lane moves at a time
STEPS = gl.constexpr(4)  # of a trip, and buffers in LDS: loads run two steps ahead


@gluon.constexpr_function
def accumulator_layout(BLOCK_N, WAVES):
    """Of a tile's accumulators: where 16x16x128 leaves them, a row's neighbouring columns in one lane."""
    columns = BLOCK_N // WAVES // 16
    return gl.amd.AMDMFMALayout(
        version=4,
        instr_shape=[16, 16, 128],
        transposed=True,
        warps_per_cta=[1, WAVES],
        tiles_per_warp=[2, min(columns, 4)],
    )


@gluon.constexpr_function
def scale_bytes_layout(ROWS, BLOCK_K, TILES, WAVES, SPLIT):
    """Of stored scale bytes `[ROWS / 32, BLOCK_K]`: what a lane reads is what the MFMA wants of it.

    Args:
        TILES: tiles of 16 rows that a wave has side by side.
        SPLIT: whether waves divide the rows among them, or all read the same ones.
    """
    registers = [[0, 1], [0, 2]]
    column = 256
    while column < BLOCK_K:
        registers.append([0, column])
        column *= 2
    row, waves = 1, []
    while row < TILES // 2:
        registers.append([row, 0])
        row *= 2
    for _ in range(WAVES.bit_length() - 1):
        waves.append([row, 0] if SPLIT else [0, 0])
        row *= 2 if SPLIT else 1
    while row < ROWS // 32:
        registers.append([row, 0])
        row *= 2
    lanes = [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64], [0, 128]]
    return gl.DistributedLinearLayout(registers, lanes, waves, [], [ROWS // 32, BLOCK_K])


@gluon.jit
def load_scales(scales, offsets, ROWS: gl.constexpr, BLOCK_K: gl.constexpr, LAYOUT: gl.constexpr, CACHE: gl.constexpr):
    """The scale operand `[ROWS, BLOCK_K / 32]` of SCALE_SHUFFLE bytes; no instruction but the load."""
    stored = cdna4.buffer_load(scales, offsets, cache=CACHE)
    split = gl.reshape(stored, [ROWS // 32, BLOCK_K // 256, 4, 16, 2, 2])
    operand = gl.reshape(gl.permute(split, [0, 4, 3, 1, 5, 2]), [ROWS, BLOCK_K // 32])
    return gl.convert_layout(operand, LAYOUT, assert_trivial=True)


@gluon.jit
def scale_offsets(ROWS: gl.constexpr, BLOCK_K: gl.constexpr, K, LAYOUT: gl.constexpr):
    """Bytes from a tile's first scale, `[ROWS / 32, BLOCK_K]`."""
    group = gl.arange(0, ROWS // 32, gl.SliceLayout(1, LAYOUT))
    byte = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
    return gl.expand_dims(group, 1) * K + gl.expand_dims(byte, 0)


@gluon.jit
def weight_offsets(BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, K, LAYOUT: gl.constexpr):
    """Bytes from a tile's first weight, `[BLOCK_K / 2, BLOCK_N]`, in the order PRESHUFFLE_16X16."""
    n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT)), 0)
    byte = gl.expand_dims(gl.arange(0, BLOCK_K // 2, gl.SliceLayout(1, LAYOUT)), 1)
    return n // 16 * (8 * K) + n % 16 * CHUNK + (byte // CHUNK * 256 + byte % CHUNK)


@gluon.jit
def row_offsets(BLOCK_M: gl.constexpr, ROW_BYTES: gl.constexpr, row_stride, WAVES: gl.constexpr):
    """Bytes from a tile's first activation, `[BLOCK_M, ROW_BYTES]`, as the DMA is to fetch them.

    LDS is filled in lane order. Which 16-byte chunk of its row a lane fetches is chosen so that the chunks lie there as
    `staged_rows` reads them: in the order `chunk ^ (row % chunks)`, which spreads a column of chunks over all banks.
    """
    CHUNKS: gl.constexpr = ROW_BYTES // CHUNK
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, CHUNK], [64 // CHUNKS, CHUNKS], [WAVES, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT)), 1)
    byte = gl.expand_dims(gl.arange(0, ROW_BYTES, gl.SliceLayout(0, LAYOUT)), 0)
    return row * row_stride + ((byte // CHUNK) ^ (row % CHUNKS)) * CHUNK + byte % CHUNK


@gluon.jit
def fetch(
    buffer,
    step,
    sources,
    offsets,
    FP4: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    ACC: gl.constexpr,
    WEIGHT_CACHE: gl.constexpr,
):
    """Start to bring in step `step` of K: rows to `buffer`; returns weights, scales of rows, scales of weights."""
    rows, row_scales, weight, weight_scale = sources
    row_offset, row_scale_offset, weight_offset, weight_scale_offset = offsets
    ROW_BYTES: gl.constexpr = BLOCK_K // 2 if FP4 else BLOCK_K
    X_SCALE: gl.constexpr = cdna4.get_mfma_scale_layout(gl.DotOperandLayout(0, ACC, 16), [BLOCK_M, BLOCK_K // 32])
    Y_SCALE: gl.constexpr = cdna4.get_mfma_scale_layout(gl.DotOperandLayout(1, ACC, 16), [BLOCK_N, BLOCK_K // 32])
    async_copy.buffer_load_to_shared(buffer, rows + step * ROW_BYTES, row_offset)
    async_copy.commit_group()
    y = cdna4.buffer_load(weight + step * (8 * BLOCK_K), weight_offset, cache=WEIGHT_CACHE)
    x_scale = load_scales(row_scales + step * BLOCK_K, row_scale_offset, BLOCK_M, BLOCK_K, X_SCALE, "")
    y_scale = load_scales(weight_scale + step * BLOCK_K, weight_scale_offset, BLOCK_N, BLOCK_K, Y_SCALE, WEIGHT_CACHE)
    return y, x_scale, y_scale


@gluon.jit
def staged_rows(buffer, BLOCK_M: gl.constexpr, ROW_BYTES: gl.constexpr):
    """The view of a buffer in which the chunks that `row_offsets` interchanged are in their places."""
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(CHUNK, 1, ROW_BYTES // CHUNK, [1, 0])
    return buffer.reinterpret(buffer.dtype, [BLOCK_M, ROW_BYTES], SWIZZLED)


@gluon.jit
def multiply_step(
    buffer,
    fetched,
    acc,
    FP4: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    ACC: gl.constexpr,
):
    """`acc` and the product of one step, which has arrived."""
    ROW_BYTES: gl.constexpr = BLOCK_K // 2 if FP4 else BLOCK_K
    FORMAT: gl.constexpr = "e2m1" if FP4 else "e4m3"
    y, x_scale, y_scale = fetched
    x = async_copy.load_shared_relaxed(staged_rows(buffer, BLOCK_M, ROW_BYTES), gl.DotOperandLayout(0, ACC, 16))
    return cdna4.mfma_scaled(x, x_scale, FORMAT, y, y_scale, "e2m1", acc)


@gluon.jit
def multiply_steps(
    buffers,
    num_trips,
    sources,
    offsets,
    acc,
    FP4: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    ACC: gl.constexpr,
    WEIGHT_CACHE: gl.constexpr,
):
    """`acc` and the products of the first `num_trips * STEPS` steps, at least one trip.

    Loads run two steps ahead; one would hide less of their latency (docs/gfx950.md). A trip has as many steps as there
    are buffers, so that each operand has registers of its own: handing registers from one step to the next would wait
    for the loads into them. The last trip fetches nothing past the end. LLVM may not interleave steps: it would run out
    of registers.
    """
    fetched = (
        fetch(buffers.index(0), 0, sources, offsets, FP4, BLOCK_M, BLOCK_N, BLOCK_K, ACC, WEIGHT_CACHE),
        fetch(buffers.index(1), 1, sources, offsets, FP4, BLOCK_M, BLOCK_N, BLOCK_K, ACC, WEIGHT_CACHE),
    )
    for trip in range(num_trips - 1):
        for step in gl.static_range(STEPS):
            async_copy.wait_group(1)
            new = fetch(
                buffers.index((step + 2) % STEPS),
                trip * STEPS + step + 2,
                sources,
                offsets,
                FP4,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                ACC,
                WEIGHT_CACHE,
            )
            acc = multiply_step(buffers.index(step), fetched[0], acc, FP4, BLOCK_M, BLOCK_K, ACC)
            fetched = (fetched[1], new)
            gl.amd.hint.sched_barrier()
    for step in gl.static_range(2):
        async_copy.wait_group(1)
        new = fetch(
            buffers.index(step + 2),
            (num_trips - 1) * STEPS + step + 2,
            sources,
            offsets,
            FP4,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            ACC,
            WEIGHT_CACHE,
        )
        acc = multiply_step(buffers.index(step), fetched[0], acc, FP4, BLOCK_M, BLOCK_K, ACC)
        fetched = (fetched[1], new)
        gl.amd.hint.sched_barrier()
    async_copy.wait_group(1)
    acc = multiply_step(buffers.index(2), fetched[0], acc, FP4, BLOCK_M, BLOCK_K, ACC)
    gl.amd.hint.sched_barrier()
    async_copy.wait_group(0)
    acc = multiply_step(buffers.index(3), fetched[1], acc, FP4, BLOCK_M, BLOCK_K, ACC)
    gl.amd.hint.sched_barrier()
    return acc


@gluon.jit
def multiply(
    rows,
    row_scales,
    first_row,
    row_stride,
    weight,
    weight_scale,
    first_column,
    K,
    FP4: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    WEIGHT_CACHE: gl.constexpr,
    WAVES: gl.constexpr,
):
    """As `main_loop.multiply`; the accumulators lie as `accumulator_layout` says.

    Steps that don't fill a trip are multiplied one by one after the others. There are none where K is a multiple of
    1024.
    """
    ROW_BYTES: gl.constexpr = BLOCK_K // 2 if FP4 else BLOCK_K
    ELEMENT: gl.constexpr = gl.uint8 if FP4 else gl.float8e4nv
    ACC: gl.constexpr = accumulator_layout(BLOCK_N, WAVES)
    TILES: gl.constexpr = ACC.tiles_per_warp
    X_BYTES: gl.constexpr = scale_bytes_layout(BLOCK_M, BLOCK_K, TILES[0], WAVES, False)
    Y_BYTES: gl.constexpr = scale_bytes_layout(BLOCK_N, BLOCK_K, TILES[1], WAVES, True)

    sources = (
        (rows + first_row * row_stride).to(gl.pointer_type(ELEMENT)),
        row_scales + first_row // 32 * K,
        weight + first_column // 16 * (8 * K),
        weight_scale + first_column // 32 * K,
    )
    offsets = (
        row_offsets(BLOCK_M, ROW_BYTES, row_stride, WAVES),
        scale_offsets(BLOCK_M, BLOCK_K, K, X_BYTES),
        weight_offsets(BLOCK_N, BLOCK_K, K, gl.DotOperandLayout(1, ACC, 16)),
        scale_offsets(BLOCK_N, BLOCK_K, K, Y_BYTES),
    )
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    buffers = gl.allocate_shared_memory(ELEMENT, [STEPS, BLOCK_M, ROW_BYTES], LINEAR)
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, ACC)
    num_trips = K // (STEPS * BLOCK_K)
    if num_trips > 0:
        acc = multiply_steps(
            buffers, num_trips, sources, offsets, acc, FP4, BLOCK_M, BLOCK_N, BLOCK_K, ACC, WEIGHT_CACHE
        )
    for step in range(num_trips * STEPS, K // BLOCK_K):
        fetched = fetch(buffers.index(0), step, sources, offsets, FP4, BLOCK_M, BLOCK_N, BLOCK_K, ACC, WEIGHT_CACHE)
        async_copy.wait_group(0)
        acc = multiply_step(buffers.index(0), fetched, acc, FP4, BLOCK_M, BLOCK_K, ACC)
    return acc
