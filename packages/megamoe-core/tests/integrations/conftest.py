"""Shared by the tests of this folder: `ep_workers` can be imported, here and by spawned ranks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
