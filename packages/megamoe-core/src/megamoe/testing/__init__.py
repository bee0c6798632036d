"""The test matrix that every backend has to pass, and what it is made of.

    cases, routings, data       what is run: problems, routings, weights and tokens from a seed
    tolerances, checks          what the result is held to
    agent, launcher             how the ranks of a test are run
    workbench, plugin           what a test is handed; the pytest options
    conformance/                the tests

Run it with `python -m pytest -p megamoe.testing.plugin --backend=NAME --pyargs megamoe.testing.conformance`.
No session imports any of it; the command line and the benchmarks take their tokens, routings and gates from here.
"""
