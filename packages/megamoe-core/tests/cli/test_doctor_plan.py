"""`megamoe doctor` and `megamoe plan`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megamoe import MoEProblem, registry, select_backend
from megamoe._version import __version__
from megamoe.backend import Reason
from megamoe.reference.backend import ReferenceBackend
from megamoe.registry import installed_backends

Call = Callable[..., object]


def test_doctor_names_every_backend_with_a_reason(megamoe: Call) -> None:
    report = megamoe("doctor", "--json").json
    assert report["version"] == __version__
    assert report["packages"]["torch"]
    names = {backend["name"] for backend in report["backends"]}
    assert names >= {"reference", "cuda", "rocm"} | installed_backends().keys()
    for backend in report["backends"]:
        assert backend["reason"] in set(Reason)
        assert backend["ok"] == (backend["reason"] == Reason.OK)
        assert backend["detail"]
    text = megamoe("doctor").stdout
    assert all(name in text for name in names)
    assert f"megamoe {__version__} (commit {report['commit']})" in text
    assert f"would run: {report['chosen'] or 'nothing'}" in text


def test_doctor_says_why_a_wanted_backend_is_not_chosen(megamoe: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    report = megamoe("doctor", "--backend", "abacus", "--json").json
    assert report["chosen"] is None
    assert {b["name"]: b["reason"] for b in report["backends"]}["abacus"] == Reason.NOT_INSTALLED
    monkeypatch.setenv("MEGAMOE_BACKEND", "reference")
    report = megamoe("doctor", "--json").json
    assert report["chosen"] == "reference"
    assert "MEGAMOE_BACKEND" in report["why"]


def test_doctor_says_what_is_set_and_what_nothing_reads(megamoe: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_TIMEOUT_S", "5")
    monkeypatch.setenv("MEGAMOE_TIMEOUT", "7")
    lines = megamoe("doctor").stdout.splitlines()
    assert "MEGAMOE_TIMEOUT_S=5" in lines
    assert "MEGAMOE_TIMEOUT=7 is read by nothing" in lines
    environment = megamoe("doctor", "--json").json["environment"]
    assert (environment["MEGAMOE_TIMEOUT_S"], environment["MEGAMOE_TIMEOUT"]) == ("5", "7")


SIZES = ("--hidden", 4096, "--intermediate", 2048, "--experts", 256, "--top-k", 8, "--tokens", 512, "--ep", 8)


def test_plan_says_what_a_session_would_allocate(megamoe: Call) -> None:
    report = megamoe("plan", *SIZES, "--backend", "reference", "--json").json
    (plan,) = report["plans"]
    problem = MoEProblem(
        hidden_size=4096, intermediate_size=2048, num_experts=256, top_k=8, num_max_tokens_per_rank=512, ep_size=8
    )
    assert plan["bytes"] == select_backend("reference").plan(problem).bytes
    assert plan["bytes"] == sum(array["bytes"] for array in plan["workspace"])
    assert plan["bytes"] == plan["symmetric_bytes"] + plan["local_bytes"]
    # 32 experts of 3 x 4096 x 2048 FP8 values, and an FP32 scale for every 128 x 128 of them.
    assert plan["weight_bytes"] == 32 * 3 * 4096 * 2048 * (1 + 4 / 128**2)
    text = megamoe("plan", *SIZES, "--backend", "reference", "--verbose").stdout
    for array in plan["workspace"]:
        assert array["array"] in text


def test_plan_begins_with_the_memory_of_a_rank(megamoe: Call) -> None:
    (plan,) = megamoe("plan", *SIZES, "--backend", "reference", "--json").json["plans"]
    lines = megamoe("plan", *SIZES, "--backend", "reference", "--moe-layers", 58).stdout.splitlines()
    assert lines[0].startswith("reference on CPU")
    assert lines[1:] == [
        f"memory of a rank: {(58 * plan['weight_bytes'] + plan['bytes']) / 2**30:.1f} GiB with 58 MoE layers",
        "  experts: 768.2 MiB a layer (32 of them)",
        f"  workspace: {plan['bytes'] / 2**20:.1f} MiB for all layers "
        f"({plan['symmetric_bytes'] / 2**20:.1f} MiB of it symmetric)",
    ]


def test_the_reference_is_planned_where_no_other_backend_can(megamoe: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned() -> set[str]:
        return {plan["backend"] for plan in megamoe("plan", *SIZES, "--json").json["plans"]}

    entries: dict[str, object] = {"reference": installed_backends()["reference"]}
    monkeypatch.setattr(registry, "installed_backends", lambda: entries)
    assert planned() == {"reference"}
    entries["other"] = SimpleNamespace(name="other", dist=None, value="a test's", load=lambda: Other)
    assert planned() == {"other"}


class Other(ReferenceBackend):
    """As a GPU's backend would be installed beside the reference."""

    name = "other"


def test_plan_takes_sizes_from_a_checkpoint(megamoe: Call, checkpoints: dict[str, Path]) -> None:
    args = ("--checkpoint", checkpoints["gpt-oss"], "--ep", 2, "--tokens", 64, "--backend", "reference", "--json")
    problem = megamoe("plan", *args).json["plans"][0]["problem"]
    assert (problem["hidden_size"], problem["intermediate_size"], problem["num_experts"]) == (256, 128, 8)
    assert (problem["quant"], problem["activation"], problem["expert_bias"]) == ("a8w4", "swiglu_oai", True)


def test_plan_says_why_a_backend_can_not(megamoe: Call) -> None:
    odd = ("--hidden", 100, "--intermediate", 128, "--experts", 8, "--top-k", 2, "--backend", "reference")
    result = megamoe("plan", *odd, exit_code=2)
    assert "hidden_size is 100" in result.stdout
    assert "NoBackendError" in result.stderr
    assert "--hidden, --top-k" in megamoe("plan", "--intermediate", 128, "--experts", 8, exit_code=2).stderr
    assert "not_installed" in megamoe("plan", *SIZES, "--backend", "abacus", exit_code=2).stderr


def test_swapped_sizes_are_refused(megamoe: Call) -> None:
    swapped = ("--hidden", 128, "--intermediate", 128, "--experts", 2, "--top-k", 8, "--ep", 1)
    assert "more picks than experts; got top_k 8; expected at most 2" in megamoe("plan", *swapped, exit_code=2).stderr


def test_a_configuration_is_one_backends_own(megamoe: Call) -> None:
    """Where no backend was named, those without such a configuration say so, and the others plan."""
    result = megamoe("plan", *SIZES, "--config", "tight")
    assert "reference on CPU, configuration tight" in result.stdout
    assert "no such configuration; got 'loose'" in megamoe("plan", *SIZES, "--config", "loose", exit_code=2).stdout
    named = megamoe("plan", *SIZES, "--config", "loose", "--backend", "reference", exit_code=2)
    assert "ConfigError: the reference has no such configuration" in named.stderr


def test_version_and_help(megamoe: Call) -> None:
    assert megamoe("--version").stdout.strip() == __version__
    text = megamoe("--help").stdout
    assert all(command in text for command in ("doctor", "run", "plan", "bench"))
