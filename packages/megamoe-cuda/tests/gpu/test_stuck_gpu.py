"""Calls that get stuck inside the pipeline: each ends in a time-out and in NaN, and reset() lets the session go on.

Faults are seeded into copies of the kernel's headers. Clusters (mode bf16, m256) have most to lose: a CTA that gives up
must neither leave while its peer may write to it, nor keep its peer waiting. Run with the matrix: `pytest -p claim`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from edits import Edit, edited_headers, use_headers

from megamoe.errors import MegaMoETimeoutError
from megamoe.problem import MoEProblem, QuantMode
from megamoe.reference.staged import staged
from megamoe.testing.data import make_weights
from megamoe.testing.tolerances import rel_l2, staged_bounds
from megamoe_cuda import backend as cuda_backend
from megamoe_cuda.backend import CudaBackend
from megamoe_cuda.jit import codegen

pytestmark = pytest.mark.gpu

PROBLEM = MoEProblem(  # three blocks an expert, of 256, 256 and about 90 rows
    hidden_size=1024, intermediate_size=512, num_experts=4, top_k=2, num_max_tokens_per_rank=1200, quant=QuantMode.BF16
)
TIMEOUT_S = 2.0
ITS_HALF = "        if (shared) {\n"  # of a stage's weights, which a CTA loads for both
STUCK = "shared && own == 1 && tile.block == 3 && k == 2"
FAULTS = {
    "a2_never_written": Edit(
        file="roles/publish.cuh",
        old="if (!is_awaited || ring.gave_up()) continue;",
        new="if (!is_awaited || ring.gave_up() || (!tile.is_gemm2 && tile.block == 5)) continue;",
    ),
    "rows_never_arrive": Edit(
        file="roles/dispatch.cuh",
        old="ptx::red_add_release_gpu(cta.workspace.rows_arrived(cta.epoch) + row.block, 1);",
        new="if (row.block != 4) ptx::red_add_release_gpu(cta.workspace.rows_arrived(cta.epoch) + row.block, 1);",
    ),
    "half_of_the_weights_left_out": Edit(file="roles/load.cuh", old=ITS_HALF, new=f"if ({STUCK}) return;\n{ITS_HALF}"),
    # 50 ms after the abort, when the other CTA has filled its output with NaN
    "half_of_the_weights_comes_late": Edit(
        file="roles/load.cuh",
        old=ITS_HALF,
        new=f"if ({STUCK}) {{\n"
        "    while (!cta.watchdog().aborted()) {\n    }\n"
        "    for (int i = 0; i < 100; ++i) __nanosleep(500'000);\n"
        f"}}\n{ITS_HALF}",
    ),
}


@pytest.fixture
def seeded(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sessions are compiled from headers with the parameter's fault in them."""
    monkeypatch.setattr(cuda_backend, "SEEN_RIGHT_ON", "under test")
    sound = codegen.INCLUDE_DIR
    use_headers(edited_headers([FAULTS[request.param]], tmp_path, request.param))
    yield
    use_headers(sound)


def check_stuck_calls() -> None:
    generator = torch.Generator(device="cuda").manual_seed(1)
    hidden = torch.randn(1200, PROBLEM.hidden_size, device="cuda", generator=generator).bfloat16()
    ids = torch.randint(0, PROBLEM.num_experts, (1200, PROBLEM.top_k), device="cuda", generator=generator)
    router = torch.rand(ids.shape, device="cuda", generator=generator)
    experts = make_weights(PROBLEM, torch.device("cuda"))
    cuda = CudaBackend()
    with cuda.open(cuda.plan(PROBLEM, config="m256"), timeout_s=TIMEOUT_S) as session:
        weights = session.prepare(experts)
        for _ in range(2):
            out = session.forward(hidden, ids, router, weights)
            with pytest.raises(MegaMoETimeoutError):
                session.check()
            assert out.isnan().all()
            session.reset()
        few = [hidden[:100]], [ids[:100] % 2], [router[:100]]  # two blocks, which no fault is in
        out = session.forward(few[0][0], few[1][0], few[2][0], weights)
        session.check()
    with torch.device("cuda"):
        (expected,) = staged(PROBLEM, *few, [experts]).outputs
    assert rel_l2(out.float(), expected.float()) < staged_bounds(PROBLEM).y_rel_l2


@pytest.mark.parametrize("seeded", sorted(FAULTS.keys() - {"half_of_the_weights_comes_late"}), indirect=True)
def test_a_stuck_cluster_ends_in_a_timeout(seeded: None) -> None:
    check_stuck_calls()


@pytest.mark.parametrize("seeded", ["half_of_the_weights_comes_late"], indirect=True)
def test_a_cta_outlasts_a_peer_that_writes_late(seeded: None) -> None:
    """Its shared memory is there until the peer's loader has ended (without that, an H200 reports nothing either)."""
    check_stuck_calls()
