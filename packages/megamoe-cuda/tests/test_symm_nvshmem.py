"""What of the NVSHMEM provider needs no GPU: tensors over memory that somebody else owns, and what failures become.

`Bindings` stands in for nvshmem4py, initialised already, with one PE; it shows nothing about NVSHMEM itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megamoe.errors import BackendUnavailableError, ConfigError, MegaMoEError, WorkspaceError
from megamoe_cuda import symm_nvshmem
from megamoe_cuda.symm_nvshmem import NvshmemGroup, bytes_at, is_installed


def test_a_tensor_shows_the_memory_it_was_given_and_copies_nothing() -> None:
    owner = torch.arange(64, dtype=torch.uint8)
    view = bytes_at(owner[16:].data_ptr(), 32, torch.device("cpu"))
    assert view.data_ptr() == owner[16:].data_ptr()
    assert torch.equal(view, owner[16:48])
    view[0] = 200
    assert owner[16] == 200


def test_the_memory_outlives_the_tensor() -> None:
    owner = torch.full((64,), 7, dtype=torch.uint8)
    for _ in range(3):
        del_me = bytes_at(owner.data_ptr(), 64, torch.device("cpu"))
        del del_me
    assert (owner == 7).all()


def test_a_folder_of_that_name_is_not_nvshmem4py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "nvshmem").mkdir()
    assert not is_installed()
    (tmp_path / "nvshmem" / "__init__.py").touch()
    assert is_installed()


class Bindings:
    """nvshmem.bindings, as far as a group of one rank calls it; tests break one function each."""

    Init_status = SimpleNamespace(STATUS_IS_INITIALIZED=2)

    def __init__(self) -> None:
        self.heap = torch.full((4096,), 0xFF, dtype=torch.uint8)
        self.freed: list[int] = []
        self.init_status: Callable[[], int] = lambda: 2
        self.n_pes: Callable[[], int] = lambda: 1
        self.my_pe: Callable[[], int] = lambda: 0
        self.align: Callable[[int, int], int] = lambda alignment, num_bytes: self.heap.data_ptr()
        self.ptr: Callable[[int, int], int] = lambda address, pe: address
        self.free = self.freed.append


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bindings]:
    found = Bindings()
    monkeypatch.setattr(symm_nvshmem, "_load", lambda: (None, found))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2048, 4096))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield found
    dist.destroy_process_group()


def allocated(num_bytes: int) -> tuple[NvshmemGroup, Any]:
    group = NvshmemGroup(dist.group.WORLD, torch.device("cpu"), timeout_s=5.0)
    return group, group.allocate(num_bytes, timeout_s=5.0)


def test_memory_comes_zeroed_and_goes_back_once(bindings: Bindings) -> None:
    group, buffer = allocated(1024)
    assert not bindings.heap[:1024].any()
    assert bindings.heap[1024:].all()
    group.free(buffer)
    assert bindings.freed == [bindings.heap.data_ptr()]


@pytest.mark.parametrize(
    ("broken", "num_bytes", "error", "message"),
    [
        ({"n_pes": lambda: 8}, 64, ConfigError, "other ranks; got 8 PEs; expected the 1 ranks .*TorchSymmGroup"),
        ({}, 2049, WorkspaceError, "out of GPU memory; got 2048 bytes free; expected 2049 bytes"),
        ({"align": lambda *_: 0}, 64, WorkspaceError, "can't allocate 64 bytes; NVSHMEM_SYMMETRIC_SIZE bounds"),
        ({"ptr": lambda *_: 0}, 64, BackendUnavailableError, "no peer-to-peer path from rank 0 to rank 0"),
    ],
    ids=["other-ranks", "full", "heap", "path"],
)
def test_what_nvshmem_refuses_is_a_typed_error(
    bindings: Bindings, broken: dict[str, Any], num_bytes: int, error: type[MegaMoEError], message: str
) -> None:
    vars(bindings).update(broken)
    with pytest.raises(error, match=message):
        allocated(num_bytes)
