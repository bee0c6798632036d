"""The protocol over time: hundreds of calls, ranks that are late, refuse or die, counters that wrap."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from typing import Any

import pytest

from megamoe.backend import Capability
from megamoe.errors import MegaMoETimeoutError, ProtocolError, RankFailedError
from megamoe.launch import RankProcessError
from megamoe.testing.cases import Case, uneven
from megamoe.testing.checks import check_same_bits
from megamoe.testing.data import Call
from megamoe.testing.launcher import ProcessWorld, values
from megamoe.testing.workbench import Workbench

SHORT_S = 2.0  # a time-out that is waited for


def _rounds(workbench: Workbench, case: Case, count: int) -> list[list[Call]]:
    """Calls with other tokens and other counts each: all, none, one rank only, uneven."""
    full = [workbench.calls(case, round_=round_) for round_ in range(count)]
    rng = random.Random(case.seed)
    rounds = [full[0], [call.rows(slice(0, 0)) for call in full[1]], [call.rows(slice(0, 1)) for call in full[2]]]
    for calls in full[3:]:
        rounds.append([call.rows(slice(0, rng.choice((0, 1, call.num_rows // 2, call.num_rows)))) for call in calls])
    return rounds


@pytest.mark.stress
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_many_calls_back_to_back(workbench: Workbench, ep_size: int) -> None:
    """Uneven token counts, zero included, call after call without a pause: each call's bits are those of it alone."""
    if ep_size not in workbench.ep_sizes:
        ep_size = workbench.largest_ep(ep_size)
    most = 20
    case = workbench.any_case(ep_size=ep_size, tokens=(most,) * workbench.largest_ep(ep_size), capacity=most)
    rounds = _rounds(workbench, case, 8)
    num_calls = 60 if workbench.device_class == "cpu" else 2000
    rng = random.Random(1)
    order = [rng.randrange(len(rounds)) for _ in range(num_calls)]
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        alone = [session.forward(calls, weights) for calls in rounds]
        for rank, outputs in enumerate(session.forward_many(rounds, order, weights)):
            for step, (round_, y) in enumerate(zip(order, outputs)):
                check_same_bits(
                    [y], [alone[round_][rank]], f"in call {step} of {num_calls} (round {round_}, rank {rank})"
                )


@pytest.mark.edge
def test_zero_tokens_everywhere(workbench: Workbench) -> None:
    """Calls without any token return, and the next call is right."""
    case = workbench.any_case(ep_size=4)
    calls = workbench.calls(case)
    none = [call.rows(slice(0, 0)) for call in calls]
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        expected = session.forward(calls, weights)
        for _ in range(3):
            assert [tuple(y.shape) for y in session.forward(none, weights)] == [(0, case.problem.hidden_size)] * len(
                calls
            )
        check_same_bits(session.forward(calls, weights), expected, "after calls without tokens")


@pytest.mark.edge
@pytest.mark.own_ranks
def test_late_rank(workbench: Workbench) -> None:
    """A rank that is late, but not too late, is waited for, whichever it is."""
    case = workbench.any_case(ep_size=2)
    calls = workbench.calls(case)
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        expected = session.forward(calls, weights)
        for late in range(case.problem.ep_size):
            delayed = [replace(call, delay_s=0.7 if rank == late else 0.0) for rank, call in enumerate(calls)]
            check_same_bits(session.forward(delayed, weights), expected, f"when rank {late} is late")


@pytest.mark.edge
@pytest.mark.own_ranks
def test_timeout_names_the_late_rank(workbench: Workbench) -> None:
    """A rank that is too late: all others raise within the time-out, some name it; reset makes all usable again."""
    case = workbench.any_case(ep_size=4)
    calls, late = workbench.calls(case), case.problem.ep_size - 1
    if late == 0:
        return
    delayed = [replace(call, delay_s=2.5 * SHORT_S if rank == late else 0.0) for rank, call in enumerate(calls)]
    with workbench.open(case.problem, timeout_s=SHORT_S) as session:
        weights = session.prepare(workbench.shards(case))
        expected = session.forward(calls, weights)
        outcomes = session.outcomes(delayed, weights)
        timeouts = []
        for rank, outcome in enumerate(outcomes[:late]):
            assert isinstance(outcome.error, ProtocolError), f"rank {rank}: {outcome.error!r}"
            if isinstance(outcome.error, MegaMoETimeoutError):
                timeouts.append(outcome.error)
                assert outcome.error.rank == rank
                assert outcome.error.phase
                assert outcome.error.timeout_s == SHORT_S
        assert timeouts, "nobody timed out"
        assert any(error.peer == late for error in timeouts), "no time-out names the late rank"
        assert isinstance(outcomes[late].error, ProtocolError), "the late rank did not learn that the call had failed"
        session.reset()
        check_same_bits(session.forward(calls, weights), expected, "after a time-out and a reset")


@pytest.mark.edge
@pytest.mark.processes
@pytest.mark.parametrize("victim", [0, -1], ids=["first", "last"])
def test_killed_rank(workbench: Workbench, victim: int) -> None:
    """A rank dies in the middle: the survivors raise within the time-out, naming it, and nothing is left behind."""
    case = workbench.any_case(ep_size=4)
    ep_size = case.problem.ep_size
    if ep_size == 1:
        return
    before = set(os.listdir("/dev/shm"))
    victim %= ep_size
    calls = workbench.calls(case)
    timeout_s = 10.0
    with workbench.new_world(ep_size) as world:
        assert isinstance(world, ProcessWorld)
        session = world.open(workbench.plan(case.problem), timeout_s=timeout_s)
        weights = session.prepare(workbench.shards(case))
        values(session.outcomes(calls, weights))
        started = time.monotonic()
        outcomes = world.forward_while_killing(victim, session, calls, weights)
        seconds = time.monotonic() - started
        assert seconds < timeout_s + 5, f"the survivors took {seconds:.1f} s to notice"
        named = []
        for rank, outcome in enumerate(outcomes):
            if rank == victim:
                assert isinstance(outcome.error, RankProcessError)
                continue
            assert isinstance(outcome.error, MegaMoETimeoutError | RankFailedError), f"rank {rank}: {outcome.error!r}"
            named.append(outcome.error.peer)
        assert victim in named, f"rank {victim} died, the survivors name {named}"
    left = {name for name in set(os.listdir("/dev/shm")) - before if "megamoe" in name}
    assert not left, f"left in /dev/shm: {left}"


@pytest.mark.edge
@pytest.mark.parametrize("ep_size", [1, 2])
def test_uneven_pattern_of_every_rank(workbench: Workbench, ep_size: int) -> None:
    """Each rank in turn is the one with the most tokens, the fewest, none."""
    workbench.require_capability(Capability.BATCH_INVARIANT)
    size = workbench.largest_ep(4 * ep_size)
    case = workbench.any_case(ep_size=size, tokens=(24,) * size, capacity=24)
    calls = workbench.calls(case)
    counts = uneven(24, size)
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        full = session.forward(calls, weights)
        for shift in range(size):
            shifted = counts[shift:] + counts[:shift]
            some = session.forward([call.rows(slice(0, num)) for call, num in zip(calls, shifted)], weights)
            check_same_bits(some, [y[:num] for y, num in zip(full, shifted)], f"with token counts {shifted}")


@pytest.mark.edge
@pytest.mark.parametrize("last", [2**31 - 4, 2**32 - 4], ids=["near-2^31", "near-2^32"])
def test_epoch_counter(workbench: Workbench, last: int) -> None:
    """Calls across the sign change and across the wrap of the epoch counter: nothing hangs, and bits stay.

    The first epoch is set through a `first_epoch` of the plan's configuration, or a session's `start_epochs`.
    """
    case = workbench.any_case(ep_size=4)
    calls = workbench.calls(case)
    expected = workbench.forward(case.problem, workbench.weights(case), calls)
    plan = workbench.plan(case.problem)
    if hasattr(plan.config, "first_epoch"):
        changes: dict[str, Any] = {"first_epoch": last + 1}
        plan = replace(plan, config=replace(plan.config, **changes))
    with workbench.world(case.problem.ep_size).open(plan, timeout_s=20.0) as session:
        if not hasattr(plan.config, "first_epoch"):
            for outcome in session.world.command("start_epochs", session.key, last):
                if isinstance(outcome.error, AttributeError):
                    workbench.refuse("lets nobody choose the first epoch")
                assert outcome.error is None, repr(outcome.error)
        weights = session.prepare(workbench.shards(case))
        for step in range(8):
            check_same_bits(session.forward(calls, weights), expected, f"in the call of epoch {last + 1 + step}")
