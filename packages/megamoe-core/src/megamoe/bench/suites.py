"""Suites: named sets of measurements. A package adds its own through the entry-point group `megamoe.bench_suites`.

An entry point names a function that returns a list of `Suite`. A suite's `run` yields a `BenchRow` for each measurement
as soon as it has it, and raises a `MegaMoEError` where the machine lacks what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points

from megamoe.bench.results import BenchRow
from megamoe.errors import ConfigError

ENTRY_POINT_GROUP = "megamoe.bench_suites"


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """What the command line asks of a suite.

    Args:
        tokens: tokens per rank to measure; None: the suite's own.
        repeats: calls per measurement.
        config: a backend's configuration by name, or None.
    """

    tokens: tuple[int, ...] | None = None
    repeats: int = 20
    config: str | None = None


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A named set of measurements.

    Args:
        name: unique.
        description: one line.
        backend: the backend that it measures.
        run: yields results.
    """

    name: str
    description: str
    backend: str
    run: Callable[[SuiteOptions], Iterator[BenchRow]]


def suites() -> dict[str, Suite]:
    """All suites of installed packages by name.

    Raises:
        ConfigError: two packages offer one name.
    """
    found: dict[str, Suite] = {}
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name):
        offered: Iterable[Suite] = entry.load()()
        for suite in offered:
            if suite.name in found:
                raise ConfigError("two benchmark suites have one name", got=suite.name, hint=f"see {entry.value}")
            found[suite.name] = suite
    return found


def find_suite(name: str) -> Suite:
    """The suite of that name.

    Raises:
        ConfigError: there is none.
    """
    known = suites()
    if name not in known:
        raise ConfigError(
            "no such benchmark suite", got=repr(name), expected=", ".join(known) or "an installed package"
        )
    return known[name]
