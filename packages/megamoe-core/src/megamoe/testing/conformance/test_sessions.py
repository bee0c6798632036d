"""Life of a session: many in a row, two at once, use after close, a workspace that is zeroed by nobody's luck."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megamoe.errors import SessionError
from megamoe.problem import MoEProblem
from megamoe.testing.cases import MODES, Layer, Mode, build
from megamoe.testing.checks import check_same_bits
from megamoe.testing.launcher import values
from megamoe.testing.workbench import Workbench, with_capacity

pytestmark = pytest.mark.edge


def test_fifty_sessions(workbench: Workbench) -> None:
    """Opened, called and closed 50 times: the same bits each time, and memory does not grow."""
    case = workbench.any_case(ep_size=2, tokens=9, capacity=64)
    calls, shards = workbench.calls(case), workbench.shards(case)
    world = workbench.world(case.problem.ep_size)
    plan = workbench.plan(case.problem)
    expected, after_ten = None, 0
    for round_ in range(50):
        with world.open(plan) as session:
            outputs = session.forward(calls, session.prepare(shards))
        expected = expected or outputs
        check_same_bits(outputs, expected, f"in session {round_}")
        if round_ == 9:
            after_ten = max(values(world.command("memory"))) + _shared_memory()
    gc.collect()
    growth = max(values(world.command("memory"))) + _shared_memory() - after_ten
    assert growth < max(plan.bytes, 1 << 20), f"40 sessions left {growth} bytes behind; one takes {plan.bytes}"


def _shared_memory() -> int:
    """Bytes in shared memory files of this machine that are ours by name."""
    root = Path("/dev/shm")
    return sum(path.stat().st_size for path in root.glob("*megamoe*")) if root.is_dir() else 0


def test_two_sessions_at_once(workbench: Workbench, mode: Mode) -> None:
    """Two sessions of different sizes and modes, their calls alternating, do not disturb each other."""
    first = workbench.case(mode, ep_size=2)
    second = workbench.any_case(ep_size=2, tokens=5, top_k=2)
    expected = [
        workbench.forward(case.problem, workbench.weights(case), workbench.calls(case)) for case in (first, second)
    ]
    with workbench.open(first.problem) as one, workbench.open(with_capacity(second.problem, 77)) as other:
        of_one, of_other = one.prepare(workbench.shards(first)), other.prepare(workbench.shards(second))
        for _ in range(3):
            check_same_bits(one.forward(workbench.calls(first), of_one), expected[0], "beside another session")
            check_same_bits(other.forward(workbench.calls(second), of_other), expected[1], "beside another session")
    # Closing one leaves the other alive.
    with workbench.open(second.problem) as survivor:
        weights = survivor.prepare(workbench.shards(second))
        with workbench.open(first.problem):
            pass
        check_same_bits(survivor.forward(workbench.calls(second), weights), expected[1], "after another one closed")


def test_closed_session(workbench: Workbench) -> None:
    """`close` can be called again; everything else then is a typed error."""
    case = workbench.any_case(ep_size=2)
    calls = workbench.calls(case)
    session = workbench.open(case.problem)
    weights = session.prepare(workbench.shards(case))
    values(session.close(forget=False))
    values(session.close(forget=False))
    for outcome in session.outcomes(calls, weights):
        assert isinstance(outcome.error, SessionError), repr(outcome.error)
    with pytest.raises(SessionError, match="closed"):
        session.prepare(workbench.shards(case))
    values(session.close())


def test_closed_without_a_call(workbench: Workbench) -> None:
    """A session that never made a call closes, and the next one works."""
    case = workbench.any_case(ep_size=4)
    for _ in range(3):
        with workbench.open(case.problem):
            pass
    workbench.forward(case.problem, workbench.weights(case), workbench.calls(case))


def test_warmup_and_reset_change_nothing(workbench: Workbench) -> None:
    """`warmup` returns its seconds, `reset` is allowed on a healthy session; results stay."""
    case = workbench.any_case(ep_size=4)
    calls = workbench.calls(case)
    expected = workbench.forward(case.problem, workbench.weights(case), calls)
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        for seconds in session.warmup():
            assert seconds >= 0
        check_same_bits(session.forward(calls, weights), expected, "after warmup")
        session.reset()
        check_same_bits(session.forward(calls, weights), expected, "after reset")


def test_inference_mode(workbench: Workbench, mode: Mode) -> None:
    """Opened and prepared under `torch.inference_mode`, as engines do, and called within and without it: same bits."""
    case = workbench.case(mode, ep_size=2)
    calls, shards = workbench.calls(case), workbench.shards(case)
    expected = workbench.forward(case.problem, workbench.weights(case), calls)
    with torch.inference_mode():  # of this thread: ranks of their own are not in it
        session = workbench.open(case.problem)
        weights = session.prepare(shards)
        check_same_bits(session.forward(calls, weights), expected, "in inference mode")
        session.move_expert(weights, [(0, 0)] * case.problem.ep_size)
    with session:
        check_same_bits(session.forward(calls, weights), expected, "after inference mode")


@pytest.mark.processes
def test_no_memory_left_behind(workbench: Workbench) -> None:
    """After sessions and their processes have ended, no shared-memory file is left."""
    before = set(os.listdir("/dev/shm"))
    case = workbench.any_case(ep_size=2)
    with workbench.new_world(case.problem.ep_size) as world:
        with world.open(workbench.plan(case.problem)) as session:
            session.forward(workbench.calls(case), session.prepare(workbench.shards(case)))
        world.open(workbench.plan(case.problem))  # never closed
    left = {name for name in set(os.listdir("/dev/shm")) - before if "megamoe" in name}
    assert not left, f"left in /dev/shm: {left}"


def test_modes_one_after_the_other(workbench: Workbench) -> None:
    """All modes in one process, each in its own session: nothing of one's set-up leaks into the next."""
    supported = [mode for mode in MODES if workbench.backend.supports(_small(workbench, mode)).ok]
    assert supported, "no mode is supported"
    expected: dict[str, list[Tensor]] = {}
    for _ in range(2):
        for mode in supported:
            case = workbench.case(mode, ep_size=2, tokens=5)
            outputs = workbench.forward(case.problem, workbench.weights(case), workbench.calls(case))
            check_same_bits(outputs, expected.setdefault(mode.id, outputs), f"of {mode.id} among the other modes")


def _small(workbench: Workbench, mode: Mode) -> MoEProblem:
    return build(Layer.EDGE, "small", mode, device_class=workbench.device_class, ep_size=1).problem
