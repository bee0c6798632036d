"""Settings of all core tests: one thread, no hypothesis deadline that a busy machine could miss, `tiny_models`."""

import sys
from pathlib import Path

import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
settings.register_profile("megamoe", deadline=None)
settings.load_profile("megamoe")
