"""Weights: layouts and dtypes that mean the same, wrong ones refused, one session for many layers, moves in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megamoe.backend import Capability
from megamoe.errors import FormatError, InputError, LayoutError, MegaMoEError
from megamoe.problem import QuantMode
from megamoe.tensors import ExpertWeights, PreparedWeights
from megamoe.testing.cases import A4W4, A8W4, A8W4_FP8, BF16, Case, Mode
from megamoe.testing.checks import check_oracle, check_same_bits, check_staged
from megamoe.testing.data import interleave, make_weights, shard, swap_gate_and_up, with_tensors
from megamoe.testing.workbench import Workbench

pytestmark = pytest.mark.edge


@pytest.mark.parametrize("mode", [BF16, A8W4, A8W4_FP8, A4W4], ids=lambda mode: mode.id)
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_interleaved_layout(workbench: Workbench, mode: Mode, bias: bool) -> None:
    """gate0, up0, gate1, ... with layout="interleaved" is the same layer as gates first with layout="packed"."""
    case = workbench.case(mode, ep_size=2, expert_bias=bias)
    calls, packed = workbench.calls(case), workbench.weights(case)
    expected = workbench.forward(case.problem, packed, calls)
    check_same_bits(workbench.forward(case.problem, interleave(packed), calls), expected, "between the two layouts")


def test_the_layout_matters(workbench: Workbench) -> None:
    """Gate and up swapped by a wrong layout tag is another layer, and the gates see it."""
    case = workbench.any_case(tokens=(24,))
    packed = workbench.weights(case)
    calls = workbench.calls(case)
    swapped = swap_gate_and_up(packed)
    outputs = workbench.forward(case.problem, swapped, calls)
    with pytest.raises(AssertionError, match="from the oracle"):
        check_oracle(case.problem, outputs, workbench.oracle(case.problem, packed, calls))


@pytest.mark.parametrize("mode", [A8W4, A8W4_FP8, A4W4], ids=lambda mode: mode.id)
def test_e8m0_weight_scales(workbench: Workbench, mode: Mode) -> None:
    """Weight scales as uint8 and as float8_e8m0fnu mean the same."""
    case = workbench.case(mode)
    calls, weights = workbench.calls(case), workbench.weights(case)
    scales = {name: tensor.view(torch.float8_e8m0fnu) for name, tensor in weights.tensors() if name.endswith("_scale")}
    expected = workbench.forward(case.problem, weights, calls)
    check_same_bits(
        workbench.forward(case.problem, with_tensors(weights, scales), calls), expected, "with e8m0 weight scales"
    )


@pytest.mark.parametrize("mode", [A8W4, A8W4_FP8, A4W4], ids=lambda mode: mode.id)
@pytest.mark.parametrize("byte", [0, 127, 131, 255])
def test_e8m0_weight_scale_byte(workbench: Workbench, mode: Mode, byte: int) -> None:
    """One scale byte of expert 0 at an end of its range: computed right, or refused when prepared, and 255 is NaN."""
    case = workbench.case(mode, tokens=(24,))
    weights = workbench.weights(case)
    scales = dict(weights.tensors())["w2_weight_scale"].clone()
    scales[0, 3, 1] = byte
    changed = with_tensors(weights, {"w2_weight_scale": scales})
    calls = workbench.calls(case)
    with workbench.open(case.problem) as session:
        expected = session.forward(calls, session.prepare([weights]))
        try:
            prepared = session.prepare([changed])
        except FormatError:
            return
        outputs = session.forward(calls, prepared)
    with_expert_0 = (calls[0].topk_ids == 0).any(-1).cpu()
    assert with_expert_0.any()
    other = [outputs[0].clone()]
    other[0][:, 3] = expected[0][:, 3]
    if byte == 255:
        assert torch.equal(outputs[0][:, 3].isnan().cpu(), with_expert_0), "NaN in other rows than those of expert 0"
    else:
        check_staged(case.problem, outputs, workbench.staged(case.problem, changed, calls).outputs)
    check_same_bits(other, expected, "of columns whose weights did not change")


def test_prepare_weights_from_tensors(workbench: Workbench, mode: Mode) -> None:
    """`prepare_weights(w13, w2, layout=...)` is `prepare` of the weight type."""
    case = workbench.case(mode, expert_bias=True)
    calls, weights = workbench.calls(case), workbench.weights(case)
    tensors = dict(weights.tensors())

    def operand(name: str) -> Any:
        scale = tensors.get(f"{name}_scale")
        return tensors[name] if scale is None else (tensors[name], scale)

    arguments = {
        "w13": operand("w13_weight"),
        "w2": operand("w2_weight"),
        "layout": "packed",
        "w13_bias": tensors["w13_bias"],
        "w2_bias": tensors["w2_bias"],
    }
    with workbench.open(case.problem) as session:
        expected = session.forward(calls, session.prepare([weights]))
        check_same_bits(session.forward(calls, session.prepare_tensors([arguments])), expected, "from plain tensors")
        for wrong in ("sideways", None):
            with pytest.raises(LayoutError, match="packed"):
                session.prepare_tensors([{**arguments, "layout": wrong}])
        w13 = tensors["w13_weight"]
        with pytest.raises(InputError, match="w13"):
            session.prepare_tensors([{**arguments, "w13": (w13, w13) if mode.quant is QuantMode.BF16 else w13}])


def _other_backend(prepared: PreparedWeights) -> PreparedWeights:
    return replace(prepared, backend="another")


def _other_layout(prepared: PreparedWeights) -> PreparedWeights:
    return replace(prepared, layout="another/v0")


def _other_mode(prepared: PreparedWeights) -> PreparedWeights:
    return replace(prepared, quant=QuantMode.BF16 if prepared.quant is not QuantMode.BF16 else QuantMode.A8W8)


def _other_expert_count(prepared: PreparedWeights) -> PreparedWeights:
    return replace(prepared, num_local_experts=prepared.num_local_experts + 1)


def _other_hidden_size(prepared: PreparedWeights) -> PreparedWeights:
    return replace(prepared, hidden_size=2 * prepared.hidden_size)


def _other_intermediate_size(prepared: PreparedWeights) -> PreparedWeights:
    return replace(prepared, intermediate_size=2 * prepared.intermediate_size)


def _other_bias(prepared: PreparedWeights) -> PreparedWeights:
    return replace(prepared, expert_bias=not prepared.expert_bias)


OTHERS = (
    _other_backend,
    _other_layout,
    _other_mode,
    _other_expert_count,
    _other_hidden_size,
    _other_intermediate_size,
    _other_bias,
)


def check_refused(
    workbench: Workbench,
    change: Callable[[PreparedWeights], PreparedWeights],
    error: type[MegaMoEError],
    match: str,
) -> None:
    """`forward` refuses what `change` makes of prepared weights, and goes on with good ones."""
    case = workbench.any_case(tokens=(5,))
    calls = workbench.calls(case)
    with workbench.open(case.problem) as session:
        good, bad = session.prepare(workbench.shards(case)), session.prepare(workbench.shards(case))
        expected = session.forward(calls, good)
        session.change_weights(bad, change)
        with pytest.raises(error, match=match):
            session.forward(calls, bad)
        check_same_bits(session.forward(calls, good), expected, "after refused weights")


@pytest.mark.parametrize("change", OTHERS)
def test_prepared_for_something_else(
    workbench: Workbench, change: Callable[[PreparedWeights], PreparedWeights]
) -> None:
    """Prepared weights carry what they were prepared for, and `forward` compares it before anything is sent."""
    check_refused(workbench, change, LayoutError, "prepared for something else")


def _elsewhere(prepared: PreparedWeights) -> PreparedWeights:
    return replace(prepared, tensors={name: tensor.to("meta") for name, tensor in prepared.tensors.items()})


def test_weights_on_another_device(workbench: Workbench) -> None:
    """They can be stored and loaded elsewhere; a kernel would read addresses of another memory."""
    check_refused(workbench, _elsewhere, InputError, "prepared weights on another device")


def _tensors_alone(prepared: PreparedWeights) -> Any:
    return dict(prepared.tensors)


def test_weights_that_are_not_prepared(workbench: Workbench) -> None:
    """`forward` takes nothing but prepared weights, and says so before anything is sent."""
    check_refused(workbench, _tensors_alone, InputError, "are not prepared; got dict")


WRONG: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "experts": lambda tensors: {name: tensor[:-1] for name, tensor in tensors.items()},
    "shape": lambda tensors: {"w2_weight": tensors["w2_weight"][:, :-1]},
    "dtype": lambda tensors: {"w13_weight": tensors["w13_weight"].view(torch.int8)},
    "bias": lambda tensors: {"w2_bias": torch.zeros(4, 4)},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_weights(workbench: Workbench, mode: Mode, wrong: str) -> None:
    """Raw weights of the wrong shape, dtype or set of tensors: a typed error that says what was expected."""
    case = workbench.case(mode)
    weights = workbench.weights(case)
    spoilt = with_tensors(weights, WRONG[wrong](dict(weights.tensors())))
    with workbench.open(case.problem) as session, pytest.raises(InputError, match="expected"):
        session.prepare([spoilt])


def test_other_modes_weights(workbench: Workbench, mode: Mode) -> None:
    """Weights of another quant mode's type are refused by type."""
    case = workbench.case(mode)
    other = replace(
        case.problem, quant=QuantMode.A8W8 if mode.quant is QuantMode.BF16 else QuantMode.BF16, act_format=None
    )
    with workbench.open(case.problem) as session, pytest.raises(InputError, match="other weights"):
        session.prepare([make_weights(other, workbench.device)])


def test_one_session_many_layers(workbench: Workbench, mode: Mode) -> None:
    """Weights are arguments of a call: layers alternate in one session, and each gives its own result."""
    case = workbench.case(mode, ep_size=2)
    calls = workbench.calls(case)
    layers = [make_weights(case.problem, workbench.device, seed=seed) for seed in (1, 2)]
    expected = [workbench.forward(case.problem, layer, calls) for layer in layers]
    with workbench.open(case.problem) as session:
        prepared = [session.prepare(shard(layer, case.problem.ep_size)) for layer in layers]
        for index in (0, 1, 1, 0):
            check_same_bits(session.forward(calls, prepared[index]), expected[index], f"of layer {index}")
    assert not torch.equal(expected[0][0], expected[1][0])


def test_move_expert_in_place(workbench: Workbench, mode: Mode) -> None:
    """What `expert_tensors` hands out is what the kernels read: a copied slot is a moved expert, at once."""
    case = workbench.case(mode, ep_size=2, expert_bias=Capability.EXPERT_BIAS in workbench.backend.capabilities())
    calls, ep_size = workbench.calls(case), case.problem.ep_size
    with workbench.open(case.problem) as session:
        weights = session.prepare(workbench.shards(case))
        session.forward(calls, weights)
        session.move_expert(weights, [(0, 2), *[None] * (ep_size - 1)])
        outputs = session.forward(calls, weights)
    moved = _with_copied_expert(workbench.weights(case), 0, 2)
    check_same_bits(outputs, workbench.forward(case.problem, moved, calls), "between a moved and a loaded expert")
    check_staged(case.problem, outputs, workbench.staged(case.problem, moved, calls).outputs)


def _with_copied_expert(weights: ExpertWeights, source: int, destination: int) -> ExpertWeights:
    tensors = {name: tensor.clone() for name, tensor in weights.tensors()}
    for tensor in tensors.values():
        tensor[destination].copy_(tensor[source])
    return with_tensors(weights, tensors)


def test_prepare_does_not_change_the_checkpoint(workbench: Workbench, mode: Mode) -> None:
    """Preparing reads the given tensors and leaves them as they are."""
    case: Case = workbench.case(mode)
    (given,) = workbench.shards(case)
    before = {name: tensor.clone() for name, tensor in given.tensors()}
    with workbench.open(case.problem) as session:
        session.prepare([given])
    for name, tensor in given.tensors():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name
