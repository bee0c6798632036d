"""Plans: pure, hashable, printable, complete; configurations by name; refusals with reasons."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch

from megamoe.backend import API_VERSION, Capability
from megamoe.errors import ConfigError
from megamoe.problem import MoEProblem
from megamoe.testing.cases import A8W8, MODES, TRANSPORTS, Mode, build
from megamoe.testing.cases import Layer as CaseLayer
from megamoe.testing.workbench import Workbench, check_refusal, with_capacity

pytestmark = pytest.mark.smoke


def test_plan_is_a_value(workbench: Workbench, mode: Mode) -> None:
    """Equal problems give equal plans with equal hashes; a plan can't be changed and says what it holds."""
    problem = workbench.case(mode, ep_size=4).problem
    plan, again = workbench.plan(problem), workbench.plan(replace(problem))
    assert plan == again
    assert hash(plan) == hash(again)
    assert plan.problem == problem
    assert plan.backend == workbench.backend.name
    assert plan.bytes > 0
    assert str(plan.bytes) in str(plan)
    assert plan.config.name in str(plan)
    with pytest.raises(FrozenInstanceError):
        plan.backend = "another"  # type: ignore[misc]


@pytest.mark.parametrize("device", ["H200", torch.device("cuda"), 0], ids=repr)
def test_what_is_no_device_to_plan_for_is_refused(workbench: Workbench, device: Any) -> None:
    """A torch.device is what one tries first; a plan is made without any."""
    problem = workbench.any_case().problem
    with pytest.raises(ConfigError, match="this is no device to plan for.*expected a DeviceSpec"):
        workbench.backend.plan(problem, device)


def test_plan_tells_problems_apart(workbench: Workbench) -> None:
    """Whatever changes the problem changes the plan, which is the key of compiled kernels and workspaces."""
    problem = workbench.any_case(ep_size=2).problem
    plan = workbench.plan(problem)
    changes: list[dict[str, Any]] = [
        {"top_k": problem.top_k - 1},
        {"num_max_tokens_per_rank": problem.num_max_tokens_per_rank + 64},
        {"swiglu_limit": 5.0},
        {"hidden_size": problem.hidden_size * 2},
        {"num_experts": problem.num_experts * 2},
    ]
    for change in changes:
        other = replace(problem, **change)
        workbench.require(other)
        assert workbench.plan(other) != plan, change


def test_bytes_grow_with_capacity(workbench: Workbench) -> None:
    """The number that an engine sizes its cache by."""
    problem = workbench.any_case(ep_size=2).problem
    small, large = (workbench.plan(with_capacity(problem, capacity)).bytes for capacity in (64, 1024))
    per_token = problem.top_k * problem.hidden_size  # the combine region alone holds top_k rows a token
    assert large - small > (1024 - 64) * per_token


def test_configurations_by_name(workbench: Workbench) -> None:
    """`configs` lists the default first; each can be pinned; an unknown name is a typed error that lists them."""
    problem = workbench.any_case(ep_size=2).problem
    names = workbench.backend.configs(problem)
    assert names, "no configuration"
    assert len(set(names)) == len(names)
    assert workbench.plan(problem).config.name == names[0]
    for name in names:
        assert workbench.plan(problem, config=name).config.name == name
    with pytest.raises(ConfigError, match=names[0]):
        workbench.plan(problem, config="no such configuration")


@pytest.mark.parametrize("wrong", [None, "a8w8", {"hidden_size": 4096}, 7], ids=repr)
def test_what_is_no_problem_is_refused(workbench: Workbench, wrong: Any) -> None:
    """A typed error that names MoEProblem, whoever asks what."""
    for ask in (workbench.backend.supports, workbench.backend.require, workbench.backend.plan):
        with pytest.raises(ConfigError, match="expected a megamoe.MoEProblem"):
            ask(wrong)


def test_claims_are_supported(workbench: Workbench) -> None:
    """Every claimed format can be planned for some size: a capability is not just a word."""
    claimed = workbench.backend.capabilities()
    assert all(isinstance(capability, Capability) for capability in claimed)
    assert workbench.backend.api_version == API_VERSION
    formats = {str(capability).split(":", 1)[1] for capability in claimed if str(capability).startswith("quant:")}
    for mode in MODES:
        if mode.id.replace("-", ":") in formats:
            for transport in TRANSPORTS:
                case = build(
                    CaseLayer.SMOKE, "any", mode, device_class=workbench.device_class, ep_size=1, transport=transport
                )
                if f"transport:{transport}" in {str(capability) for capability in claimed}:
                    verdict = workbench.backend.supports(case.problem)
                    assert verdict.ok, f"claims {mode.id} over {transport}, yet refuses: {verdict.detail}"


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 100},
        {"hidden_size": 129},
        {"intermediate_size": 100},
        {"intermediate_size": 1},
        {"hidden_size": 7},
    ],
    ids=str,
)
def test_odd_sizes_are_refused(workbench: Workbench, sizes: dict[str, Any]) -> None:
    """Sizes that the mode's blocks do not divide are refused by `supports`, with a reason, not met in a kernel."""
    case = build(CaseLayer.EDGE, "odd", A8W8, device_class=workbench.device_class, ep_size=1)
    check_refusal(workbench.backend, replace(case.problem, **sizes))


def test_supports_is_pure(workbench: Workbench) -> None:
    """Asking costs no device memory and gives the same answer twice."""
    if torch.cuda.is_available() and workbench.device.type == "cuda":
        before = torch.cuda.memory_allocated()
    problem = workbench.any_case().problem
    assert workbench.backend.supports(problem) == workbench.backend.supports(problem)
    assert {field.name for field in fields(MoEProblem)} >= {"hidden_size", "quant"}
    if torch.cuda.is_available() and workbench.device.type == "cuda":
        assert torch.cuda.memory_allocated() == before
