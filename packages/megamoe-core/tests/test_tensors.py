"""Weights as types: made from plain tensors, held against the problem, refused when prepared for something else."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megamoe.errors import InputError, LayoutError
from megamoe.problem import MoEProblem, QuantMode
from megamoe.tensors import (
    Bf16Weights,
    ExpertWeights,
    Fp8BlockWeights,
    GateUpLayout,
    Mxfp4Weights,
    PreparedWeights,
    check_weights,
    expert_tensors,
    make_weights,
)

E, H, INTER = 2, 256, 128


def problem(quant: str, **fields: Any) -> MoEProblem:
    return MoEProblem(
        hidden_size=H, intermediate_size=INTER, num_experts=E, top_k=1, num_max_tokens_per_rank=1, quant=quant, **fields
    )


def operands(quant: str) -> tuple[Any, Any]:
    """w13 and w2 of a mode, zeros."""
    shapes = ((E, 2 * INTER, H), (E, H, INTER))
    if quant == "bf16":
        return tuple(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    if quant == "a8w8":
        return tuple(
            (torch.zeros(shape, dtype=torch.float8_e4m3fn), torch.ones(E, shape[1] // 128, shape[2] // 128))
            for shape in shapes
        )
    return tuple(
        (
            torch.zeros(E, rows, columns // 2, dtype=torch.uint8),
            torch.full((E, rows, columns // 32), 127, dtype=torch.uint8),
        )
        for _, rows, columns in shapes
    )


TYPES = {"bf16": Bf16Weights, "a8w8": Fp8BlockWeights, "a8w4": Mxfp4Weights, "a4w4": Mxfp4Weights}


@pytest.mark.parametrize("quant", TYPES)
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_the_mode_names_the_type(quant: str, bias: bool) -> None:
    biases = {"w13_bias": torch.zeros(E, 2 * INTER), "w2_bias": torch.zeros(E, H)} if bias else {}
    layer = problem(quant, expert_bias=bias)
    weights = make_weights(layer, *operands(quant), layout="packed", **biases)
    assert type(weights) is TYPES[quant]
    assert weights.layout is GateUpLayout.PACKED
    check_weights(weights, layer)
    names = [name for name, _ in weights.tensors()]
    assert ("w13_bias" in names) == bias
    assert ("w13_weight_scale" in names) == (quant != "bf16")


@pytest.mark.parametrize("quant", TYPES)
def test_a_pair_where_there_are_scales_and_only_there(quant: str) -> None:
    w13, w2 = operands(quant)
    wrong = (w13, w13) if quant == "bf16" else w13[0]
    with pytest.raises(InputError, match=f"w13_weight does not fit quant mode {quant}"):
        make_weights(problem(quant), wrong, w2, layout="packed")


def test_a_list_of_experts_is_not_spelt_out() -> None:
    """256 of them were 8 kB of message."""
    with pytest.raises(
        InputError, match=r"got 256 of them \(torch.stack makes one tensor of a list\); expected a BF16"
    ):
        make_weights(problem("bf16"), [torch.zeros(1)] * 256, operands("bf16")[1], layout="packed")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, "x", (), (None, None), (torch.zeros(1),) * 3])
@pytest.mark.parametrize("quant", ["bf16", "a8w8"])
def test_what_is_no_weight_is_refused(quant: str, wrong: Any) -> None:
    with pytest.raises(InputError, match=f"w13_weight does not fit quant mode {quant}"):
        make_weights(problem(quant), wrong, operands(quant)[1], layout="packed")
    with pytest.raises(InputError, match="w2_bias is not a tensor"):
        make_weights(problem(quant), *operands(quant), layout="packed", w2_bias="x")


@pytest.mark.parametrize("layout", ["", "gate_first", "PACKED", None])
def test_the_layout_is_named_exactly(layout: Any) -> None:
    with pytest.raises(LayoutError, match="packed or interleaved"):
        make_weights(problem("bf16"), *operands("bf16"), layout=layout)


def test_the_layout_has_no_default() -> None:
    with pytest.raises(TypeError, match="layout"):
        make_weights(problem("bf16"), *operands("bf16"))  # type: ignore[call-arg]


def made(quant: str) -> ExpertWeights:
    return make_weights(problem(quant), *operands(quant), layout="packed")


@pytest.mark.parametrize("quant", TYPES)
@pytest.mark.parametrize("name", ["w13_weight", "w2_weight"])
def test_every_tensor_is_checked(quant: str, name: str) -> None:
    weights = made(quant)
    for tensor_name, tensor in weights.tensors():
        if tensor_name.startswith(name):
            with pytest.raises(InputError, match=f"{tensor_name} has the wrong shape.*got.*expected"):
                check_weights(replace(weights, **{tensor_name: tensor[:, :-1]}), problem(quant))
            with pytest.raises(InputError, match=f"{tensor_name} has the wrong dtype.*float64"):
                check_weights(replace(weights, **{tensor_name: tensor.to(torch.float64)}), problem(quant))


def test_expert_count_is_the_ranks_share() -> None:
    with pytest.raises(InputError, match="w13_weight has the wrong shape.*each of the 2 ranks its own experts"):
        check_weights(made("bf16"), replace(problem("bf16"), ep_size=2))


def test_biases_are_there_exactly_when_the_problem_has_them() -> None:
    with pytest.raises(InputError, match="w13_bias is missing.*expert_bias"):
        check_weights(made("bf16"), problem("bf16", expert_bias=True))
    with_bias = replace(made("bf16"), w2_bias=torch.zeros(E, H))
    with pytest.raises(InputError, match="w2_bias is not expected.*expert_bias"):
        check_weights(with_bias, problem("bf16"))


def test_another_modes_type_is_refused() -> None:
    with pytest.raises(InputError, match="takes other weights; got Bf16Weights; expected Fp8BlockWeights"):
        check_weights(made("bf16"), problem("a8w8"))
    check_weights(made("a8w4"), problem("a4w4"))  # the same weights, other activations


def test_scales_may_be_bytes_or_e8m0() -> None:
    weights = made("a8w4")
    scales = {name: tensor.view(torch.float8_e8m0fnu) for name, tensor in weights.tensors() if name.endswith("scale")}
    check_weights(replace(weights, **scales), problem("a8w4"))


def test_e4m3fnuz_is_not_e4m3fn() -> None:
    weights = made("a8w8")
    assert isinstance(weights, Fp8BlockWeights)
    other = replace(weights, w13_weight=weights.w13_weight.view(torch.float8_e4m3fnuz))
    with pytest.raises(InputError, match="float8_e4m3fnuz; expected torch.float8_e4m3fn"):
        check_weights(other, problem("a8w8"))


PREPARED = PreparedWeights.of(problem("a8w8"), backend="reference", layout="plain/v1", tensors={"w": torch.zeros(E, 3)})


def test_prepared_weights_fit_what_they_were_prepared_for() -> None:
    PREPARED.require(backend="reference", layout="plain/v1", problem=problem("a8w8"))


@pytest.mark.parametrize(
    "change",
    [
        {"backend": "cuda"},
        {"layout": "plain/v2"},
        {"quant": QuantMode.BF16},
        {"num_local_experts": 3},
        {"hidden_size": 2 * H},
        {"intermediate_size": 2 * INTER},
        {"expert_bias": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_prepared_for_something_else(change: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match="prepared for something else") as caught:
        replace(PREPARED, **change).require(backend="reference", layout="plain/v1", problem=problem("a8w8"))
    assert str(next(iter(change.values()))) in str(caught.value)
    assert "prepare_weights" in str(caught.value)


def test_a_line_names_prepared_weights_without_their_elements() -> None:
    assert "layout='plain/v1'" in repr(PREPARED)
    assert "tensor(" not in repr(PREPARED)  # on a GPU, each would be a copy and a wait


def test_expert_tensors_alias() -> None:
    views = expert_tensors(PREPARED)
    views["w"][1] = 5
    assert PREPARED.tensors["w"][1].tolist() == [5, 5, 5]
    PREPARED.tensors["w"].zero_()
    views.clear()  # the mapping is a copy, the memory is not
    assert "w" in PREPARED.tensors
