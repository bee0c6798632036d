"""What the ROCm backend claims on which rung, what it refuses, and its plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megamoe import env
from megamoe.backend import Capability, Reason, VirtualRanks
from megamoe.errors import ConfigError, UnsupportedProblemError
from megamoe.problem import MoEProblem
from megamoe.schedule.device_spec import H200, MI355X
from megamoe_rocm import rungs
from megamoe_rocm.backend import RocmBackend
from megamoe_rocm.rungs import Rung

PROBLEM = MoEProblem(
    hidden_size=7168, intermediate_size=3072, num_experts=384, top_k=6, num_max_tokens_per_rank=512, quant="a8w4"
)


def asked_for(monkeypatch: pytest.MonkeyPatch, rung: str) -> RocmBackend:
    monkeypatch.setenv("MEGAMOE_ROCM_DEVICE", rung)
    return RocmBackend()


@pytest.fixture(autouse=True)
def _nothing_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGAMOE_ROCM_DEVICE", raising=False)


def test_the_devices_are_those_that_the_command_line_offers() -> None:
    assert tuple(Rung) == env.ROCM_DEVICES


def test_nothing_is_claimed_on_a_device_that_nobody_had_and_every_way_in_says_why() -> None:
    backend = RocmBackend()
    assert backend.capabilities() == frozenset()
    verdict = backend.supports(PROBLEM)
    assert not verdict.ok
    assert "MEGAMOE_ROCM_DEVICE=gfx950" in verdict.detail
    for way_in in (backend.plan, backend.require):
        with pytest.raises(UnsupportedProblemError, match="not been seen right on a gfx950 GPU"):
            way_in(PROBLEM)


def test_whoever_asks_for_the_device_by_name_may_plan_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = asked_for(monkeypatch, "gfx950")
    assert backend.capabilities() == rungs.implemented(Rung.GFX950)
    plan = backend.plan(PROBLEM)
    assert (plan.device, plan.config.name) == (MI355X, "auto")
    assert backend.plan(PROBLEM, replace(MI355X, num_sms=224), config="m64").config.name == "m64"


@pytest.mark.parametrize("rung", [Rung.NVIDIA, Rung.INTERPRETER, Rung.ISA])
def test_a_stand_in_claims_what_was_seen_right_on_it(monkeypatch: pytest.MonkeyPatch, rung: Rung) -> None:
    backend = asked_for(monkeypatch, rung)
    monkeypatch.setattr(rungs, "SEEN_RIGHT_ON", dict.fromkeys(Rung))
    assert backend.capabilities() == frozenset()
    monkeypatch.setattr(rungs, "SEEN_RIGHT_ON", {**dict.fromkeys(Rung), rung: "a machine, a day"})
    assert backend.capabilities() == rungs.implemented(rung)
    assert (Capability.GRAPH_CAPTURE in backend.capabilities()) == (rung is Rung.NVIDIA)
    assert backend.plan(PROBLEM).device.arch == (H200.arch if rung is Rung.NVIDIA else "cpu")


def test_a_name_of_no_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="gfx950 or nvidia or interpreter or isa"):
        asked_for(monkeypatch, "mi300").capabilities()


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"quant": "a8w8"}, Reason.QUANT),
        ({"quant": "a8w4", "act_format": "fp8_1x128"}, Reason.ACT_FORMAT),
        ({"hidden_size": 7296}, Reason.SHAPE),
        ({"intermediate_size": 3200}, Reason.SHAPE),
        ({"ep_size": 16}, Reason.EP_SIZE),
        ({"num_max_tokens_per_rank": 2**29}, Reason.CAPACITY),
    ],
)
def test_refusals_have_their_reason(monkeypatch: pytest.MonkeyPatch, changes: dict, reason: Reason) -> None:
    verdict = asked_for(monkeypatch, "gfx950").supports(replace(PROBLEM, **changes))
    assert (verdict.ok, verdict.reason) == (False, reason)


@pytest.mark.parametrize("group", [None, "a name", VirtualRanks()])
def test_what_is_no_group_of_the_plans_ranks_is_refused(monkeypatch: pytest.MonkeyPatch, group: object) -> None:
    backend = asked_for(monkeypatch, "gfx950")
    plan = backend.plan(replace(PROBLEM, ep_size=2))
    if group == VirtualRanks():
        plan = replace(plan, backend="cuda")
    with pytest.raises(ConfigError):
        backend.open(plan, group)
