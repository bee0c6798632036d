"""Devices in plain numbers: what planning and roofs need, without a device.

"measured" figures are those of the machine named beside them; "data sheet" figures are the vendor's peaks, which no
kernel reaches. A figure that does not exist for a device is None.
"""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One device.

    Attributes:
        name: the product's name.
        arch: compiler target: "sm_90a", "gfx950", or "cpu".
        num_sms: streaming multiprocessors or compute units: at most that many resident CTAs of a persistent kernel.
        l2_bytes: last-level cache that all SMs share, bytes; None where it is not one cache.
        hbm_bytes_per_s: device memory bandwidth, reads, bytes per second.
        bf16_flops: dense BF16 matrix rate, FLOP/s.
        fp8_flops: dense FP8 matrix rate, FLOP/s.
        fp4_flops: dense FP4 matrix rate, FLOP/s.
        link_push_bytes_per_s: remote stores to peers, bytes per second and direction.
        link_pull_bytes_per_s: remote loads from peers, bytes per second and direction.

    Raises:
        ConfigError: `num_sms` is no positive integer.
    """

    name: str
    arch: str
    num_sms: int
    l2_bytes: int | None = None
    hbm_bytes_per_s: float
    bf16_flops: float
    fp8_flops: float | None = None
    fp4_flops: float | None = None
    link_push_bytes_per_s: float | None = None
    link_pull_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.num_sms, bool) or not isinstance(self.num_sms, int) or self.num_sms < 1:
            raise ConfigError(
                f"a share of {self.name} without SMs",
                got=repr(self.num_sms),
                expected="num_sms of at least 1",
                hint="lower MEGAMOE_RANKS_PER_GPU, where ranks share a GPU",
            )


H200 = DeviceSpec(
    name="NVIDIA H200",
    arch="sm_90a",
    num_sms=132,  # data sheet, SXM5
    l2_bytes=50 * MIB,  # Hopper white paper, GH100 as sold
    hbm_bytes_per_s=4.5e12,  # measured, reads, 2026-11; data sheet 4.8e12
    bf16_flops=775e12,  # measured, cuBLAS 8192^3, 2026-11
    fp8_flops=1348e12,  # measured, cuBLAS tensor-wise 8192^3, 2026-11; 1150e12 with 1x128 and 128x128 scales
    link_push_bytes_per_s=365e9,  # measured, kernels of two H200s, 2026-11; copy engine 390e9
    link_pull_bytes_per_s=337e9,  # same
)

MI355X = DeviceSpec(
    name="AMD Instinct MI355X",
    arch="gfx950",
    num_sms=256,  # data sheet
    hbm_bytes_per_s=8.0e12,  # data sheet, HBM3E
    bf16_flops=2.5e15,  # data sheet
    fp8_flops=5.0e15,  # data sheet
    fp4_flops=10.1e15,  # data sheet, MXFP4
    link_push_bytes_per_s=7 * 76.8e9,  # data sheet: 7 Infinity Fabric links of 153.6 GB/s, both directions together
    link_pull_bytes_per_s=7 * 76.8e9,  # same
)

CPU = DeviceSpec(
    name="CPU",
    arch="cpu",
    num_sms=1,  # nominal; CTAs of the reference are threads' work, their number is its configuration's
    hbm_bytes_per_s=20e9,  # nominal: one server memory channel
    bf16_flops=100e9,  # nominal: one core with AVX-512
)

DEVICES = {spec.name: spec for spec in (H200, MI355X, CPU)}
"""Specs by name."""
