"""pytest plugin for the runs that decide whether a rung may be claimed: `-p claim` claims every rung for this run."""

from megamoe_rocm import rungs

rungs.SEEN_RIGHT_ON = {rung: rungs.SEEN_RIGHT_ON[rung] or "under test" for rung in rungs.Rung}
