"""Compile the kernels of the conformance matrix for an NVIDIA GPU, into the cache, so that a run on one need not.

python precompile.py [PROCESSES]   # needs no GPU; Triton must be the version that the run has
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Hashable, Iterator
from concurrent.futures import ProcessPoolExecutor

from megamoe.problem import MoEProblem
from megamoe.testing.cases import cases, stress_case
from megamoe_rocm import claimed  # noqa: F401  # plans are made for what is claimed
from megamoe_rocm.backend import RocmBackend
from megamoe_rocm.kernels.launch import SM90, Launch
from megamoe_rocm.runtime.nvidia import load_or_compile
from megamoe_rocm.standard import Collector, collect

STRESS_SEEDS = 48  # the matrix's default


def problems() -> Iterator[MoEProblem]:
    """Problems of the matrix that the backend supports."""
    rocm = RocmBackend()

    def accept(problem: MoEProblem) -> bool:
        return rocm.supports(problem).ok

    yield from (case.problem for case in cases("gpu") if accept(case.problem))
    yield from (stress_case(seed, "gpu", accept).problem for seed in range(STRESS_SEEDS))


def kernels(problem: MoEProblem) -> dict[Hashable, Launch]:
    """Every kernel of the problem's sessions: in each configuration, with and without taps."""
    collector = Collector(SM90)
    for config in RocmBackend().configs(problem):
        collect(problem, collector, config=config, taps=True)
    return collector.found


def compile_one(problem: MoEProblem, key: Hashable) -> str | None:
    """The kernel's complaint, if it does not compile."""
    try:
        load_or_compile(kernels(problem)[key])
    except Exception as error:
        return f"{key}: {error}"
    return None


def main() -> None:
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else os.cpu_count()
    start = time.perf_counter()
    wanted: dict[Hashable, MoEProblem] = {}
    for problem in dict.fromkeys(problems()):
        for key in kernels(problem):
            wanted.setdefault(key, problem)
    with ProcessPoolExecutor(processes) as pool:
        complaints = [text for text in pool.map(compile_one, wanted.values(), wanted) if text]
    print(f"{len(wanted)} kernels in {time.perf_counter() - start:.0f} s, {len(complaints)} do not compile")
    for text in complaints:
        print(text)
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
