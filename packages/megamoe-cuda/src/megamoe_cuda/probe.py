"""Can this machine run the SM90 kernel, and if not, what is missing.

The driver is asked directly, through its C interface, before any Python package of CUDA is looked at: a machine without
a GPU hears about the GPU, not about a package. No context is made, so a process that probes may still fork workers.
"""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass, field
from pathlib import Path

from megamoe.backend import Reason, Verdict
from megamoe.errors import BackendUnavailableError

DRIVER = "libcuda.so.1"
BINDINGS = "cuda.bindings"
CUDA_CORE = "cuda.core"
NVRTC = "nvrtc"
TORCH_CUDA = "torch.version.cuda"
KFD = Path("/sys/class/kfd/kfd/topology")  # where AMD's kernel driver lists its GPUs

COMPUTE_CAPABILITY = (9, 0)  # Hopper: wgmma and setmaxnreg exist in sm_90a only, neither before nor after

# CUDA driver API, cuda.h
_CUDA_ERROR_NO_DEVICE = 100
_ATTRIBUTE_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
_ATTRIBUTE_MINOR = 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A device that the driver lists: its name and compute capability."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What was found.

    Args:
        driver_failure: why the driver can't be used, or None.
        driver_version: the CUDA version that the driver supports, (major, minor); None without a driver.
        gpus: devices that this process may see.
        amd: whether AMD's kernel driver is loaded.
        nvrtc_version: version of the compiler, or None.
        failures: package -> why it can't be used; looked at only where there is a GPU.
    """

    driver_failure: str | None = None
    driver_version: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    amd: bool = False
    nvrtc_version: tuple[int, int] | None = None
    failures: dict[str, str] = field(default_factory=dict)


def look() -> Machine:
    """Look at this machine."""
    amd = KFD.exists()
    try:
        version, gpus = _ask_driver(ctypes.CDLL(DRIVER))
    except OSError as error:
        return Machine(driver_failure=str(error), amd=amd)
    if not gpus:
        return Machine(driver_version=version, amd=amd)
    failures, nvrtc_version = _look_at_packages()
    return Machine(driver_version=version, gpus=gpus, amd=amd, nvrtc_version=nvrtc_version, failures=failures)


def _ask_driver(driver: ctypes.CDLL) -> tuple[tuple[int, int], tuple[Gpu, ...]]:
    """Version and devices of the driver. OSError where it does not start."""
    status = driver.cuInit(0)
    if status not in (0, _CUDA_ERROR_NO_DEVICE):
        raise OSError(f"cuInit failed with CUDA error {status}")
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    count = ctypes.c_int()
    if status == 0:
        driver.cuDeviceGetCount(ctypes.byref(count))
    gpus = tuple(_ask_device(driver, index) for index in range(count.value))
    return (version.value // 1000, version.value % 1000 // 10), gpus


def _ask_device(driver: ctypes.CDLL, index: int) -> Gpu:
    device, name, value = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    capability = []
    for attribute in (_ATTRIBUTE_MAJOR, _ATTRIBUTE_MINOR):
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return Gpu(name=name.value.decode(), capability=(capability[0], capability[1]))


def _look_at_packages() -> tuple[dict[str, str], tuple[int, int] | None]:
    """Packages that can't be used, with what their import says, and the version of NVRTC."""
    failures: dict[str, str] = {}
    for module in (BINDINGS, CUDA_CORE):
        try:
            importlib.import_module(module)
        except ImportError as error:
            failures[module] = str(error)
    nvrtc_version = None
    if BINDINGS not in failures:
        try:
            nvrtc_version = _nvrtc_version()
        except (ImportError, RuntimeError) as error:  # cuda-bindings raises RuntimeError where it finds no libnvrtc
            failures[NVRTC] = str(error)
    version = importlib.import_module("torch.version")
    if version.cuda is None:
        failures[TORCH_CUDA] = f"PyTorch {version.__version__} is built without CUDA"
    return failures, nvrtc_version


def compiler_version() -> tuple[int, int]:
    """Version of NVRTC, where all that compiles with it is installed. Needs no GPU.

    Raises:
        BackendUnavailableError: cuda-bindings, cuda-core or NVRTC is missing; says what to install.
    """
    try:
        importlib.import_module(CUDA_CORE)
        return _nvrtc_version()
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailableError(
            "no compiler for CUDA kernels here",
            got=str(error).strip(),
            expected="cuda-bindings, cuda-core and NVRTC",
            hint="pip install 'megamoe-cuda[compile-cu13]' (or [compile-cu12]); it needs no GPU",
        ) from error


def _nvrtc_version() -> tuple[int, int]:
    """ImportError where cuda-bindings is not installed, RuntimeError where it finds no NVRTC."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    status, major, minor = nvrtc.nvrtcVersion()
    if int(status) != 0:
        raise RuntimeError(f"nvrtcVersion failed with {status}")
    return major, minor


def judge(machine: Machine) -> Verdict:
    """The first thing that stands against running here, what is hardest to change first."""
    if machine.driver_failure is not None or not machine.gpus:
        return _no_device(machine)
    if all(gpu.capability != COMPUTE_CAPABILITY for gpu in machine.gpus):
        found = ", ".join(sorted({f"{gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]})" for gpu in machine.gpus}))
        return Verdict.no(Reason.WRONG_DEVICE, f"{found} found, an SM90 GPU (H100, H200, H20) needed")
    for package, remedy in (
        (TORCH_CUDA, "install a CUDA build of PyTorch"),
        (BINDINGS, "cuda-bindings can't be imported: pip install megamoe-cuda[cu13] (or [cu12])"),
        (CUDA_CORE, "cuda-core can't be imported: pip install cuda-core"),
        (NVRTC, "NVRTC is not found: pip install megamoe-cuda[cu13] (or [cu12])"),
    ):
        if package in machine.failures:
            return Verdict.no(Reason.MISSING_LIBRARY, f"{remedy} ({machine.failures[package]})")
    assert machine.driver_version is not None
    assert machine.nvrtc_version is not None
    # Within a major version, older drivers load newer machine code (CUDA's minor-version compatibility).
    if machine.driver_version[0] < machine.nvrtc_version[0]:
        return Verdict.no(
            Reason.DRIVER_TOO_OLD,
            f"the driver supports CUDA {machine.driver_version[0]}.{machine.driver_version[1]}, kernels come from "
            f"NVRTC {machine.nvrtc_version[0]}.{machine.nvrtc_version[1]}: update the driver, or install "
            f"megamoe-cuda[cu{machine.driver_version[0]}]",
        )
    return Verdict.yes(", ".join(gpu.name for gpu in machine.gpus))


def _no_device(machine: Machine) -> Verdict:
    if machine.driver_failure is not None:
        detail = f"no NVIDIA driver: {machine.driver_failure}"
    else:
        detail = "the NVIDIA driver lists no GPU for this process; look at CUDA_VISIBLE_DEVICES"
    if machine.amd:
        detail += "; the GPUs here are AMD's, which megamoe-rocm drives"
    return Verdict.no(Reason.NO_DEVICE, detail)
