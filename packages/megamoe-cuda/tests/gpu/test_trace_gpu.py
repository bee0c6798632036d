"""Time stamps of a call, on a GPU.

Run as test_session_gpu.py: `pytest -p claim packages/megamoe-cuda/tests/gpu/test_trace_gpu.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megamoe.backend import VirtualRanks
from megamoe.bench.trace import bars
from megamoe.problem import MoEProblem
from megamoe.testing.data import make_weights, shard
from megamoe_cuda import backend as cuda_backend
from megamoe_cuda.backend import CudaBackend
from megamoe_cuda.launcher import TRACE_POINTS
from megamoe_cuda.trace import trace_of

pytestmark = pytest.mark.gpu

PROBLEM = MoEProblem(
    hidden_size=1024, intermediate_size=512, num_experts=16, top_k=4, num_max_tokens_per_rank=256, ep_size=2
)
LONGEST_CALL_US = 100_000.0


@pytest.fixture(autouse=True)
def claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "SEEN_RIGHT_ON", "under test")


def make_call(seed: int) -> tuple[list[Any], ...]:
    rng = torch.Generator().manual_seed(seed)
    hidden = [torch.randn(256, PROBLEM.hidden_size, generator=rng).bfloat16().cuda() for _ in range(2)]
    ids = [torch.rand(256, 16, generator=rng).argsort(-1)[:, :4].contiguous().cuda() for _ in range(2)]
    return hidden, ids, [torch.rand(256, 4, generator=rng).cuda() for _ in range(2)]


def test_points_come_in_order_and_results_stay_the_same() -> None:
    backend = CudaBackend()
    with backend.open(backend.plan(PROBLEM), VirtualRanks()) as session:
        weights = [session.prepare(share) for share in shard(make_weights(PROBLEM, torch.device("cuda")), 2)]
        expected = session.forward(*make_call(0), weights)
        session.keep_trace()
        outputs = session.forward(*make_call(0), weights)
        session.check()
        assert all(map(torch.equal, outputs, expected))
        trace = trace_of("a call", session)
    chain = ("started", "routed", "planned", "multiplied", "finished", "combined")
    for ctas in trace.stamps_ns:
        for stamps in ctas:
            by_name = dict(zip(TRACE_POINTS, stamps, strict=True))
            assert all(stamps)
            times = [by_name[name] for name in chain]
            assert times == sorted(times)
            assert by_name["planned"] <= by_name["pulled"] <= by_name["finished"]
        # No CTA is done before all of them have multiplied.
        place = {name: index for index, name in enumerate(TRACE_POINTS)}
        last_multiplied = max(stamps[place["multiplied"]] for stamps in ctas)
        assert last_multiplied <= min(stamps[place["finished"]] for stamps in ctas)
    assert all(0 <= bar.begin_us <= bar.end_us < LONGEST_CALL_US for bar in bars(trace))
