"""Can this machine run the kernels on the rung that was asked for, and if not, what is missing.

The kernel driver's list of GPUs is read before anything is imported, so on a machine without an AMD GPU the answer is
about the GPU, not about whichever library happens to be missing.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path

from megamoe.backend import Reason, Verdict
from megamoe_rocm.rungs import Rung

TARGET = "gfx950"
FNUZ_TARGETS = ("gfx940", "gfx941", "gfx942")  # MI300: their FP8 is e4m3fnuz, which has other values for the same bits

HIP_RUNTIME = "libamdhip64.so"
HIP_PYTHON = "hip-python"
MORI = "amd-mori"
TORCH_HIP = "torch.version.hip"
NEEDS = (
    f"needed are {TARGET} GPUs (MI350 series), ROCm 7, a ROCm build of PyTorch, hip-python and megamoe-rocm[mori]; "
    "MEGAMOE_ROCM_DEVICE=interpreter or isa runs the kernels without"
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What was found.

    Args:
        targets: instruction sets of the AMD GPUs, by the kernel driver.
        driver_access: whether this process may open the driver's device file.
        nvidia: whether an NVIDIA driver is loaded.
        failures: library -> why it can't be used; looked at only where there is an AMD GPU.
    """

    targets: tuple[str, ...]
    driver_access: bool
    nvidia: bool
    failures: dict[str, str] = field(default_factory=dict)


def look(root: Path = Path("/")) -> Machine:
    """Look at the machine whose files are under `root`; imports GPU libraries only where there is an AMD GPU."""
    targets = kfd_targets(root)
    return Machine(
        targets=targets,
        driver_access=os.access(root / "dev/kfd", os.R_OK | os.W_OK),
        nvidia=(root / "proc/driver/nvidia/version").exists(),
        failures=library_failures() if targets else {},
    )


def kfd_targets(root: Path) -> tuple[str, ...]:
    """Instruction sets of the GPUs that AMD's kernel driver lists, for example ("gfx950",) * 8; CPUs are left out.

    Source: Linux, Documentation of the KFD topology in sysfs: `gfx_target_version` is
    major * 10000 + minor * 100 + stepping, 0 for a CPU; the name has minor and stepping in hexadecimal.
    """
    targets = []
    for properties in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        values = dict(line.split(maxsplit=1) for line in properties.read_text().splitlines() if " " in line)
        version = int(values.get("gfx_target_version", "0"))
        if version:
            major, minor, stepping = version // 10000, version // 100 % 100, version % 100
            targets.append(f"gfx{major}{minor:x}{stepping:x}")
    return tuple(targets)


def library_failures() -> dict[str, str]:
    """Libraries that can't be used, with what their loader says."""
    failures = {}
    try:
        ctypes.CDLL(HIP_RUNTIME)
    except OSError as error:
        failures[HIP_RUNTIME] = str(error)
    for library, load in ((HIP_PYTHON, _load_hip_python), (MORI, _load_mori)):
        try:
            load()
        except (ImportError, OSError) as error:  # amd-mori raises OSError where ROCm's libraries are missing
            failures[library] = f"{type(error).__name__}: {error}"
    version = importlib.import_module("torch.version")
    if getattr(version, "hip", None) is None:
        failures[TORCH_HIP] = f"PyTorch {version.__version__} is built for {'CUDA' if version.cuda else 'the CPU'}"
    return failures


def _load_hip_python() -> None:
    from hip import hip  # noqa: F401  # a module of the package, or since hip-python 10 a name in it


def _load_mori() -> None:
    importlib.import_module("mori.shmem")


def probe(rung: Rung) -> Verdict:
    """Whether this machine can run the kernels on a rung."""
    if rung is Rung.GFX950:
        return judge(look())
    missing = {Rung.NVIDIA: _missing_for_nvidia, Rung.INTERPRETER: _missing_for_interpreter, Rung.ISA: _missing_for_isa}
    return missing[rung]() or Verdict.yes(f"{rung.value}: a rehearsal, no gfx950 is used")


def judge(machine: Machine) -> Verdict:
    """The first thing that stands against running here, what is hardest to change first."""
    if not machine.targets:
        other = "; the GPUs here are NVIDIA's, which megamoe-cuda drives" if machine.nvidia else f"; {NEEDS}"
        return Verdict.no(Reason.NO_DEVICE, f"no AMD GPU: the amdgpu driver lists none{other}")
    if TARGET not in machine.targets:
        return _wrong_device(machine.targets)
    if not machine.driver_access:
        return Verdict.no(
            Reason.NO_DEVICE,
            "/dev/kfd can't be opened: join the render group, or start the container with --device=/dev/kfd",
        )
    for library, remedy in (
        (HIP_RUNTIME, "ROCm's runtime is not found: install ROCm 7, or add its lib folder to LD_LIBRARY_PATH"),
        (HIP_PYTHON, "hip-python can't be imported: pip install hip-python of the ROCm release that is installed"),
        (TORCH_HIP, "PyTorch is not a ROCm build: install it from PyTorch's ROCm index"),
        (
            MORI,
            "Mori can't be imported: pip install megamoe-rocm[mori]; an OSError means that it misses ROCm's libraries",
        ),
    ):
        if library in machine.failures:
            return Verdict.no(Reason.MISSING_LIBRARY, f"{remedy} ({machine.failures[library]})")
    return Verdict.yes(", ".join(machine.targets))


def _wrong_device(targets: tuple[str, ...]) -> Verdict:
    found = ", ".join(sorted(set(targets)))
    if set(targets) & set(FNUZ_TARGETS):
        detail = (
            f"{found} found, {TARGET} needed: FP8 there is e4m3fnuz, and reading e4m3fn weights as such would give "
            "other values without an error"
        )
    else:
        detail = f"{found} found, {TARGET} (MI350 series) needed"
    return Verdict.no(Reason.WRONG_DEVICE, detail)


def _missing_for_nvidia() -> Verdict | None:
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return Verdict.no(Reason.NO_DEVICE, "no NVIDIA GPU that PyTorch can use")
    return _missing_triton()  # whether the GPU is an SM90 is seen when a session opens: asking makes a context


def _missing_for_interpreter() -> Verdict | None:
    if missing := _missing_triton():
        return missing
    from megamoe_rocm.kernels.combine import combine_rows

    if hasattr(combine_rows, "cache_key"):  # Triton decides when a kernel is defined
        return Verdict.no(Reason.MISSING_LIBRARY, "Triton does not interpret: set TRITON_INTERPRET=1 before the start")
    return None


def _missing_for_isa() -> Verdict | None:
    from megamoe_rocm.aot.compiler import import_triton
    from megamoe_rocm.aot.disassembly import objdump
    from megamoe_rocm.aot.errors import ToolchainError

    try:
        import_triton()
        objdump()
    except ToolchainError as error:
        return Verdict.no(Reason.MISSING_LIBRARY, str(error))
    return None


def _missing_triton() -> Verdict | None:
    if importlib.util.find_spec("triton") is None:
        return Verdict.no(Reason.MISSING_LIBRARY, "Triton is missing: pip install megamoe-rocm[triton]")
    return None
