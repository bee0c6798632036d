"""The same bits: run to run, whatever peers, EP size, other rows, capacity, configuration and taps are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megamoe.backend import Capability
from megamoe.testing.cases import TRANSPORTS, Mode
from megamoe.testing.checks import check_same_bits
from megamoe.testing.data import concatenate, shard
from megamoe.testing.workbench import Workbench, with_capacity, with_ep_size

pytestmark = pytest.mark.edge


def test_run_to_run(workbench: Workbench, mode: Mode) -> None:
    """Two calls of one session, and a call of another session, agree."""
    case = workbench.case(mode, ep_size=4)
    calls, shards = workbench.calls(case), workbench.shards(case)
    with workbench.open(case.problem) as session:
        weights = session.prepare(shards)
        first, second = session.forward(calls, weights), session.forward(calls, weights)
    with workbench.open(case.problem) as session:
        third = session.forward(calls, session.prepare(shards))
    check_same_bits(second, first, "between two calls")
    check_same_bits(third, first, "between two sessions")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ep_size(workbench: Workbench, mode: Mode, transport: str) -> None:
    """A token's row does not depend on how many ranks the experts are spread over, nor on which of them are its own."""
    workbench.require_capability(Capability.BATCH_INVARIANT)
    case = workbench.case(mode, ep_size=4, transport=transport)
    spread = workbench.calls(case)
    expected = torch.cat([y.cpu() for y in workbench.forward(case.problem, workbench.weights(case), spread)])
    together = concatenate(spread)
    for ep_size in {1, 2} & set(workbench.ep_sizes) - {case.problem.ep_size}:
        problem = with_ep_size(with_capacity(case.problem, together.num_rows), ep_size)
        idle = [together.rows(slice(0, 0))] * (ep_size - 1)
        outputs = workbench.forward(problem, workbench.weights(case), [*idle, together])
        check_same_bits(outputs[-1:], [expected], f"between EP{ep_size} and EP{case.problem.ep_size}")


def test_rest_of_the_batch(workbench: Workbench, mode: Mode) -> None:
    """The same row alone, in another place, and among a thousand others, is the same."""
    workbench.require_capability(Capability.BATCH_INVARIANT)
    most = 200 if workbench.device_class == "cpu" else 1000
    case = workbench.case(mode, tokens=(most,))
    (batch,) = workbench.calls(case)
    row = most // 3
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        (whole,) = session.forward([batch], weights)
        for name, rows in (
            ("alone", [row]),
            ("first of three", [row, 0, 1]),
            ("last of seventy", [*range(69), row]),
            ("reversed", list(reversed(range(most)))),
        ):
            (part,) = session.forward([batch.rows(rows)], weights)
            check_same_bits([part], [whole[rows]], f"between the whole batch and one where the row is {name}")


def test_other_ranks_tokens(workbench: Workbench, mode: Mode) -> None:
    """A rank's rows do not change with what its peers bring."""
    workbench.require_capability(Capability.BATCH_INVARIANT)
    case = workbench.case(mode, ep_size=4)
    calls, others = workbench.calls(case), workbench.calls(case, round_=1)
    none = [calls[0], *(call.rows(slice(0, 0)) for call in calls[1:])]
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        expected = session.forward(calls, weights)[:1]
        check_same_bits(
            session.forward([calls[0], *others[1:]], weights)[:1], expected, "when peers bring other tokens"
        )
        check_same_bits(session.forward(none, weights)[:1], expected, "when peers bring no tokens")


def test_capacity(workbench: Workbench, mode: Mode) -> None:
    """32 tokens with capacity 32 and with a capacity thousands of times as large: offsets are not cut to 32 bits."""
    case = workbench.case(mode, ep_size=2, tokens=32)
    capacity = 8192 if workbench.device_class == "cpu" else 65536
    calls, weights = workbench.calls(case), workbench.weights(case)
    roomy = with_capacity(case.problem, capacity)
    workbench.require(roomy)
    expected = workbench.forward(case.problem, weights, calls)
    check_same_bits(workbench.forward(roomy, weights, calls), expected, f"between capacity 32 and {capacity}")


def test_configurations(workbench: Workbench, mode: Mode) -> None:
    """Every configuration that the backend offers gives the default one's bits, at several token counts."""
    workbench.require_capability(Capability.BATCH_INVARIANT)
    case = workbench.case(mode, ep_size=2)
    calls, shards = workbench.calls(case), shard(workbench.weights(case), case.problem.ep_size)
    few = [call.rows(slice(0, 3)) for call in calls]
    expected = None
    for config in workbench.backend.configs(case.problem):
        with workbench.open(case.problem, config=config) as session:
            weights = session.prepare(shards)
            outputs = [*session.forward(calls, weights), *session.forward(few, weights)]
        expected = expected or outputs
        check_same_bits(outputs, expected, f"between the default configuration and {config}")


def test_taps(workbench: Workbench, mode: Mode) -> None:
    """Keeping what stands between the stages changes no bit, also where a rank gets more rows than its ring holds.

    The matrix keeps it, and a session that does may run other kernels, whose blocks never overwrite each other.
    """
    workbench.require_capability(Capability.STAGE_TAPS)
    most = 200 if workbench.device_class == "cpu" else 1000
    case = workbench.case(mode, ep_size=2, tokens=(most, most))
    calls = workbench.calls(case)
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        plain = session.forward(calls, weights)
        session.keep_taps()
        tapped = session.forward(calls, weights)
    check_same_bits(tapped, plain, "between sessions with and without taps")


def test_slot_order(workbench: Workbench, mode: Mode) -> None:
    """Combine adds slots in order k = 0..K-1: a huge row and its negative cancel before the rest is added.

    In any other order the small rows drown in the huge one; ordinary rows add up exactly, and could not tell.
    """
    case = workbench.case(mode, ep_size=2, top_k=4, tokens=12)
    cancelling, masked = [], []
    for call in workbench.calls(case):
        ids, router = call.topk_ids.clone(), call.topk_weights.clone()
        ids[:, 1] = ids[:, 0]
        router[:, 0], router[:, 1] = 2.0**40, -(2.0**40)
        cancelling.append(replace(call, topk_ids=ids, topk_weights=router))
        ids = ids.clone()
        ids[:, :2] = -1
        masked.append(replace(call, topk_ids=ids, topk_weights=router))
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        outputs, expected = session.forward(cancelling, weights), session.forward(masked, weights)
    check_same_bits(outputs, expected, "between slots 0 and 1 that cancel and that are masked")


def test_redundant_experts(workbench: Workbench, mode: Mode) -> None:
    """A copy of an expert on another rank gives the original's bits."""
    case = workbench.case(mode, ep_size=2, routing="redundant")
    calls = workbench.calls(case)
    half = case.problem.num_experts // 2
    originals = [replace(call, topk_ids=call.topk_ids % half) for call in calls]
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        mixed, expected = session.forward(calls, weights), session.forward(originals, weights)
    check_same_bits(mixed, expected, "between an expert and its copy")
