"""What the pieces of a call take on a machine, measured apart from the fused kernel.

The simulation (schedule/simulate.py) puts a call together from these. A number carries where it comes from: "probe" is
a kernel that holds one thing only (a main loop without dispatch, a copy, a flag), so that the fused kernel's time is a
prediction from them and no fit to itself. "Counted" and "estimated" numbers were not measured alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.schedule.device_spec import DeviceSpec


@dataclass(frozen=True, kw_only=True)
class KernelRates:
    """Times in microseconds, rates in bytes per second.

    Attributes:
        device: `DeviceSpec.name` that they hold for.
        k_block_us: by tile height, 128 of K of a tile of 256 columns, at the boost clock.
        half_tile: time of a tile whose second warpgroup has only padding, as a share of a full one's.
        tile_us: of a tile beside its K blocks and epilogue: first stage's latency, queue.
        activation_epilogue_us: GEMM1's epilogue of 128 rows: activation, FP8, A2's stores.
        store_epilogue_us: GEMM2's epilogue of 128 rows, stores that stay on the device.
        quantise_epilogue_us: the same where the transport is quantised.
        sustained_slowdown: time of a call whose math warps work throughout, over that at the boost clock.
        hbm_bytes_per_s: weights streamed by bulk copies.
        copy_bytes_per_s: reads and writes together, of plain loads and stores.
        sm_stream_bytes_per_s: the most that one SM streams: its bytes in flight over the latency.
        sm_push_bytes_per_s: the most that one SM stores to peers.
        launch_us: of an empty persistent launch between its events.
        memory_latency_us: a dependent load from device memory.
        grid_join_us: a grid-wide barrier.
        plan_us: prefix sums over all ranks' counts.
    """

    device: str
    k_block_us: dict[int, float]
    half_tile: float
    tile_us: float
    activation_epilogue_us: float
    store_epilogue_us: float
    quantise_epilogue_us: float
    sustained_slowdown: float
    hbm_bytes_per_s: float
    copy_bytes_per_s: float
    sm_stream_bytes_per_s: float
    sm_push_bytes_per_s: float
    launch_us: float
    memory_latency_us: float
    grid_join_us: float
    plan_us: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """One way to other ranks.

    Attributes:
        name: of the link.
        share: of a rank's rows that take it.
        pull_bytes_per_s: rows in.
        push_bytes_per_s: results out, and peers' results in.
        flag_us: a flag, one way.
    """

    name: str
    share: float
    pull_bytes_per_s: float
    push_bytes_per_s: float
    flag_us: float


# NVIDIA H200 SXM, driver 580, 2026-11-30. Main loops: 32 experts of 2048 rows, H=4096 I=2048, NVRTC 13.
H200_RATES = KernelRates(
    device="NVIDIA H200",
    # Probe, nothing stored, 63 rounds of 132 tiles: 1526.8 us at 32 K blocks a tile, 772.8 at 16. The difference is 16
    # K blocks. 64 rows with BF16 stores, 125 rounds: 1818.6 and 951.8.
    # 32 rows with swapped operands: counted, 8 WGMMAs of 32 cycles by either warpgroup, a promotion, a barrier.
    k_block_us={32: 0.35, 64: 0.434, 128: 0.748},
    # Counted: one warpgroup's WGMMAs and promotions in turn, 2 x (0.13 + 0.06 + 0.05) us of a K block's 0.748.
    half_tile=0.65,
    tile_us=0.25,  # probe: what the two loops above leave
    activation_epilogue_us=1.82,  # probe: 1641.3 us with SwiGLU and FP8 stores, against 1526.8 without any
    store_epilogue_us=1.14,  # probe: 844.5 us with BF16 stores, against 772.8 without any
    # Estimated: direct FP8 stores cost the probes 1.7 to 2.6 us with one scale a row and half as many values.
    quantise_epilogue_us=2.6,
    sustained_slowdown=1.21,  # probe with both epilogues: 3011 us back to back under the 700 W cap, 2486 at 1980 MHz
    hbm_bytes_per_s=4.31e12,  # probe, 28 experts' weights: 705 MB in 169.8 us less the launch
    copy_bytes_per_s=4.27e12,  # probe, device to device
    sm_stream_bytes_per_s=131e9,  # counted: 4 stages of 32 KiB in flight, 1 us of loaded latency
    sm_push_bytes_per_s=19.4e9,  # probe: 16 SMs push 310 GB/s
    launch_us=6.0,  # probe: 5 to 7 us of a launch are fixed
    memory_latency_us=0.8,  # counted: DRAM and a TLB miss
    grid_join_us=0.84,  # probe
    plan_us=1.0,  # counted: three dependent passes of a warp over shared memory, between barriers
)

KERNEL_RATES = {rates.device: rates for rates in (H200_RATES,)}
"""Rates by device."""

NETWORK_BYTES_PER_S = 50e9
"""Between NVLink domains, per GPU and direction: data sheet of a 400 Gb/s adapter. Nothing was measured over it."""
NETWORK_FLAG_US = 5.0  # estimated: a remote write through two adapters and a switch
NVLINK_FLAG_US = 1.45  # probe, two H200s: half of a system-scope round trip of 2.9 us


def links_of(device: DeviceSpec, ep_size: int, domain_size: int) -> tuple[Link, ...]:
    """Links of a rank whose picks are spread evenly over `ep_size` ranks in NVLink domains of `domain_size`."""
    near = min(domain_size, ep_size)
    links = []
    if near > 1 and device.link_pull_bytes_per_s is not None and device.link_push_bytes_per_s is not None:
        links.append(
            Link(
                name="NVLink",
                share=(near - 1) / ep_size,
                pull_bytes_per_s=device.link_pull_bytes_per_s,
                push_bytes_per_s=device.link_push_bytes_per_s,
                flag_us=NVLINK_FLAG_US,
            )
        )
    if ep_size > near:
        links.append(
            Link(
                name="network",
                share=(ep_size - near) / ep_size,
                pull_bytes_per_s=NETWORK_BYTES_PER_S,
                push_bytes_per_s=NETWORK_BYTES_PER_S,
                flag_us=NETWORK_FLAG_US,
            )
        )
    return tuple(links)
