"""Conformance tests are imported here without their plugin; strict markers need to know theirs all the same."""

import pytest

from megamoe.testing.plugin import MARKERS


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
