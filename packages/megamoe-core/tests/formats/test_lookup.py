"""Formats of the quant modes."""

import pytest

from megamoe.errors import FormatError
from megamoe.formats import (
    BF16,
    FP8_1X128,
    FP8_128X128,
    MXFP4,
    MXFP8,
    ActivationFormat,
    BlockFormat,
    activation_format,
    weight_format,
)
from megamoe.problem import ActFormat, QuantMode


@pytest.mark.parametrize(
    "mode, activations, weights",
    [("bf16", BF16, BF16), ("a8w8", FP8_1X128, FP8_128X128), ("a8w4", MXFP8, MXFP4), ("a4w4", MXFP4, MXFP4)],
)
def test_modes(mode: str, activations: ActivationFormat, weights: BlockFormat) -> None:
    assert activation_format(mode) is activations
    assert activation_format(mode, activations.name) is activations
    assert weight_format(mode) is weights


def test_a8w4_has_two_activation_formats() -> None:
    assert activation_format("a8w4", "fp8_1x128") is FP8_1X128
    assert activation_format(QuantMode.A8W4, ActFormat.MXFP8) is MXFP8


def test_every_mode_and_act_format_of_a_problem_is_known() -> None:
    for mode in QuantMode:
        assert activation_format(mode)
        assert weight_format(mode)
    for act_format in ActFormat:
        assert activation_format(QuantMode.A8W4, act_format).name == act_format


@pytest.mark.parametrize("mode, act_format", [("a8w8", "mxfp8"), ("a4w4", "fp8_1x128"), ("bf16", "mxfp4")])
def test_a_format_of_another_mode_is_refused(mode: str, act_format: str) -> None:
    with pytest.raises(FormatError, match=f"unknown activation format of {mode}; got '{act_format}'"):
        activation_format(mode, act_format)


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(FormatError, match="unknown quant mode; got 'w8a8'; expected bf16 or a8w8 or a8w4 or a4w4"):
        activation_format("w8a8")
    with pytest.raises(FormatError, match="unknown quant mode"):
        weight_format("fp8")
