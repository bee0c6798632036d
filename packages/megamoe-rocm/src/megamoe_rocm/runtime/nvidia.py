"""The kernels on an NVIDIA GPU, for tests of their logic: real concurrency, flags and stores between GPUs.

Triton compiles them to SM89's instructions, which ptxas then puts on an SM90: for an SM90 Triton would multiply tiles
of 64 rows and more by wgmma and smaller ones by mma.sync, which round in other places, so that a row's bits would hang
on the tile. On gfx950 they do not. `tl.dot_scaled` is emulated; nothing here says anything about speed or about AMD's
compiler. Signatures and constants are those of the code objects for gfx950 (kernels/signature.py), but for `LANES` and
`CLOCK`. Machine code is kept in the cache directory, so that a process need not compile what another one has.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
import tempfile
import zlib
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megamoe import env
from megamoe.errors import BackendUnavailableError
from megamoe_rocm import kernels
from megamoe_rocm.aot.compiler import CompileOptions, Parameter
from megamoe_rocm.aot.errors import BuildError, ToolchainError
from megamoe_rocm.kernels.launch import SM90, Launch
from megamoe_rocm.kernels.signature import parameters
from megamoe_rocm.runtime.arguments import ArgumentLayout
from megamoe_rocm.runtime.launcher import Launcher, kernel_key, refuse_capture

INSTRUCTIONS = 89
ARCH = 90
WARP = SM90.lanes
OLDEST_TRITON = (3, 6)  # whose atomics and scaled dots were looked at
SCRATCH_POINTERS = 2  # global and profile scratch, of Triton 3.6's and later calling convention

_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_…


@dataclass(frozen=True, kw_only=True)
class Cubin:
    """Machine code of one kernel.

    Args:
        image: the file's bytes.
        entry: the kernel's name in it.
        parameters: name and Triton type of each run-time parameter, in order.
        num_warps: of a CTA.
        smem_bytes: dynamic shared memory.
    """

    image: bytes
    entry: str
    parameters: tuple[tuple[str, str], ...]
    num_warps: int
    smem_bytes: int


def load_or_compile(launch: Launch) -> Cubin:
    """The machine code of a launch, from the cache where it is there.

    Raises:
        ToolchainError: Triton is missing or too old.
        BuildError: Triton can't compile it.
    """
    signature = parameters(launch)
    file = env.cache_dir() / "rocm-on-sm90" / f"{_digest(launch, signature)}.cubin"
    try:
        return _decode(file.read_bytes())
    except (OSError, ValueError, zlib.error):  # absent, or cut off
        cubin = compile_for_sm90(launch, signature)
        _write(file, _encode(cubin))
        return cubin


def compile_for_sm90(launch: Launch, signature: dict[str, Parameter]) -> Cubin:
    """Compile a launch with the Triton that is installed; needs no GPU."""
    triton = _triton()
    names = list(launch.kernel.arg_names)
    source = triton.compiler.ASTSource(
        fn=launch.kernel,
        signature={name: signature[name].type if name in signature else "constexpr" for name in names},
        constexprs={(names.index(name),): value for name, value in launch.constants.items()},
        attrs={(names.index(name),): item.attributes() for name, item in signature.items() if item.attributes()},
    )
    try:
        built = triton.compile(
            source, target=triton.backends.compiler.GPUTarget("cuda", INSTRUCTIONS, WARP), options=_options(launch)
        )
    except Exception as error:  # Triton raises MLIR's, Python's and its own exceptions
        raise BuildError(f"{launch.kernel.__name__} does not compile for sm_{ARCH}", got=error) from error
    if built.metadata.global_scratch_size or built.metadata.profile_scratch_size:
        raise BuildError(f"{launch.kernel.__name__} wants scratch memory, which is not given")
    return Cubin(
        image=_assemble(built.asm["ptx"]),
        entry=built.metadata.name,
        parameters=tuple((name, signature[name].type) for name in names if name in signature),
        num_warps=built.metadata.num_warps,
        smem_bytes=built.metadata.shared,
    )


class NvidiaLauncher(Launcher):
    """Launches on one NVIDIA GPU, in torch's context of it.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.target = SM90
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._loaded: dict[Hashable, _Loaded] = {}

    def load(self, launches: Iterable[Launch]) -> None:
        """See `Launcher.load`."""
        with torch.cuda.device(self.device):
            for launch in launches:
                self._get(launch)

    def launch(self, launch: Launch, *, rank: int) -> None:
        """See `Launcher.launch`."""
        with torch.cuda.device(self.device):
            self._queue(self._get(launch), launch)

    def _queue(self, kernel: _Loaded, launch: Launch) -> None:
        block = ctypes.create_string_buffer(kernel.layout.pack(launch.arguments), kernel.layout.num_bytes)
        num_bytes = ctypes.c_size_t(kernel.layout.num_bytes)
        extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER, ctypes.addressof(block), _BUFFER_SIZE, ctypes.addressof(num_bytes), 0
        )
        x, y = (*launch.grid, 1)[:2]
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        threads = launch.num_warps * WARP
        self._call(
            "cuLaunchKernel", kernel.function, x, y, 1, threads, 1, 1, kernel.cubin.smem_bytes, stream, None, extra
        )

    def _get(self, launch: Launch) -> _Loaded:
        key = kernel_key(launch)
        loaded = self._loaded.get(key)
        if loaded is None:
            refuse_capture(launch)
            loaded = self._loaded[key] = self._load(load_or_compile(launch))
        return loaded

    def _load(self, cubin: Cubin) -> _Loaded:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), cubin.image)
        self._call("cuModuleGetFunction", ctypes.byref(function), module, cubin.entry.encode())
        self._call("cuFuncSetAttribute", function, _DYNAMIC_SMEM, cubin.smem_bytes)
        layout = ArgumentLayout(cubin.parameters, scratch_pointers=SCRATCH_POINTERS)
        return _Loaded(module=module, function=function, cubin=cubin, layout=layout)

    def unload(self) -> None:
        """See `Launcher.unload`."""
        with torch.cuda.device(self.device):
            for kernel in self._loaded.values():
                self._call("cuModuleUnload", kernel.module)
        self._loaded.clear()

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            raise BackendUnavailableError(f"{name} failed", got=f"{status}: {(text.value or b'').decode()}")


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    module: ctypes.c_void_p
    function: ctypes.c_void_p
    cubin: Cubin
    layout: ArgumentLayout


def _triton() -> Any:
    try:
        import triton
        import triton.backends.compiler
        import triton.compiler
    except ImportError as error:
        raise ToolchainError("Triton is missing", hint="pip install triton, or the one that PyTorch brings") from error
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST_TRITON:
        raise ToolchainError("Triton is too old", got=triton.__version__, expected="3.6 or newer")
    return triton


def _assemble(ptx: str) -> bytes:
    """Machine code for `ARCH`, by Triton's own ptxas."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        command = [get_ptxas(ARCH).path, "--fmad=false", f"--gpu-name=sm_{ARCH}", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"ptxas can't assemble a kernel for sm_{ARCH}", got=done.stderr[-500:])
        return target.read_bytes()


def _options(launch: Launch) -> dict[str, Any]:
    return {"num_warps": launch.num_warps, "num_stages": CompileOptions().num_stages, "enable_fp_fusion": False}


def _digest(launch: Launch, signature: dict[str, Parameter]) -> str:
    """Of everything that the machine code depends on."""
    identity = {
        "triton": _triton().__version__,
        "arch": [INSTRUCTIONS, ARCH],
        "kernel": launch.kernel.__name__,
        "sources": _sources(),
        "signature": {name: asdict(item) for name, item in signature.items()},
        "constants": {name: str(value) for name, value in launch.constants.items()},
        "options": _options(launch),
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


@cache
def _sources() -> str:
    """Digest of all kernels' sources. Triton has one for each kernel, which depends on what it digested before."""
    files = sorted(Path(kernels.__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _encode(cubin: Cubin) -> bytes:
    """A line of JSON with a checksum, then the compressed machine code."""
    facts = asdict(cubin)
    image = zlib.compress(facts.pop("image"))
    facts["crc"] = zlib.crc32(image)
    return json.dumps(facts).encode() + b"\n" + image


def _decode(data: bytes) -> Cubin:
    header, _, image = data.partition(b"\n")
    facts = json.loads(header)
    if facts.pop("crc") != zlib.crc32(image):
        raise ValueError("another checksum")
    facts["parameters"] = tuple((name, kind) for name, kind in facts["parameters"])
    return Cubin(image=zlib.decompress(image), **facts)


def _write(file: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all; where the directory can't be written, compile again next time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.replace(name, file)
    except OSError:
        return
