"""Compile a Triton or Gluon kernel for gfx950 without a GPU."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megamoe_rocm.aot.code_object import WAVE_SIZE, CodeObject
from megamoe_rocm.aot.disassembly import TARGET
from megamoe_rocm.aot.errors import BuildError, ToolchainError

if TYPE_CHECKING:
    from types import ModuleType

TRITON_VERSION = "3.9.0"  # 3.6.0 spills where this does not and waits for loads earlier: docs/gfx950.md


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Options of Triton's HIP backend.

    Args:
        num_warps: waves a workgroup; a power of two.
        num_stages: software pipeline depth of plain Triton loops.
        matrix_instr_nonkdim: M and N of the MFMA that `tl.dot_scaled` becomes: 16, 32, or 0 for the compiler's choice.
        waves_per_eu: occupancy hint for the register allocator; 0 for none.
        llvm_attributes: function attributes for LLVM, `name=value` separated by commas; "" for none.
        fp_fusion: whether multiplications and additions may contract. Off: every backend rounds in the same places.
    """

    num_warps: int = 4
    num_stages: int = 2
    matrix_instr_nonkdim: int = 16
    waves_per_eu: int = 0
    llvm_attributes: str = ""
    fp_fusion: bool = False

    def triton(self) -> dict[str, Any]:
        """The same in Triton's spelling."""
        values = asdict(self)
        values["enable_fp_fusion"] = values.pop("fp_fusion")
        values["llvm_fn_attrs"] = values.pop("llvm_attributes")
        return values


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One run-time parameter of a kernel.

    Args:
        type: Triton's spelling: `*u8`, `*fp32`, `*i64`, `i32`, `fp32`.
        divisibility: what the value is a multiple of: 16 for an aligned pointer or a size, or 1.
        below_2gib: for a pointer, that its buffer ends within 2 GiB: allows buffer instructions with 32-bit offsets.
            Never for a peer's pointer that can reach further.
    """

    type: str
    divisibility: int = 1
    below_2gib: bool = False

    def attributes(self) -> list[list[Any]]:
        """Triton's attributes."""
        found: list[list[Any]] = []
        if self.divisibility > 1:
            found.append(["tt.divisibility", self.divisibility])
        if self.below_2gib:
            found.append(["tt.pointer_range", 32])
        return found


def pointer(element: str, *, below_2gib: bool = True) -> Parameter:
    """A 16-byte aligned pointer to `element`s."""
    return Parameter(type=f"*{element}", divisibility=16, below_2gib=below_2gib)


def size(*, divisibility: int = 1) -> Parameter:
    """A 32-bit integer."""
    return Parameter(type="i32", divisibility=divisibility)


def compile_kernel(
    kernel: Any,
    *,
    parameters: Mapping[str, Parameter],
    constants: Mapping[str, Any] | None = None,
    options: CompileOptions | None = None,
) -> CodeObject:
    """Compile one kernel for gfx950.

    Args:
        kernel: a function under `triton.jit` or `gluon.jit`.
        parameters: every run-time parameter, by name.
        constants: every `constexpr` parameter, by name.
        options: of the backend.

    Raises:
        ToolchainError: Triton is missing, or another version than `TRITON_VERSION`.
        BuildError: the parameters don't fit the kernel, or the compiler failed.
    """
    constants, options = constants or {}, options or CompileOptions()
    triton = import_triton()
    source = _source(triton, kernel, parameters, constants)
    target = triton.backends.compiler.GPUTarget("hip", TARGET, WAVE_SIZE)
    try:
        with triton.knobs.compilation.scope(), triton.knobs.cache.scope():
            triton.knobs.compilation.disable_line_info = True  # the same bytes wherever the source is
            # Triton's cache knows the source of what it translates, not of functions that it calls meanwhile.
            triton.knobs.cache.dir = str(Path(triton.knobs.cache.dir) / _sources(kernel))
            built = triton.compile(source, target=target, options=options.triton())
    except Exception as error:  # Triton raises MLIR's, Python's and its own exceptions
        raise BuildError(
            f"{kernel.__name__} does not compile for {TARGET}", got=error, hint=_constants(constants)
        ) from error
    if built.metadata.num_warps != options.num_warps:
        raise BuildError("a kernel with another workgroup", got=built.metadata.num_warps, expected=options.num_warps)
    return CodeObject.from_bytes(
        built.asm["hsaco"],
        lds_bytes=built.metadata.shared,
        parameters=tuple((name, parameters[name].type) for name in kernel.arg_names if name in parameters),
        build={"triton": triton.__version__, "options": asdict(options), "constants": _printable(constants)},
        assembly=built.asm["amdgcn"],
    )


def _sources(kernel: Any) -> str:
    """Digest of all source files beside a kernel's own."""
    files = sorted(Path(kernel.fn.__code__.co_filename).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def import_triton() -> ModuleType:
    """Triton, at the version that this package's kernels are written for.

    Raises:
        ToolchainError: it is missing or another version.
    """
    try:
        import triton
        import triton.backends.compiler
        import triton.compiler
        import triton.knobs
    except ImportError as error:
        raise ToolchainError(
            "Triton is missing", expected=f"triton=={TRITON_VERSION}", hint="pip install megamoe-rocm[triton]"
        ) from error
    if triton.__version__ != TRITON_VERSION:
        raise ToolchainError(
            "another Triton than the kernels were inspected with",
            got=triton.__version__,
            expected=TRITON_VERSION,
            hint=f"pip install --no-deps triton=={TRITON_VERSION} into a venv made with --system-site-packages: "
            "torch keeps its own outside of it (docs/gfx950.md)",
        )
    module: ModuleType = triton
    return module


def _source(triton: Any, kernel: Any, parameters: Mapping[str, Parameter], constants: Mapping[str, Any]) -> Any:
    names = list(kernel.arg_names)
    missing = [name for name in names if name not in parameters and name not in constants]
    unknown = [name for name in (*parameters, *constants) if name not in names]
    if missing or unknown:
        raise BuildError(
            f"parameters of {kernel.__name__}", got={"missing": missing, "unknown": unknown}, expected=names
        )
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    form = GluonASTSource if isinstance(kernel, GluonJITFunction) else triton.compiler.ASTSource
    return form(
        fn=kernel,
        signature={name: parameters[name].type if name in parameters else "constexpr" for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): item.attributes() for name, item in parameters.items() if item.attributes()},
    )


def _printable(constants: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, int | float | str) else str(value) for name, value in constants.items()}


def _constants(constants: Mapping[str, Any]) -> str:
    return "constants " + ", ".join(f"{name}={value}" for name, value in constants.items())
