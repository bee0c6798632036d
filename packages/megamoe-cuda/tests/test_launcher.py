"""The bytes of a launch's arguments, against a C structure, and that what changes from call to call is rewritten."""

from __future__ import annotations

import ctypes
import re
import struct

import pytest

from megamoe.errors import MegaMoETimeoutError, ProtocolError, RankFailedError
from megamoe.problem import MoEProblem
from megamoe.symm import Group
from megamoe.symm.torch_symm import TorchSymmGroup
from megamoe_cuda import launcher
from megamoe_cuda.aot import builds
from megamoe_cuda.jit.codegen import KERNEL_NAME
from megamoe_cuda.jit.compiler import CompiledKernel, KernelCompileError, compile_kernel
from megamoe_cuda.jit.elf import sections
from megamoe_cuda.launcher import (
    FAILURE_RECORD,
    FAILURES,
    PHASES,
    Failure,
    LoadedKernel,
    RankCall,
    _ArgumentBlock,
    read_failure,
)
from megamoe_cuda.session import as_error
from megamoe_cuda.smem_budget import SHARED_BASE
from megamoe_cuda.symm_nvshmem import NvshmemGroup
from megamoe_cuda.workspace_layout import kernel_workspace

PROBLEM = MoEProblem(
    hidden_size=512, intermediate_size=256, num_experts=8, top_k=2, num_max_tokens_per_rank=64, ep_size=2
)
POINTERS = (
    "hidden_states", "hidden_scales", "topk_ids", "topk_weights", "w13_scale", "w2_scale", "out", "device_num_tokens",
    "expert_counts", "gemm1_tap", "trace",
)  # fmt: skip


class RankArguments(ctypes.Structure):
    """As in include/megamoe/symm/arguments.cuh; padded to the alignment of a tensor map."""

    _fields_ = (
        ("maps", ctypes.c_char * 512),
        *((name, ctypes.c_uint64) for name in POINTERS),
        ("num_tokens", ctypes.c_uint32),
        ("topk_ids_are_int64", ctypes.c_uint32),
        ("padding", ctypes.c_char * 32),
    )


class KernelArguments(ctypes.Structure):
    _fields_ = (
        ("workspaces", ctypes.c_uint64 * 2),
        ("failure_records", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("first_rank", ctypes.c_uint32),
        ("padding", ctypes.c_char * 28),
        ("ranks", RankArguments * 2),
    )


def call(**changes: int) -> RankCall:
    values = {name: 0x1000 + index for index, name in enumerate(RankCall._fields)}
    return RankCall(**(values | {"topk_ids_are_int64": True} | changes))  # type: ignore[arg-type]


WORKSPACES = (7 << 20, 9 << 20)


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> _ArgumentBlock:
    """Of two virtual ranks. Tensor maps are the driver's: here their bytes name their address."""
    monkeypatch.setattr(
        launcher,
        "byte_matrix_map",
        lambda address, **sizes: f"{address} {sizes['num_rows']} {sizes['num_columns']}".encode().ljust(128, b"."),
    )
    kernel = next(builds(PROBLEM, virtual=True)).kernel
    return _ArgumentBlock(kernel, kernel_workspace(kernel), WORKSPACES, 0, 0xABC, 2.5)


def written(block: _ArgumentBlock, *calls: RankCall) -> KernelArguments:
    block.write(calls)
    address = ctypes.cast(block.parameters, ctypes.POINTER(ctypes.c_uint64))[0]
    assert len(block._buffer) == ctypes.sizeof(KernelArguments)
    return KernelArguments.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(KernelArguments)))


def test_every_field_is_where_the_kernel_reads_it(block: _ArgumentBlock) -> None:
    calls = (call(), call(num_tokens=5, topk_ids_are_int64=0))
    got = written(block, *calls)
    assert tuple(got.workspaces) == WORKSPACES
    assert (got.failure_records, got.timeout_ns, got.first_rank) == (0xABC, 2_500_000_000, 0)
    for rank, expected in zip(got.ranks, calls, strict=True):
        for name in (*POINTERS, "num_tokens", "topk_ids_are_int64"):
            assert getattr(rank, name) == getattr(expected, name), name


def test_maps_are_of_this_ranks_weights_and_ring(block: _ArgumentBlock) -> None:
    ranks = written(block, call(w13=11, w2=12), call(w13=21, w2=22)).ranks
    assert ranks[0].maps.startswith(b"11 2048 512.")  # 8 experts over 2 ranks, 2I = 512 rows each
    layout = block._layout
    for index, workspace in enumerate(WORKSPACES):
        pool = f"{workspace + layout.offset('pool_payload')} ".encode()
        assert bytes(ranks[index].maps)[256:].startswith(pool)


def test_what_changes_is_rewritten(block: _ArgumentBlock) -> None:
    written(block, call(), call())
    got = written(block, call(out=99), call(w2=77))
    assert got.ranks[0].out == 99
    assert b"77 " in bytes(got.ranks[1].maps)
    assert b"77 " not in bytes(got.ranks[0].maps)


def record(kind: str) -> Failure:
    failure = read_failure(FAILURE_RECORD.pack(FAILURES.index(kind), 3, 5, PHASES.index("combine"), 41, 5, 40, 41))
    assert failure is not None
    return failure


def test_a_failure_record_is_read_back() -> None:
    assert read_failure(bytes(FAILURE_RECORD.size)) is None
    failure = record("timeout")
    assert (failure.rank, failure.peer, failure.phase, failure.epoch, failure.index) == (3, 5, "combine", 41, 5)
    assert (failure.observed, failure.expected) == (40, 41)


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        ("timeout", MegaMoETimeoutError, r"rank 3 waited 2\.5 s for rank 5 .* got 40; expected 41"),
        ("peer failed", RankFailedError, "rank 5 gave up a call that rank 3 waited for in phase combine"),
        ("impossible counts", ProtocolError, "rank 3 was sent impossible row counts by rank 5 .* got 40"),
    ],
)
def test_each_kind_of_failure_has_an_error(kind: str, error: type[ProtocolError], says: str) -> None:
    raised = as_error(record(kind), 2.5)
    assert type(raised) is error
    assert re.search(says, str(raised))


@pytest.mark.parametrize("kind", ["timeout", "peer failed"])
@pytest.mark.parametrize(
    ("group", "advice"),
    [(TorchSymmGroup, "the others go on in a new session"), (NvshmemGroup, "restart the processes of all ranks")],
)
def test_what_to_do_without_a_dead_rank_is_its_groups_to_say(kind: str, group: type[Group], advice: str) -> None:
    said = str(as_error(record(kind), 2.5, group.if_a_rank_died))
    assert re.search(rf"if (rank 5|a rank) died, {advice}", said)
    assert "died" not in str(as_error(record(kind), 2.5)), "one process has all ranks"


def compiled(cubin: bytes = b"", **changes: int) -> CompiledKernel:
    kernel = next(builds(PROBLEM)).kernel
    facts = {"registers": kernel.tile.registers_at_entry, "spill_bytes": 0, "stack_bytes": 0, "dynamic_smem_bytes": 0}
    return CompiledKernel(config=kernel, cubin=cubin, warnings=(), **(facts | changes))


def load(kernel: CompiledKernel) -> LoadedKernel:
    return LoadedKernel(kernel, workspaces=[0], first_rank=0, failure_records=0, timeout_s=1.0)


def elf(**num_bytes: int) -> bytes:
    """With empty sections of these names and sizes, of the kind that only reserves memory."""
    names = [b"", b".shstrtab", *(name.encode().replace(b"__", b".") for name in num_bytes)]
    table = b"\0".join(names) + b"\0"
    sizes = [0, len(table), *num_bytes.values()]
    headers = b"".join(
        struct.pack("<IIQQQQIIQQ", table.index(name + b"\0") if name else 0, 8, 0, 0, 64, size, 0, 0, 1, 0)
        for name, size in zip(names, sizes, strict=True)
    )
    start = struct.pack("<40sQ10sHHH", b"\x7fELF", 64 + len(table), b"", 64, len(names), 1)
    return start.ljust(64, b"\0") + table + headers


def test_a_kernel_whose_warpgroups_would_wait_for_registers_is_not_loaded() -> None:
    with pytest.raises(KernelCompileError, match="got 160; expected 168"):
        load(compiled(registers=160))


@pytest.mark.parametrize(("section", "got"), [({"__nv__shared__sm90_mega_moe": 2048}, "2048"), ({}, "no section")])
def test_a_kernel_whose_shared_memory_begins_elsewhere_is_not_loaded(section: dict[str, int], got: str) -> None:
    with pytest.raises(KernelCompileError, match=f"begin elsewhere .* got {got}.*; expected 1024"):
        load(compiled(elf(__text__sm90_mega_moe=64, **section)))


def test_with_the_compiler_that_is_installed_it_begins_there() -> None:
    pytest.importorskip("cuda.core", reason="needs the extra compile-cu12 or compile-cu13")
    cubin = compile_kernel(next(builds(PROBLEM)).kernel).cubin
    assert sections(cubin)[f".nv.shared.{KERNEL_NAME}"].num_bytes == SHARED_BASE
