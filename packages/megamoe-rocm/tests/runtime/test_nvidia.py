"""Kernels for the NVIDIA stand-in: compiled without a GPU, kept on disk, compiled again where the disk is wrong."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a stand-in for libcuda, and a current stream for torch, whose address takes more than 32 bits."""
    compiler = shutil.which("gcc") or pytest.skip("no C compiler")
    library, log = tmp_path / "libcuda.so.1", tmp_path / "log"
    source = Path(__file__).with_name("stand_in") / "cuda.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setenv("STAND_IN_LOG", str(log))
    open_library = ctypes.CDLL

    def open_stand_in(name: Any) -> ctypes.CDLL:
        return open_library(str(library) if name == library.name else name)

    monkeypatch.setattr(nvidia.ctypes, "CDLL", open_stand_in)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0x7F0123456780))
    return log


def test_a_launch_as_the_driver_sees_it(driver: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = nvidia.Cubin(
        image=b"\177ELF", entry="k", parameters=(("x", "*u8"), ("n", "i32")), num_warps=4, smem_bytes=4096
    )
    monkeypatch.setattr(nvidia, "load_or_compile", lambda launch: cubin)
    x = torch.zeros(4, dtype=torch.uint8)
    small = Launch(kernel=launch.kernel, grid=(3, 5), arguments={"x": x, "n": 7}, constants={}, num_warps=4)
    launcher = nvidia.NvidiaLauncher(torch.device("cpu"))
    launcher.load([small])
    launcher.launch(small, rank=0)
    launcher.launch(small, rank=0)
    launcher.unload()
    arguments = struct.pack("=QixxxxQQ", x.data_ptr(), 7, 0, 0).hex()  # then two null pointers of Triton's
    launched = f"cuLaunchKernel 0x200000000000 3,5,1 128,1,1 4096 0x7f0123456780 {arguments}"
    assert driver.read_text().splitlines() == [
        "cuModuleLoadData 1",
        "cuModuleGetFunction 0x100000000000 k",
        "cuFuncSetAttribute 0x200000000000 8 4096",
        launched,
        launched,
        "cuModuleUnload 0x100000000000",
    ]
