"""pytest plugin `-p repeat`: runs every test $REPEAT times."""

from __future__ import annotations

import os
from typing import Any

import pytest


@pytest.fixture
def turn(request: pytest.FixtureRequest) -> Any:
    """Which repetition this is."""
    return request.param


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.fixturenames.append("turn")
    metafunc.parametrize("turn", range(int(os.environ["REPEAT"])), indirect=True)
