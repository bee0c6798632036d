"""NVRTC through cuda.core: a KernelConfig to an sm_90a cubin, with what the assembler says about it. Needs no GPU."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

from megamoe.errors import BackendError
from megamoe_cuda.jit.codegen import INCLUDE_DIR, kernel_source
from megamoe_cuda.kernel_config import KernelConfig
from megamoe_cuda.probe import compiler_version
from megamoe_cuda.smem_budget import shared_memory

ARCH = "sm_90a"
PTXAS_OPTIONS = ("-v",)
CACHING_NVRTC = (12, 9)
"""The first NVRTC that keeps what it compiled, and whose --no-cache tells it not to: a hit leaves ptxas' log empty."""
COMPLAINT = re.compile(r"warning|\(C7\d{3}\)", re.IGNORECASE)
"""What marks a line of the log: ptxas reports some serialised WGMMAs (C7514) as information only."""


class KernelCompileError(BackendError):
    """NVRTC or ptxas refused the kernel, or reported something this package does not understand."""


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """Machine code of one configuration.

    Attributes:
        config: what it was compiled for.
        cubin: sm_90a machine code.
        registers: registers per thread at entry, as ptxas reports them (setmaxnreg moves them later).
        spill_bytes: bytes of spill stores and loads.
        stack_bytes: stack frame.
        dynamic_smem_bytes: dynamic shared memory to launch with.
        warnings: what NVRTC and ptxas complain of; C75xx means serialised WGMMAs or an ignored setmaxnreg.
    """

    config: KernelConfig
    cubin: bytes
    registers: int
    spill_bytes: int
    stack_bytes: int
    dynamic_smem_bytes: int
    warnings: tuple[str, ...]


def compile_kernel(config: KernelConfig) -> CompiledKernel:
    """Compile `config`.

    Raises:
        KernelCompileError: NVRTC or ptxas refused the source; the message holds their log.
    """
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(
        arch=ARCH,
        std="c++17",
        include_path=str(INCLUDE_DIR),
        fma=False,  # contraction is explicit, so that bits do not depend on the tile shape
        ptxas_options=list(PTXAS_OPTIONS),
        no_cache=True if compiler_version() >= CACHING_NVRTC else None,
    )
    try:
        code = Program(kernel_source(config), "c++", options).compile("cubin", logs=log)
    except Exception as error:
        raise KernelCompileError(f"the SM90 kernel does not compile: {error}\n{log.getvalue()}") from error
    text = log.getvalue()
    return CompiledKernel(
        config=config,
        cubin=bytes(code.code),
        registers=_number(r"Used (\d+) registers", text),
        spill_bytes=_number(r"(\d+) bytes spill stores", text) + _number(r"(\d+) bytes spill loads", text),
        stack_bytes=_number(r"(\d+) bytes stack frame", text),
        dynamic_smem_bytes=shared_memory(config).num_bytes,
        warnings=tuple(line.strip() for line in text.splitlines() if COMPLAINT.search(line)),
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise KernelCompileError(f"the assembler's log has no line like {pattern!r}:\n{text}")
    return int(found[1])
