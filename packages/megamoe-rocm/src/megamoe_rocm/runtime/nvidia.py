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
from megamoe_rocm.runtime.launcher import LoadedKernel, ModuleLauncher

INSTRUCTIONS = 89
ARCH = 90
WARP = SM90.lanes
OLDEST_TRITON = (3, 6)  # whose atomics and scaled dots were looked at
SCRATCH_POINTERS = 2  # global and profile scratch, of Triton 3.6's and later calling convention

_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_END = 0  # CU_LAUNCH_PARAM_END


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


class NvidiaLauncher(ModuleLauncher):
    """Launches on one NVIDIA GPU, in torch's context of it.

    Args:
        device: the GPU.
    """

    launch_function = "cuLaunchKernel"
    unload_function = "cuModuleUnload"
    end = _END

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.target = SM90
        self._driver = ctypes.CDLL("libcuda.so.1")
        # A stream is an address of 64 bits, which ctypes would cut to an int.
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        self._driver.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]

    def _load(self, launch: Launch) -> LoadedKernel:
        cubin = load_or_compile(launch)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), cubin.image)
        self._call("cuModuleGetFunction", ctypes.byref(function), module, cubin.entry.encode())
        self._call("cuFuncSetAttribute", function, _DYNAMIC_SMEM, cubin.smem_bytes)
        layout = ArgumentLayout(cubin.parameters, scratch_pointers=SCRATCH_POINTERS)
        return LoadedKernel(module=module, function=function, shared_bytes=cubin.smem_bytes, layout=layout)

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        status = getattr(self._driver, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            raise BackendUnavailableError(f"{name} failed", got=f"{status}: {(text.value or b'').decode()}")
        return ()


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
