"""Loads compiled kernels and launches them: raw addresses and a stream, no torch.

The bytes packed here are `KernelArguments` of include/megamoe/symm/arguments.cuh.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megamoe.schedule.tiles import round_up
from megamoe_cuda.driver import check
from megamoe_cuda.jit.codegen import KERNEL_NAME
from megamoe_cuda.jit.compiler import CompiledKernel
from megamoe_cuda.kernel_config import BLOCK_N, NUM_THREADS, KernelConfig
from megamoe_cuda.tma import byte_matrix_map
from megamoe_cuda.workspace_layout import kernel_workspace

STRUCT_ALIGNMENT = 64  # of a CUtensorMap
DEFAULT_TIMEOUT_S = 300.0  # kernels that one rank had to compile first are late by minutes
TIMEOUT_RECORD = struct.Struct("<8I")
PHASES = ("stage", "route", "dispatch", "gemm1", "gemm2", "finish", "combine", "pipeline")
"""Names of megamoe::Phase (symm/watchdog.cuh)."""


@dataclass(frozen=True, kw_only=True)
class RankCall:
    """One rank's tensors for one call: device addresses, 0 where a tensor is absent. The caller keeps them alive.

    Attributes:
        hidden_states: `[T, H]` BF16, or e4m3 with `hidden_scales`.
        hidden_scales: `[T, H / 128]` FP32, or 0: the kernel quantises.
        topk_ids: `[T, K]`, int32 or int64.
        topk_ids_are_int64: which of the two.
        topk_weights: `[T, K]` FP32.
        w13: `[E_local, 2I, H]` e4m3, gate and up interleaved by 8 rows.
        w13_scale: `[E_local, 2I / 128, H / 128]` FP32, packed order (gate blocks first).
        w2: `[E_local, H, I]` e4m3.
        w2_scale: `[E_local, H / 128, I / 128]` FP32.
        out: `[T, H]` BF16.
        num_tokens: T; ignored when `device_num_tokens` is given.
        device_num_tokens: uint32 scalar, read by the kernel; rows of `out` past it are not written.
        expert_counts: `[E_local]` uint32, receives the rows per local expert; or 0.
        gemm1_tap: `[rows, 2I]` FP32, receives GEMM1's accumulators (kernels compiled with `tap_gemm1`); or 0.
    """

    hidden_states: int
    hidden_scales: int = 0
    topk_ids: int
    topk_ids_are_int64: bool
    topk_weights: int
    w13: int
    w13_scale: int
    w2: int
    w2_scale: int
    out: int
    num_tokens: int
    device_num_tokens: int = 0
    expert_counts: int = 0
    gemm1_tap: int = 0


@dataclass(frozen=True, kw_only=True)
class Timeout:
    """What a wait of the kernel waited for when it gave up."""

    rank: int
    peer: int
    phase: str
    epoch: int
    index: int
    observed: int
    expected: int


def read_timeout(record: bytes) -> Timeout | None:
    """Decode one record of host-mapped memory (TIMEOUT_RECORD.size bytes per virtual rank), None if nothing happened."""
    happened, rank, peer, phase, epoch, index, observed, expected = TIMEOUT_RECORD.unpack(record)
    if not happened:
        return None
    return Timeout(
        rank=rank, peer=peer, phase=PHASES[phase], epoch=epoch, index=index, observed=observed, expected=expected
    )


class LoadedKernel:
    """A kernel in the current CUDA context, ready to launch."""

    def __init__(self, compiled: CompiledKernel) -> None:
        """Load the machine code.

        Raises:
            CudaDriverError: the driver refused it (no SM90, no context).
        """
        from cuda.bindings import driver

        self.config: KernelConfig = compiled.config
        self.layout = kernel_workspace(self.config)
        self._module = check(driver.cuModuleLoadData(compiled.cubin))
        self._function = check(driver.cuModuleGetFunction(self._module, KERNEL_NAME.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(self._function, attribute, compiled.dynamic_smem_bytes))
        self._launch = _launch_config(self.config.num_ctas, compiled.dynamic_smem_bytes)

    def launch(
        self,
        *,
        workspaces: Sequence[int],
        first_rank: int,
        calls: Sequence[RankCall],
        timeout_records: int,
        timeout_s: float,
        stream: int,
    ) -> None:
        """Launch one call; stream-ordered, graph-safe, no host sync.

        Args:
            workspaces: every rank's workspace, as this GPU addresses it.
            first_rank: this process's rank; 0 with virtual ranks.
            calls: one per virtual rank.
            timeout_records: device address of host-mapped memory, TIMEOUT_RECORD.size bytes per virtual rank.
            timeout_s: how long a wait of the kernel lasts before it gives up.
            stream: a CUstream handle.

        Raises:
            CudaDriverError: the launch was refused.
        """
        from cuda.bindings import driver

        arguments = self._pack(workspaces, first_rank, calls, timeout_records, timeout_s)
        buffer = ctypes.create_string_buffer(arguments, len(arguments))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self._launch.hStream = driver.CUstream(stream)
        check(driver.cuLaunchKernelEx(self._launch, self._function, ctypes.addressof(parameters), 0))

    def _pack(
        self,
        workspaces: Sequence[int],
        first_rank: int,
        calls: Sequence[RankCall],
        timeout_records: int,
        timeout_s: float,
    ) -> bytes:
        assert len(workspaces) == self.config.num_ranks
        assert len(calls) == self.config.num_virtual_ranks
        header = struct.pack(
            f"<{len(workspaces)}QQQI", *workspaces, timeout_records, int(timeout_s * 1e9), first_rank
        )
        ranks = [self._pack_rank(workspaces[first_rank + i], call) for i, call in enumerate(calls)]
        return b"".join(_padded(part) for part in (header, *ranks))

    def _pack_rank(self, workspace: int, call: RankCall) -> bytes:
        config = self.config
        block_m, ring_rows = config.tile.block_m, config.ring.num_rows
        hidden, intermediate = config.hidden_size, config.intermediate_size
        matrices = (
            (call.w13, config.num_local_experts * 2 * intermediate, hidden, BLOCK_N),
            (call.w2, config.num_local_experts * hidden, intermediate, BLOCK_N),
            (workspace + self.layout.offset("pool_payload"), ring_rows, hidden, block_m),
            (workspace + self.layout.offset("a2_payload"), ring_rows, intermediate, block_m),
        )
        maps = [
            byte_matrix_map(address, num_rows=rows, num_columns=columns, box_rows=box)
            for address, rows, columns, box in matrices
        ]
        pointers = struct.pack(
            "<10Q2I",
            call.hidden_states,
            call.hidden_scales,
            call.topk_ids,
            call.topk_weights,
            call.w13_scale,
            call.w2_scale,
            call.out,
            call.device_num_tokens,
            call.expert_counts,
            call.gemm1_tap,
            call.num_tokens,
            call.topk_ids_are_int64,
        )
        return b"".join(maps) + pointers


def _padded(part: bytes) -> bytes:
    return part.ljust(round_up(len(part), STRUCT_ALIGNMENT), b"\0")


def _launch_config(num_ctas: int, dynamic_smem_bytes: int) -> Any:
    """A cooperative launch: the kernel's CTAs wait for each other, so all must be resident at once."""
    from cuda.bindings import driver

    cooperative = driver.CUlaunchAttribute()
    cooperative.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    cooperative.value.cooperative = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = num_ctas, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = NUM_THREADS, 1, 1
    config.sharedMemBytes = dynamic_smem_bytes
    config.attrs = [cooperative]
    config.numAttrs = 1
    return config
