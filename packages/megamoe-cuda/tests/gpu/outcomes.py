"""pytest plugin `-p outcomes`: writes what each test came to, so that a run on lent GPUs leaves a result to commit.

$OUTCOMES is the JSON file: the command, commit and GPUs, then a list of tests with outcome and seconds, and what a
failed one said, and the tests that were collected and not reached. It is rewritten after every test, so that a run that
is cut short leaves what it had.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe import env
from megamoe.bench.commit import current_commit

FILE = Path(os.environ["OUTCOMES"])
SAYS = 2000  # characters of a failure
results: list[dict[str, Any]] = []
collected: list[str] = []


def write() -> None:
    counts = Counter(each["outcome"] for each in results)
    found = {
        "bench": "conformance",
        "commit": current_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["pytest", *sys.argv[1:]]),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "num_gpus": torch.cuda.device_count(),
        "ranks_per_gpu": env.ranks_per_gpu(),
        **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "tests": results,
        "not_reached": sorted(set(collected) - {each["test"] for each in results}),
    }
    partial = FILE.with_suffix(".partial")
    partial.write_text(json.dumps(found, indent=0) + "\n")
    partial.replace(FILE)


def short_name(nodeid: str) -> str:
    return nodeid.split("::", 1)[-1]


def pytest_collection_finish(session: pytest.Session) -> None:
    collected.extend(short_name(item.nodeid) for item in session.items)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    entry: dict[str, Any] = {"test": short_name(report.nodeid), "outcome": report.outcome}
    entry["seconds"] = round(report.duration, 3)
    if report.skipped and isinstance(report.longrepr, tuple):
        entry["says"] = report.longrepr[2]  # the reason; before it come a file and a line
    elif report.failed:
        entry["says"] = report.longreprtext[-SAYS:]
    results.append(entry)
    write()
