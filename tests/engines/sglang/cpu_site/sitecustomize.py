"""Python imports this in every process that a server on the CPU starts, where this folder is on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import sglang_without_kernels  # noqa: F401
