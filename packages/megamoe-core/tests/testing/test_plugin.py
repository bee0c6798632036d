"""The plugin: what it runs, what it lets pass as skipped, and what it says about it."""

from __future__ import annotations

import pytest
import torch

from megamoe.backend import Capability
from megamoe.reference import executor
from megamoe.reference.backend import ReferenceBackend
from megamoe.testing.plugin import STRESS_SEEDS

pytest_plugins = ["pytester"]

PLUGIN = ("-p", "megamoe.testing.plugin", "-p", "no:cacheprovider")


def test_only_refusals_may_skip(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_passes(workbench): pass
        def test_skips(workbench): pytest.skip("no time")
        @pytest.mark.skip(reason="marked")
        def test_marked(workbench): pass
        @pytest.mark.xfail
        def test_expected_failure(workbench): assert False
        def test_refused(workbench): workbench.refuse("too large: at most 3")
        def test_of_something_else(): pytest.skip("not a conformance test")
        """
    )
    result = pytester.runpytest(*PLUGIN, "-rA")
    result.assert_outcomes(passed=1, failed=2, errors=1, skipped=2)
    result.stdout.fnmatch_lines(
        [
            "*test_skips was skipped: a conformance test runs, or the backend refuses it",
            "*refused by the backend, with a checked reason*",
            "*1  too large: at most 3",
        ]
    )


CASES = """
    def test_case(workbench, case): print("ran", case.id)
    """


def collected(pytester: pytest.Pytester, *options: str) -> list[str]:
    pytester.makepyfile(CASES)
    result = pytester.runpytest(*PLUGIN, "--collect-only", "-q", *options)
    assert result.ret == 0
    return [line.split("[")[1].rstrip("]") for line in result.outlines if "::test_case[" in line]


def test_layers_are_markers(pytester: pytest.Pytester) -> None:
    everything = collected(pytester)
    layers = {layer: collected(pytester, "-m", layer) for layer in ("smoke", "shapes", "edge", "stress")}
    assert all(layers.values())
    assert sorted(everything) == sorted(case for cases in layers.values() for case in cases)
    assert layers["stress"] == [f"stress-{seed}" for seed in range(STRESS_SEEDS)]


def test_seeds_replay_stress_cases(pytester: pytest.Pytester) -> None:
    assert collected(pytester, "--megamoe-seed=17", "--megamoe-seed=9000") == ["stress-17", "stress-9000"]
    assert collected(pytester, "-m", "stress", "--megamoe-stress=3") == ["stress-0", "stress-1", "stress-2"]


def test_ep_sizes(pytester: pytest.Pytester) -> None:
    some = collected(pytester, "--ep-sizes=1,4", "-m", "smoke or shapes or edge")
    assert some
    assert all(case.endswith(("-ep1", "-ep4")) for case in some)


def test_what_virtual_ranks_cant_show_is_left_out(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.own_ranks
        def test_late(workbench): pass
        @pytest.mark.processes
        def test_killed(workbench): pass
        """
    )
    pytester.runpytest(*PLUGIN, "--ranks=virtual").assert_outcomes(deselected=2)
    pytester.runpytest(*PLUGIN, "--ranks=threads").assert_outcomes(passed=1, deselected=1)
    pytester.runpytest(*PLUGIN, "--ranks=processes").assert_outcomes(passed=2)


def test_header_names_what_is_tested(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(workbench): pass")
    result = pytester.runpytest(*PLUGIN, "--ranks=threads", "--ep-sizes=1,2")
    result.stdout.fnmatch_lines(
        [
            "megamoe: backend reference (torch *), device cpu, ranks threads, EP sizes 1, 2, torch *",
            "megamoe: plain-a8w8-ep2 runs configuration default in * bytes per rank",
        ]
    )


def test_a_backend_that_claims_nothing_is_a_usage_error(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megamoe.reference.backend.ReferenceBackend.capabilities", lambda self: frozenset())
    pytester.makepyfile("def test_nothing(case): pass")
    result = pytester.runpytest(*PLUGIN)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*backend reference claims nothing: what its capabilities() lists is what is tested*"])


@pytest.mark.parametrize(
    "options, why",
    [([], "does not offer transport:bf16*"), (["--ep-sizes=3"], "the matrix has none of that many ranks")],
    ids=["refused", "ranks"],
)
def test_a_backend_that_refuses_all_that_is_drawn_is_a_usage_error(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: list[str], why: str
) -> None:
    """As while it is being written, when it does not claim a format of each kind yet."""
    monkeypatch.setattr(ReferenceBackend, "capabilities", lambda self: frozenset({Capability.QUANT_A8W8}))
    pytester.makepyfile("def test_nothing(case): pass")
    result = pytester.runpytest(*PLUGIN, *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*backend reference runs no problem of the matrix at EP sizes *: {why}"])


def test_a_case_that_fails_names_the_first_stage_that_is_wrong(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = executor.gemm1
    monkeypatch.setattr(executor, "gemm1", lambda *args, **kwargs: right(*args, **kwargs) * 1.01)
    case = "megamoe.testing.conformance.test_matrix"
    result = pytester.runpytest(*PLUGIN, "--pyargs", case, "-m", "smoke", "-k", "plain-a8w8-ep1")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*AssertionError: rank 0: GEMM1 relL2 0.01 >= *"])


@pytest.mark.parametrize(
    "options, message",
    [
        (["--backend=tpu"], "*backend tpu can't be tested here: not_installed: installed are *"),
        (["--backend=no:Class"], "*backend no:Class can't be tested here: import_failed: ModuleNotFoundError: *"),
        (["--backend=megamoe.env:"], "*can't be tested here: not_installed: it is no module:Class*"),
        (["--backend=megamoe.env:debug"], "*can't be tested here: broken: its entry point makes bool, not a megamoe*"),
        (["--ranks=threads", "--device=cuda"], "*--ranks=threads is for CPU backends*"),
        (["--device=cuda"], "*torch sees no GPU here: a backend that computes on CPUs needs --device=cpu*"),
        (["--ep-sizes=1,x"], "*--ep-sizes is '1,x', not numbers of ranks such as 1,2"),
    ],
    ids=["unknown", "no-module", "no-class", "no-backend", "threads-on-gpu", "no-gpu", "ep-sizes"],
)
def test_what_cant_be_tested_is_a_usage_error(
    pytester: pytest.Pytester, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pytester.makepyfile("def test_nothing(workbench): pass")
    result = pytester.runpytest(*PLUGIN, *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])
