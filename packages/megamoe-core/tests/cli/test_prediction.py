"""`megamoe plan --simulate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from megamoe import MoEProblem, select_backend
from megamoe.backend import KernelConfig, Plan
from megamoe.cli.prediction import predict, predict_on_paper, predict_plan, print_prediction, why_not
from megamoe.errors import ConfigError
from megamoe.schedule.device_spec import H200, MI355X
from megamoe.schedule.simulate import Tiling

Call = Callable[..., Any]

SIZES = ("--hidden", 512, "--intermediate", 256, "--experts", 16, "--top-k", 2, "--tokens", 64, "--ep", 2)
PROBLEM = MoEProblem(
    hidden_size=512, intermediate_size=256, num_experts=16, top_k=2, num_max_tokens_per_rank=640, ep_size=2
)


@dataclass(frozen=True, kw_only=True)
class TiledConfig(KernelConfig):
    """A configuration that can be simulated."""

    def tiling(self, problem: MoEProblem, num_tokens: int, num_ctas: int) -> Tiling:
        """One cut for all calls."""
        return Tiling(
            block_m=64,
            block_n=256,
            block_k=128,
            num_ctas=num_ctas,
            num_stages=4,
            box_rows=64,
            lag_blocks=8,
            ring_blocks=24,
        )


PLAN = replace(select_backend("reference").plan(PROBLEM), config=TiledConfig(name="tiled"), device=H200)


def test_predictions_cover_the_usual_counts_up_to_the_capacity() -> None:
    calls = predict_plan(PLAN)
    assert [call.num_tokens for call in calls] == [8, 128, 256, 512, 640]
    times = [call.prediction.us for call in calls]
    assert times == sorted(times)
    assert {call.ep_size for call in calls} == {2}


def test_paper_covers_the_groups_that_divide_the_experts() -> None:
    calls = predict_on_paper(PLAN)
    assert {(call.ep_size, call.domain_size) for call in calls} == {(8, 8), (16, 8), (16, 72)}
    times = {(call.ep_size, call.domain_size, call.num_tokens): call.prediction.us for call in calls}
    assert times[16, 8, 640] > times[16, 72, 640]  # half of the rows over a slower link


def test_a_plan_without_a_model_says_why() -> None:
    assert "has no model" in str(why_not(select_backend("reference").plan(PROBLEM)))
    elsewhere: Plan = replace(PLAN, device=MI355X)
    assert MI355X.name in str(why_not(elsewhere))
    assert "bf16 was not measured" in str(why_not(replace(PLAN, problem=replace(PROBLEM, quant="bf16"))))
    with pytest.raises(ConfigError, match="not measured"):
        predict(elsewhere, 8)


def test_the_tables_say_what_is_paper(capsys: pytest.CaptureFixture[str]) -> None:
    print_prediction(PLAN, on_paper=True)
    text = " ".join(capsys.readouterr().out.split())
    assert "predicted: EP2" in text
    assert "on paper: no such group was run" in text
    print_prediction(PLAN, on_paper=False)
    assert "on paper" not in capsys.readouterr().out


def test_the_command_reports_a_missing_model(megamoe: Call) -> None:
    args = ("plan", *SIZES, "--backend", "reference", "--simulate")
    (plan,) = megamoe(*args, "--json").json["plans"]
    assert plan["prediction"] is None
    assert "no model" in plan["no_prediction"]
    assert "no prediction: backend reference has no model" in megamoe(*args).stdout
    assert "prediction" not in megamoe("plan", *SIZES, "--backend", "reference", "--json").json["plans"][0]
