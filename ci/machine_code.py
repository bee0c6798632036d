"""What the CUDA kernels compile to, a line each: to show that an edit of the headers leaves the machine code alone.

    python ci/machine_code.py > before        # in one checkout
    python ci/machine_code.py > after         # in another, or after the edit
    diff before after

A line holds a hash of the instructions and of the literals beside them; registers, bytes of stack and of spills, as the
assembler counts them; bytes of shared memory; and the kernel's name. Covered is every tile of every mode, with either
transport, with biases and odd sizes where the mode takes them, and with taps and trace. Needs NVRTC and no GPU; three
seconds of a core for each.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from megamoe.problem import ActFormat, MoEProblem, QuantMode, Transport
from megamoe.schedule.device_spec import H200
from megamoe_cuda.aot import Build, builds
from megamoe_cuda.heuristics import session_config, tiles_of
from megamoe_cuda.jit.codegen import KERNEL_NAME
from megamoe_cuda.jit.compiler import compile_kernel
from megamoe_cuda.jit.elf import sections

CODE = f".text.{KERNEL_NAME}"  # sections of a cubin
LITERALS = f".nv.constant2.{KERNEL_NAME}"  # not all kernels have any
SEED = MoEProblem(
    hidden_size=4096, intermediate_size=2048, num_experts=256, top_k=8, num_max_tokens_per_rank=8192, ep_size=8
)
ACT_FORMATS = {QuantMode.A8W8: None, QuantMode.BF16: None, QuantMode.A8W4: ActFormat.FP8_1X128}


def covered() -> Iterator[tuple[str, Build]]:
    """What is compiled, each with what its name does not say."""
    for quant, act_format in ACT_FORMATS.items():
        problem = replace(SEED, quant=quant, act_format=act_format)
        hidden, intermediate = (4096, 2048) if quant is QuantMode.A8W8 else (2912, 2880)
        for transport in Transport:
            for name in tiles_of(problem):
                for build in builds(replace(problem, transport=transport), config=name):
                    yield "", build
        biased = replace(
            problem,
            hidden_size=hidden,
            intermediate_size=intermediate,
            expert_bias=True,
            transport=Transport.FP8_BLOCKWISE_1X32,
        )
        for build in builds(biased):
            yield "", build
        for name in tiles_of(problem):
            config = replace(session_config(problem, name).tapped(), trace=True)
            kernel = config.kernel(problem, config.tiles[0], num_virtual_ranks=1, ctas_per_rank=H200.num_sms)
            yield " taps trace", Build(problem=problem, kernel=kernel)


def line_of(item: tuple[str, Build]) -> str:
    """Compile, and say what came out."""
    suffix, build = item
    compiled = compile_kernel(build.kernel)
    found = sections(compiled.cubin)
    code = hashlib.sha256()
    for section in (found[name] for name in (CODE, LITERALS) if name in found):
        code.update(compiled.cubin[section.offset : section.offset + section.num_bytes])
    numbers = (compiled.registers, compiled.stack_bytes, compiled.spill_bytes, compiled.dynamic_smem_bytes)
    return f"{code.hexdigest()} {' '.join(map(str, numbers))} {build.name}{suffix}"


def main(num_processes: int) -> None:
    """Print a line for each kernel, in a fixed order."""
    with ProcessPoolExecutor(num_processes) as pool:
        for line in pool.map(line_of, covered()):
            print(line, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
