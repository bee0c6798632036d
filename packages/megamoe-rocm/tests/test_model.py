"""The model of time: what it must say whatever its assumptions are worth, and what the main loops were built for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megamoe.problem import MoEProblem
from megamoe.schedule.device_spec import MI355X
from megamoe_rocm.model.layer import predict


def problem(**changes) -> MoEProblem:
    sizes = {"hidden_size": 7168, "intermediate_size": 3072, "num_experts": 384, "top_k": 6}
    fields = {**sizes, "ep_size": 8, "num_max_tokens_per_rank": 32768, "quant": "a4w4", **changes}
    return MoEProblem(**fields)


def half(*_) -> float:
    return 0.5


def test_a_full_call_multiplies_what_it_must_at_the_utilisation_given() -> None:
    found = predict(problem(), 32768, half)
    flops = 2 * 32768 * 6 * (2 * 3072 * 7168 + 7168 * 3072)
    assert found.padding < 0.01
    assert flops / (found.stage1.matrix_s + found.stage2.matrix_s) == pytest.approx(MI355X.fp4_flops / 2, rel=0.02)
    assert predict(problem(), 32768, lambda *_: 0.25).stage1.matrix_s == pytest.approx(2 * found.stage1.matrix_s)


def test_fp8_operands_take_twice_the_matrix_time_and_fp8_rows_almost_half_the_links() -> None:
    plain, a8w4 = predict(problem(), 8192, half), predict(problem(quant="a8w4"), 8192, half)
    assert a8w4.stage1.matrix_s == pytest.approx(2 * plain.stage1.matrix_s)
    fp8 = predict(problem(transport="fp8_blockwise_1x32"), 8192, half)
    assert fp8.stage2.link_s / plain.stage2.link_s == pytest.approx((1 + 1 / 32) / 2)


def test_few_tokens_are_bound_by_the_weights_of_the_experts_that_they_meet() -> None:
    few = predict(problem(), 8, half)
    assert few.stage1.limit == few.stage2.limit == "memory"
    assert few.padding > 0.9
    full = predict(problem(), 8192, half)
    assert few.handshake_s / few.seconds > 10 * full.handshake_s / full.seconds
    alone = predict(replace(problem(), num_experts=48, ep_size=1), 8, half)
    assert alone.stage1.link_s == alone.stage2.link_s == 0
    assert alone.handshake_s < few.handshake_s


@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("quant, floor", [("a4w4", 0.7), ("a8w4", 0.85)])
@pytest.mark.parametrize("kernel", ["dispatch_gemm1", "gemm2_p2p"])
def test_main_loops_of_large_buckets_reach_what_they_were_designed_for(kernel: str, quant: str, floor: float) -> None:
    from megamoe_rocm.heuristics import tile_for
    from megamoe_rocm.model.report import loop_utilisation

    for count in (2048, 4096):
        tile = tile_for(num_max_tokens_per_rank=32768, num_tokens=count)
        assert loop_utilisation(kernel, tile, problem(quant=quant)) >= floor
