"""Loads compiled kernels and launches them: raw addresses and a stream, no torch.

The bytes packed here are `KernelArguments` of include/megamoe/symm/arguments.cuh.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megamoe.problem import QuantMode
from megamoe.schedule.tiles import round_up
from megamoe.schedule.workspace import WorkspaceLayout
from megamoe_cuda.driver import check
from megamoe_cuda.jit.codegen import KERNEL_NAME
from megamoe_cuda.jit.compiler import CompiledKernel, KernelCompileError
from megamoe_cuda.jit.elf import sections
from megamoe_cuda.kernel_config import KernelConfig
from megamoe_cuda.smem_budget import SHARED_BASE
from megamoe_cuda.tma import TENSOR_MAP_BYTES, byte_matrix_map
from megamoe_cuda.workspace_layout import kernel_workspace

STRUCT_ALIGNMENT = 64  # of a CUtensorMap
FAILURE_RECORD = struct.Struct("<8I")
MAPS_BYTES = 4 * TENSOR_MAP_BYTES  # of RankArguments: w13, w2, pool, a2
POINTERS = struct.Struct("<11Q2I4Q")  # the rest of RankArguments
RANK_BYTES = round_up(MAPS_BYTES + POINTERS.size, STRUCT_ALIGNMENT)
PHASES = ("stage", "route", "dispatch", "gemm1", "gemm2", "finish", "combine", "pipeline")
"""Names of megamoe::Phase (symm/watchdog.cuh)."""
FAILURES = ("none", "timeout", "peer failed", "impossible counts")
"""Names of megamoe::Failure (symm/watchdog.cuh)."""
TRACE_POINTS = ("started", "routed", "planned", "pulled", "multiplied", "finished", "combined")
"""Names of megamoe::TracePoint (symm/trace.cuh)."""


class RankCall(NamedTuple):
    """One rank's tensors for one call: device addresses, 0 where a tensor is absent. The caller keeps them alive.

    In the order of RankArguments, behind its maps.

    Attributes:
        hidden_states: `[T, H]` BF16, or e4m3 with `hidden_scales`.
        hidden_scales: `[T, H / 128]` FP32, or 0: the kernel quantises where its mode does.
        topk_ids: `[T, K]`, int32 or int64.
        topk_weights: `[T, K]` FP32.
        w13_scale, w2_scale, w13_bias, w2_bias, w13, w2: as `weights.py` lays them out; 0 for scales that the mode does
            not have, and for biases of experts without (kernels compiled without `expert_bias`).
        out: `[T, H]` BF16.
        device_num_tokens: int32 scalar, read by the kernel, a negative one as 0; rows of `out` past it are not written.
            Or 0.
        expert_counts: `[E_local]` uint32, receives the rows per local expert; or 0.
        gemm1_tap: `[rows, 2I]` FP32, receives GEMM1's accumulators, experts in order and no padding between them
            (kernels compiled with `tap_gemm1`); or 0.
        trace: `[ctas_per_rank, len(TRACE_POINTS)]` uint64, receives times in ns (kernels compiled with `trace`); or 0.
        num_tokens: tokens, at most T; with `device_num_tokens`, the most that it may say.
        topk_ids_are_int64: or int32.
    """

    hidden_states: int
    hidden_scales: int
    topk_ids: int
    topk_weights: int
    w13_scale: int
    w2_scale: int
    out: int
    device_num_tokens: int
    expert_counts: int
    gemm1_tap: int
    trace: int
    num_tokens: int
    topk_ids_are_int64: bool
    w13_bias: int
    w2_bias: int
    w13: int
    w2: int


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What ended a call on a rank: one of FAILURES, and what was waited for or read."""

    kind: str
    rank: int
    peer: int
    phase: str
    epoch: int
    index: int
    observed: int
    expected: int


def read_failure(record: bytes) -> Failure | None:
    """Decode one record of host-mapped memory (FAILURE_RECORD.size bytes per virtual rank); None: nothing happened."""
    kind, rank, peer, phase, epoch, index, observed, expected = FAILURE_RECORD.unpack(record)
    if not kind:
        return None
    return Failure(
        kind=FAILURES[kind],
        rank=rank,
        peer=peer,
        phase=PHASES[phase],
        epoch=epoch,
        index=index,
        observed=observed,
        expected=expected,
    )


class LoadedKernel:
    """A kernel in the current CUDA context, ready to launch."""

    def __init__(
        self,
        compiled: CompiledKernel,
        *,
        workspaces: Sequence[int],
        first_rank: int,
        failure_records: int,
        timeout_s: float,
    ) -> None:
        """Load the machine code.

        Args:
            compiled: what to load.
            workspaces: every rank's workspace, as this GPU addresses it.
            first_rank: this process's rank; 0 with virtual ranks.
            failure_records: device address of host-mapped memory, FAILURE_RECORD.size bytes per virtual rank.
            timeout_s: how long a wait of the kernel lasts before it gives up.

        Raises:
            CudaDriverError: the driver refused it (no SM90, no context).
            KernelCompileError: its threads have other registers at entry than its warpgroups share out. The last
                warpgroup to ask for its share would wait for ever, before any watchdog. Or its dynamic shared memory
                begins elsewhere than its WGMMA descriptors say.
        """
        self.config: KernelConfig = compiled.config
        if compiled.registers != self.config.tile.registers_at_entry:
            raise KernelCompileError(
                "the assembler gave the kernel other registers than its warpgroups share out",
                got=compiled.registers,
                expected=self.config.tile.registers_at_entry,
                hint="use another NVRTC; with 13.0 these counts agree",
            )
        shared = sections(compiled.cubin).get(f".nv.shared.{KERNEL_NAME}")  # what lies before dynamic shared memory
        if shared is None or shared.num_bytes != SHARED_BASE:
            raise KernelCompileError(
                "the assembler lets the kernel's dynamic shared memory begin elsewhere than its WGMMA descriptors say",
                got=shared.num_bytes if shared else "no section that says where",
                expected=SHARED_BASE,
                hint="use another NVRTC; with 12.4 and 13.0 it begins there",
            )
        from cuda.bindings import driver

        self._context = check(driver.cuCtxGetCurrent())
        self._bind = driver.cuCtxSetCurrent
        self._no_context = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
        self.layout = kernel_workspace(self.config)
        self._module = check(driver.cuModuleLoadData(compiled.cubin))
        self._function = check(driver.cuModuleGetFunction(self._module, KERNEL_NAME.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(self._function, attribute, compiled.dynamic_smem_bytes))
        self._launch = _launch_config(self.config, compiled.dynamic_smem_bytes)
        self._launch_kernel = driver.cuLaunchKernelEx
        self._as_stream = driver.CUstream
        self._stream: int | None = None
        self._arguments = _ArgumentBlock(self.config, self.layout, workspaces, first_rank, failure_records, timeout_s)

    def unload(self) -> None:
        """Give the machine code back, once no launch and no captured graph uses it any more."""
        from cuda.bindings import driver

        check(driver.cuModuleUnload(self._module))

    def launch(self, *, calls: Sequence[RankCall], stream: int) -> None:
        """Launch one call; stream-ordered, graph-safe, no host sync. One thread at a time.

        Args:
            calls: one per virtual rank.
            stream: a CUstream handle.

        Raises:
            CudaDriverError: the launch was refused.
        """
        self._arguments.write(calls)
        if stream != self._stream:
            self._stream, self._launch.hStream = stream, self._as_stream(stream)
        launched = self._launch_kernel(self._launch, self._function, self._arguments.parameters, 0)
        if launched[0] == self._no_context:  # the first call of CUDA in this thread
            check(self._bind(self._context))
            launched = self._launch_kernel(self._launch, self._function, self._arguments.parameters, 0)
        check(launched)


class _ArgumentBlock:
    """KernelArguments in host memory. What is the same in every launch, or as in the last one, stays as it is: packing
    all of it takes the host longer than the launch."""

    def __init__(
        self,
        config: KernelConfig,
        layout: WorkspaceLayout,
        workspaces: Sequence[int],
        first_rank: int,
        failure_records: int,
        timeout_s: float,
    ) -> None:
        assert len(workspaces) == config.num_ranks
        self._config = config
        self._layout = layout
        self._workspaces = workspaces[first_rank : first_rank + config.num_virtual_ranks]
        header = struct.Struct(f"<{config.num_ranks}QQQI")
        self._ranks_offset = round_up(header.size, STRUCT_ALIGNMENT)
        num_bytes = self._ranks_offset + config.num_virtual_ranks * RANK_BYTES
        self._buffer = ctypes.create_string_buffer(num_bytes)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self.parameters = ctypes.addressof(self._pointers)
        self._last_weights: list[tuple[int, int] | None] = [None] * config.num_virtual_ranks
        header.pack_into(self._buffer, 0, *workspaces, failure_records, int(timeout_s * 1e9), first_rank)

    def write(self, calls: Sequence[RankCall]) -> None:
        assert len(calls) == self._config.num_virtual_ranks
        for index, call in enumerate(calls):
            offset = self._ranks_offset + index * RANK_BYTES
            if self._last_weights[index] != (call.w13, call.w2):
                self._write_maps(offset, self._workspaces[index], call)
                self._last_weights[index] = (call.w13, call.w2)
            POINTERS.pack_into(self._buffer, offset + MAPS_BYTES, *call)

    def _write_maps(self, offset: int, workspace: int, call: RankCall) -> None:
        config = self._config
        box_rows, weight_box, ring_rows = config.tile.box_rows, config.weight_box_rows, config.ring.num_rows
        input_bytes, a2_bytes = config.input_row_bytes, config.a2_row_bytes
        weights = (
            (call.w13, config.num_local_experts * 2 * config.intermediate_size, input_bytes, weight_box),
            (call.w2, config.num_local_experts * config.hidden_size, a2_bytes, weight_box),
        )
        activations = (
            (workspace + self._layout.offset("pool_payload"), ring_rows, input_bytes, box_rows),
            (workspace + self._layout.offset("a2_payload"), ring_rows, a2_bytes, box_rows),
        )
        packed = config.quant is QuantMode.A8W4  # packed weights are read without a map
        maps = bytes(len(weights) * TENSOR_MAP_BYTES) if packed else b""
        maps += b"".join(
            byte_matrix_map(address, num_rows=rows, num_columns=columns, box_rows=box)
            for address, rows, columns, box in (activations if packed else weights + activations)
        )
        ctypes.memmove(ctypes.addressof(self._buffer) + offset, maps, MAPS_BYTES)


def _launch_config(kernel: KernelConfig, dynamic_smem_bytes: int) -> Any:
    """A cooperative launch: the kernel's CTAs wait for each other, so all must be resident at once."""
    from cuda.bindings import driver

    cooperative = driver.CUlaunchAttribute()
    cooperative.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    cooperative.value.cooperative = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = kernel.num_ctas, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.tile.num_threads, 1, 1
    config.sharedMemBytes = dynamic_smem_bytes
    attributes = [cooperative]
    cluster_size = kernel.tile.cluster_size
    if cluster_size > 1:
        cluster = driver.CUlaunchAttribute()
        cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = cluster_size, 1, 1
        attributes.append(cluster)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config
