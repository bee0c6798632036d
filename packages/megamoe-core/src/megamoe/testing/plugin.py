"""Opt-in pytest plugin that runs the conformance matrix on a backend.

    python -m pytest -p megamoe.testing.plugin --backend=reference --pyargs megamoe.testing.conformance

A test may end as *refused* where the backend says, with a checked reason, that it does not do what is tested. Any other
skip, and any expected failure, is a failure: what is claimed is run.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial
from typing import cast

import pytest
import torch

from megamoe import env
from megamoe.backend import Capability
from megamoe.problem import MoEProblem
from megamoe.registry import REFERENCE
from megamoe.testing.cases import MODES, Case, cases, stress_case
from megamoe.testing.launcher import find_backend
from megamoe.testing.workbench import RankKind, Workbench

STRESS_SEEDS = 48
WORKBENCH = pytest.StashKey[Workbench]()
MARKERS = (
    "smoke: the smallest cases, seconds in total",
    "shapes: hidden, intermediate, expert and top-k sizes of real models",
    "edge: routing, counts, values and life-cycle cases that broke other implementations",
    "stress: random, seeded, replayable cases and long repetitions",
    "own_ranks: needs a thread or a process per rank; virtual ranks can't be late or die one by one",
    "processes: needs a process per rank",
)
NEEDED_RANKS: dict[str, tuple[RankKind, ...]] = {
    "own_ranks": ("threads", "processes"),
    "processes": ("processes",),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("megamoe", "MegaMoE conformance matrix")
    group.addoption(
        "--backend", default=REFERENCE, help="name or module:Class of the backend under test (default: reference)"
    )
    group.addoption("--device", default=None, help="cpu or cuda (default: cpu for the reference, else cuda)")
    group.addoption(
        "--ranks",
        choices=("virtual", "threads", "processes"),
        default=None,
        help="virtual: one session drives all ranks (default where claimed); threads: of this process, for CPU "
        "backends; processes: one per rank, on GPUs with a GPU each",
    )
    group.addoption("--ep-sizes", default=None, help="EP sizes to run, such as 1,2 (default: all that can be run here)")
    group.addoption("--megamoe-stress", type=int, default=STRESS_SEEDS, help=f"number of stress seeds ({STRESS_SEEDS})")
    group.addoption("--megamoe-seed", type=int, action="append", help="run this stress seed only; may be repeated")


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    config.stash[WORKBENCH] = _make_workbench(config)


def _make_workbench(config: pytest.Config) -> Workbench:
    name = config.getoption("--backend")
    candidate = find_backend(name)
    verdict = candidate.verdict if candidate.backend is None else candidate.backend.probe()
    if candidate.backend is None or not verdict.ok:
        raise pytest.UsageError(f"backend {name} can't be tested here: {verdict.reason}: {verdict.detail}")
    backend = candidate.backend
    if not backend.capabilities():
        raise pytest.UsageError(f"backend {name} claims nothing: what its capabilities() lists is what is tested")
    device = torch.device(config.getoption("--device") or ("cpu" if name == REFERENCE else "cuda"))
    if device.type == "cpu":
        torch.set_num_threads(1)  # tensors are small: more threads only wait for each other
    virtual = Capability.VIRTUAL_RANKS in backend.capabilities()
    ranks = cast(RankKind, config.getoption("--ranks") or ("virtual" if virtual else "processes"))
    if ranks == "virtual" and not virtual:
        raise pytest.UsageError(f"backend {name} does not claim {Capability.VIRTUAL_RANKS}: use --ranks=processes")
    if ranks == "threads" and device.type != "cpu":
        raise pytest.UsageError("--ranks=threads is for CPU backends: ranks on GPUs are virtual or processes")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("torch sees no GPU here: a backend that computes on CPUs needs --device=cpu")
    ep_sizes = _ep_sizes(config.getoption("--ep-sizes"), device, ranks)
    workbench = Workbench(backend, device, ranks, ep_sizes, found_as=name)
    _require_a_case(workbench)
    return workbench


def _require_a_case(workbench: Workbench) -> None:
    """Raise with the backend's reasons where it would refuse whatever is drawn."""
    try:
        stress_case(0, workbench.device_class, partial(_can_run, workbench))
    except RuntimeError as error:
        mine = [case.problem for case in cases(workbench.device_class) if case.problem.ep_size in workbench.ep_sizes]
        reasons = dict.fromkeys(workbench.backend.supports(problem).detail for problem in mine)
        why = "; ".join(list(reasons)[:3]) or "the matrix has none of that many ranks"
        sizes = ", ".join(map(str, workbench.ep_sizes))
        raise pytest.UsageError(
            f"backend {workbench.found_as} runs no problem of the matrix at EP sizes {sizes}: {why}"
        ) from error


def _can_run(workbench: Workbench, problem: MoEProblem) -> bool:
    return problem.ep_size in workbench.ep_sizes and workbench.backend.supports(problem).ok


def _ep_sizes(asked: str | None, device: torch.device, ranks: RankKind) -> list[int]:
    if asked:
        parts = asked.split(",")
        if not all(part.isdecimal() and int(part) for part in parts):
            raise pytest.UsageError(f"--ep-sizes is {asked!r}, not numbers of ranks such as 1,2")
        return [int(part) for part in parts]
    sizes = (1, 2, 4, 8)
    if device.type == "cuda" and ranks == "processes":
        most = torch.cuda.device_count() * env.ranks_per_gpu()
        return [size for size in sizes if size <= most]
    return list(sizes)


def pytest_unconfigure(config: pytest.Config) -> None:
    if WORKBENCH in config.stash:
        config.stash[WORKBENCH].close()


def pytest_report_header(config: pytest.Config) -> list[str]:
    workbench = config.stash[WORKBENCH]
    backend = workbench.backend
    lines = [
        f"megamoe: backend {backend.name} ({backend.probe().detail or 'usable'}), device {workbench.device}, "
        f"ranks {workbench.ranks}, EP sizes {', '.join(map(str, workbench.ep_sizes))}, torch {torch.__version__}"
    ]
    plan = _plan_of_first_case(workbench)
    if plan is not None:
        lines.append(f"megamoe: {plan}")
    return lines


def _plan_of_first_case(workbench: Workbench) -> str | None:
    for case in cases(workbench.device_class):
        if workbench.backend.supports(case.problem).ok:
            plan = workbench.plan(case.problem)
            return f"{case.id} runs configuration {plan.config.name} in {plan.bytes} bytes per rank"
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        parameters = [
            pytest.param(case, id=case.id, marks=getattr(pytest.mark, case.layer)) for case in _cases(metafunc.config)
        ]
        metafunc.parametrize("case", parameters)
    chosen = {name for mark in metafunc.definition.iter_markers("parametrize") for name in mark.args[:1]}
    if "mode" in metafunc.fixturenames and "mode" not in chosen:
        metafunc.parametrize("mode", MODES, ids=lambda mode: mode.id)


def _cases(config: pytest.Config) -> Iterator[Case]:
    workbench = config.stash[WORKBENCH]
    seeds = config.getoption("--megamoe-seed")
    if not seeds:
        yield from (case for case in cases(workbench.device_class) if case.problem.ep_size in workbench.ep_sizes)
        seeds = range(config.getoption("--megamoe-stress"))
    for seed in seeds:
        yield stress_case(seed, workbench.device_class, partial(_can_run, workbench))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this kind of ranks can't show."""
    workbench = config.stash[WORKBENCH]
    left_out = [
        item
        for item in items
        if any(
            item.get_closest_marker(marker) and workbench.ranks not in kinds for marker, kinds in NEEDED_RANKS.items()
        )
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let only refusals be skips."""
    report = yield
    if report.outcome != "skipped" or "workbench" not in getattr(item, "fixturenames", ()):
        return report
    refusals = item.config.stash[WORKBENCH].refusals
    if call.excinfo is None or str(call.excinfo.value) not in refusals or hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped: a conformance test runs, or the backend refuses it"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    refusals = config.stash[WORKBENCH].refusals
    if refusals:
        terminalreporter.section("refused by the backend, with a checked reason")
        for reason, count in refusals.most_common():
            terminalreporter.write_line(f"{count:5d}  {reason}")


@pytest.fixture(scope="session")
def workbench(pytestconfig: pytest.Config) -> Workbench:
    """The backend under test and what tests do with it."""
    return pytestconfig.stash[WORKBENCH]
