"""Symmetric memory from Mori, against a stand-in with the signatures and the behaviour of amd-mori 1.2.4.

Ranks are threads, each with a Mori of its own.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megamoe.errors import BackendUnavailableError, ConfigError, WorkspaceError
from megamoe.problem import MoEProblem
from megamoe.symm import InprocGroup
from megamoe.testing.threads import on_ranks
from megamoe_rocm import symm_mori
from megamoe_rocm.symm_mori import HEAP_CHUNK, HEAP_SIZE, MoriGroup, heap_size
from megamoe_rocm.unfused.mori_exchange import SMALL_BUFFERS, MoriExchange, heap_bytes

STAND_IN = Path(__file__).with_name("stand_in")
TIMEOUT_S = 20.0
NUM_BYTES = 4096
PUBLISHED = {
    "shmem_get_unique_id": [],
    "shmem_init_attr": ["flags", "rank", "nranks", "unique_id"],
    "shmem_mype": [],
    "shmem_npes": [],
    "shmem_malloc": ["size"],
    "shmem_free": ["ptr"],
    "shmem_ptr_p2p": ["dest_ptr", "my_pe", "dest_pe"],
}
"""Parameters by function: mori/shmem/api.py of the wheel amd_mori-1.2.4-cp312-cp312-manylinux_2_39_x86_64."""

PUBLISHED_OPS = {
    "EpDispatchCombineConfig": [
        "data_type",
        "rank",
        "world_size",
        "hidden_dim",
        "scale_dim",
        "scale_type_size",
        "max_token_type_size",
        "max_num_inp_token_per_rank",
        "num_experts_per_rank",
        "num_experts_per_token",
        "warp_num_per_block",
        "block_num",
        "max_total_recv_tokens",
        "use_external_inp_buf",
        "kernel_type",
        "gpu_per_node",
        "rdma_block_num",
        "num_qp_per_pe",
        "quant_type",
    ],
    "dispatch": [
        *("input", "weights", "scales", "indices", "block_num", "rdma_block_num", "warp_per_block"),
        *("call_local_expert_count", "routing", "return_routing"),
    ],
    "combine": [
        *("input", "weights", "indices", "block_num", "rdma_block_num", "warp_per_block"),
        *("use_external_inp_buf", "call_reset", "routing"),
    ],
}
"""Fields and parameters: mori/ops/dispatch_combine.py of the same wheel."""


def plain_bytes(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """`symm_mori.bytes_at` for a CPU, of which torch knows only one."""
    return torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), dtype=torch.uint8)


@pytest.fixture
def shmem(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A fresh stand-in for Mori."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    for name in [name for name in sys.modules if name.split(".")[0] == "mori"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(symm_mori, "bytes_at", plain_bytes)
    # As if unset, and put back afterwards: the group sets it.
    monkeypatch.setenv(HEAP_SIZE, "")
    monkeypatch.delenv(HEAP_SIZE)
    yield importlib.import_module("mori.shmem.api")
    for name in [name for name in sys.modules if name.split(".")[0] == "mori"]:
        del sys.modules[name]


def join(group: InprocGroup, *, heap_bytes: int = NUM_BYTES) -> MoriGroup:
    """A rank's device has its own number, as GPUs have."""
    return MoriGroup(group, torch.device("cpu", group.rank), heap_bytes=heap_bytes, timeout_s=TIMEOUT_S)


def test_the_stand_in_has_the_published_signatures(shmem: ModuleType) -> None:
    found = {name: [*inspect.signature(getattr(shmem, name)).parameters] for name in PUBLISHED}
    assert found == PUBLISHED
    functions = {name for name, value in vars(shmem).items() if inspect.isfunction(value) and name[0] != "_"}
    assert functions == set(PUBLISHED), "nothing else is there to be called"


def test_where_mori_is_installed_its_signatures_are_the_published_ones() -> None:
    """amd-mori needs ROCm to be imported: its file is read instead."""
    try:
        installed = metadata.distribution("amd-mori")
    except metadata.PackageNotFoundError:
        pytest.skip("amd-mori is not installed")
    tree = ast.parse(Path(str(installed.locate_file("mori/shmem/api.py"))).read_text())
    found = {
        node.name: [item.arg for item in node.args.args] for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    assert {name: found[name] for name in PUBLISHED} == PUBLISHED
    assert "_shmem_module_loaded_gpus" in {
        node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def test_the_stand_in_for_its_operators_has_the_published_signatures(shmem: ModuleType) -> None:
    ops = importlib.import_module("mori.ops")
    found = {"EpDispatchCombineConfig": [each.name for each in fields(ops.EpDispatchCombineConfig)]}
    for name in ("dispatch", "combine"):
        found[name] = [*inspect.signature(getattr(ops.EpDispatchCombineOp, name)).parameters][1:]
    assert found == PUBLISHED_OPS


def test_where_mori_is_installed_its_operators_have_them() -> None:
    try:
        installed = metadata.distribution("amd-mori")
    except metadata.PackageNotFoundError:
        pytest.skip("amd-mori is not installed")
    tree = ast.parse(Path(str(installed.locate_file("mori/ops/dispatch_combine.py"))).read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    config = classes["EpDispatchCombineConfig"].body
    found = {
        "EpDispatchCombineConfig": [ast.unparse(node.target) for node in config if isinstance(node, ast.AnnAssign)]
    }
    for node in classes["EpDispatchCombineOp"].body:
        if isinstance(node, ast.FunctionDef) and node.name in PUBLISHED_OPS:
            found[node.name] = [item.arg for item in (*node.args.args, *node.args.kwonlyargs)][1:]
    assert found == PUBLISHED_OPS


def of_ranks(ep_size: int) -> MoEProblem:
    return MoEProblem(
        hidden_size=512,
        intermediate_size=256,
        num_experts=2 * ep_size,
        top_k=2,
        num_max_tokens_per_rank=8,
        ep_size=ep_size,
        quant="a4w4",
    )


def test_operators_take_a_power_of_two_of_ranks(shmem: ModuleType) -> None:
    with pytest.raises(ConfigError, match="power of two"):
        MoriExchange(of_ranks(3), 0)


def test_operators_that_can_not_be_loaded_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mori.ops", None)
    with pytest.raises(BackendUnavailableError, match=r"megamoe-rocm\[mori\]"):
        MoriExchange(of_ranks(2), 0)


def test_room_is_made_for_every_buffer_of_an_operator() -> None:
    """By the sizes in src/ops/dispatch_combine/dispatch_combine.cpp of the wheel."""
    problem = of_ranks(8)
    rows, row = 64, 512 * 2
    picks, scales = 2 * 4, 512 // 32
    combine_in = rows * (row + 2 * picks + scales + 4)
    dispatch_out, combine_out = rows * row, 8 * row
    small = rows * (3 * picks + 2 * picks + 2 * scales) + 4 * rows * 2
    assert heap_bytes(problem) - SMALL_BUFFERS >= combine_in + dispatch_out + combine_out + small


def test_ranks_store_into_each_others_memory_and_give_it_back(shmem: ModuleType) -> None:
    def body(group: InprocGroup) -> tuple[list[int], list[int]]:
        mori = join(group)
        buffer = mori.allocate(NUM_BYTES, timeout_s=TIMEOUT_S)
        zeros = int(buffer.local.sum())  # read before any peer stores
        mori.barrier(timeout_s=TIMEOUT_S, phase="all have read")
        for peer in range(mori.size):
            buffer.peer(peer)[mori.rank] = mori.rank + 1
        mori.barrier(timeout_s=TIMEOUT_S, phase="all have stored")
        seen = [zeros, *buffer.local[:3].tolist()]
        address = buffer.local.data_ptr()
        mori.free(buffer)
        return seen, [address - freed for freed in shmem._own().freed]

    assert on_ranks(3, body) == [([0, 1, 2, 3], [0])] * 3


def test_the_heap_is_as_large_as_sessions_of_the_plan_need(shmem: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    on_ranks(1, join)
    (heap,) = shmem.heaps.values()
    assert heap.size == heap_size(NUM_BYTES) == 2 * HEAP_CHUNK
    assert heap_size(HEAP_CHUNK) == 4 * HEAP_CHUNK  # with what an allocation takes besides


def test_a_size_of_the_users_is_left_alone(shmem: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEAP_SIZE, "1M")
    on_ranks(1, join)
    (heap,) = shmem.heaps.values()
    assert heap.size == 1 << 20


def test_what_the_application_has_initialised_is_joined(shmem: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEAP_SIZE, "1M")
    uid = shmem.shmem_get_unique_id()

    def body(group: InprocGroup) -> list[int]:
        shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, 1 - group.rank, 2, uid)
        shmem._shmem_module_loaded_gpus |= {0, 1}
        group.barrier(timeout_s=TIMEOUT_S, phase="test")
        buffer = join(group).allocate(NUM_BYTES, timeout_s=TIMEOUT_S)
        buffer.peer(1 - group.rank)[0] = 7 + group.rank
        group.barrier(timeout_s=TIMEOUT_S, phase="test")
        return buffer.local[:1].tolist()

    assert on_ranks(2, body) == [[8], [7]], "PEs are numbered the other way round"


def test_other_pes_than_the_groups_ranks_are_refused(shmem: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEAP_SIZE, "1M")
    uid = shmem.shmem_get_unique_id()

    def body(group: InprocGroup) -> MoriGroup:
        shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, group.rank, 4, uid)
        group.barrier(timeout_s=TIMEOUT_S, phase="test")
        return join(group)

    for error in on_ranks(2, body):
        assert isinstance(error, ConfigError)
        assert "4 PEs" in str(error)


def test_a_full_heap_is_an_error_on_every_rank_and_what_was_taken_is_given_back(
    shmem: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HEAP_SIZE, "8192")

    def body(group: InprocGroup) -> tuple[Exception, int]:
        mori = join(group)
        if group.rank == 1:
            shmem._own().used += 4096  # as if the application had taken it
        with pytest.raises(WorkspaceError) as raised:
            mori.allocate(NUM_BYTES, timeout_s=TIMEOUT_S)
        return raised.value, len(shmem._own().freed)

    (first, freed_by_first), (second, freed_by_second) = on_ranks(2, body)
    assert "rank 1 could not map the peers' memory" in str(first)
    assert HEAP_SIZE in str(second)
    assert (freed_by_first, freed_by_second) == (1, 0)


def test_no_peer_to_peer_path_is_an_error_on_every_rank(shmem: ModuleType) -> None:
    shmem.failing.add((1, 0))
    errors = on_ranks(2, lambda group: join(group).allocate(NUM_BYTES, timeout_s=TIMEOUT_S))
    assert all(isinstance(error, BackendUnavailableError) for error in errors)
    assert all("no peer-to-peer path from rank 1 to rank 0" in str(error) for error in errors)


def test_mori_that_does_not_start_is_an_error_on_every_rank(shmem: ModuleType) -> None:
    shmem.failing.add("init")
    for error in on_ranks(2, join):
        assert isinstance(error, BackendUnavailableError)
        assert "Mori does not start" in str(error)


def test_mori_without_rocm_is_an_error_on_every_rank(shmem: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ModuleType:
        raise OSError("libpci.so.3: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", missing)
    for error in on_ranks(2, join):
        assert isinstance(error, BackendUnavailableError)
        assert "libpci" in str(error)
