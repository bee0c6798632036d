"""Shared by the tests of this folder: its modules can be imported, here and by spawned ranks."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
if find_spec("sglang") is not None:
    import sglang_without_kernels  # noqa: F401  # before any test imports SGLang
