"""Flags on the device: waits with a limit, arrivals, and the epoch of a call.

Release and acquire are atomics. A scalar atomic is executed by one wave, and what it waits for before it releases is
that wave's own stores (seen in gfx950 code of Triton 3.9.0: the workgroup barrier before it does not drain the other
waves). So an arrival is counted by every wave of a program, each after its own stores, and counters count waves. Where
a single word is to be stored, the waves arrive somewhere first.

A loop that polls has barriers in it, so all waves must leave it together: what it decides by is read by one wave and
handed to the others. Atomics are (of a scalar, and of a tensor that is smaller than the program), plain loads are not.

A poll is an atomic addition of 0: an acquire at system scope with every Triton version from 3.6.0 on.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import time

import triton
import triton.language as tl

from megamoe_rocm.kernels.axes import lanes

# Words of the `status` array: why a wait has given up, then rank, peer, phase, epoch, index, and the values that were
# found and waited for.
STATUS_WORDS = tl.constexpr(8)
TIMED_OUT = tl.constexpr(1)
PEER_GAVE_UP = tl.constexpr(2)


@triton.jit
def call_epoch(epoch):
    """Number of the call that runs, int32 with the bits of a uint32; `epoch` points to the last one that ended."""
    return ((tl.load(epoch).to(tl.int64) + 1) & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def reached(value, target):
    """Whether a flag's word satisfies a wait: value - target >= 0 as a signed 32-bit difference."""
    return ((value.to(tl.int64) - target) & 0xFFFFFFFF) < 0x80000000


def host_clock():
    """Nanoseconds; what Triton's interpreter takes for a clock."""
    return time.monotonic_ns()


host_clock.__triton_builtin__ = True  # type: ignore[attr-defined]  # for the compiler, which never gets there


@triton.jit
def ticks(CLOCK: tl.constexpr, WAVES: tl.constexpr, LANES: tl.constexpr):
    """Units of 1024 ticks of a clock, int32 that wraps: one wave's reading, in all waves of the program.

    Triton 3.9's own `memrealtime` waits for another counter than the one that says that the value has arrived.
    """
    if CLOCK == "memrealtime":
        now = tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
        )
    elif CLOCK == "globaltimer":
        now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    else:
        now = tl.full([], host_clock(), tl.int64)
    lane = lanes(WAVES * LANES)
    return tl.max(tl.where(lane == 0, (now >> 10).to(tl.int32), -2147483648), axis=0)


@triton.jit
def give_up(status, why, rank, peer, phase, epoch, index, value, target):
    """Say in `status` what a wait has waited for, unless another wait has given up before."""
    if tl.atomic_cas(status, 0, why, sem="relaxed", scope="gpu") == 0:
        tl.store(status + 1, rank)
        tl.store(status + 2, peer)
        tl.store(status + 3, phase)
        tl.store(status + 4, epoch)
        tl.store(status + 5, index)
        tl.store(status + 6, value)
        tl.store(status + 7, target)


@triton.jit
def wait_for(
    flag,
    target,
    patience,
    status,
    rank,
    phase,
    epoch,
    index,
    CLOCK: tl.constexpr,
    WAVES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Poll a counter of this rank until it reaches `target`, as long as `patience`; then give up; `status` says so.

    Once a wait of this rank has given up, none waits any more, and the rank's results mean nothing: `combine` writes
    NaN. `phase` and `index` are what the time-out's message names.
    """
    value = tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    limit = tl.where(read_by_one(status) == 0, patience, 0)
    start = ticks(CLOCK, WAVES, LANES)
    while (reached(value, target) == 0) & (ticks(CLOCK, WAVES, LANES) - start < limit):
        value = tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    if reached(value, target) == 0:
        give_up(status, TIMED_OUT, rank, rank, phase, epoch, index, value, target)


@triton.jit
def wait_for_ranks(
    flags,
    abort,
    epoch,
    ep_size,
    patience,
    status,
    rank,
    phase,
    RANKS: tl.constexpr,
    CLOCK: tl.constexpr,
    WAVES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Poll the epoch flags of all ranks, `flags` `[ep_size]`, as `wait_for` does, until each has this call's epoch.

    Gives up at once where a rank has given this call up: `abort` `[ep_size]` has its epoch.
    """
    peer = lanes(RANKS)
    is_rank = peer < ep_size
    values = acquire_ranks(flags, ep_size, RANKS)
    has_aborted = peer < 0  # nobody, as far as is known
    num_late = count_late(values, epoch, ep_size, RANKS)
    limit = tl.where(read_by_one(status) == 0, patience, 0)
    start = ticks(CLOCK, WAVES, LANES)
    while (num_late > 0) & (ticks(CLOCK, WAVES, LANES) - start < limit):
        values = acquire_ranks(flags, ep_size, RANKS)
        has_aborted = is_rank & (poll_ranks(abort, ep_size, RANKS, "relaxed") == epoch)
        num_late = count_late(values, epoch, ep_size, RANKS)
        limit = tl.where(tl.max(has_aborted.to(tl.int32), axis=0) == 0, limit, 0)
    if num_late > 0:
        late = tl.min(tl.where(is_rank & (reached(values, epoch) == 0), peer, RANKS), axis=0)
        aborted = tl.min(tl.where(has_aborted, peer, RANKS), axis=0)
        why = tl.where(aborted < RANKS, PEER_GAVE_UP, TIMED_OUT)
        late = tl.where(aborted < RANKS, aborted, late)
        value = tl.sum(tl.where(peer == late, values, 0), axis=0)
        give_up(status, why, rank, late, phase, epoch, late, value, epoch)


@triton.jit
def read_by_one(word):
    """A word that other programs may be changing, as one wave reads it, in all waves of the program."""
    return tl.atomic_add(word, 0, sem="relaxed", scope="gpu")


@triton.jit
def acquire_ranks(flags, ep_size, RANKS: tl.constexpr):
    """Values of the epoch flags of all ranks, acquired at system scope; what their ranks stored before is seen."""
    return poll_ranks(flags, ep_size, RANKS, "acquire")


@triton.jit
def poll_ranks(flags, ep_size, RANKS: tl.constexpr, SEM: tl.constexpr):
    """Words that all ranks store, `[ep_size]`, as they are in memory now."""
    peer = lanes(RANKS)
    return tl.atomic_add(flags + peer, peer * 0, mask=peer < ep_size, sem=SEM, scope="sys")


@triton.jit
def count_late(values, epoch, ep_size, RANKS: tl.constexpr):
    """How many of the ranks' epoch flags have not reached this call's epoch, int32."""
    is_rank = lanes(RANKS) < ep_size
    return tl.sum((is_rank & (reached(values, epoch) == 0)).to(tl.int32), axis=0)


@triton.jit
def arrive(counter, amount, WAVES: tl.constexpr, SCOPE: tl.constexpr, LANES: tl.constexpr = 64):
    """Release this program's stores: every wave adds `amount` to `counter` after its own. Acquires as well.

    LANES is 64 where a wave has that many and waits for the stores of all of them, 32 for an NVIDIA warp, whose threads
    each order their own: there a barrier comes first.

    Returns:
        the largest value before an addition. With amount 1 it is WAVES * programs - 1 in the last of all programs.
    """
    if LANES == 32:
        tl.debug_barrier()
    lane = lanes(WAVES * LANES)
    first_of_wave = lane % LANES == 0
    before = tl.atomic_add(counter + lane * 0, lane * 0 + amount, mask=first_of_wave, sem="acq_rel", scope=SCOPE)
    return tl.max(tl.where(first_of_wave, before, 0), axis=0)


@triton.jit
def peer_address(peers, rank, offset):
    """Address of byte `offset` of a rank's symmetric memory, int64; `peers` holds the ranks' base addresses."""
    return tl.load(peers + rank) + offset


@triton.jit
def publish(peers, rank, ep_size, offset, epoch, RANKS: tl.constexpr):
    """Set word `rank` of the epoch flags at `offset` on every rank. Release at system scope."""
    peer = lanes(RANKS)
    is_rank = peer < ep_size
    word = tl.load(peers + peer, mask=is_rank, other=0) + offset + rank * 4
    value = peer * 0 + epoch
    tl.atomic_xchg(word.to(tl.pointer_type(tl.int32)), value, mask=is_rank, sem="release", scope="sys")
