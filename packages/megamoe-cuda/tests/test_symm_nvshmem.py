"""The part of the NVSHMEM provider that needs no GPU: tensors over memory that somebody else owns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megamoe_cuda.symm_nvshmem import bytes_at, is_installed


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
