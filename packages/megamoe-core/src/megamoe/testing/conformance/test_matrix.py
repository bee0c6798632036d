"""Every case of the table: one call, held to the oracle, to the staged reference, and to what the ids say."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megamoe.backend import Capability
from megamoe.testing.cases import Case, InputKind
from megamoe.testing.checks import check_oracle, check_receive_counts, check_shape, check_staged, check_taps
from megamoe.testing.data import Call
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
    if taps is not None:  # before the output, so that a failure names the first stage that is wrong
        check_taps(problem, taps, staged.taps)
    check_staged(problem, outputs, staged.outputs)
    if counts is not None:
        check_receive_counts(problem, calls, counts)
    if _gates_apply(case, calls):
        check_oracle(problem, outputs, workbench.oracle(problem, workbench.weights(case), calls))


def _gates_apply(case: Case, calls: Sequence[Call]) -> bool:
    """The gates are stated for Gaussian activations, and for rows that are about as large as their terms."""
    gaussian = case.inputs in (InputKind.GAUSSIAN, InputKind.ZERO_BLOCKS)
    num_experts = case.problem.num_experts
    first_copy = num_experts - num_experts // 2 if case.routing == "redundant" else num_experts
    return gaussian and not any(_terms_cancel(call, first_copy) for call in calls)


def _terms_cancel(call: Call, first_copy: int) -> bool:
    """Whether a row picks the same weights twice with opposite signs: the terms cancel, their noise stays.

    Experts from `first_copy` on are copies of those from 0 on.
    """
    ids = torch.where(call.topk_ids >= first_copy, call.topk_ids - first_copy, call.topk_ids)
    same = (ids.unsqueeze(1) == ids.unsqueeze(2)) & (ids >= 0).unsqueeze(1)
    opposite = call.topk_weights.unsqueeze(1) * call.topk_weights.unsqueeze(2) < 0
    return bool((same & opposite).any())
