"""Compile kernels for gfx950 without a GPU, read registers, LDS and instructions back, and hold them to promises."""

from megamoe_rocm.aot.code_object import CodeObject, KernelArgument, KernelDescriptor, Resources
from megamoe_rocm.aot.compiler import CompileOptions, Parameter, compile_kernel, pointer, size
from megamoe_rocm.aot.disassembly import Instruction, disassemble
from megamoe_rocm.aot.errors import BuildError, CodeObjectError, InspectionError, ToolchainError
from megamoe_rocm.aot.inspection import (
    Expectation,
    Fences,
    Inspection,
    check,
    find_fences,
    inspect,
    main_loop,
    peer_stores,
)
from megamoe_rocm.aot.occupancy import Occupancy, occupancy

__all__ = [
    "compile_kernel",
    "CompileOptions",
    "Parameter",
    "pointer",
    "size",
    "CodeObject",
    "KernelArgument",
    "KernelDescriptor",
    "Resources",
    "Instruction",
    "disassemble",
    "Occupancy",
    "occupancy",
    "Expectation",
    "Inspection",
    "Fences",
    "check",
    "inspect",
    "find_fences",
    "main_loop",
    "peer_stores",
    "BuildError",
    "CodeObjectError",
    "InspectionError",
    "ToolchainError",
]
