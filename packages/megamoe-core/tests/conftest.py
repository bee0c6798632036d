"""Settings of all core tests: one thread, and no hypothesis deadline that a busy machine could miss."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("megamoe", deadline=None)
settings.load_profile("megamoe")
