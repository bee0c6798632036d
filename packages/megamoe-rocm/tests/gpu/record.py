"""pytest plugin `-p record`: what each test came to and how far outputs were from the references, as JSON lines.

Lines go to $RECORD at once, so that a run that is cut short leaves them. $SHARD, such as 2/6, runs the second of six
parts of the tests, for several processes side by side. Parts take equally long by the durations in the file $DURATIONS,
a result of an earlier run (benchmarks/results/conformance); without it they have equally many tests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megamoe.problem import MoEProblem
from megamoe.testing import checks
from megamoe.testing.conformance import test_matrix
from megamoe.testing.tolerances import rel_l2, row_rel_l2

SAYS = 2000  # characters of a failure
UNKNOWN_S = 1.0  # of a test that the earlier run does not have


def write(line: dict[str, Any]) -> None:
    with open(os.environ["RECORD"], "a") as file:
        file.write(json.dumps(line) + "\n")


def check_staged(problem: MoEProblem, outputs: Sequence[Tensor], staged: Sequence[Tensor]) -> None:
    got, expected = checks._joined(outputs, staged)
    rows = row_rel_l2(got, expected)
    case = os.environ["PYTEST_CURRENT_TEST"].split("[")[-1].split("]")[0]
    worst = rows.max().item() if len(rows) else 0.0
    write(
        {"case": case, "quant": problem.quant, "transport": problem.transport}
        | {"y": rel_l2(got, expected), "row": worst}
    )
    checks.check_staged(problem, outputs, staged)


def pytest_configure() -> None:
    test_matrix.check_staged = check_staged


@pytest.hookimpl(trylast=True)  # what is not selected takes no time
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    index, _, count = os.environ.get("SHARD", "1/1").partition("/")
    durations = read_durations()
    seconds = {item: durations.get(name_of(item.nodeid), UNKNOWN_S) for item in items}
    loads = [0.0] * int(count)
    part = {}
    for item in sorted(items, key=lambda item: -seconds[item]):  # the longest first, to whoever has least to do
        part[item] = loads.index(min(loads))
        loads[part[item]] += seconds[item]
    mine = [item for item in items if part[item] == int(index) - 1]
    config.hook.pytest_deselected(items=[item for item in items if part[item] != int(index) - 1])
    items[:] = mine


def read_durations() -> dict[str, float]:
    """Seconds by test; more than one entry of a name is one test on several numbers of ranks: the longest counts."""
    file = os.environ.get("DURATIONS")
    if not file:
        return {}
    durations: dict[str, float] = {}
    for test in json.loads(Path(file).read_text())["tests"]:
        durations[test["test"]] = max(test["seconds"], durations.get(test["test"], 0.0))
    return durations


def name_of(nodeid: str) -> str:
    """A test's name in a record."""
    return nodeid.split("::", 1)[-1]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    says = {"says": report.longreprtext[-SAYS:]} if report.failed else {}
    write({"test": name_of(report.nodeid), "outcome": report.outcome, "s": round(report.duration, 2), **says})
