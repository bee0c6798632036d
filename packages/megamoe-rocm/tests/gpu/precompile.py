"""Compile the kernels of the conformance matrix for an NVIDIA GPU, into the cache, so that a run on one need not.

python precompile.py [PROCESSES]   # needs no GPU; Triton must be the version that the run has
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Hashable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

import claim  # noqa: F401  # plans are made for what is claimed
import torch

from megamoe.backend import Plan
from megamoe.problem import MoEProblem
from megamoe.symm import PeerMemory
from megamoe.testing.cases import cases, stress_case
from megamoe_rocm.backend import RocmBackend
from megamoe_rocm.kernels.launch import SM90, Launch
from megamoe_rocm.runtime.launcher import Launcher, kernel_key
from megamoe_rocm.runtime.nvidia import load_or_compile
from megamoe_rocm.session import RocmSession

STRESS_SEEDS = 48  # the matrix's default


class Collector(Launcher):
    """Remembers the launches whose kernels are loaded, one a kernel. Its tensors have no memory."""

    def __init__(self) -> None:
        self.device, self.target = torch.device("meta"), SM90
        self.found: dict[Hashable, Launch] = {}

    def load(self, launches: Iterable[Launch]) -> None:
        for launch in launches:
            self.found.setdefault(kernel_key(launch), launch)

    def launch(self, launch: Launch, *, rank: int) -> None:
        raise AssertionError("nothing is run")


def problems() -> Iterator[MoEProblem]:
    """Problems of the matrix that the backend supports."""
    rocm = RocmBackend()

    def accept(problem: MoEProblem) -> bool:
        return rocm.supports(problem).ok

    yield from (case.problem for case in cases("gpu") if accept(case.problem))
    yield from (stress_case(seed, "gpu", accept).problem for seed in range(STRESS_SEEDS))


def kernels(problem: MoEProblem) -> dict[Hashable, Launch]:
    """Every kernel of the problem's sessions: in each configuration, with and without taps."""
    collector = Collector()
    for config in RocmBackend().configs(problem):
        collect(RocmBackend().plan(problem, config=config), collector)
    return collector.found


def collect(plan: Plan, collector: Collector) -> None:
    """Have a session load what it can need."""

    def allocate(num_bytes: int) -> PeerMemory:
        ranks = [torch.empty(num_bytes, dtype=torch.uint8, device="meta") for _ in range(plan.problem.ep_size)]
        return PeerMemory(ranks=tuple(ranks), release=lambda: None)

    session = RocmSession(plan, group=None, virtual=True, launcher=collector, timeout_s=1.0, allocate=allocate)
    session.start()
    session.warmup()
    session.keep_taps()
    session.warmup()


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
