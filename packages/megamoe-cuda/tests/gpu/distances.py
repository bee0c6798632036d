"""pytest plugin `-p distances`: writes how far each case of the matrix was from its references, and what failed.

A JSON line per check and failure goes to $OUT/distances.jsonl at once, so that a run that is cut short leaves them. The
bounds of megamoe.testing.tolerances are calibrated with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megamoe.backend import StageTaps
from megamoe.problem import MoEProblem
from megamoe.testing import checks
from megamoe.testing.conformance import test_matrix
from megamoe.testing.tolerances import rel_l2, row_rel_l2

FILE = Path(os.environ.get("OUT", ".")) / "distances.jsonl"


def check_staged(problem: MoEProblem, outputs: Sequence[Tensor], staged: Sequence[Tensor]) -> None:
    got, expected = checks._joined(outputs, staged)
    rows = row_rel_l2(got, expected)
    write(problem, "staged", y=rel_l2(got, expected), row=rows.max().item() if len(rows) else 0.0)
    checks.check_staged(problem, outputs, staged)


def check_oracle(problem: MoEProblem, outputs: Sequence[Tensor], oracle: Sequence[Tensor]) -> None:
    got, expected = checks._joined(outputs, oracle)
    write(problem, "oracle", y=rel_l2(got, expected))
    checks.check_oracle(problem, outputs, oracle)


def check_taps(problem: MoEProblem, taps: Sequence[StageTaps | None], staged: Sequence[StageTaps]) -> None:
    for rank, (got, expected) in enumerate(zip(taps, staged, strict=True)):
        if got is not None:
            write(problem, "taps", rank=rank, **of_taps(checks._matching_rows(rank, got, expected), got, expected))
    checks.check_taps(problem, taps, staged)


def of_taps(order: Tensor, got: StageTaps, expected: StageTaps) -> dict[str, float]:
    assert got.gate_up is not None
    assert expected.gate_up is not None
    steps = checks._code_steps(got.a2, expected.a2, order)
    scale = 0.0
    if got.a2.scales is not None and expected.a2.scales is not None:
        theirs = expected.a2.scales.cpu()
        scale = ((got.a2.scales.cpu()[order] - theirs).abs() / theirs).max().item()
    return {
        "gate_up": rel_l2(got.gate_up.cpu()[order], expected.gate_up.cpu()),
        "scale": scale,
        "flipped": steps.ne(0).double().mean().item(),
        "most_steps": int(steps.max()),
    }


def write(problem: MoEProblem, against: str, **values: Any) -> None:
    case = os.environ["PYTEST_CURRENT_TEST"].split("[")[-1].split("]")[0]
    write_line({"case": case, "transport": str(problem.transport), "against": against, **values})


def write_line(line: dict[str, Any]) -> None:
    with FILE.open("a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        write_line({"failed": report.nodeid, "seconds": report.duration, "says": report.longreprtext[-2000:]})


def pytest_configure() -> None:
    for check in (check_staged, check_oracle, check_taps):
        setattr(test_matrix, check.__name__, check)
