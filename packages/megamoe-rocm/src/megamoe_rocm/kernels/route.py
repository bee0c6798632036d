"""Phase `route`: picks are counted per expert, their entries pushed to the experts' owners, and the counts published.

Two launches, because a pick's place among an owner's entries follows from the counts of all picks of the rank. A pick's
place among those of its expert is the order in which it was counted; that order never changes a result.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from megamoe_rocm.kernels.axes import lanes
from megamoe_rocm.kernels.flags import arrive, call_epoch, peer_address, publish
from megamoe_rocm.kernels.stores import drain, store_through


@triton.jit
def clear(words, num_words, TILE: tl.constexpr):
    """Zero int32 words, shared out among the programs of the launch."""
    for first in range(tl.program_id(0) * TILE, num_words, tl.num_programs(0) * TILE):
        at = first + tl.arange(0, TILE)
        tl.store(words + at, tl.zeros([TILE], tl.int32), mask=at < num_words)


@triton.jit
def load_picks(topk_ids, device_num_tokens, num_rows, top_k, num_experts, TILE: tl.constexpr):
    """This program's picks: their numbers, ids (0 where there is no expert), which have one, which are out of range."""
    num_picks = tl.minimum(tl.load(device_num_tokens), num_rows) * top_k
    pick = tl.program_id(0) * TILE + lanes(TILE)
    ids = tl.load(topk_ids + pick, mask=pick < num_picks, other=-1)
    is_expert = (ids >= 0) & (ids < num_experts)
    out_of_range = (ids < -1) | (ids >= num_experts)
    return pick, tl.where(is_expert, ids, 0).to(tl.int32), is_expert, out_of_range


@triton.jit
def count_picks(
    topk_ids,
    epoch,
    route_totals,
    counters,
    launch_counters,
    pick_places,
    route_bases,
    dropped_ids,
    device_num_tokens,
    num_rows,
    top_k,
    ep_size,
    num_local_experts,
    counter_words,
    launch_words,
    join,
    TILE: tl.constexpr,
    EXPERTS: tl.constexpr,
    WAVES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Count `TILE` picks per program; the last program to arrive turns the totals into bases.

    Args:
        topk_ids: `[num_rows, top_k]` int32 or int64.
        epoch: the last call that ended.
        route_totals: `[2, num_experts]` int32; this call's copy is counted, the other one cleared.
        counters, launch_counters: `[2, counter_words]`, `[2, launch_words]`; the other copy is cleared.
        pick_places: `[capacity * top_k]` int32; receives each pick's place among those of its expert.
        route_bases: `[num_experts]` int32; receives the place of an expert's first entry among those of its owner.
        dropped_ids: int32, grows by the ids outside [-1, num_experts).
        join: word of `launch_counters` at which the programs arrive.
    """
    parity = call_epoch(epoch) & 1
    num_experts = ep_size * num_local_experts
    clear(route_totals + (1 - parity) * num_experts, num_experts, TILE)
    clear(counters + (1 - parity) * counter_words, counter_words, TILE)
    clear(launch_counters + (1 - parity) * launch_words, launch_words, TILE)

    totals = route_totals + parity * num_experts
    pick, expert, is_expert, out_of_range = load_picks(topk_ids, device_num_tokens, num_rows, top_k, num_experts, TILE)
    place = tl.atomic_add(totals + expert, tl.full([TILE], 1, tl.int32), mask=is_expert, sem="relaxed", scope="gpu")
    tl.store(pick_places + pick, place, mask=is_expert)
    num_dropped = tl.sum(out_of_range.to(tl.int32), axis=0)
    if num_dropped > 0:
        tl.atomic_add(dropped_ids, num_dropped, sem="relaxed", scope="gpu")

    before = arrive(launch_counters + parity * launch_words + join, 1, WAVES, "gpu", LANES)
    if before == WAVES * tl.num_programs(0) - 1:
        for owner in range(ep_size):
            base = 0
            for first in range(0, num_local_experts, EXPERTS):
                local = first + tl.arange(0, EXPERTS)
                inside = local < num_local_experts
                of_owner = owner * num_local_experts + local
                counts = tl.load(totals + of_owner, mask=inside, other=0)
                tl.store(route_bases + of_owner, base + tl.cumsum(counts, axis=0) - counts, mask=inside)
                base += tl.sum(counts, axis=0)


@triton.jit
def push_entries(
    topk_ids,
    topk_weights,
    epoch,
    route_totals,
    launch_counters,
    pick_places,
    route_bases,
    device_num_tokens,
    peers,
    entries_offset,
    counts_offset,
    published_offset,
    rank,
    num_rows,
    capacity,
    top_k,
    ep_size,
    num_local_experts,
    launch_words,
    join,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    WAVES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Push `TILE` picks' entries per program; the last one pushes the counts and raises counts_published everywhere.

    Args:
        topk_weights: `[num_rows, top_k]` FP32.
        peers: `[ep_size]` int64, base address of each rank's symmetric memory.
        entries_offset, counts_offset, published_offset: bytes from there to route_entries, route_counts and
            counts_published.
        join: word of `launch_counters` at which the programs arrive.

    The rest is as in `count_picks`.
    """
    call = call_epoch(epoch)
    num_experts = ep_size * num_local_experts
    totals = route_totals + (call & 1) * num_experts
    pick, expert, is_expert, _ = load_picks(topk_ids, device_num_tokens, num_rows, top_k, num_experts, TILE)
    place = tl.load(pick_places + pick, mask=is_expert, other=0) + tl.load(
        route_bases + expert, mask=is_expert, other=0
    )
    weight = tl.load(topk_weights + pick, mask=is_expert, other=0.0).to(tl.int32, bitcast=True)
    entry = (weight.to(tl.int64) << 32) | pick.to(tl.int64)
    address = peer_address(peers, expert // num_local_experts, entries_offset)
    address += (tl.cast(rank, tl.int64) * capacity * top_k + place) * 8
    store_through(address.to(tl.pointer_type(tl.int64)), entry, is_expert, 8)
    drain(WAVES)

    joined = launch_counters + (call & 1) * launch_words + join
    if arrive(joined, 1, WAVES, "sys", LANES) == WAVES * tl.num_programs(0) - 1:
        for owner in range(ep_size):
            target = peer_address(peers, owner, counts_offset) + tl.cast(rank, tl.int64) * num_local_experts * 4
            for first in range(0, num_local_experts, TILE):
                local = first + lanes(TILE)
                inside = local < num_local_experts
                counts = tl.load(totals + owner * num_local_experts + local, mask=inside, other=0)
                store_through(target.to(tl.pointer_type(tl.int32)) + local, counts, inside, 4)
        drain(WAVES)
        if LANES == 32:
            tl.debug_barrier()  # one warp publishes what all have stored; for gfx950 Triton puts a barrier there itself
        publish(peers, rank, ep_size, published_offset, call, RANKS)
