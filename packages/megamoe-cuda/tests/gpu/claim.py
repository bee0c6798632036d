"""pytest plugin for the runs that decide whether the kernel may be claimed: `-p claim` claims it for this run only."""

from megamoe_cuda import backend

backend.SEEN_RIGHT_ON = backend.SEEN_RIGHT_ON or "under test"
