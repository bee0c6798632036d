"""A few small calls for compute-sanitizer, which makes a kernel hundreds of times slower.

    python sanitize.py compile                                                            # first: not under the tool
    compute-sanitizer --tool memcheck --kernel-name kns=sm90_mega_moe python sanitize.py

Two virtual ranks of 8 CTAs, so that each CTA runs many tiles; every tile shape in every mode, both transports, a ring
that wraps, several routers. Results are held to the staged reference. Exit 1 where a call fails or is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

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


def problems() -> Iterator[MoEProblem]:
    a8w8 = MoEProblem(
        hidden_size=256, intermediate_size=256, num_experts=4, top_k=2, num_max_tokens_per_rank=TOKENS[-1], ep_size=2
    )
    yield a8w8
    yield replace(a8w8, transport=Transport.FP8_BLOCKWISE_1X32)
    yield replace(a8w8, quant=QuantMode.BF16, hidden_size=512)  # two column tiles in both GEMMs, as clusters need
    yield replace(a8w8, quant=QuantMode.A8W4, act_format=ActFormat.FP8_1X128)


def inputs(problem: MoEProblem, num_tokens: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(rank)
    hidden = torch.randn(num_tokens, problem.hidden_size, generator=rng)
    ids = torch.randint(-1, problem.num_experts, (num_tokens, problem.top_k), generator=rng)
    if num_tokens == TOKENS[-1]:  # all on the last rank, whose ring wraps
        ids[ids >= 0] = problem.num_experts - 1 - ids[ids >= 0] % problem.num_local_experts
    return hidden.bfloat16().cuda(), ids.cuda(), torch.rand(ids.shape, generator=rng).cuda()


def compile_all() -> None:
    for problem in problems():
        for name in tiles_of(problem):
            for build in builds(problem, config=name, virtual=True, num_sms=DEVICE.num_sms):
                load_or_compile(build.kernel)


def run() -> bool:
    """Whether every call was right."""
    cuda, right = backend.CudaBackend(), True
    for problem in problems():
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


if __name__ == "__main__":
    backend.SEEN_RIGHT_ON = backend.SEEN_RIGHT_ON or "under test"
    if sys.argv[1:] == ["compile"]:
        compile_all()
    else:
        sys.exit(not run())
