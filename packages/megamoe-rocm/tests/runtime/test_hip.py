"""Launches through the real hip-python, on a stand-in for ROCm's runtime that writes down what it is called with."""

from __future__ import annotations

import importlib.util
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from megamoe_rocm.aot.code_object import CodeObject, KernelArgument
from megamoe_rocm.aot.errors import CodeObjectError
from megamoe_rocm.runtime.arguments import ArgumentLayout, offsets
from megamoe_rocm.runtime.hip_runtime import HipDevice, argument_layout, query

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory, toolchain: None) -> Path:
    """Folder of the stand-in; hip-python looks for the library when it is first called."""
    if importlib.util.find_spec("hip") is None:
        assert not os.environ.get("CI"), "hip-python is a dependency of megamoe-rocm"
        pytest.skip("hip-python is not installed")
    folder = tmp_path_factory.mktemp("rocm")
    compiler = shutil.which("gcc") or pytest.skip("no C compiler")
    library = folder / "libamdhip64.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, HERE / "stand_in/amdhip64.c"], check=True)
    return folder


def run(runtime: Path, log: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HERE / "hip_calls.py")],
        env=os.environ | {"LD_LIBRARY_PATH": str(runtime), "STAND_IN_LOG": str(log), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_launch_as_the_runtime_sees_it(runtime: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = run(runtime, log)
    assert done.returncode == 0, done.stderr
    device, facts = done.stdout.splitlines()
    assert device == str(
        HipDevice(name="AMD Instinct MI355X", architecture="gfx950:sramecc+:xnack-", num_cus=256, lds_bytes=160 * 1024)
    )
    address, lds_bytes = facts.split()[:2]
    calls = [line.split() for line in log.read_text().splitlines()]
    assert [call[0] for call in calls] == [
        "hipGetDeviceProperties",
        "hipDeviceGetAttribute",
        "hipModuleLoadData",
        "hipModuleGetFunction",
        "hipModuleLaunchKernel",
    ]
    assert calls[2][1] == "1", "the bytes of an ELF file"
    assert calls[3][1:] == ["0x1000", "mixed"]
    function, grid, block, shared, stream, argument_bytes = calls[4][1:]
    assert (function, grid, block, stream) == ("0x2000", "3,5,1", "128,1,1", "0xabc0")
    assert shared == lds_bytes
    # x, n, factor, far_offset, y, as C would lay them out; then two null pointers of Triton's
    expected = struct.pack("=QifqQQQ", int(address), 7, 0.5, 2**40, 0, 0, 0)
    assert bytes.fromhex(argument_bytes) == expected


@pytest.mark.parametrize("function", ["hipGetDeviceProperties", "hipModuleLoadData", "hipModuleLaunchKernel"])
def test_a_call_that_fails_is_named(runtime: Path, tmp_path: Path, function: str) -> None:
    done = run(runtime, tmp_path / "log", STAND_IN_FAIL=function)
    assert done.returncode != 0
    assert f"BackendUnavailableError: {function} failed; got 1: invalid argument" in done.stderr


def test_a_runtime_beside_the_one_that_pytorch_brings_is_refused(runtime: Path, tmp_path: Path) -> None:
    """As where a wheel of PyTorch has loaded its own, and the loader finds that of /opt/rocm."""
    of_torch = shutil.copy(runtime / "libamdhip64.so", tmp_path / "libamdhip64.so.7")
    done = run(runtime, tmp_path / "log", LD_PRELOAD=str(of_torch))
    assert "BackendUnavailableError: PyTorch and hip-python use different HIP runtimes" in done.stderr
    assert str(of_torch) in done.stderr
    assert str(runtime / "libamdhip64.so") in done.stderr


def test_hip_python_7_fills_a_structure_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions otherwise are those of hip-python 10, which the other tests run."""

    class Hip7:
        hipError_t = SimpleNamespace(hipSuccess=0)
        hipDeviceAttribute_t = SimpleNamespace(hipDeviceAttributeMaxSharedMemoryPerBlock=74)
        hipDeviceProp_t = SimpleNamespace

        @staticmethod
        def hipGetDeviceProperties(prop: SimpleNamespace, device: int) -> tuple[int]:
            prop.name, prop.gcnArchName, prop.multiProcessorCount = b"MI355X", b"gfx950:sramecc+", 256 + device
            return (0,)

        @staticmethod
        def hipDeviceGetAttribute(attribute: int, device: int) -> tuple[int, int]:
            return 0, attribute * 1000 + device

    monkeypatch.setitem(sys.modules, "hip", SimpleNamespace(hip=Hip7))
    assert query(1) == HipDevice(name="MI355X", architecture="gfx950:sramecc+", num_cus=257, lds_bytes=74_001)


def test_without_rocm_the_first_call_says_so(runtime: Path, tmp_path: Path) -> None:
    done = run(tmp_path, tmp_path / "log")
    assert "BackendUnavailableError: hipGetDeviceProperties can't be called" in done.stderr
    assert "libamdhip64.so" in done.stderr


def test_arguments_lie_at_multiples_of_their_size() -> None:
    parameters = (("a", "i32"), ("b", "*u8"), ("c", "fp32"), ("d", "i64"))
    assert offsets(parameters) == (0, 8, 16, 24)
    layout = ArgumentLayout(parameters, scratch_pointers=1)
    packed = layout.pack({"d": -1, "c": 1.5, "b": 2**47, "a": -2})
    assert packed == struct.pack("=iiQfiqQ", -2, 0, 2**47, 1.5, 0, -1, 0)
    assert layout.num_bytes == 40


def test_metadata_that_places_arguments_elsewhere_is_refused() -> None:
    def argument(name: str, kind: str, offset: int, num_bytes: int) -> KernelArgument:
        return KernelArgument(name=name, type=kind, offset=offset, num_bytes=num_bytes, kind="by_value")

    class Other(CodeObject):
        name = "other"

    arguments = (argument("a", "i32", 0, 4), argument("b", "i64", 4, 8))
    with pytest.raises(CodeObjectError, match="lie elsewhere"):
        argument_layout(Other(hsaco=b"", arguments=arguments, lds_bytes=0, build={}))
