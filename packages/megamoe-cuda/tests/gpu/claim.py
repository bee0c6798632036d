"""pytest plugin for the runs that decide what may be claimed: `-p claim` claims all that is written, for this run."""

from megamoe.backend import Capability
from megamoe_cuda import backend

NOT_SEEN_RIGHT: frozenset[Capability] = frozenset()
"""What the kernel is written to do and was not seen doing right."""

backend.SEEN_RIGHT_ON = backend.SEEN_RIGHT_ON or "under test"
backend.IMPLEMENTED |= NOT_SEEN_RIGHT
