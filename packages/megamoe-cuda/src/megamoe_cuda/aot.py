"""Compiling ahead of time: which kernels, and what they may cost. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megamoe.errors import ConfigError
from megamoe.problem import ActFormat, Activation, MoEProblem, QuantMode, Transport
from megamoe.schedule.device_spec import H200
from megamoe_cuda.heuristics import session_config
from megamoe_cuda.jit.compiler import CompiledKernel
from megamoe_cuda.kernel_config import KernelConfig
from megamoe_cuda.smem_budget import MAX_DYNAMIC_BYTES


@dataclass(frozen=True, kw_only=True)
class Build:
    """One kernel to compile, with the problem that it is for."""

    problem: MoEProblem
    kernel: KernelConfig

    @property
    def name(self) -> str:
        """For reports."""
        problem, kernel = self.problem, self.kernel
        ranks = f"EP{problem.ep_size}{' virtual' if kernel.num_virtual_ranks > 1 else ''}"
        experts = f"E{problem.num_experts}{' with biases' if problem.expert_bias else ''}"
        activation = f"{problem.activation}{'' if problem.swiglu_limit is None else f' limit {problem.swiglu_limit:g}'}"
        return (
            f"{problem.quant} {kernel.tile.name} H{problem.hidden_size} I{problem.intermediate_size} {experts} "
            f"top-{problem.top_k} capacity {problem.num_max_tokens_per_rank} {ranks} {problem.transport} {activation}"
        )


def builds(
    problem: MoEProblem, *, config: str | None = None, virtual: bool = False, num_sms: int = H200.num_sms
) -> Iterator[Build]:
    """The kernels of a session of `problem`: one for each of its tiles.

    Args:
        problem: what the session runs.
        config: name of a configuration to pin, or None.
        virtual: whether one GPU runs all ranks.
        num_sms: SMs that the kernels take, as in the plan of the session.

    Raises:
        ConfigError: a virtual rank would be left without an SM, or with too few for a cluster.
    """
    num_virtual_ranks = problem.ep_size if virtual else 1
    if num_sms < num_virtual_ranks:
        raise ConfigError("more virtual ranks than SMs", got=num_virtual_ranks, expected=f"at most {num_sms}")
    chosen = session_config(problem, config, num_sms=num_sms)
    for tile in chosen.tiles:
        kernel = chosen.kernel(
            problem, tile, num_virtual_ranks=num_virtual_ranks, ctas_per_rank=num_sms // num_virtual_ranks
        )
        yield Build(problem=problem, kernel=kernel)


_GPT_OSS = MoEProblem(  # gpt-oss-120b at EP8
    hidden_size=2880,
    intermediate_size=2880,
    num_experts=128,
    top_k=4,
    num_max_tokens_per_rank=8192,
    ep_size=8,
    activation=Activation.SWIGLU_OAI,
    swiglu_limit=7.0,
    expert_bias=True,
)


def standard_builds() -> Iterator[Build]:
    """What CI compiles: each tile with each transport and activation, and the sizes of real models."""
    seed = MoEProblem(
        hidden_size=4096, intermediate_size=2048, num_experts=256, top_k=8, num_max_tokens_per_rank=8192, ep_size=8
    )
    for transport in Transport:
        base = replace(seed, transport=transport)
        yield from builds(base)
        yield from builds(base, virtual=True)
        yield from builds(replace(base, ep_size=1, num_experts=32))
        yield from builds(replace(base, swiglu_limit=10.0))
        yield from builds(replace(base, activation=Activation.SWIGLU_OAI, swiglu_limit=7.0))
        yield from builds(replace(base, expert_bias=True))
        for quant, act_format in ((QuantMode.BF16, None), (QuantMode.A8W4, ActFormat.FP8_1X128)):
            for problem in (seed, _GPT_OSS):
                yield from builds(replace(problem, quant=quant, act_format=act_format, transport=transport))
    # DeepSeek-V3, DeepSeek-V4-Pro, Qwen3-235B-A22B
    for hidden, intermediate, experts, top_k in ((7168, 2048, 256, 8), (7168, 3072, 384, 6), (4096, 1536, 128, 8)):
        yield from builds(
            replace(seed, hidden_size=hidden, intermediate_size=intermediate, num_experts=experts, top_k=top_k)
        )


def complaints(kernel: CompiledKernel) -> list[str]:
    """What is over the budget: spills, other registers than warpgroups share out, too much shared memory, or a warning.

    Warnings of the assembler say that WGMMAs were serialised (C7510 to C7519) or that setmaxnreg was ignored; either
    costs more than any other mistake, and results stay right.
    """
    found = []
    if kernel.spill_bytes:
        found.append(f"spills {kernel.spill_bytes} bytes")
    entry = kernel.config.tile.registers_at_entry
    if kernel.registers != entry:
        found.append(f"{kernel.registers} registers at entry, the warpgroups share out {entry}")
    if kernel.dynamic_smem_bytes > MAX_DYNAMIC_BYTES:
        found.append(f"{kernel.dynamic_smem_bytes} bytes of shared memory, the limit is {MAX_DYNAMIC_BYTES}")
    return found + list(kernel.warnings)
