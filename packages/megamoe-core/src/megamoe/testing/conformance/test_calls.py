"""Arguments of `forward`: what is accepted means what it says, and what is wrong is refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megamoe.backend import Capability
from megamoe.errors import CapacityError, InputError, SessionError
from megamoe.problem import QuantMode
from megamoe.testing.cases import A8W8, Case, Mode
from megamoe.testing.checks import check_receive_counts, check_same_bits, check_shape
from megamoe.testing.data import Call, quantize_call
from megamoe.testing.launcher import values
from megamoe.testing.workbench import Workbench

pytestmark = pytest.mark.edge


def test_given_out(workbench: Workbench) -> None:
    """`out=` is written whole, rows without experts included, and returned."""
    case = workbench.any_case(ep_size=4, routing="masked_rows")
    calls = workbench.calls(case)
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        expected = session.forward(calls, weights)
        given = session.forward([replace(call, give_out=True) for call in calls], weights)
    check_same_bits(given, expected, "with out=")


@pytest.mark.parametrize("padded", ["none", "int", "scalar-tensor"])
def test_in_place(workbench: Workbench, padded: str) -> None:
    """`out` may be `hidden_states` itself: equal bits, and zeros in padding rows."""
    case = workbench.any_case(ep_size=4)
    calls = workbench.calls(case)
    if padded != "none":
        workbench.require_capability(Capability.NUM_TOKENS)
        kept = [call.num_rows // 2 for call in calls]
        calls = [
            replace(call, num_tokens=num if padded == "int" else torch.tensor(num, dtype=torch.int32))
            for call, num in zip(calls, kept)
        ]
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        expected = session.forward(calls, weights)
        check_same_bits(
            session.forward([replace(call, in_place=True) for call in calls], weights), expected, "in place"
        )


def test_strided_arguments(workbench: Workbench) -> None:
    """Every second row of larger tensors: read as what they are, or refused; never the rows in between."""
    case = workbench.any_case(ep_size=2)
    calls = workbench.calls(case)
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        expected = session.forward(calls, weights)
        outcomes = session.outcomes([replace(call, strided=True) for call in calls], weights)
        if all(isinstance(outcome.error, InputError) for outcome in outcomes):
            return
        check_same_bits(values(outcomes), expected, "with gaps between rows")


def test_ids_are_checked_in_debug_mode(workbench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With MEGAMOE_DEBUG=1 an id outside [-1, E) is a typed error on the host that says where; -1 is none."""
    monkeypatch.setenv("MEGAMOE_DEBUG", "1")
    case = workbench.any_case(tokens=(6,), routing="masked_some")
    (call,) = workbench.calls(case)
    ids = call.topk_ids.clone()
    ids[4, 1] = case.problem.num_experts
    with workbench.new_world(1) as world, world.open(workbench.plan(case.problem)) as session:
        weights = session.prepare(workbench.shards(case))
        with pytest.raises(InputError, match=f"topk_ids.*{case.problem.num_experts}"):
            session.forward([replace(call, topk_ids=ids)], weights)
        check_shape(case.problem, [call], session.forward([call], weights))
        if Capability.NUM_TOKENS in workbench.backend.capabilities():  # padding may hold anything
            for num_tokens in (4, torch.tensor(4, dtype=torch.int32)):
                session.forward([replace(call, topk_ids=ids, num_tokens=num_tokens)], weights)


def test_int32_ids(workbench: Workbench) -> None:
    """int32 and int64 ids mean the same, -1 and ids outside included."""
    case = workbench.any_case(ep_size=4, routing="out_of_range")
    calls = workbench.calls(case)
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        expected = session.forward(calls, weights)
        narrow = session.forward([replace(call, topk_ids=call.topk_ids.int()) for call in calls], weights)
    check_same_bits(narrow, expected, "with int32 ids")


def test_wide_ids_are_not_cut(workbench: Workbench) -> None:
    """An int64 id of 2^32 + 1 is no expert; cut to 32 bits it would be expert 1."""
    case = workbench.any_case(routing="one_expert")
    (call,) = workbench.calls(case)
    (y,) = workbench.forward(
        case.problem, workbench.weights(case), [replace(call, topk_ids=torch.full_like(call.topk_ids, 2**32 + 1))]
    )
    assert (y == 0).all(), "an id beyond 32 bits was cut to a valid one"


def test_dropped_ids_are_counted(workbench: Workbench) -> None:
    """Ids outside [-1, E) are skipped and counted on the rank that brought them, over resets; -1 is not counted."""
    case = workbench.any_case(ep_size=4, routing="out_of_range")
    calls = workbench.calls(case)
    calls = [
        replace(
            call,
            topk_ids=call.topk_ids.index_fill(1, torch.zeros(1, dtype=torch.int64, device=call.topk_ids.device), -1),
        )
        for call in calls
    ]
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        session.forward(calls, weights)
        session.reset()
        session.forward(calls, weights)
        stats = session.stats()
    for rank, (call, counted) in enumerate(zip(calls, stats)):
        outside = ((call.topk_ids < -1) | (call.topk_ids >= case.problem.num_experts)).sum().item()
        assert counted.dropped_ids == 2 * outside, f"rank {rank} counted {counted.dropped_ids} of {2 * outside}"
        assert counted.calls == 2


@pytest.mark.parametrize("device_scalar", [False, True], ids=["int", "scalar-tensor"])
def test_num_tokens(workbench: Workbench, mode: Mode, device_scalar: bool) -> None:
    """Rows past `num_tokens` send nothing, whatever they hold, and come back zero; the others do not change."""
    workbench.require_capability(Capability.NUM_TOKENS)
    case = workbench.case(mode, ep_size=4)
    calls = workbench.calls(case)
    kept = [call.num_rows // 2 for call in calls]
    padded = [_with_garbage_after(call, num) for call, num in zip(calls, kept)]
    if device_scalar:
        padded = [replace(call, num_tokens=torch.tensor(num, dtype=torch.int32)) for call, num in zip(padded, kept)]
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        expected = session.forward([call.rows(slice(0, num)) for call, num in zip(calls, kept)], weights)
        outputs = session.forward(padded, weights)
        if Capability.RECEIVE_COUNTS in workbench.backend.capabilities():
            check_receive_counts(case.problem, padded, session.receive_counts())
    for rank, (y, num) in enumerate(zip(outputs, kept)):
        assert (y[num:] == 0).all(), f"rank {rank}: a padding row is not zero"
    check_same_bits([y[:num] for y, num in zip(outputs, kept)], expected, "with padding rows behind")


def _with_garbage_after(call: Call, num_tokens: int) -> Call:
    hidden, ids, router = call.bf16.clone(), call.topk_ids.clone(), call.topk_weights.clone()
    hidden[num_tokens:] = float("nan")
    ids[num_tokens:] = torch.where(torch.arange(ids.shape[1], device=ids.device) % 2 == 0, 0, 2**31 - 1)
    router[num_tokens:] = float("nan")
    return replace(call, hidden_states=hidden, topk_ids=ids, topk_weights=router, num_tokens=num_tokens)


def test_quantized_input(workbench: Workbench, mode: Mode) -> None:
    """Rows that come already quantised, in the mode's format, give what the same BF16 rows give."""
    workbench.require_capability(Capability.INPUT_QUANTIZED)
    case = workbench.case(mode, ep_size=4)
    calls = workbench.calls(case)
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        if mode.quant is QuantMode.BF16:
            pairs = [replace(call, hidden_states=(call.bf16, torch.ones(call.num_rows, 1))) for call in calls]
            with pytest.raises(InputError, match="scales"):
                session.forward(pairs, weights)
            return
        expected = session.forward(calls, weights)
        quantized = [quantize_call(call, case.problem) for call in calls]
        check_same_bits(session.forward(quantized, weights), expected, "with quantised input")
        if quantized[0].pair[1].dtype == torch.uint8:
            check_same_bits(
                session.forward([_as_e8m0(call) for call in quantized], weights), expected, "with float8_e8m0fnu scales"
            )


def _as_e8m0(call: Call) -> Call:
    payload, scales = call.pair
    return replace(call, hidden_states=(payload, scales.view(torch.float8_e8m0fnu)))


def test_over_capacity(workbench: Workbench) -> None:
    """capacity + 1 tokens on every rank: a typed error on each, and the session goes on."""
    case = workbench.any_case(ep_size=4)
    calls = workbench.calls(case)
    capacity = case.problem.num_max_tokens_per_rank
    too_many = [_of_rows(case, capacity + 1, workbench.device)] * case.problem.ep_size
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        expected = session.forward(calls, weights)
        for rank, outcome in enumerate(session.outcomes(too_many, weights)):
            assert isinstance(outcome.error, CapacityError), f"rank {rank}: {outcome.error!r}"
            assert str(capacity) in str(outcome.error)
            assert str(capacity + 1) in str(outcome.error)
        session.recover()
        check_same_bits(session.forward(calls, weights), expected, "after a refused call")


def _of_rows(case: Case, num_rows: int, device: torch.device) -> Call:
    top_k = case.problem.top_k
    return Call(
        hidden_states=torch.zeros(num_rows, case.problem.hidden_size, dtype=torch.bfloat16, device=device),
        topk_ids=torch.zeros(num_rows, top_k, dtype=torch.int64, device=device),
        topk_weights=torch.zeros(num_rows, top_k, device=device),
    )


WRONG: dict[str, Callable[[Call], Call]] = {
    "hidden_states dtype": lambda call: replace(call, hidden_states=call.bf16.float()),
    "hidden_states columns": lambda call: replace(call, hidden_states=call.bf16[:, :-1]),
    "hidden_states dimensions": lambda call: replace(call, hidden_states=call.bf16[None]),
    "topk_ids dtype": lambda call: replace(call, topk_ids=call.topk_ids.short()),
    "topk_ids rows": lambda call: replace(call, topk_ids=call.topk_ids[:-1]),
    "topk_ids columns": lambda call: replace(call, topk_ids=call.topk_ids[:, :-1]),
    "topk_weights dtype": lambda call: replace(call, topk_weights=call.topk_weights.bfloat16()),
    "topk_weights columns": lambda call: replace(call, topk_weights=call.topk_weights[:, :-1]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_argument(workbench: Workbench, wrong: str) -> None:
    """One typed error that names the argument; the session goes on."""
    case = workbench.any_case(tokens=(5,))
    (call,) = workbench.calls(case)
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        with pytest.raises(InputError, match=wrong.split()[0]):
            session.forward([WRONG[wrong](call)], weights)
        check_shape(case.problem, [call], session.forward([call], weights))


def test_other_modes_quantized_rows_are_refused(workbench: Workbench) -> None:
    """Quantised rows of another format are refused, not reinterpreted."""
    workbench.require_capability(Capability.INPUT_QUANTIZED)
    case = workbench.case(A8W8, tokens=(4,))
    (call,) = workbench.calls(case)
    payload, scales = quantize_call(call, case.problem).pair
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        for pair in (
            (payload.view(torch.uint8), scales),
            (payload.view(torch.float8_e4m3fnuz), scales),
            (payload, scales.to(torch.float8_e8m0fnu)),
            (payload, scales[:, :-1]),
        ):
            with pytest.raises(InputError, match="hidden_states"):
                session.forward([replace(call, hidden_states=pair)], weights)


@pytest.mark.own_ranks
def test_one_rank_over_capacity(workbench: Workbench) -> None:
    """The rank with too many tokens gets the typed error, no peer hangs, and after a reset all go on."""
    case = workbench.any_case(ep_size=4)
    if case.problem.ep_size == 1:
        return
    calls = workbench.calls(case)
    capacity = case.problem.num_max_tokens_per_rank
    wrong = [*calls[:-1], _of_rows(case, capacity + 1, workbench.device)]
    with workbench.open(case.problem, timeout_s=3.0) as session:
        weights = session.prepare(workbench.shards(case))
        expected = session.forward(calls, weights)
        *others, last = session.outcomes(wrong, weights)
        assert isinstance(last.error, CapacityError), repr(last.error)
        for rank, outcome in enumerate(others):
            assert outcome.error is not None, f"rank {rank} finished a call that its peer never made"
        *_, last = session.outcomes(calls, weights)
        assert isinstance(last.error, SessionError), (
            f"peers may take this for the call that was missing: {last.error!r}"
        )
        session.reset()
        check_same_bits(values(session.outcomes(calls, weights)), expected, "after a peer's refused call and a reset")
