"""How many waves of a kernel one gfx950 compute unit holds. Pure arithmetic on the numbers a code object states.

Sources: AMD CDNA4 ISA, "Kernel resources" (512 unified VGPRs a lane and SIMD, four SIMDs, 160 KiB of LDS);
LLVM AMDGPUUsage and AMDGPUBaseInfo (allocation granules, 8 waves a SIMD, SGPR limit).
"""

from __future__ import annotations

from dataclasses import dataclass

SIMDS_PER_CU = 4
VGPRS_PER_SIMD = 512  # architectural and accumulation registers together, per lane
VGPR_GRANULE = 8
MAX_WAVES_PER_SIMD = 8
MAX_SGPRS_AT_FULL_OCCUPANCY = 100  # of 800; up to 102 are addressable, which leaves room for seven waves
LDS_BYTES_PER_CU = 163840
LDS_GRANULE = 1280


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Waves a SIMD and workgroups a compute unit, with what limits them.

    Args:
        workgroups_per_cu: whole workgroups that are resident together.
        waves_per_simd: those workgroups' waves, over four SIMDs.
        limits: resource -> workgroups per CU if it alone limited.
    """

    workgroups_per_cu: int
    waves_per_simd: float
    limits: dict[str, int]

    @property
    def limiter(self) -> str:
        """The resource with the lowest limit."""
        return min(self.limits, key=lambda name: self.limits[name])


def occupancy(*, num_vgprs: int, num_sgprs: int, lds_bytes: int, num_warps: int) -> Occupancy:
    """Occupancy of workgroups of `num_warps` waves of `num_vgprs` unified VGPRs and `lds_bytes` of LDS each."""
    waves_by_vgprs = min(VGPRS_PER_SIMD // round_up(max(num_vgprs, 1), VGPR_GRANULE), MAX_WAVES_PER_SIMD)
    waves_by_sgprs = MAX_WAVES_PER_SIMD if num_sgprs <= MAX_SGPRS_AT_FULL_OCCUPANCY else MAX_WAVES_PER_SIMD - 1
    limits = {
        "vgprs": _workgroups(waves_by_vgprs, num_warps),
        "sgprs": _workgroups(waves_by_sgprs, num_warps),
        "waves": _workgroups(MAX_WAVES_PER_SIMD, num_warps),
    }
    if lds_bytes:
        limits["lds"] = LDS_BYTES_PER_CU // round_up(lds_bytes, LDS_GRANULE)
    workgroups = min(limits.values())
    return Occupancy(workgroups_per_cu=workgroups, waves_per_simd=workgroups * num_warps / SIMDS_PER_CU, limits=limits)


def _workgroups(waves_per_simd: int, num_warps: int) -> int:
    # A workgroup's waves are dealt out over the SIMDs; with fewer than four waves a SIMD is still whole to them.
    if num_warps >= SIMDS_PER_CU:
        return waves_per_simd // -(-num_warps // SIMDS_PER_CU)
    return waves_per_simd * SIMDS_PER_CU // num_warps


def round_up(value: int, granule: int) -> int:
    """`value` rounded up to a multiple of `granule`."""
    return -(-value // granule) * granule
