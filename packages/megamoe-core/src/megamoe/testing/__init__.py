"""The test matrix that every backend has to pass, and what it is made of.

    cases, routings, data       what is run: problems, routings, weights and tokens from a seed
    tolerances, checks          what the result is held to
    agent, launcher             how the ranks of a test are run
    workbench, plugin           what a test is handed; the pytest options
    conformance/                the tests

Run it with `python -m pytest -p megamoe.testing.plugin --backend=NAME --pyargs megamoe.testing.conformance`.
Nothing here is imported by the library itself.
"""
