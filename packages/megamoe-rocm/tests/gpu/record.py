"""pytest plugin `-p record`: what each test came to and how far outputs were from the references, as JSON lines.

Lines go to $RECORD at once, so that a run that is cut short leaves them. $SHARD, such as 2/6, runs every sixth test
from the second on, for several processes side by side.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from megamoe.problem import MoEProblem
from megamoe.testing import checks
from megamoe.testing.conformance import test_matrix
from megamoe.testing.tolerances import rel_l2, row_rel_l2

SAYS = 2000  # characters of a failure


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    index, _, count = os.environ.get("SHARD", "1/1").partition("/")
    mine = items[int(index) - 1 :: int(count)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(mine)])
    items[:] = mine


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    says = {"says": report.longreprtext[-SAYS:]} if report.failed else {}
    write({"test": report.nodeid.split("::", 1)[-1], "outcome": report.outcome, "s": round(report.duration, 2), **says})
