"""Code objects on an AMD GPU, through hip-python: what the wheel ships is loaded and launched, nothing is compiled.

Facts, hip-python 7.0.2, 7.2.2 (docstrings) and 10.0.0.0.1.2 (package rocm-bindings-hip, hip.pyi, _hip_helpers.pyx):
every function returns a tuple whose first entry is its status; `hipModuleLaunchKernel` takes an address as `extra`;
HIP_LAUNCH_PARAM_END is 3, not CUDA's 0. The runtime adds the hidden arguments behind the explicit ones by itself.
hip-python opens libamdhip64.so by that name, wherever the loader finds it; PyTorch's wheels bring one of their own, in
newer ones as libamdhip64.so.7 outside of the loader's path (github.com/ROCm/pytorch/pull/3334).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megamoe.errors import BackendUnavailableError
from megamoe_rocm.aot.code_object import CodeObject
from megamoe_rocm.aot.errors import CodeObjectError
from megamoe_rocm.kernels.launch import GFX950, Launch
from megamoe_rocm.runtime.arguments import ArgumentLayout, offsets
from megamoe_rocm.runtime.launcher import LoadedKernel, ModuleLauncher

END = 3  # HIP_LAUNCH_PARAM_END, hip_runtime_api.h
HIDDEN = "hidden_"  # how the metadata begins the kinds of arguments that the runtime adds


@dataclass(frozen=True, kw_only=True)
class HipDevice:
    """What the runtime says about a device.

    Args:
        name: the product's.
        architecture: instruction set and features, such as `gfx950:sramecc+:xnack-`.
        num_cus: compute units.
        lds_bytes: LDS that a workgroup may use.
    """

    name: str
    architecture: str
    num_cus: int
    lds_bytes: int

    @property
    def target(self) -> str:
        """The instruction set alone."""
        return self.architecture.split(":")[0]


def query(index: int) -> HipDevice:
    """Ask the runtime about device `index`.

    Raises:
        BackendUnavailableError: hip-python or ROCm is missing, there is no such device, or PyTorch has another runtime.
    """
    hip = _hip()
    properties = _properties(hip, index)
    _require_one_runtime()
    attributes = hip.hipDeviceAttribute_t
    (lds_bytes,) = _call(hip, "hipDeviceGetAttribute", attributes.hipDeviceAttributeMaxSharedMemoryPerBlock, index)
    return HipDevice(
        name=_text(properties.name),
        architecture=_text(properties.gcnArchName),
        num_cus=int(properties.multiProcessorCount),
        lds_bytes=int(lds_bytes),
    )


class HipLauncher(ModuleLauncher):
    """Launches code objects on one AMD GPU, in torch's context of it.

    Args:
        device: the GPU; torch calls it "cuda".
        find: the code object of a launch.
    """

    launch_function = "hipModuleLaunchKernel"
    unload_function = "hipModuleUnload"
    end = END

    def __init__(self, device: torch.device, find: Callable[[Launch], CodeObject]) -> None:
        super().__init__(device)
        self.target = GFX950
        self._find = find
        self._hip = _hip()

    def _load(self, launch: Launch) -> LoadedKernel:
        code = self._find(launch)
        layout = argument_layout(code)
        (module,) = self._call("hipModuleLoadData", code.hsaco)
        (function,) = self._call("hipModuleGetFunction", module, code.name.encode())
        return LoadedKernel(module=module, function=function, shared_bytes=code.lds_bytes, layout=layout)

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        return _call(self._hip, name, *arguments)


def argument_layout(code: CodeObject) -> ArgumentLayout:
    """How the explicit arguments of a code object lie in memory.

    Raises:
        CodeObjectError: its metadata places them elsewhere.
    """
    explicit = [item for item in code.arguments if not item.kind.startswith(HIDDEN)]
    parameters = tuple((item.name, item.type) for item in explicit if item.name)
    scratch = len(explicit) - len(parameters)  # pointers of Triton's, last and unnamed
    found = tuple(item.offset for item in explicit[: len(parameters)])
    if found != offsets(parameters):
        raise CodeObjectError(f"arguments of {code.name} lie elsewhere", got=found, expected=offsets(parameters))
    return ArgumentLayout(parameters, scratch_pointers=scratch)


def _hip() -> Any:
    try:
        from hip import hip  # a module of the package, or since hip-python 10 a name in it
    except ImportError as error:
        raise BackendUnavailableError(
            f"hip-python can't be imported: {error}",
            hint="pip install hip-python of the ROCm release that is installed",
        ) from error
    return hip


def _properties(hip: Any, index: int) -> Any:
    """What hip-python 10 returns, and hip-python 7 writes into a structure that it is given."""
    try:
        return _call(hip, "hipGetDeviceProperties", index)[0]
    except TypeError:  # takes exactly 2 positional arguments
        properties = hip.hipDeviceProp_t()
        _call(hip, "hipGetDeviceProperties", properties, index)
        return properties


def _require_one_runtime() -> None:
    """Streams and memory of one runtime mean nothing to another: PyTorch's must be the one that hip-python calls.

    Raises:
        BackendUnavailableError: this process has loaded two.
    """
    mapped = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    loaded = {fields[5] for fields in mapped if len(fields) > 5 and "/libamdhip64.so" in fields[5]}
    if len(loaded) > 1:
        raise BackendUnavailableError(
            "PyTorch and hip-python use different HIP runtimes",
            got=", ".join(sorted(loaded)),
            expected="one of them",
            hint="put PyTorch's, or a link to it, as libamdhip64.so into a folder at the front of LD_LIBRARY_PATH",
        )


def _call(hip: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
    """Call a function of hip-python; returns what comes after the status."""
    try:
        status, *results = getattr(hip, name)(*arguments)
    except RuntimeError as error:  # hip-python loads libamdhip64.so at the first call
        raise BackendUnavailableError(f"{name} can't be called: {error}", hint="install ROCm 7") from error
    if status != hip.hipError_t.hipSuccess:
        text = _text(hip.hipGetErrorString(status)[-1])
        raise BackendUnavailableError(f"{name} failed", got=f"{int(status)}: {text}")
    return tuple(results)


def _text(value: str | bytes) -> str:
    """hip-python gives C strings as bytes or as str, by its version."""
    return value.decode() if isinstance(value, bytes) else value
