"""NaN, Inf and the extremes of every format: they stay in the row that they came in with."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megamoe.backend import Capability
from megamoe.problem import QuantMode
from megamoe.testing.cases import A4W4, A8W4, A8W4_FP8, A8W8, TRANSPORTS, InputKind, Mode
from megamoe.testing.checks import check_same_bits, check_staged
from megamoe.testing.data import Call, quantize_call
from megamoe.testing.tolerances import STAGED_BOUNDS, rel_l2
from megamoe.testing.workbench import Workbench

pytestmark = pytest.mark.edge

NAN, INF = float("nan"), float("inf")


def _poisoned(call: Call, row: int, value: float, column: int = 5) -> Call:
    hidden = call.bf16.clone()
    hidden[row, column] = value
    return replace(call, hidden_states=hidden)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_poison_under_masked_ids(workbench: Workbench, mode: Mode, transport: str) -> None:
    """NaN and Inf in rows, and in router weights, whose ids are -1 reach nothing: not even their own output row."""
    case = workbench.case(mode, ep_size=2, routing="masked_rows", transport=transport)
    calls = workbench.calls(case)
    poisoned = []
    for call in calls:
        hidden, router = call.bf16.clone(), call.topk_weights.clone()
        hidden[::4], hidden[2::4] = NAN, INF
        router[::2] = NAN
        poisoned.append(replace(call, hidden_states=hidden, topk_weights=router))
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        expected, outputs = session.forward(calls, weights), session.forward(poisoned, weights)
    check_same_bits(outputs, expected, "with NaN and Inf under masked ids")


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_poison_stays_in_its_row(workbench: Workbench, mode: Mode, transport: str, value: float) -> None:
    """One bad element makes its own row non-finite (NaN where the mode quantises), and changes no other bit."""
    case = workbench.case(mode, ep_size=2, tokens=(40, 7), transport=transport)
    calls = workbench.calls(case)
    row = 13
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        clean, dirty = (
            session.forward(calls, weights),
            session.forward([_poisoned(calls[0], row, value), calls[1]], weights),
        )
    bad = dirty[0][row]
    if mode.quant is QuantMode.BF16 and not math.isnan(value):
        assert not bad.isfinite().all(), "an infinite element left no trace"
    else:
        assert bad.isnan().all(), "a NaN was lost on the way"
    dirty[0][row] = clean[0][row]
    check_same_bits(dirty, clean, f"of other rows when one holds {value}")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_poison_of_an_earlier_call(workbench: Workbench, mode: Mode, transport: str) -> None:
    """What calls full of NaN leave behind, in the pool's padding and under masked slots, changes nothing later."""
    case = workbench.case(mode, ep_size=2, tokens=(40, 40), routing="masked_some", transport=transport)
    calls = workbench.calls(case)
    few = [call.rows(slice(0, 3)) for call in calls]
    bad = [
        replace(call, hidden_states=torch.full_like(call.bf16, NAN), topk_ids=call.topk_ids.clamp(min=0))
        for call in calls
    ]
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        expected = [session.forward(few, weights), session.forward(calls, weights)]
        for _ in range(2):  # both copies of what is kept twice
            session.forward(bad, weights)
        check_same_bits(session.forward(few, weights), expected[0], "after calls that were all NaN")
        check_same_bits(session.forward(calls, weights), expected[1], "after calls that were all NaN")


def test_extreme_rows(workbench: Workbench, mode: Mode) -> None:
    """Zeros, subnormals, one huge element: held to the staged reference, and other rows' bits do not change."""
    case = workbench.case(mode, tokens=(24,))
    (call,) = workbench.calls(case)
    hidden = call.bf16.clone()
    hidden[0] = 0
    hidden[1] = -0.0
    hidden[2] = torch.finfo(torch.bfloat16).tiny / 4  # subnormal
    hidden[3] *= 1e-30
    hidden[4, 17] = 3e4
    hidden[5] = torch.tensor([448.0, -448.0, 6.0, -0.5], device=hidden.device).repeat(hidden.shape[1] // 4)
    dirty = replace(call, hidden_states=hidden)
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        (clean_y,), (y,) = session.forward([call], weights), session.forward([dirty], weights)
    assert (y[:2] == 0).all(), "a row of zeros has an output"
    assert y[:6].isfinite().all()
    check_same_bits([y[6:]], [clean_y[6:]], "of ordinary rows beside extreme ones")
    staged = workbench.staged(case.problem, workbench.weights(case), [dirty])
    for row in range(6):  # row by row: the huge one would hide the others
        check_staged(case.problem, [y[row : row + 1]], [staged.outputs[0][row : row + 1]])


def test_largest_finite_input(workbench: Workbench, mode: Mode) -> None:
    """BF16's largest number in every element: products overflow, so anything may come out; other rows do not notice."""
    case = workbench.case(mode, tokens=(24,))
    (call,) = workbench.calls(case)
    hidden = call.bf16.clone()
    hidden[7] = torch.finfo(torch.bfloat16).max
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        (clean,), (y,) = (
            session.forward([call], weights),
            session.forward([replace(call, hidden_states=hidden)], weights),
        )
    y[7] = clean[7]
    check_same_bits([y], [clean], "of rows beside one of the largest numbers")


@pytest.mark.parametrize("mode", [A8W4, A4W4], ids=lambda mode: mode.id)
@pytest.mark.parametrize("byte", [0, 1, 126, 127, 128, 254, 255])
def test_e8m0_byte(workbench: Workbench, mode: Mode, byte: int) -> None:
    """E8M0 scale bytes at the ends: 0 is 2^-127, 127 is 1, 254 is 2^127, 255 is NaN; bytes >= 128 stay unsigned."""
    workbench.require_capability(Capability.INPUT_QUANTIZED)
    case = workbench.case(mode, tokens=(12,))
    call = quantize_call(workbench.calls(case)[0], case.problem)
    payload, scales = call.pair
    changed = scales.clone()
    changed[4, 1] = byte
    dirty = replace(call, hidden_states=(payload, changed))
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        (clean,), (y,) = session.forward([call], weights), session.forward([dirty], weights)
    staged = workbench.staged(case.problem, workbench.weights(case), [dirty]).outputs[0]
    finite = staged[4].isfinite()
    assert torch.equal(y[4].isfinite(), finite.to(y.device)), "finite in other places than the staged reference"
    if byte == 255:
        assert y[4].isnan().all(), "scale byte 255 is not NaN"
    elif finite.all():
        check_staged(case.problem, [y[4:5]], [staged[4:5]])
    y[4] = clean[4]
    check_same_bits([y], [clean], f"of rows beside one with scale byte {byte}")


@pytest.mark.parametrize("mode", [A8W8, A8W4_FP8], ids=lambda mode: mode.id)
@pytest.mark.parametrize("scale", [0.0, 1e-38, NAN, INF])
def test_fp32_scale(workbench: Workbench, mode: Mode, scale: float) -> None:
    """FP32 scales at the ends: zero gives zeros' part, NaN and Inf spoil their row only."""
    workbench.require_capability(Capability.INPUT_QUANTIZED)
    case = workbench.case(mode, tokens=(12,))
    call = quantize_call(workbench.calls(case)[0], case.problem)
    payload, scales = call.pair
    changed = scales.clone()
    changed[4, 1] = scale
    dirty = replace(call, hidden_states=(payload, changed))
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        (clean,), (y,) = session.forward([call], weights), session.forward([dirty], weights)
    staged = workbench.staged(case.problem, workbench.weights(case), [dirty]).outputs[0]
    if not math.isfinite(scale):
        assert not y[4].isfinite().any(), f"scale {scale} left no trace"
    else:
        check_staged(case.problem, [y[4:5]], [staged[4:5]])
    y[4] = clean[4]
    check_same_bits([y], [clean], f"of rows beside one with scale {scale}")


def test_zero_router_weight(workbench: Workbench, mode: Mode) -> None:
    """A router weight of 0 contributes exactly nothing, on the FP8 transport too (a block of zeros has a scale)."""
    for transport in TRANSPORTS:
        case = workbench.case(mode, ep_size=2, transport=transport)
        calls = workbench.calls(case)
        zero = [replace(call, topk_weights=torch.zeros_like(call.topk_weights)) for call in calls]
        for y in workbench.forward(case.problem, workbench.weights(case), zero):
            assert (y == 0).all()


def test_clamp_bites(workbench: Workbench, mode: Mode) -> None:
    """With outliers the clamp changes the result by far more than the bounds: a dropped clamp can't pass the matrix."""
    limited = workbench.case(mode, inputs=InputKind.OUTLIERS, swiglu_limit=10.0)
    free = workbench.case(mode, inputs=InputKind.OUTLIERS)
    calls = workbench.calls(limited)
    (y,) = workbench.forward(limited.problem, workbench.weights(limited), calls)
    (unclamped,) = workbench.forward(free.problem, workbench.weights(free), calls)
    assert rel_l2(y, unclamped) > 5 * STAGED_BOUNDS[QuantMode(mode.quant)].y_rel_l2
