"""Compiled kernels by their configuration: from the cache, or from the compiler."""

from __future__ import annotations

import inspect
from functools import lru_cache

from megamoe import env
from megamoe_cuda.jit import compiler
from megamoe_cuda.jit.cache import Entry, KernelCache, kernel_key
from megamoe_cuda.jit.codegen import INCLUDE_DIR, KERNEL_NAME, kernel_source
from megamoe_cuda.jit.compiler import ARCH, PTXAS_OPTIONS, CompiledKernel, compile_kernel
from megamoe_cuda.kernel_config import KernelConfig
from megamoe_cuda.probe import compiler_version

_NUMBERS = ("registers", "spill_bytes", "stack_bytes", "dynamic_smem_bytes")


def load_or_compile(config: KernelConfig) -> CompiledKernel:
    """Machine code of `config`, from the cache where it is there; needs no GPU.

    Raises:
        KernelCompileError: the compiler refused it.
    """
    entry = KernelCache(env.cache_dir()).get(key_of(config), lambda: as_entry(compile_kernel(config)))
    return CompiledKernel(
        config=config,
        cubin=entry.code,
        warnings=tuple(entry.info["warnings"]),
        **{name: entry.info[name] for name in _NUMBERS},
    )


def as_entry(compiled: CompiledKernel) -> Entry:
    """What the cache keeps of a compiled kernel."""
    info = {name: getattr(compiled, name) for name in _NUMBERS}
    return Entry(
        code=compiled.cubin,
        info=info | {"warnings": list(compiled.warnings), "kernel": KERNEL_NAME, "config": title(compiled.config)},
    )


def title(config: KernelConfig) -> str:
    """A kernel in a line, for lists. Its I is the problem's rounded up to 128."""
    ranks = f"EP{config.num_ranks}{' virtual' if config.num_virtual_ranks > 1 else ''}"
    extras = {"with biases": config.expert_bias, "with taps": config.tap_gemm1, "with trace": config.trace}
    limit = "" if config.swiglu_limit is None else f" limit {config.swiglu_limit:g}"
    parts = (
        f"{config.quant} {config.tile.name} H{config.hidden_size} I{config.intermediate_size} E{config.num_experts}",
        f"top-{config.top_k} capacity {config.num_max_tokens_per_rank} {ranks} on {config.ctas_per_rank} SMs each",
        f"{config.transport} {config.activation}{limit}",
        *(name for name, there in extras.items() if there),
    )
    return " ".join(parts)


def key_of(config: KernelConfig) -> str:
    """Cache key of `config`, compiled by the compiler that is installed here."""
    major, minor = compiler_version()
    return kernel_key(
        sources=headers() | {f"{KERNEL_NAME}.cu": kernel_source(config)},
        options=(*PTXAS_OPTIONS, inspect.getsource(compiler)),  # the other options stand in its text
        arch=ARCH,
        compiler=f"nvrtc {major}.{minor}",
    )


@lru_cache(maxsize=1)
def headers() -> dict[str, str]:
    """Include name -> text of every header of the package; the files do not change while a process runs."""
    return {str(path.relative_to(INCLUDE_DIR)): path.read_text() for path in sorted(INCLUDE_DIR.rglob("*.cuh"))}
