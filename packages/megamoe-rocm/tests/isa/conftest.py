"""Helpers of these tests are modules beside them, and the layer of the checks in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def layers(toolchain: None) -> ModuleType:
    """`harness.py` beside the checks in Triton's interpreter."""
    path = Path(__file__).parents[1] / "kernels/interpreted/harness.py"
    spec = importlib.util.spec_from_file_location("interpreted_harness", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
