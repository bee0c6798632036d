"""A few small calls for compute-sanitizer, which makes a kernel hundreds of times slower.

    python sanitize.py compile [VARIANT]                                                  # first: not under the tool
    compute-sanitizer --tool memcheck --kernel-name kns=sm90_mega_moe python sanitize.py [VARIANT]

Two virtual ranks of 8 CTAs, so that each CTA runs many tiles; every tile shape in every mode, both transports, a ring
that wraps, several routers. Results are held to the staged reference. Exit 1 where a call fails or is wrong. Kernels
have line numbers, which the tool then names and which leave their machine code alone; they are cached apart.

A variant is `every-lane`, in which each lane of a warp arrives at barriers for itself (docs/sm90-kernel.md says what
that shows), or the name of a fault of mutations.py: racecheck knows CTAs of a cluster that write to one another too
early or too late.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from edits import Edit, edited_headers, use_headers
from mutations import MUTATIONS

from megamoe import env
from megamoe.backend import VirtualRanks
from megamoe.problem import ActFormat, MoEProblem, QuantMode, Transport
from megamoe.reference.staged import staged
from megamoe.schedule.device_spec import H200
from megamoe.testing.data import make_weights, shard
from megamoe.testing.tolerances import rel_l2, staged_bounds
from megamoe_cuda import backend
from megamoe_cuda.aot import builds
from megamoe_cuda.heuristics import tiles_of
from megamoe_cuda.jit.store import load_or_compile

TIMEOUT_S = 100.0
DEVICE = replace(H200, num_sms=16)
TOKENS = (7, 600)
EVERY_LANE = (
    Edit(
        file="pipeline/ring.cuh",
        old="1 + (kConverts ? kConverterGroupWarps : 1)",
        new="1 + (kConverts ? kConverterGroupWarps * kWarpSize : 1)",
    ),
    Edit(
        file="pipeline/ring.cuh",
        old="cfg::kMathWarps * cfg::kClusterSize",
        new="cfg::kMathWarps * cfg::kClusterSize * kWarpSize",
    ),
    Edit(
        file="pipeline/ring.cuh",
        old="ptx::mbarrier_init(packed_empty(stage), kConverterGroupWarps);",
        new="ptx::mbarrier_init(packed_empty(stage), kConverterGroupWarps * kWarpSize);",
    ),
    Edit(
        file="pipeline/stage_reader.cuh",
        old="if (condition && alive && peer_empty != 0) ptx::mbarrier_arrive_in_cluster(peer_empty + 8 * stage);",
        new="for (uint32_t cta = 0; condition && alive && cta < cfg::kClusterSize; ++cta) "
        "ptx::mbarrier_arrive_in_cluster(ptx::shared_address_in(ring.empty(stage), cta));",
    ),
    Edit(
        file="pipeline/stage_reader.cuh",
        old="if (condition && is_first_lane) ptx::mbarrier_arrive",
        new="if (condition) ptx::mbarrier_arrive",
    ),
    Edit(
        file="pipeline/tile_queue.cuh",
        old="ptx::mbarrier_init(done(turn), cfg::kMathWarps + 1);",
        new="ptx::mbarrier_init(done(turn), cfg::kMathWarps * kWarpSize + 1);",
    ),
    Edit(
        file="pipeline/tile_queue.cuh",
        old="if (lane_id() == 0) ptx::mbarrier_arrive(done(turn));",
        new="ptx::mbarrier_arrive(done(turn));",
    ),
    Edit(
        file="roles/convert.cuh",
        old="if (lane_id() == 0) {\n                ptx::mbarrier_arrive(ring.packed_empty(packed.stage));",
        new="{\n                ptx::mbarrier_arrive(ring.packed_empty(packed.stage));",
    ),
)
VARIANTS = {"every-lane": EVERY_LANE} | {mutation.name: mutation.edits for mutation in MUTATIONS}


def problems(modes: Collection[QuantMode] = tuple(QuantMode)) -> Iterator[MoEProblem]:
    # Two column tiles in both GEMMs, as clusters need. Bulk copies suit rows of GEMM1's weight scales, not of GEMM2's.
    a8w8 = MoEProblem(
        hidden_size=512, intermediate_size=256, num_experts=4, top_k=2, num_max_tokens_per_rank=TOKENS[-1], ep_size=2
    )
    every = (
        a8w8,
        replace(a8w8, transport=Transport.FP8_BLOCKWISE_1X32),
        replace(a8w8, quant=QuantMode.BF16),
        replace(a8w8, quant=QuantMode.A8W4, act_format=ActFormat.FP8_1X128),
    )
    yield from (problem for problem in every if problem.quant in modes)


def inputs(problem: MoEProblem, num_tokens: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(rank)
    hidden = torch.randn(num_tokens, problem.hidden_size, generator=rng)
    ids = torch.randint(-1, problem.num_experts, (num_tokens, problem.top_k), generator=rng)
    if num_tokens == TOKENS[-1]:  # all on the last rank, whose ring wraps
        ids[ids >= 0] = problem.num_experts - 1 - ids[ids >= 0] % problem.num_local_experts
    return hidden.bfloat16().cuda(), ids.cuda(), torch.rand(ids.shape, generator=rng).cuda()


def compile_all(modes: Collection[QuantMode]) -> None:
    kernels = [
        build.kernel
        for problem in problems(modes)
        for name in tiles_of(problem)
        for build in builds(problem, config=name, virtual=True, num_sms=DEVICE.num_sms)
    ]
    with ProcessPoolExecutor(os.cpu_count()) as pool:  # forked: with this process's headers
        list(pool.map(load_or_compile, kernels))


def run(modes: Collection[QuantMode]) -> bool:
    """Whether every call was right."""
    cuda, right = backend.CudaBackend(), True
    for problem in problems(modes):
        shares = shard(make_weights(problem, torch.device("cuda")), problem.ep_size)
        for name in tiles_of(problem):
            with cuda.open(cuda.plan(problem, DEVICE, config=name), VirtualRanks(), timeout_s=TIMEOUT_S) as session:
                weights = [session.prepare(share) for share in shares]
                for num_tokens in TOKENS:
                    arguments = [inputs(problem, num_tokens, rank) for rank in range(2)]
                    hidden, ids, router = (list(part) for part in zip(*arguments, strict=True))
                    got = torch.cat(session.forward(hidden, ids, router, weights))
                    session.check()
                    with torch.device("cuda"):
                        expected = torch.cat(staged(problem, hidden, ids, router, shares).outputs)
                    distance = rel_l2(got.float(), expected.float())
                    right &= distance < staged_bounds(problem).y_limit(2 * num_tokens)
                    print(
                        f"{problem.quant} {problem.transport} {name} {num_tokens} tokens: relL2 {distance:.3g}",
                        flush=True,
                    )
    return right


def prepare(variant: str, directory: Path) -> None:
    """Compile with line numbers in this process, from the variant's headers."""
    import cuda.core  # not where the tests of this repository's CPU side import this file

    cuda.core.ProgramOptions = functools.partial(cuda.core.ProgramOptions, lineinfo=True)
    os.environ["MEGAMOE_CACHE_DIR"] = str(env.cache_dir() / "with-lines")
    backend.SEEN_RIGHT_ON = backend.SEEN_RIGHT_ON or "under test"
    if variant:
        use_headers(edited_headers(VARIANTS[variant], directory, variant))


def main() -> None:
    variant = sys.argv[-1] if sys.argv[-1] in VARIANTS else ""
    modes = {mutation.mode for mutation in MUTATIONS if mutation.name == variant} or set(QuantMode)
    with tempfile.TemporaryDirectory() as directory:
        prepare(variant, Path(directory))
        if sys.argv[1:2] == ["compile"]:
            compile_all(modes)
        else:
            sys.exit(not run(modes))


if __name__ == "__main__":
    main()
