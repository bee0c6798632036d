"""Graph capture, for backends that claim it."""

from __future__ import annotations

import pytest

from megamoe.backend import Capability
from megamoe.errors import CaptureError
from megamoe.testing.checks import check_same_bits
from megamoe.testing.workbench import Workbench

pytestmark = pytest.mark.edge


@pytest.mark.parametrize("ep_size", [1, 4])
def test_replay_with_other_routings(workbench: Workbench, ep_size: int) -> None:
    """Captured once, replayed 20 times with other tokens, routings and token counts: the bits of eager calls."""
    workbench.require_capability(Capability.GRAPH_CAPTURE)
    case = workbench.any_case(ep_size=ep_size)
    rounds = [workbench.calls(case, round_=round_) for round_ in range(20)]
    rounds = [
        [call.rows(slice(0, call.num_rows - index % (call.num_rows + 1))) for call in calls]
        for index, calls in enumerate(rounds)
    ]
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        eager = [session.forward(calls, weights) for calls in rounds]
        replayed = session.capture_and_replay(rounds, weights)
    for round_, expected in enumerate(eager):
        check_same_bits([outputs[round_] for outputs in replayed], expected, f"between replay and eager call {round_}")


def test_first_call_inside_a_capture(workbench: Workbench) -> None:
    """Without warmup a call inside a capture is a typed error that says to warm up, not a broken graph."""
    workbench.require_capability(Capability.GRAPH_CAPTURE)
    case = workbench.any_case(ep_size=1)
    calls = workbench.calls(case)
    expected = workbench.forward(case.problem, workbench.weights(case), calls)
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        for outcome in session.capture_cold(calls, weights):
            assert isinstance(outcome.error, CaptureError), repr(outcome.error)
            assert "warmup" in str(outcome.error)
        session.warmup()
        check_same_bits(session.forward(calls, weights), expected, "after a refused capture")
