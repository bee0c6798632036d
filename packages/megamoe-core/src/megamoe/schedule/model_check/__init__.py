"""A model checker for the protocol: it runs the real programs of schedule/persistent.py in small configurations.

What it proves of a scenario (a shape, and the routing of two or three consecutive calls)
    - every row is pulled, every tile multiplied and every token staged and combined exactly once;
    - no cell is read before it is written, or after it is overwritten; the sum that a token gets consists of the right
      rows of the right call;
    - no two accesses to a cell, one of them a write, are unordered (a data race);
    - no deadlock.

How memory is modelled (memory.py)
    Acts run on symbolic data: a cell holds who wrote what in which call. Order comes from flags alone. Each worker has
    a vector clock; a raise leaves its clock in the flag's word (if the flag's scope spans both ranks), a wait takes the
    clock of the *oldest* value that satisfies it. An access must come after, by clock, what it conflicts with, however
    lucky the interleaving was. So a dropped flag, a relaxed access or a scope that is too narrow is found as a race.

Why few schedules suffice (search.py)
    Programs depend on the exchanged counts, not on timing, so each is a fixed list of ops. With Search.REDUCED, acts,
    clears, and waits that are satisfied run at once: where they are free of races, which is checked, they commute with
    what other workers do. Raises of one word are tried in all orders only if the order can matter: if a wait for that
    word can be satisfied by some of the raises without the others. If that is so for no word, all interleavings are
    equivalent and one is run; the protocol as it stands is of this kind. Search.ALL does not use this argument and runs
    every interleaving of every op; tests compare the two.

What it cannot see: fences between a GPU's memory proxies, time-outs and aborted calls, and how a backend carries out
an act.
"""

from megamoe.schedule.model_check.memory import Problem, Violation
from megamoe.schedule.model_check.programs import NO_FAULT, Fault, Routing, Scenario, Step, WorkerId
from megamoe.schedule.model_check.search import Result, Search, explore, walk

__all__ = [
    "NO_FAULT",
    "Fault",
    "Problem",
    "Result",
    "Routing",
    "Scenario",
    "Search",
    "Step",
    "Violation",
    "WorkerId",
    "explore",
    "walk",
]
