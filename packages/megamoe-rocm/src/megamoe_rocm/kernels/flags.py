"""Flags on the device: waits with a limit, arrivals, and the epoch of a call.

Release and acquire are atomics. A scalar atomic is executed by one wave, and what it waits for before it releases is
that wave's own stores (seen in gfx950 code of Triton 3.9.0: the workgroup barrier before it does not drain the other
waves). So an arrival is counted by every wave of a program, each after its own stores, and counters count waves. Where
a single word is to be stored, the waves arrive somewhere first.

A poll is an atomic addition of 0: an acquire at system scope with every Triton version from 3.6.0 on.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

# Words of the `status` array: whether a wait has timed out, then rank, peer, phase, epoch, index, and the values that
# were found and waited for.
STATUS_WORDS = tl.constexpr(8)


@triton.jit
def call_epoch(epoch):
    """Number of the call that runs, int32 with the bits of a uint32; `epoch` points to the last one that ended."""
    return ((tl.load(epoch).to(tl.int64) + 1) & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def reached(value, target):
    """Whether a flag's word satisfies a wait: value - target >= 0 as a signed 32-bit difference."""
    return ((value.to(tl.int64) - target) & 0xFFFFFFFF) < 0x80000000


@triton.jit
def give_up(status, rank, peer, phase, epoch, index, value, target):
    """Say in `status` what a wait has waited for, unless another wait has given up before."""
    if tl.atomic_cas(status, 0, 1, sem="relaxed", scope="gpu") == 0:
        tl.store(status + 1, rank)
        tl.store(status + 2, peer)
        tl.store(status + 3, phase)
        tl.store(status + 4, epoch)
        tl.store(status + 5, index)
        tl.store(status + 6, value)
        tl.store(status + 7, target)


@triton.jit
def wait_for(flag, target, polls, status, rank, phase, epoch, index):
    """Poll a counter of this rank until it reaches `target`, at most `polls` times; then give up; `status` says so.

    Once a wait of this rank has given up, none waits any more, and the rank's results mean nothing: `combine` writes
    NaN. `phase` and `index` are what the time-out's message names.
    """
    value = tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    left = tl.where(tl.load(status, volatile=True) == 0, polls, 0)
    while (reached(value, target) == 0) & (left > 0):
        value = tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
        left -= 1
    if reached(value, target) == 0:
        give_up(status, rank, rank, phase, epoch, index, value, target)


@triton.jit
def wait_for_ranks(flags, epoch, ep_size, polls, status, rank, phase, RANKS: tl.constexpr):
    """Poll the epoch flags of all ranks, `flags` `[ep_size]`, as `wait_for` does, until each has this call's epoch."""
    peer = tl.arange(0, RANKS)
    is_rank = peer < ep_size
    values = tl.atomic_add(flags + peer, tl.zeros([RANKS], tl.int32), mask=is_rank, sem="acquire", scope="sys")
    num_late = tl.sum((is_rank & (reached(values, epoch) == 0)).to(tl.int32), axis=0)
    left = tl.where(tl.load(status, volatile=True) == 0, polls, 0)
    while (num_late > 0) & (left > 0):
        values = tl.atomic_add(flags + peer, tl.zeros([RANKS], tl.int32), mask=is_rank, sem="acquire", scope="sys")
        num_late = tl.sum((is_rank & (reached(values, epoch) == 0)).to(tl.int32), axis=0)
        left -= 1
    if num_late > 0:
        late = tl.min(tl.where(is_rank & (reached(values, epoch) == 0), peer, RANKS), axis=0)
        value = tl.sum(tl.where(peer == late, values, 0), axis=0)
        give_up(status, rank, late, phase, epoch, late, value, epoch)


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
    lane = tl.arange(0, WAVES * LANES)
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
    peer = tl.arange(0, RANKS)
    is_rank = peer < ep_size
    word = tl.load(peers + peer, mask=is_rank, other=0) + offset + rank * 4
    value = tl.zeros([RANKS], tl.int32) + epoch
    tl.atomic_xchg(word.to(tl.pointer_type(tl.int32)), value, mask=is_rank, sem="release", scope="sys")
