"""Kernels for the NVIDIA stand-in: compiled without a GPU, kept on disk, compiled again where the disk is wrong."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

pytest.importorskip("triton")

from megamoe.problem import MoEProblem
from megamoe_rocm.kernels.launch import SM90, Launch
from megamoe_rocm.runtime import nvidia
from megamoe_rocm.standard import Collector, collect

EM_CUDA = 190  # e_machine of a cubin
PROBLEM = MoEProblem(
    hidden_size=512, intermediate_size=256, num_experts=4, top_k=2, num_max_tokens_per_rank=8, quant="a4w4"
)


@pytest.fixture
def launch() -> Launch:
    """The smallest kernel."""
    collector = Collector(SM90)
    collect(PROBLEM, collector)
    return next(each for each in collector.found.values() if each.kernel.__name__ == "copy_input")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    return tmp_path / "rocm-on-sm90"


def test_machine_code_is_kept(launch: Launch, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = nvidia.load_or_compile(launch)
    assert compiled.image[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", compiled.image, 18)[0] == EM_CUDA
    assert compiled.entry == "copy_input"
    assert [name for name, _ in compiled.parameters] == [*launch.arguments]
    assert len([*cache.iterdir()]) == 1
    monkeypatch.setattr(nvidia, "compile_for_sm90", None)  # nobody calls it
    assert nvidia.load_or_compile(launch) == compiled


def test_a_damaged_file_is_replaced(launch: Launch, cache: Path) -> None:
    compiled = nvidia.load_or_compile(launch)
    (file,) = cache.iterdir()
    for damaged in (file.read_bytes()[:-1], b"", b"not json\n"):
        file.write_bytes(damaged)
        assert nvidia.load_or_compile(launch) == compiled


def test_kernels_of_other_constants_are_kept_apart(launch: Launch, cache: Path) -> None:
    nvidia.load_or_compile(launch)
    launch.constants["ROWS"] *= 2
    nvidia.load_or_compile(launch)
    assert len([*cache.iterdir()]) == 2


def test_a_directory_that_cannot_be_written_is_no_error(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path / "file"))
    assert nvidia.load_or_compile(launch).image
