"""Every case of the table: one call, held to the oracle, to the staged reference, and to what the ids say."""

from __future__ import annotations

from megamoe.backend import Capability
from megamoe.testing.cases import Case, InputKind
from megamoe.testing.checks import check_oracle, check_receive_counts, check_shape, check_staged, check_taps
from megamoe.testing.workbench import Workbench


def test_case(workbench: Workbench, case: Case) -> None:
    """Guards around all tensors are part of every call (`megamoe.testing.agent`)."""
    problem = case.problem
    claimed = workbench.backend.capabilities()
    calls = workbench.calls(case)
    with workbench.open(problem) as session:
        if Capability.STAGE_TAPS in claimed:
            session.keep_taps()
        outputs = session.forward(calls, session.prepare(workbench.shards(case)))
        counts = session.receive_counts() if Capability.RECEIVE_COUNTS in claimed else None
        taps = session.taps() if Capability.STAGE_TAPS in claimed else None

    check_shape(problem, calls, outputs)
    staged = workbench.staged(problem, workbench.weights(case), calls)
    check_staged(problem, outputs, staged.outputs)
    if taps is not None:
        check_taps(problem, taps, staged.taps)
    if counts is not None:
        check_receive_counts(problem, calls, counts)
    if case.inputs in (InputKind.GAUSSIAN, InputKind.ZERO_BLOCKS):  # the gates are stated for Gaussian activations
        check_oracle(problem, outputs, workbench.oracle(problem, workbench.weights(case), calls))
