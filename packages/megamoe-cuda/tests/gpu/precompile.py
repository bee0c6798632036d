"""Compile the kernels of the conformance matrix on all cores, so that a run on a GPU does not wait for the compiler.

python precompile.py virtual         # one GPU that runs all ranks
python precompile.py processes [N]   # a process per rank, EP 1 to N (2); follows MEGAMOE_RANKS_PER_GPU
python precompile.py bench [N]       # the benchmark on N GPUs (2)
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from megamoe import env
from megamoe.bench.suites import SuiteOptions
from megamoe.problem import MoEProblem, Transport
from megamoe.schedule.device_spec import H200
from megamoe.testing.cases import cases, stress_case
from megamoe_cuda import backend
from megamoe_cuda.aot import builds
from megamoe_cuda.backend import CudaBackend
from megamoe_cuda.bench import modes, seed_sm90, shapes, skew
from megamoe_cuda.heuristics import session_config
from megamoe_cuda.jit.store import load_or_compile
from megamoe_cuda.kernel_config import KernelConfig

STRESS_SEEDS = 48  # the matrix's default on GPUs


def problems(ep_sizes: tuple[int, ...]) -> Iterator[MoEProblem]:
    """Problems of the matrix that the backend supports."""
    backend.SEEN_RIGHT_ON = "under test"
    cuda = CudaBackend()

    def accept(problem: MoEProblem) -> bool:
        return problem.ep_size in ep_sizes and cuda.supports(problem).ok

    yield from (case.problem for case in cases("gpu") if accept(case.problem))
    yield from (stress_case(seed, "gpu", accept).problem for seed in range(STRESS_SEEDS))


def kernels(problem: MoEProblem, virtual: bool) -> Iterator[KernelConfig]:
    """Kernels of a session of `problem` that keeps taps, as cases of the matrix do."""
    num_virtual_ranks = problem.ep_size if virtual else 1
    num_sms = H200.num_sms if virtual else H200.num_sms // env.ranks_per_gpu()
    config = session_config(problem, None, num_sms=num_sms).tapped()
    for tile in config.tiles:
        yield config.kernel(
            problem, tile, num_virtual_ranks=num_virtual_ranks, ctas_per_rank=num_sms // num_virtual_ranks
        )


def bench_kernels(num_gpus: int) -> Iterator[KernelConfig]:
    """Kernels of the benchmark."""
    for setting in seed_sm90.settings(num_gpus):
        for measurement in seed_sm90._measurements(setting, SuiteOptions()):
            yield from (build.kernel for build in builds(measurement.problem))
    for tokens in modes.TOKENS:
        for transport in Transport:
            for problem in modes._problems(tokens, transport):
                yield from (build.kernel for build in builds(problem))
    for shape in shapes.SHAPES:
        for measurement in shapes._measurements(shape, SuiteOptions()):
            yield from (build.kernel for build in builds(measurement.problem))
    for each in skew._rounds(SuiteOptions()):
        problem = skew._alone(each, skew._picks(each))
        rows_tile = session_config(problem, None).tile_for(problem, problem.num_max_tokens_per_rank).name
        for tile in (each.tile, rows_tile):
            yield from (build.kernel for build in builds(problem, config=tile))


def matrix_kernels(virtual: bool, largest_ep_size: int) -> Iterator[KernelConfig]:
    """Kernels of the matrix."""
    for problem in problems(tuple(ep_size for ep_size in (1, 2, 4, 8) if ep_size <= largest_ep_size)):
        yield from kernels(problem, virtual)


def compile_one(kernel: KernelConfig) -> str | None:
    """The kernel's complaint, if it does not compile."""
    try:
        load_or_compile(kernel)
    except Exception as error:
        return f"{kernel}: {error}"
    return None


def main() -> None:
    kind = sys.argv[1]
    num_gpus = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    virtual = kind == "virtual"
    found = bench_kernels(num_gpus) if kind == "bench" else matrix_kernels(virtual, 8 if virtual else num_gpus)
    wanted = dict.fromkeys(found)
    started = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        failures = [failure for failure in pool.map(compile_one, wanted, chunksize=2) if failure]
    print(f"{len(wanted)} kernels in {time.perf_counter() - started:.0f} s, {len(failures)} failed")
    for failure in failures:
        print(failure[:2000])
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
