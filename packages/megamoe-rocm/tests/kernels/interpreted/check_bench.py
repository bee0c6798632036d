"""One rank of the benchmark and one of validate's gates, on kernels in the interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from harness import problem

from megamoe.problem import Transport
from megamoe_rocm import gates
from megamoe_rocm.bench import Measurement, measure_rank


@pytest.fixture(autouse=True)
def _a_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_ROCM_DEVICE", "interpreter")


def test_a_rank_measures_the_kernels_and_what_is_beside_them() -> None:
    of = problem(ep_size=1, num_max_tokens_per_rank=8, transport=Transport.FP8_BLOCKWISE_1X32)
    context = SimpleNamespace(rank=0, world_size=1)
    (result,) = measure_rank(context, [Measurement(problem=of, num_tokens=8, repeats=2, config=None)])
    assert (len(result.seconds), result.unfused_error) == (2, "")
    assert {name: len(seconds) for name, seconds in result.unfused.items()} == {"unfused_collectives": 2}
    assert result.machine.gpu == "Triton's interpreter on the CPU"


def test_a_layer_is_within_its_gate_and_not_for_nothing() -> None:
    row = gates.measure_layer(problem(quant="a8w4"), 8)
    assert row.passed
    assert 0.03 < row.rel_l2 < 0.06
    assert not gates.measure_layer(problem(quant="a4w4"), 8).rel_l2 < gates.GATES["a8w4"]
